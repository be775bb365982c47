//! A process referenced by its pidfd: signals cannot reach another process, and its threads can be proven stopped.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions},
};
use serde::Deserialize;

#[derive(Debug)]
pub struct ProcessHandle {
    pid: i32,
    fd: OwnedFd,
}

/// The part of runsc's state file that we need.
#[derive(Deserialize)]
struct StateFile {
    #[serde(rename = "goferPid", default)]
    gofer: i32,
    #[serde(default)]
    sandbox: Option<Sentry>,
    #[serde(default)]
    status: String,
}

#[derive(Deserialize)]
struct Sentry {
    #[serde(default)]
    pid: i32,
}

/// The status that runsc gives a container once it is started or restored.
const RUNNING: &str = "running";

/// The processes of a container by its state file; `None` until runsc has written it.
#[derive(Debug)]
pub struct Pids {
    pub sentry: i32,
    pub gofer: i32,
}

pub fn pids(state_file: &Path) -> Option<Pids> {
    let state: StateFile = serde_json::from_slice(&fs::read(state_file).ok()?).ok()?;
    let sentry = state.sandbox?.pid;
    (sentry > 0).then_some(Pids { sentry, gofer: state.gofer })
}

/// Whether a container is running, according to its state file.
pub fn is_running(state_file: &Path) -> bool {
    let state = fs::read(state_file).ok().and_then(|text| serde_json::from_slice::<StateFile>(&text).ok());
    state.is_some_and(|state| state.status == RUNNING)
}

impl ProcessHandle {
    pub fn open(pid: i32) -> io::Result<Self> {
        let number = Pid::from_raw(pid).filter(|_| pid > 1).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { pid, fd: rustix::process::pidfd_open(number, PidfdFlags::NONBLOCK)? })
    }

    /// The processes that `parent` has started and not yet reaped.
    pub fn children_of(parent: u32) -> Vec<Self> {
        let threads = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
        let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
        let pids: Vec<i32> = lists.flat_map(|list| list.split(' ').flat_map(str::parse).collect::<Vec<_>>()).collect();
        pids.into_iter().filter_map(|pid| Self::open(pid).ok()).collect()
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Becomes readable when the process ends.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Signalling a process that is gone succeeds.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match rustix::process::pidfd_send_signal(&self.fd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(&self.fd, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }

    /// Reaps the process if it is our child (or was adopted by us as subreaper): runsc waits a minute for a
    /// zombie.
    pub fn reap(&self) {
        let _ = rustix::process::waitid(WaitId::PidFd(self.fd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    }

    /// Whether every thread is stopped. Checks twice: a thread that was running during the first check may have
    /// created another one that the check missed.
    pub fn is_stopped(&self) -> bool {
        self.has_ended() || (self.looks_stopped() && self.looks_stopped())
    }

    fn looks_stopped(&self) -> bool {
        let Ok(threads) = fs::read_dir(format!("/proc/{}/task", self.pid)) else { return self.has_ended() };
        threads.flatten().all(|thread| match fs::read_to_string(thread.path().join("stat")) {
            Ok(stat) => matches!(state(&stat), Some('T' | 't' | 'Z' | 'X')),
            // It ended between the two reads.
            Err(error) => error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(3),
        })
    }
}

/// The state letter of a `stat` line. The process name before it may contain anything, including parentheses.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(") ")?.1.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_found_behind_a_hostile_name() {
        assert_eq!(state("12 (a) T b) S 1 1"), Some('S'));
        assert_eq!(state("12 (exe) T 1 1"), Some('T'));
        assert_eq!(state(""), None);
    }

    #[test]
    fn a_process_stops_goes_on_and_ends_by_its_pidfd() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = ProcessHandle::open(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(!process.is_stopped());
        process.signal(Signal::STOP).unwrap();
        while !process.is_stopped() {
            std::thread::yield_now();
        }
        process.signal(Signal::CONT).unwrap();
        while process.is_stopped() {
            std::thread::yield_now();
        }
        process.signal(Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(process.has_ended());
        process.signal(Signal::STOP).unwrap();
    }

    #[test]
    fn pids_are_read_only_from_a_whole_state_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(pids(file.path()).is_none());
        fs::write(file.path(), r#"{"id":"x","goferPid":7,"sandbox":{"pid":0}}"#).unwrap();
        assert!(pids(file.path()).is_none());
        fs::write(file.path(), r#"{"id":"x","goferPid":7,"sandbox":{"pid":9,"uid":0}}"#).unwrap();
        let found = pids(file.path()).unwrap();
        assert_eq!((found.sentry, found.gofer), (9, 7));
    }
}
