//! A command and all its descendants, including those that left its session.
//!
//! Orphans become children of the agent. They are identified by a variable that each command finds in its
//! environment and passes on.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::exec_spawn::EXEC_VARIABLE;

/// Scans per call: each finds what the victims of the previous one had just started.
const MAX_SCANS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    parent: i32,
    group: i32,
    session: i32,
}

/// The root of a process tree.
#[derive(Clone, Copy, Debug)]
pub struct TreeRoot {
    pub exec: u32,
    /// The command's process, if no later command can have the same pid.
    pub pid: Option<i32>,
    /// The command's process is not reaped yet, so its pid cannot have been reused.
    pub is_alive: bool,
}

/// Sends `signal` to the whole tree; returns whether anything of it was still alive.
pub fn signal(root: TreeRoot, signal: Signal) -> bool {
    if let (Some(pid), true) = (root.pid, root.is_alive) {
        let _ = kill(Pid::from_raw(-pid), signal);
    }
    let own = std::process::id() as i32;
    let mut hit = BTreeSet::new();
    for _ in 0..MAX_SCANS {
        let found = members(&scan(), own, root.pid, |pid| carries(pid, root.exec));
        let fresh: Vec<i32> = found.into_iter().filter(|pid| hit.insert(*pid)).collect();
        if fresh.is_empty() {
            break;
        }
        for pid in fresh {
            let _ = kill(Pid::from_raw(pid), signal);
        }
        if signal != Signal::SIGKILL {
            break;
        }
    }
    !hit.is_empty()
}

/// Whether the process `pid` belongs to the tree.
pub fn contains(root: TreeRoot, processes: &[Process], pid: i32) -> bool {
    members(processes, std::process::id() as i32, root.pid, |pid| carries(pid, root.exec)).contains(&pid)
}

/// Kills everything below the agent. As PID 1 the agent can leave this to the kernel.
pub fn kill_all() {
    let own = std::process::id() as i32;
    for _ in 0..MAX_SCANS * MAX_SCANS {
        let found = members(&scan(), own, None, |_| true);
        if found.is_empty() {
            return;
        }
        for pid in found {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// All processes of the tree among the descendants of `own`.
fn members(processes: &[Process], own: i32, root: Option<i32>, carries: impl Fn(i32) -> bool) -> BTreeSet<i32> {
    let mut children: BTreeMap<i32, Vec<&Process>> = BTreeMap::new();
    for process in processes {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = BTreeSet::new();
    let mut seen = BTreeSet::from([own]);
    let mut open: Vec<(i32, bool)> = vec![(own, false)];
    while let Some((parent, belongs)) = open.pop() {
        for process in children.get(&parent).into_iter().flatten() {
            // A table read while it changes may contain a cycle.
            if !seen.insert(process.pid) {
                continue;
            }
            let of_root = root.is_some_and(|root| [process.pid, process.group, process.session].contains(&root));
            let belongs = belongs || of_root || carries(process.pid);
            if belongs {
                found.insert(process.pid);
            }
            open.push((process.pid, belongs));
        }
    }
    found
}

/// All live processes below the agent: inside a sandbox these are all others. Returns `None` if `may_go_on`
/// turns false before all are read.
pub fn below(may_go_on: impl Fn() -> bool) -> Option<Vec<Process>> {
    let processes = numbers().map(|pid| may_go_on().then(|| read(pid)));
    let processes: Vec<Process> = processes.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect();
    let found = members(&processes, std::process::id() as i32, None, |_| true);
    Some(processes.into_iter().filter(|process| found.contains(&process.pid)).collect())
}

fn scan() -> Vec<Process> {
    numbers().filter_map(read).collect()
}

fn numbers() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn read(pid: i32) -> Option<Process> {
    parse_stat(pid, &fs::read(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses a live process from its `stat` line. Its name may contain anything, even parentheses.
fn parse_stat(pid: i32, line: &[u8]) -> Option<Process> {
    let name_end = line.iter().rposition(|byte| *byte == b')')?;
    let rest = String::from_utf8_lossy(&line[name_end + 1..]).into_owned();
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse().ok();
    // A group leader that exited before its threads looks dead but is not.
    let threads = number(17).unwrap_or(1);
    if matches!(*fields.first()?, "Z" | "X") && threads < 2 {
        return None;
    }
    Some(Process { pid, parent: number(1)?, group: number(2)?, session: number(3)? })
}

fn carries(pid: i32, exec: u32) -> bool {
    let wanted = format!("{EXEC_VARIABLE}={exec}");
    fs::read(format!("/proc/{pid}/environ"))
        .is_ok_and(|environ| environ.split(|byte| *byte == 0).any(|entry| entry == wanted.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32, group: i32, session: i32) -> Process {
        Process { pid, parent, group, session }
    }

    #[test]
    fn a_tree_is_the_session_all_descendants_and_marked_orphans_below_the_agent() {
        let table = [
            process(1, 0, 1, 1),
            process(10, 1, 10, 10),  // the command
            process(11, 10, 11, 10), // a job of it
            process(12, 11, 12, 12), // a child with its own session
            process(13, 1, 13, 13),  // a marked daemon
            process(14, 13, 13, 13), // and its child
            process(15, 1, 11, 10),  // an orphan in the session
            process(20, 1, 20, 20),  // another command
            process(21, 20, 20, 20),
            process(30, 7, 30, 30), // marked, but nobody's descendant
        ];
        let found = members(&table, 1, Some(10), |pid| pid == 13 || pid == 30);
        assert_eq!(found, BTreeSet::from([10, 11, 12, 13, 14, 15]));
        assert_eq!(members(&table, 1, None, |pid| pid == 13), BTreeSet::from([13, 14]));
    }

    #[test]
    fn a_circle_in_the_table_ends() {
        let table = [process(2, 3, 2, 2), process(3, 2, 2, 2), process(4, 1, 4, 4), process(1, 4, 1, 1)];
        assert_eq!(members(&table, 1, Some(4), |_| false), BTreeSet::from([4]));
    }

    #[test]
    fn a_hostile_name_does_not_confuse_the_reader() {
        let line = b"7 (a) R 1 2 3 (b\xff) S 5 6 8 0 -1";
        assert_eq!(parse_stat(7, line), Some(process(7, 5, 6, 8)));
        assert_eq!(parse_stat(7, b"7 (x) Z 5 6 8 0 -1 0 0 0 0 0 0 0 0 0 20 0 1"), None);
        assert_eq!(parse_stat(7, b"7 (x) Z 5 6 8 0 -1 0 0 0 0 0 0 0 0 0 20 0 2"), Some(process(7, 5, 6, 8)));
        assert_eq!(parse_stat(7, b"7"), None);
    }
}
