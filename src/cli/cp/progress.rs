//! How far a copy has come, on one line of a terminal.

use std::{
    io::Write,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use crate::clock::{Moment, SharedClock};

const BETWEEN: Duration = Duration::from_millis(100);
const BAR: usize = 30;

#[derive(Debug)]
pub struct Progress {
    clock: SharedClock,
    is_shown: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    began: Moment,
    drawn: Option<Moment>,
    done: u64,
    total: Option<u64>,
}

impl Progress {
    pub fn new(clock: SharedClock, is_shown: bool) -> Self {
        let state = State { began: clock.now(), drawn: None, done: 0, total: None };
        Self { clock, is_shown, state: Mutex::new(state) }
    }

    pub fn total(&self, total: Option<u64>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).total = total;
    }

    /// So many bytes more.
    pub fn add(&self, bytes: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.done += bytes;
        let now = self.clock.now();
        if self.is_shown && state.drawn.is_none_or(|drawn| now - drawn >= BETWEEN) {
            state.drawn = Some(now);
            // A terminal that is gone is no reason to stop.
            let _ = write!(std::io::stderr(), "\r\x1b[K{}", line(state.done, state.total, now - state.began));
        }
    }

    /// Leaves the line as it was.
    pub fn clear(&self) {
        let drawn = self.state.lock().unwrap_or_else(PoisonError::into_inner).drawn;
        if drawn.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

fn line(done: u64, total: Option<u64>, took: Duration) -> String {
    let speed = done as f64 / took.as_secs_f64().max(0.001);
    let about = format!("{} {}/s", size(done as f64), size(speed));
    let Some(total) = total.filter(|total| *total > 0) else { return about };
    let share = (done as f64 / total as f64).min(1.0);
    let full = (share * BAR as f64) as usize;
    format!("[{}{}] {:3.0}% {about}", "#".repeat(full), " ".repeat(BAR - full), share * 100.0)
}

fn size(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut bytes, mut unit) = (bytes, 0);
    while bytes >= 1024.0 && unit + 1 < units.len() {
        bytes /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes:.0} B") } else { format!("{bytes:.1} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_how_much_how_fast_and_how_far() {
        assert_eq!(line(3 << 20, None, Duration::from_secs(2)), "3.0 MiB 1.5 MiB/s");
        let half = line(512, Some(1024), Duration::from_secs(1));
        assert_eq!(half, format!("[{}{}]  50% 512 B 512 B/s", "#".repeat(15), " ".repeat(15)));
        // An archive is a little more than what is in it.
        assert!(line(2000, Some(1000), Duration::from_secs(1)).contains("100%"));
        assert!(line(0, Some(0), Duration::ZERO).starts_with("0 B"));
    }
}
