//! Medians, budgets and the table that is printed.

use std::time::Duration;

/// Measured times of one thing.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    pub const fn empty() -> Self {
        Self(Vec::new())
    }

    pub fn add(&mut self, time: Duration) {
        self.0.push(time);
    }

    fn at(&self, share: f64) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let place = ((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len().max(1)) - 1;
        sorted.get(place).copied().unwrap_or_default()
    }

    pub fn median(&self) -> Duration {
        self.at(0.5)
    }

    pub fn p90(&self) -> Duration {
        self.at(0.9)
    }

    pub fn p99(&self) -> Duration {
        self.at(0.99)
    }

    pub fn longest(&self) -> Duration {
        self.at(1.0)
    }

    pub fn ratio(&self, floor: &Self) -> f64 {
        self.median().as_secs_f64() / floor.median().as_secs_f64().max(1e-9)
    }

    /// Median and p90, for people.
    pub fn show(&self) -> String {
        format!("{} (p90 {})", show(self.median()), show(self.p90()))
    }
}

impl FromIterator<Duration> for Times {
    fn from_iter<I: IntoIterator<Item = Duration>>(times: I) -> Self {
        Self(times.into_iter().collect())
    }
}

pub fn show(time: Duration) -> String {
    match time.as_secs_f64() {
        seconds if seconds >= 1.0 => format!("{seconds:.2} s"),
        seconds if seconds >= 0.02 => format!("{:.0} ms", seconds * 1e3),
        seconds => format!("{:.1} ms", seconds * 1e3),
    }
}

pub fn show_bytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// One line of the table.
#[derive(Debug)]
pub struct Line {
    pub row: &'static str,
    pub what: &'static str,
    pub ours: String,
    pub floor: String,
    pub ratio: Option<f64>,
    pub budget: &'static str,
    /// `None`: only printed.
    pub is_met: Option<bool>,
}

impl Line {
    /// A time that may be so many times as long as its floor.
    pub fn ratio(
        row: &'static str,
        what: &'static str,
        ours: &Times,
        floor: &Times,
        most: f64,
        budget: &'static str,
    ) -> Self {
        let ratio = ours.ratio(floor);
        Self {
            row,
            what,
            ours: ours.show(),
            floor: floor.show(),
            ratio: Some(ratio),
            budget,
            is_met: Some(ratio <= most),
        }
    }

    /// A value with a bound of its own.
    pub fn bound(
        row: &'static str,
        what: &'static str,
        ours: String,
        budget: &'static str,
        is_met: Option<bool>,
    ) -> Self {
        Self { row, what, ours, floor: String::new(), ratio: None, budget, is_met }
    }

    fn text(&self) -> String {
        let ratio = self.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2} ×"));
        let mark = self.is_met.map_or("", |is_met| if is_met { "✓" } else { "✗" });
        let Self { row, what, ours, floor, budget, .. } = self;
        format!("| {row} | {what} | {ours} | {floor} | {ratio} | {budget} | {mark} |")
    }
}

#[derive(Debug, Default)]
pub struct Table(Vec<Line>);

impl Table {
    /// Shown at once too: the whole takes minutes.
    pub fn add(&mut self, line: Line) {
        println!("{}", line.text());
        self.0.push(line);
    }

    pub fn print(&self) {
        println!("\n| # | What | baton | compared with | ratio | budget | |\n|---|---|---|---|---|---|---|");
        for line in &self.0 {
            println!("{}", line.text());
        }
        let judged = self.0.iter().filter_map(|line| line.is_met);
        let (met, all) = judged.fold((0, 0), |(met, all), is_met| (met + u32::from(is_met), all + 1));
        println!("\n{met} of {all} within their budget");
    }
}
