//! Enforces the limits that the container's own kernel does not: observes its usage from outside and has its
//! agent reclaim memory long before the machine would run short.
//!
//! ```text
//!   used:   ──────── limit ──────────── line ───────────────── most
//!            fine    │  left alone       │ memory is reclaimed   │ the container ends
//!                    └─ the line starts here; if reclaiming fails, it moves just above what is left
//! ```

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use baton_protocol::{
    id::SandboxId,
    limits::{Limits, show_size},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    cgroup::{Group, most_memory},
    channel::Channel,
    guard_link::Fence,
    sentry::SentryControl,
};
use crate::clock::{Moment, SharedClock};

/// Bytes that a sandbox can fill in a second, a generous estimate.
const FASTEST: u64 = 2 << 30;
/// Shortest and longest interval between two checks.
const SOONEST: Duration = Duration::from_millis(20);
const LATEST: Duration = Duration::from_millis(500);
/// How long reclaimed memory may take to become visible.
const RELIEF: Duration = Duration::from_millis(250);
/// Give up reclaiming memory after this many attempts.
const IN_VAIN: u32 = 4;
/// Memory of the sentry itself, independent of what runs.
const OWN: u64 = 32 << 20;
/// Interval at which processes are counted: the kernel inside limits them per user, and a sandbox has many
/// users.
const COUNT_EVERY: Duration = Duration::from_secs(1);
const ANSWER: Duration = Duration::from_secs(1);
/// How often the agent is told to end processes before its container is ended: the agent itself may be stopped.
const MAX_RELIEF_ATTEMPTS: u32 = 3;
/// Number of processes above the limit that the agent may start.
const RESERVED_PROCESSES: u64 = 32;
/// The name under which the kernel shows the file with a sandbox's memory.
const MEMORY: &str = "/memfd:runsc-memory";
const PAGE: u64 = 4096;

/// The container being watched.
#[derive(Debug)]
pub(super) struct Subject {
    pub id: SandboxId,
    pub sentry: i32,
    pub group: Option<Group>,
    pub channel: Arc<Channel>,
    pub control: SentryControl,
    pub fence: watch::Receiver<Fence>,
    pub paused: watch::Receiver<bool>,
    pub doomed: CancellationToken,
    pub ended: CancellationToken,
}

impl Subject {
    /// Whether it is paused or fenced: then its usage does not grow and it does not answer.
    fn stands(&self) -> bool {
        *self.fence.borrow() != Fence::Running || *self.paused.borrow()
    }
}

/// Watches until the container has ended; `None` if it has no limit to enforce.
pub(super) fn watch(
    clock: &SharedClock,
    subject: Subject,
    limits: &Limits,
) -> Option<impl Future<Output = ()> + use<>> {
    if limits.memory.is_none() && limits.pids.is_none() {
        return None;
    }
    let ended = subject.ended.clone();
    let gauge = Gauge { sentry: subject.sentry, memory: Vec::new(), seek_at: clock.now() };
    let watched = Watched {
        clock: clock.clone(),
        gauge: limits.memory.map(|limit| (gauge, Scale::new(limit))),
        pids: limits.pids.map(ProcessCount::new),
        count_at: clock.now() + COUNT_EVERY,
        hurries: false,
        subject,
    };
    Some(async move {
        tokio::select! {
            () = watched.run() => {}
            () = ended.cancelled() => {}
        }
    })
}

struct Watched {
    clock: SharedClock,
    subject: Subject,
    gauge: Option<(Gauge, Scale)>,
    pids: Option<ProcessCount>,
    count_at: Moment,
    /// Over its limit, and therefore not throttled for now.
    hurries: bool,
}

impl Watched {
    async fn run(mut self) {
        loop {
            let mut wait = LATEST;
            if !self.subject.stands() {
                wait = self.check();
                if self.clock.now() >= self.count_at {
                    self.count().await;
                    self.count_at = self.clock.now() + COUNT_EVERY;
                }
            }
            self.clock.sleep(wait).await;
        }
    }

    /// Checks the memory and returns the time until the next check.
    fn check(&mut self) -> Duration {
        let Some((gauge, scale)) = &mut self.gauge else { return LATEST };
        let used = match gauge.read(self.clock.now()) {
            Ok(used) => used,
            Err(error) => {
                // The container is starting or ending.
                tracing::debug!(sandbox = %self.subject.id, %error, "the memory usage could not be read");
                return SOONEST;
            }
        };
        let limit = scale.limit;
        let verdict = scale.check(used);
        let is_over = matches!(verdict, Verdict::Over { .. });
        if std::mem::replace(&mut self.hurries, is_over) != is_over {
            self.set_throttle(is_over);
        }
        match verdict {
            Verdict::Fine { free } => soon(free),
            Verdict::Over { at_once } => {
                tracing::info!(sandbox = %self.subject.id, used, limit, at_once, "over the memory limit; reclaiming memory");
                let why = format!("the sandbox is over its memory limit of {}", show_size(limit));
                self.subject.channel.relieve(if at_once { 0 } else { used }, why);
                RELIEF
            }
            Verdict::TooMuch => {
                tracing::error!(sandbox = %self.subject.id, used, limit, "far over the memory limit; ending the container");
                self.subject.doomed.cancel();
                LATEST
            }
        }
    }

    /// Unthrottles the CPU while memory is reclaimed: the agent needs it, and the processes to be killed use all
    /// of it.
    fn set_throttle(&self, is_over: bool) {
        let Some(group) = &self.subject.group else { return };
        let set = if is_over { group.unthrottle() } else { group.throttle() };
        if let Err(error) = set {
            tracing::warn!(sandbox = %self.subject.id, %error, "the CPU limit could not be set");
        }
    }

    /// Counts the processes of all users.
    async fn count(&mut self) {
        let Some(census) = &mut self.pids else { return };
        let counted = self.clock.timeout(ANSWER, self.subject.control.processes()).await;
        let Ok(Ok(count)) = counted else { return };
        let (limit, sandbox) = (census.limit, &self.subject.id);
        match census.check(count) {
            ProcessVerdict::Fine => {}
            ProcessVerdict::Over => {
                tracing::info!(%sandbox, count, limit, "over the process limit; ending the commands");
                self.subject.channel.relieve(0, format!("the sandbox is over its limit of {limit} processes"));
            }
            ProcessVerdict::Unheeded => {
                tracing::error!(%sandbox, count, limit, "still over the process limit; ending the container");
                self.subject.doomed.cancel();
            }
        }
    }
}

/// The verdict on a number of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProcessVerdict {
    Fine,
    /// The agent must end processes.
    Over,
    /// The agent was told repeatedly and did not.
    Unheeded,
}

/// Judges a count of processes. Pure.
#[derive(Debug)]
struct ProcessCount {
    limit: u32,
    /// How often the agent was told since the count was last within the limit.
    told: u32,
}

impl ProcessCount {
    fn new(limit: u32) -> Self {
        Self { limit, told: 0 }
    }

    fn check(&mut self, count: u64) -> ProcessVerdict {
        if count <= u64::from(self.limit).saturating_add(RESERVED_PROCESSES) {
            self.told = 0;
            return ProcessVerdict::Fine;
        }
        if self.told >= MAX_RELIEF_ATTEMPTS {
            return ProcessVerdict::Unheeded;
        }
        self.told += 1;
        ProcessVerdict::Over
    }
}

/// The less memory is free, the sooner the next check.
fn soon(free: u64) -> Duration {
    Duration::from_secs_f64(free as f64 / FASTEST as f64).clamp(SOONEST, LATEST)
}

/// Measures a container's memory, as the host sees it.
struct Gauge {
    sentry: i32,
    memory: Vec<PathBuf>,
    /// When to search for the memory again: a restore replaces the memory its sentry started with.
    seek_at: Moment,
}

impl Gauge {
    /// The memory of its commands, plus what the sentry needs to track them and their files.
    fn read(&mut self, now: Moment) -> io::Result<u64> {
        if now >= self.seek_at || !self.memory.iter().all(|place| is_memory(place)) {
            self.memory = find(self.sentry)?;
            self.seek_at = now + COUNT_EVERY;
        }
        let mut files = BTreeMap::new();
        for place in &self.memory {
            let file = fs::metadata(place)?;
            files.insert((file.dev(), file.ino()), file.blocks().saturating_mul(512));
        }
        let held = files.values().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        let statm = fs::read_to_string(format!("/proc/{}/statm", self.sentry))?;
        Ok(held.saturating_add(remembered(&statm).saturating_sub(OWN)))
    }
}

fn find(sentry: i32) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{sentry}/fd"))? {
        let place = entry?.path();
        if is_memory(&place) {
            found.push(place);
        }
    }
    if found.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(found) }
}

fn is_memory(place: &Path) -> bool {
    fs::read_link(place).is_ok_and(|link| names_memory(&link))
}

fn names_memory(link: &Path) -> bool {
    link.to_str().is_some_and(|link| link.split(' ').next() == Some(MEMORY))
}

/// Memory of a process that is backed by no file, from its `statm`.
fn remembered(statm: &str) -> u64 {
    let mut sizes = statm.split(' ').skip(1).map(|pages| pages.parse::<u64>().unwrap_or(0));
    let (resident, shared) = (sizes.next().unwrap_or(0), sizes.next().unwrap_or(0));
    resident.saturating_sub(shared).saturating_mul(PAGE)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Fine {
        free: u64,
    },
    /// Memory has to be reclaimed. `at_once` is set if ending the largest process did not help: something grows
    /// faster than the agent can scan.
    Over {
        at_once: bool,
    },
    TooMuch,
}

/// Judges a usage of memory. Pure.
#[derive(Debug)]
struct Scale {
    limit: u64,
    /// Above this, memory has to be reclaimed.
    line: u64,
    /// The usage when memory was last reclaimed.
    last: u64,
    in_vain: u32,
}

impl Scale {
    fn new(limit: u64) -> Self {
        Self { limit, line: limit, last: u64::MAX, in_vain: 0 }
    }

    fn check(&mut self, used: u64) -> Verdict {
        let step = self.limit / 16;
        if used <= self.limit {
            *self = Self::new(self.limit);
            return Verdict::Fine { free: self.limit - used };
        }
        if used > most_memory(self.limit) {
            return Verdict::TooMuch;
        }
        if used <= self.line {
            return Verdict::Fine { free: self.line - used };
        }
        // What the last attempt did not free cannot be reclaimed.
        self.in_vain = if used.saturating_add(step) > self.last { self.in_vain + 1 } else { 1 };
        self.last = used;
        if self.in_vain > IN_VAIN {
            // Leaves headroom for a client to come in and clean up.
            (self.line, self.in_vain, self.last) = (used.saturating_add(step), 0, u64::MAX);
            return Verdict::Fine { free: step };
        }
        Verdict::Over { at_once: self.in_vain == 2 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn room_is_made_above_the_limit_and_not_below() {
        let mut scale = Scale::new(512 * MIB);
        assert_eq!(scale.check(500 * MIB), Verdict::Fine { free: 12 * MIB });
        assert_eq!(scale.check(512 * MIB), Verdict::Fine { free: 0 });
        assert_eq!(scale.check(513 * MIB), Verdict::Over { at_once: false });
        assert_eq!(scale.check(100 * MIB), Verdict::Fine { free: 412 * MIB });
        assert_eq!(scale.check(900 * MIB), Verdict::TooMuch);
    }

    #[test]
    fn as_long_as_room_comes_more_is_made() {
        let mut scale = Scale::new(512 * MIB);
        for used in [800, 750, 700, 650, 600, 550] {
            assert_eq!(scale.check(used * MIB), Verdict::Over { at_once: false });
        }
    }

    #[test]
    fn what_cannot_be_had_back_is_left_alone_until_more_comes_on_top() {
        let mut scale = Scale::new(512 * MIB);
        for time in 1..=IN_VAIN {
            assert_eq!(scale.check(600 * MIB), Verdict::Over { at_once: time == 2 });
        }
        assert_eq!(scale.check(600 * MIB), Verdict::Fine { free: 32 * MIB });
        assert_eq!(scale.check(620 * MIB), Verdict::Fine { free: 12 * MIB });
        assert_eq!(scale.check(640 * MIB), Verdict::Over { at_once: false });
        assert_eq!(scale.check(400 * MIB), Verdict::Fine { free: 112 * MIB });
        assert_eq!(scale.check(600 * MIB), Verdict::Over { at_once: false }, "from the beginning again");
    }

    #[test]
    fn an_agent_that_does_not_heed_is_ended_after_a_few_counts_in_a_row_and_not_before() {
        let most = u64::from(64 + u32::try_from(RESERVED_PROCESSES).unwrap());
        // Every sequence of counts, few or too many.
        for bits in 0..1_u32 << 10 {
            let (mut census, mut in_a_row) = (ProcessCount::new(64), 0);
            for at in 0..10 {
                let is_over = bits >> at & 1 == 1;
                in_a_row = if is_over { in_a_row + 1 } else { 0 };
                let expected = match in_a_row {
                    0 => ProcessVerdict::Fine,
                    1..=MAX_RELIEF_ATTEMPTS => ProcessVerdict::Over,
                    _ => ProcessVerdict::Unheeded,
                };
                assert_eq!(census.check(if is_over { most + 1 } else { most }), expected, "{bits:b} at {at}");
            }
        }
        assert_eq!(ProcessCount::new(u32::MAX).check(u64::MAX), ProcessVerdict::Over);
    }

    #[test]
    fn the_less_is_free_the_sooner_it_is_looked_at_again() {
        assert_eq!(soon(0), SOONEST);
        assert_eq!(soon(256 * MIB), Duration::from_millis(125));
        assert_eq!(soon(1 << 40), LATEST);
    }

    #[test]
    fn memory_is_known_by_its_name_and_by_what_is_in_no_file() {
        assert!(names_memory(Path::new("/memfd:runsc-memory (deleted)")));
        assert!(!names_memory(Path::new("/memfd:runsc-memory2 (deleted)")));
        assert!(!names_memory(Path::new("/memfd:systrap-memory (deleted)")));
        assert_eq!(remembered("1000 300 100 5 0 20 0\n"), 200 * PAGE);
        assert_eq!(remembered(""), 0);
    }
}
