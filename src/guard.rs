//! The guard: a small process beside the server that stops containers at their deadline.
//!
//! It reads orders on stdin and reports on stdout ([`guard_wire`]). It starts no processes, depends on no other
//! process, and outlives the server just long enough to kill its remaining containers and unmount what it left
//! mounted.
//!
//! ```text
//!   arm ──▶ Running ──deadline, fence──▶ Stopping ──all threads stopped──▶ Stopped
//!              │  ▲                         │                                │
//!              │  └──────── resume ─────────┼────────────────────────────────┘
//!              └─not synced──▶ Killed ◀─────┘ not confirmed in time
//! ```

pub mod guard_mounts;
pub mod guard_wire;
pub mod process_handle;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use self::guard_wire::{GuardOutcome, GuardReport, Order};
use process_handle::ProcessHandle;
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    fs::FlockOperation,
    process::Signal,
};

/// How often to check the clock even if no deadline is near: a machine that was suspended wakes late.
const MAX_SLEEP: Duration = Duration::from_millis(250);
/// How often to check for a state file that does not exist yet.
const SEEK: Duration = Duration::from_millis(5);
/// How often to check whether all threads are stopped.
const CONFIRM: Duration = Duration::from_millis(1);
/// How long to look for containers that were just starting when the server died.
const LAST_SEEK: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    Stopping { until: Duration },
    Stopped,
    Killed,
}

#[derive(Debug)]
struct Container {
    state_file: PathBuf,
    deadline: Duration,
    confirm: Duration,
    synced: bool,
    sentry: Option<ProcessHandle>,
    state: State,
}

#[derive(Debug, Default)]
struct Guard {
    containers: BTreeMap<String, Container>,
    reports: Vec<GuardReport>,
}

/// Runs until the server closes stdin or dies; on return every container it knows is dead.
pub fn main() -> ExitCode {
    // Both fail without the privilege; the guard then runs at normal priority.
    let _ = rustix::process::setpriority_process(None, -15);
    let _ = std::fs::write("/proc/self/oom_score_adj", "-900");
    let mut guard = Guard::default();
    let served = guard.serve();
    guard.end();
    // The working directory is the server's state directory; what cannot be unmounted now is unmounted at the next
    // start.
    let _ = std::env::current_dir().and_then(|state_dir| take_down(&state_dir));
    if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Unmounts what a server left mounted when it ended, unless another server uses its directory.
fn take_down(state_dir: &Path) -> io::Result<()> {
    let (lock, until) = (File::open(state_dir.join(guard_mounts::LOCK))?, now() + LAST_SEEK);
    while !guard_mounts::below(state_dir)?.is_empty() && now() < until {
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return guard_mounts::unmount_below(state_dir),
            // A server that is just ending still holds the lock.
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(SEEK),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

impl Guard {
    fn serve(&mut self) -> io::Result<()> {
        let mut output = io::stdout().lock();
        let (mut pending, mut chunk) = (Vec::new(), [0; 4096]);
        loop {
            let wait = self.tick(now());
            for report in self.reports.drain(..) {
                output.write_all(format!("{report}\n").as_bytes())?;
            }
            output.flush()?;
            let timeout = wait.and_then(|wait| Timespec::try_from(wait).ok());
            let stdin = rustix::stdio::stdin();
            match rustix::event::poll(&mut [PollFd::new(&stdin, PollFlags::IN)], timeout.as_ref()) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            let count = rustix::io::read(stdin, &mut chunk)?;
            if count == 0 {
                return Ok(());
            }
            pending.extend_from_slice(&chunk[..count]);
            while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                if let Ok(order) = String::from_utf8_lossy(&line[..end]).parse() {
                    self.obey(order, now());
                }
            }
        }
    }

    fn obey(&mut self, order: Order, now: Duration) {
        match order {
            Order::Arm { container, deadline, confirm, state_file } => {
                let armed =
                    Container { state_file, deadline, confirm, synced: false, sentry: None, state: State::Running };
                self.containers.insert(container.clone(), armed);
                self.report(GuardOutcome::Armed, container);
            }
            Order::Extend { container, deadline } => {
                if let Some(known) = self.containers.get_mut(&container) {
                    known.deadline = deadline;
                }
            }
            Order::Take { container, deadline } => {
                if let Some(known) = self.containers.get_mut(&container) {
                    known.deadline = deadline;
                    self.report(GuardOutcome::Taken, container);
                }
            }
            Order::Synced { container } => {
                if let Some(known) = self.containers.get_mut(&container) {
                    known.synced = true;
                }
            }
            Order::Fence { container } => {
                let Some(known) = self.containers.get_mut(&container) else { return };
                known.deadline = known.deadline.min(now);
                let told = if known.state == State::Stopped { Some(GuardOutcome::Fenced) } else { known.tick(now) };
                if let Some(what) = told {
                    self.report(what, container);
                }
            }
            Order::Resume { container, deadline } => {
                let Some(known) = self.containers.get_mut(&container) else { return };
                if known.state == State::Killed || deadline <= now {
                    let what = if known.state == State::Killed { GuardOutcome::Killed } else { GuardOutcome::Fenced };
                    return self.report(what, container);
                }
                (known.deadline, known.state) = (deadline, State::Running);
                known.seek();
                if let Some(sentry) = &known.sentry {
                    let _ = sentry.signal(Signal::CONT);
                }
                self.report(GuardOutcome::Resumed, container);
            }
            Order::Disarm { container } => {
                self.containers.remove(&container);
                self.report(GuardOutcome::Disarmed, container);
            }
        }
    }

    fn report(&mut self, what: GuardOutcome, container: String) {
        self.reports.push(GuardReport { what, container });
    }

    /// Does what is due, and returns the time until the next check.
    fn tick(&mut self, now: Duration) -> Option<Duration> {
        let mut wait: Option<Duration> = None;
        for (name, container) in &mut self.containers {
            if let Some(what) = container.tick(now) {
                self.reports.push(GuardReport { what, container: name.clone() });
            }
            let next = match container.state {
                State::Running if container.sentry.is_none() => SEEK,
                State::Running => container.deadline.saturating_sub(now).min(MAX_SLEEP),
                State::Stopping { .. } => CONFIRM,
                State::Stopped | State::Killed => continue,
            };
            wait = Some(wait.map_or(next, |wait| wait.min(next)));
        }
        wait
    }

    /// The server is gone: kills everything it ran.
    fn end(&mut self) {
        let until = now() + LAST_SEEK;
        loop {
            for container in self.containers.values_mut() {
                container.seek();
                if let Some(sentry) = &container.sentry {
                    let _ = sentry.signal(Signal::KILL);
                }
            }
            self.containers.retain(|_, container| container.sentry.is_none());
            if self.containers.is_empty() || now() >= until {
                return;
            }
            std::thread::sleep(SEEK);
        }
    }
}

impl Container {
    fn tick(&mut self, now: Duration) -> Option<GuardOutcome> {
        match self.state {
            State::Running => {
                self.seek();
                if now < self.deadline {
                    return None;
                }
                // Without a process there is nothing to stop yet; it is stopped as soon as it appears.
                let sentry = self.sentry.as_ref()?;
                if self.synced && sentry.signal(Signal::STOP).is_ok() {
                    self.state = State::Stopping { until: now + self.confirm };
                    return self.tick(now);
                }
                self.kill()
            }
            State::Stopping { until } => {
                let sentry = self.sentry.as_ref()?;
                if sentry.is_stopped() {
                    self.state = State::Stopped;
                    return Some(GuardOutcome::Fenced);
                }
                if now < until { None } else { self.kill() }
            }
            State::Stopped | State::Killed => None,
        }
    }

    fn seek(&mut self) {
        if self.sentry.is_none() {
            self.sentry = process_handle::pids(&self.state_file).and_then(|pids| ProcessHandle::open(pids.sentry).ok());
        }
    }

    fn kill(&mut self) -> Option<GuardOutcome> {
        let _ = self.sentry.as_ref()?.signal(Signal::KILL);
        self.state = State::Killed;
        Some(GuardOutcome::Killed)
    }
}
