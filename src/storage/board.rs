//! The board: the one local place between API and reconciler of an instance.
//!
//! The API *nudges* (look at this sandbox now) and says who is attached and active.
//! The reconciler *posts* passing phases, numbered, in order, in a bounded log that
//! sessions follow. Everything here is plain data, so that the two sides may later
//! be two processes. Nothing durable hangs on it: it may be lost at any moment.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_protocol::{
    id::{CheckpointId, SandboxId},
    reason::Reason,
};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};

use crate::{
    clock::{Moment, SharedClock},
    notice::Notice,
};

/// How many passing phases of a sandbox are kept for a session that reads slowly.
const KEPT: usize = 256;

/// What progress is of: a snapshot or a checkpoint on its way to the store, a checkpoint or the archive
/// of a root file system on its way here.
pub const SNAPSHOT: &str = "snapshot";
pub const UPLOAD: &str = "upload";
pub const DOWNLOAD: &str = "download";
pub const EXTRACT: &str = "extract";
/// Activity is passed on to another process no more often than this.
const TOUCH: std::time::Duration = std::time::Duration::from_millis(200);

/// Why a sandbox left, or is about to leave, this instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// The spec says `checkpointed`.
    Checkpointed,
    /// The spec says `handed_off`.
    HandedOff,
    /// Another instance waits for it.
    Waiter,
    /// This instance is on its way out.
    Drain,
    /// Nothing happened for the idle time.
    Idle,
    /// The spec says `deleted`.
    Deleted,
}

/// How a sandbox came to run here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Boot {
    Fresh,
    /// From its head. `rolled_back` when it had run on after that: work since then is lost.
    Restored {
        checkpoint_id: CheckpointId,
        age_ms: u64,
        rolled_back: bool,
    },
    /// Only the files of its last checkpoint could be used.
    Files {
        checkpoint_id: CheckpointId,
    },
}

/// What happens to a sandbox on this instance, as it happens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Passing {
    /// The lock is about to be taken or waited for.
    Acquiring,
    Acquired,
    Running {
        boot: Boot,
    },
    /// It will not start, for good.
    Failed {
        reason: Reason,
        message: String,
    },
    /// Another instance asked for it.
    ReleaseRequested,
    Checkpointing {
        why: Why,
    },
    /// It runs on.
    CheckpointFailed {
        why: Why,
        reason: Reason,
        message: String,
    },
    /// It is not here any more. With a checkpoint it can be had again; without one it ended.
    Left {
        why: Why,
        checkpoint_id: Option<CheckpointId>,
    },
    /// It stands still because the lease could not be renewed.
    Fenced {
        message: String,
    },
    /// It goes on.
    Unfenced,
    /// Another instance has it. What ran here is gone.
    LeaseLost {
        message: String,
    },
    /// Requests were answered in the metadata.
    Answered,
    /// How far a long action has come, in bytes; `total` is 0 if nobody knows it.
    Progress {
        what: String,
        done: u64,
        total: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Posted {
    pub number: u64,
    pub passing: Passing,
}

/// What sessions have told about a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Presence {
    /// A session is attached, or waits for the sandbox to run here.
    pub attached: bool,
    /// One was, at some time.
    pub ever_attached: bool,
    /// When the board first heard of the sandbox.
    pub known_since: Moment,
    /// When a client last did something, or left.
    pub active_at: Moment,
}

/// What the API says to the reconciler. A board of the API's own process passes it on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Told {
    Attached(SandboxId),
    Left(SandboxId),
    Touched(SandboxId),
    Nudged(SandboxId),
}

/// Where a board passes on what it is told.
struct Teller(Box<dyn Fn(Told) + Send + Sync>);

impl std::fmt::Debug for Teller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Teller")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub sessions: usize,
    /// Sandboxes that were nudged and not yet looked at.
    pub nudges: usize,
}

#[derive(Debug)]
struct Line {
    log: VecDeque<Posted>,
    next: u64,
    /// The newest number; who follows holds it too.
    posted: Arc<Notice<u64>>,
    sessions: u32,
    held: bool,
    /// Sessions so far: a change makes the reconciler forget that it refused.
    asked: u64,
    known_since: Moment,
    active_at: Moment,
    /// When activity was last passed on.
    touched_at: Option<Moment>,
}

#[derive(Debug)]
pub struct Board {
    clock: SharedClock,
    /// Some: the reconciler is another process, and has a board of its own.
    teller: Option<Teller>,
    lines: Mutex<BTreeMap<SandboxId, Line>>,
    nudged: Mutex<BTreeSet<SandboxId>>,
    bell: Notify,
    /// Counts changes of what is held.
    holds: watch::Sender<u64>,
}

impl Board {
    pub fn new(clock: SharedClock) -> Arc<Self> {
        Arc::new(Self::with(clock, None))
    }

    /// A board of the API alone: what it is told it passes on, in order. `tell` must not wait.
    pub fn telling(clock: SharedClock, tell: impl Fn(Told) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self::with(clock, Some(Teller(Box::new(tell)))))
    }

    fn with(clock: SharedClock, teller: Option<Teller>) -> Self {
        let holds = watch::Sender::new(0);
        Self { clock, teller, lines: Mutex::default(), nudged: Mutex::default(), bell: Notify::new(), holds }
    }

    fn tell(&self, told: impl FnOnce() -> Told) {
        if let Some(Teller(tell)) = &self.teller {
            tell(told());
        }
    }

    /// Asks the reconciler to look at a sandbox now. Many nudges before the look are one.
    pub fn nudge(&self, id: &SandboxId) {
        if self.teller.is_some() {
            self.tell(|| Told::Nudged(id.clone()));
            // Nobody else ends a line here.
            self.forget(id);
            return;
        }
        lock(&self.nudged).insert(id.clone());
        self.bell.notify_one();
    }

    /// The next sandbox somebody nudged. For one listener.
    pub async fn next_nudge(&self) -> SandboxId {
        loop {
            let heard = self.bell.notified();
            if let Some(id) = lock(&self.nudged).pop_first() {
                return id;
            }
            heard.await;
        }
    }

    pub fn post(&self, id: &SandboxId, passing: Passing) {
        let mut lines = lock(&self.lines);
        let line = self.line(&mut lines, id);
        line.next += 1;
        let number = line.next;
        line.log.push_back(Posted { number, passing });
        if line.log.len() > KEPT {
            line.log.pop_front();
        }
        line.posted.post(number);
    }

    /// Follows what is posted from now on.
    pub fn follow(self: &Arc<Self>, id: &SandboxId) -> Follower {
        let mut lines = lock(&self.lines);
        let line = self.line(&mut lines, id);
        Follower { board: self.clone(), id: id.clone(), seen: line.next, posted: line.posted.clone() }
    }

    /// As [`attach`](Self::attach), unless `most` sandboxes are already here or on their way.
    pub fn admit(self: &Arc<Self>, id: &SandboxId, most: usize) -> Option<Attached> {
        let mut lines = lock(&self.lines);
        let here = |line: &Line| line.sessions > 0 || line.held;
        let others = lines.iter().filter(|(other, line)| *other != id && here(line)).count();
        (others < most).then(|| self.attach_to(&mut lines, id))
    }

    /// How much there is on the board, for whoever measures.
    pub fn counts(&self) -> Counts {
        let sessions = lock(&self.lines).values().map(|line| line.sessions as usize).sum();
        Counts { sessions, nudges: lock(&self.nudged).len() }
    }

    /// How many sandboxes this instance holds.
    pub fn held(&self) -> usize {
        lock(&self.lines).values().filter(|line| line.held).count()
    }

    /// It is on this instance, or a session waits for it here.
    pub fn is_here(&self, id: &SandboxId) -> bool {
        lock(&self.lines).get(id).is_some_and(|line| line.sessions > 0 || line.held)
    }

    /// The reconciler says whether it holds a sandbox.
    pub fn hold(&self, id: &SandboxId, held: bool) {
        let mut lines = lock(&self.lines);
        let line = self.line(&mut lines, id);
        if std::mem::replace(&mut line.held, held) != held {
            self.holds.send_modify(|count| *count += 1);
        }
    }

    /// Tells when something is held or let go.
    pub fn holds(&self) -> watch::Receiver<u64> {
        self.holds.subscribe()
    }

    /// What is held now.
    pub fn held_ids(&self) -> Vec<SandboxId> {
        lock(&self.lines).iter().filter(|(_, line)| line.held).map(|(id, _)| id.clone()).collect()
    }

    /// Says that a session is here for this sandbox, until the value is dropped.
    pub fn attach(self: &Arc<Self>, id: &SandboxId) -> Attached {
        self.attach_to(&mut lock(&self.lines), id)
    }

    fn attach_to(self: &Arc<Self>, lines: &mut BTreeMap<SandboxId, Line>, id: &SandboxId) -> Attached {
        let now = self.clock.now();
        let line = self.line(lines, id);
        line.sessions += 1;
        line.asked += 1;
        line.active_at = now;
        // Under the lock, so that a coming and a going are told in their order.
        self.tell(|| Told::Attached(id.clone()));
        Attached { board: self.clone(), id: id.clone() }
    }

    /// A client did something: the idle time begins anew.
    pub fn touch(&self, id: &SandboxId) {
        let now = self.clock.now();
        if let Some(line) = lock(&self.lines).get_mut(id) {
            line.active_at = now;
            if self.teller.is_some() && line.touched_at.is_none_or(|at| now - at >= TOUCH) {
                line.touched_at = Some(now);
                self.tell(|| Told::Touched(id.clone()));
            }
        }
    }

    pub fn presence(&self, id: &SandboxId) -> Presence {
        let mut lines = lock(&self.lines);
        let line = self.line(&mut lines, id);
        Presence {
            attached: line.sessions > 0,
            ever_attached: line.asked > 0,
            known_since: line.known_since,
            active_at: line.active_at,
        }
    }

    /// How many sessions have come for this sandbox so far.
    pub fn asked(&self, id: &SandboxId) -> u64 {
        lock(&self.lines).get(id).map_or(0, |line| line.asked)
    }

    /// Forgets a sandbox that is not here any more, unless a session still reads.
    pub fn forget(&self, id: &SandboxId) {
        self.forget_but_for(id, 0);
    }

    /// So many readers do not count.
    fn forget_but_for(&self, id: &SandboxId, readers: usize) {
        let mut lines = lock(&self.lines);
        let unread = |line: &Line| Arc::strong_count(&line.posted) - 1 <= readers;
        if lines.get(id).is_some_and(|line| line.sessions == 0 && !line.held && unread(line)) {
            lines.remove(id);
        }
    }

    fn line<'a>(&self, lines: &'a mut BTreeMap<SandboxId, Line>, id: &SandboxId) -> &'a mut Line {
        lines.entry(id.clone()).or_insert_with(|| {
            let now = self.clock.now();
            Line {
                log: VecDeque::new(),
                next: 0,
                posted: Arc::default(),
                sessions: 0,
                held: false,
                asked: 0,
                known_since: now,
                active_at: now,
                touched_at: None,
            }
        })
    }
}

/// A session's presence on the board.
#[derive(Debug)]
pub struct Attached {
    board: Arc<Board>,
    id: SandboxId,
}

impl Drop for Attached {
    fn drop(&mut self) {
        let now = self.board.clock.now();
        if let Some(line) = lock(&self.board.lines).get_mut(&self.id) {
            line.sessions -= 1;
            line.active_at = now;
            self.board.tell(|| Told::Left(self.id.clone()));
        }
        self.board.nudge(&self.id);
    }
}

/// Reads a sandbox's passing phases in order.
#[derive(Debug)]
pub struct Follower {
    board: Arc<Board>,
    id: SandboxId,
    seen: u64,
    posted: Arc<Notice<u64>>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        // With a reconciler here its loop forgets the line; on a board of the API alone nobody does.
        if self.board.teller.is_some() {
            self.board.forget_but_for(&self.id, 1);
        }
    }
}

impl Follower {
    /// The next phase. If this reader fell behind the log, the numbers show the gap. May be cancelled.
    pub async fn next(&mut self) -> Posted {
        loop {
            self.posted.until(|newest| *newest > self.seen).await;
            let found = lock(&self.board.lines)
                .get(&self.id)
                .and_then(|line| line.log.iter().find(|posted| posted.number > self.seen).cloned());
            if let Some(posted) = found {
                self.seen = posted.number;
                return posted;
            }
            // The line was forgotten; nothing will ever come.
            std::future::pending::<()>().await;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
