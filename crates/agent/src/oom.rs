//! Frees memory when the sandbox exceeds its limit: ends the largest consumer, so that the rest survives.
//!
//! ```text
//!   one process holds a good part ──▶ that one is killed
//!   many hold a little each, or
//!   are too many to be scanned ─────▶ all are killed, at once
//!   nothing is running ─────────────▶ files in memory are removed
//! ```

use std::{fs, time::Duration};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    active_time,
    exec_spawn::plain,
    process_tree::{self, Process},
};

/// The largest process is killed alone if it holds at least `1 / GOOD_PART` of all memory in use.
const GOOD_PART: u64 = 8;
/// Time limit of a scan: memory may grow faster than a longer scan can follow.
const LONGEST_LOOK: Duration = Duration::from_millis(150);
/// Directory of files in memory.
const MEMORY_FILES: &str = "/dev/shm";
const PAGE: u64 = 4096;

/// What was killed or removed.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    One {
        pid: i32,
        /// The process name, for messages.
        name: String,
    },
    All,
    Files,
}

/// All processes and the memory they hold; `None` if there are too many to scan in time.
pub fn scan_memory() -> Option<Vec<(Process, u64)>> {
    let until = active_time::now() + LONGEST_LOOK;
    let processes = process_tree::below(|| active_time::now() < until)?;
    processes.into_iter().map(|process| (active_time::now() < until).then(|| (process, memory(process.pid)))).collect()
}

/// Kills the largest of these processes, which are all there are, or all of them. `used` is all memory in use.
pub fn relieve(processes: &[(Process, u64)], used: u64) -> Ended {
    let held: Vec<(i32, u64)> = processes.iter().map(|(process, held)| (process.pid, *held)).collect();
    match choose(&held, used) {
        Choice::One(pid) => {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            Ended::One { pid, name: format!("process {pid} ({})", plain(name.trim_end())) }
        }
        Choice::All => end_all(),
        Choice::Files => {
            if std::process::id() == 1 {
                clear();
            }
            Ended::Files
        }
    }
}

/// Kills everything, without a scan.
pub fn end_all() -> Ended {
    // Outside a sandbox this would kill every process on the machine.
    if std::process::id() == 1 {
        let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
    } else {
        process_tree::kill_all();
    }
    Ended::All
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    One(i32),
    All,
    Files,
}

/// Chooses from all processes but the agent, given the memory each holds.
fn choose(held: &[(i32, u64)], used: u64) -> Choice {
    match held.iter().max_by_key(|(_, held)| *held) {
        None => Choice::Files,
        Some((pid, held)) if held.saturating_mul(GOOD_PART) >= used => Choice::One(*pid),
        Some(_) => Choice::All,
    }
}

/// The memory that a process holds.
fn memory(pid: i32) -> u64 {
    let sizes = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    sizes.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * PAGE
}

fn clear() {
    for entry in fs::read_dir(MEMORY_FILES).into_iter().flatten().flatten() {
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let _ = if is_directory { fs::remove_dir_all(entry.path()) } else { fs::remove_file(entry.path()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_holds_a_good_part_is_ended_alone() {
        assert_eq!(choose(&[(7, 10), (8, 90), (9, 20)], 120), Choice::One(8));
        assert_eq!(choose(&[(7, 15)], 120), Choice::One(7));
    }

    #[test]
    fn of_many_that_hold_little_all_are_ended() {
        let many: Vec<(i32, u64)> = (2..200).map(|pid| (pid, 3)).collect();
        assert_eq!(choose(&many, 600), Choice::All);
    }

    #[test]
    fn when_nothing_runs_the_files_go() {
        assert_eq!(choose(&[], 600), Choice::Files);
    }
}
