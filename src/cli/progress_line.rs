//! The progress of a long operation, on one line of a terminal.

use std::{
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use baton_client::{OnStatus, Status};
use parking_lot::Mutex;

use super::stdio_bridge::raw_terminal;
use crate::clock::{Moment, SharedClock, SystemClock};

const REDRAW_INTERVAL: Duration = Duration::from_millis(100);
const BAR_WIDTH: usize = 30;

#[derive(Debug)]
pub struct ProgressLine {
    clock: SharedClock,
    is_shown: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// What is in progress; empty if that is obvious.
    what: &'static str,
    began: Moment,
    drawn: Option<Moment>,
    done: u64,
    total: Option<u64>,
}

impl ProgressLine {
    pub fn new(clock: SharedClock, is_shown: bool) -> Self {
        let state = State { what: "", began: clock.now(), drawn: None, done: 0, total: None };
        Self { clock, is_shown, state: Mutex::new(state) }
    }

    pub fn total(&self, total: Option<u64>) {
        self.state.lock().total = total;
    }

    /// Adds to the bytes done.
    pub fn add(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.done = state.done.saturating_add(bytes);
        let now = self.clock.now();
        if state.drawn.is_none_or(|drawn| now - drawn >= REDRAW_INTERVAL) {
            self.draw(&mut state, now);
        }
    }

    /// Sets the progress of an operation that is reported now and then.
    fn set(&self, what: &'static str, done: u64, total: Option<u64>) {
        let (mut state, now) = (self.state.lock(), self.clock.now());
        if state.what != what {
            *state = State { what, began: now, ..*state };
        }
        (state.done, state.total) = (done, total);
        self.draw(&mut state, now);
    }

    /// Clears the line.
    pub fn clear(&self) {
        let mut state = self.state.lock();
        state.what = "";
        if state.drawn.take().is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }

    fn draw(&self, state: &mut State, now: Moment) {
        if self.is_shown {
            state.drawn = Some(now);
            let took = (now > state.began).then(|| now - state.began);
            // A closed terminal is no reason to stop.
            let _ = write!(std::io::stderr(), "\r\x1b[K{}{}", state.what, line(state.done, state.total, took));
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Shows the server's progress until the sandbox runs: from then on the screen belongs to the command.
pub fn until_running() -> Option<OnStatus> {
    shown_progress().map(|progress| following(progress, false))
}

/// Shows the server's progress to the end, for verbs that print nothing else meanwhile. The line is to be cleared before
/// they print: the connection may keep its callback a little longer.
pub fn to_the_end() -> Option<(Arc<ProgressLine>, OnStatus)> {
    shown_progress().map(|progress| (progress.clone(), following(progress, true)))
}

fn shown_progress() -> Option<Arc<ProgressLine>> {
    raw_terminal::is_stderr().then(|| Arc::new(ProgressLine::new(Arc::new(SystemClock), true)))
}

fn following(progress: Arc<ProgressLine>, is_to_the_end: bool) -> OnStatus {
    let is_over = AtomicBool::new(false);
    Arc::new(move |update| {
        if is_over.load(Ordering::Relaxed) {
            return;
        }
        match update.progress {
            Some(moved) => progress.set(word(update.status), moved.done, (moved.total > 0).then_some(moved.total)),
            None => progress.clear(),
        }
        if update.status == Status::Running && !is_to_the_end {
            is_over.store(true, Ordering::Relaxed);
        }
    })
}

#[expect(clippy::wildcard_enum_match_arm, reason = "only what takes long is told")]
fn word(status: Status) -> &'static str {
    match status {
        Status::Creating => "creating ",
        Status::Restoring => "restoring ",
        Status::Checkpointing => "checkpointing ",
        Status::FilesystemSnapshotCreating => "taking a snapshot ",
        _ => "working ",
    }
}

/// Without a duration the speed is omitted.
fn line(done: u64, total: Option<u64>, took: Option<Duration>) -> String {
    let mut about = size(done as f64);
    if let Some(took) = took {
        about += &format!(" {}/s", size(done as f64 / took.as_secs_f64().max(0.001)));
    }
    let Some(total) = total.filter(|total| *total > 0) else { return about };
    let share = (done as f64 / total as f64).min(1.0);
    let full = (share * BAR_WIDTH as f64) as usize;
    format!("[{}{}] {:3.0}% {about}", "#".repeat(full), " ".repeat(BAR_WIDTH - full), share * 100.0)
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
        assert_eq!(line(3 << 20, None, Some(Duration::from_secs(2))), "3.0 MiB 1.5 MiB/s");
        let half = line(512, Some(1024), Some(Duration::from_secs(1)));
        assert_eq!(half, format!("[{}{}]  50% 512 B 512 B/s", "#".repeat(15), " ".repeat(15)));
        // An archive is slightly larger than its content.
        assert!(line(2000, Some(1000), Some(Duration::from_secs(1))).contains("100%"));
        assert_eq!(line(0, Some(0), None), "0 B");
    }
}
