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

use crate::clock::{Moment, SharedClock};

/// How many passing phases of a sandbox are kept for a session that reads slowly.
const KEPT: usize = 256;

/// What the progress of a snapshot is called.
pub const SNAPSHOT: &str = "snapshot";

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
    /// How far a long action has come.
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

#[derive(Debug)]
struct Line {
    log: VecDeque<Posted>,
    next: u64,
    posted: watch::Sender<u64>,
    sessions: u32,
    held: bool,
    /// Sessions so far: a change makes the reconciler forget that it refused.
    asked: u64,
    known_since: Moment,
    active_at: Moment,
}

#[derive(Debug)]
pub struct Board {
    clock: SharedClock,
    lines: Mutex<BTreeMap<SandboxId, Line>>,
    nudged: Mutex<BTreeSet<SandboxId>>,
    bell: Notify,
}

impl Board {
    pub fn new(clock: SharedClock) -> Arc<Self> {
        Arc::new(Self { clock, lines: Mutex::default(), nudged: Mutex::default(), bell: Notify::new() })
    }

    /// Asks the reconciler to look at a sandbox now. Many nudges before the look are one.
    pub fn nudge(&self, id: &SandboxId) {
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
        line.posted.send_replace(number);
    }

    /// Follows what is posted from now on.
    pub fn follow(self: &Arc<Self>, id: &SandboxId) -> Follower {
        let mut lines = lock(&self.lines);
        let line = self.line(&mut lines, id);
        Follower { board: self.clone(), id: id.clone(), seen: line.next, posted: line.posted.subscribe() }
    }

    /// As [`attach`](Self::attach), unless `most` sandboxes are already here or on their way.
    pub fn admit(self: &Arc<Self>, id: &SandboxId, most: usize) -> Option<Attached> {
        let mut lines = lock(&self.lines);
        let here = |line: &Line| line.sessions > 0 || line.held;
        let others = lines.iter().filter(|(other, line)| *other != id && here(line)).count();
        (others < most).then(|| self.attach_to(&mut lines, id))
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
        self.line(&mut lines, id).held = held;
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
        Attached { board: self.clone(), id: id.clone() }
    }

    /// A client did something: the idle time begins anew.
    pub fn touch(&self, id: &SandboxId) {
        let now = self.clock.now();
        if let Some(line) = lock(&self.lines).get_mut(id) {
            line.active_at = now;
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
        let mut lines = lock(&self.lines);
        if lines.get(id).is_some_and(|line| line.sessions == 0 && !line.held && line.posted.receiver_count() == 0) {
            lines.remove(id);
        }
    }

    fn line<'a>(&self, lines: &'a mut BTreeMap<SandboxId, Line>, id: &SandboxId) -> &'a mut Line {
        lines.entry(id.clone()).or_insert_with(|| {
            let now = self.clock.now();
            Line {
                log: VecDeque::new(),
                next: 0,
                posted: watch::Sender::new(0),
                sessions: 0,
                held: false,
                asked: 0,
                known_since: now,
                active_at: now,
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
    posted: watch::Receiver<u64>,
}

impl Follower {
    /// The next phase. If this reader fell behind the log, the numbers show the gap. May be cancelled.
    pub async fn next(&mut self) -> Posted {
        loop {
            self.posted.mark_unchanged();
            let found = lock(&self.board.lines)
                .get(&self.id)
                .and_then(|line| line.log.iter().find(|posted| posted.number > self.seen).cloned());
            if let Some(posted) = found {
                self.seen = posted.number;
                return posted;
            }
            if self.posted.changed().await.is_err() {
                // The line was forgotten; nothing will ever come.
                std::future::pending::<()>().await;
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::TestClock;
    use std::time::Duration;

    fn board() -> (Arc<Board>, SandboxId, SharedClock) {
        let clock: SharedClock = Arc::new(TestClock::new(1));
        (Board::new(clock.clone()), clock.sandbox_id(), clock)
    }

    #[tokio::test(start_paused = true)]
    async fn a_follower_hears_every_phase_once_and_in_order() {
        let (board, id, _) = board();
        board.post(&id, Passing::Acquiring);
        let mut follower = board.follow(&id);
        board.post(&id, Passing::Acquired);
        board.post(&id, Passing::Unfenced);
        assert_eq!(follower.next().await, Posted { number: 2, passing: Passing::Acquired });
        assert_eq!(follower.next().await, Posted { number: 3, passing: Passing::Unfenced });
        let late = follower.next();
        tokio::pin!(late);
        assert!(futures::poll!(&mut late).is_pending());
        board.post(&id, Passing::Acquiring);
        assert_eq!(late.await.number, 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_follower_that_fell_behind_sees_the_gap_in_the_numbers() {
        let (board, id, _) = board();
        let mut follower = board.follow(&id);
        for _ in 0..KEPT + 10 {
            board.post(&id, Passing::Acquiring);
        }
        assert_eq!(follower.next().await.number, 11);
    }

    #[tokio::test(start_paused = true)]
    async fn many_nudges_before_the_look_are_one() {
        let (board, id, _) = board();
        board.nudge(&id);
        board.nudge(&id);
        assert_eq!(board.next_nudge().await, id);
        assert!(lock(&board.nudged).is_empty());
        let waiting = board.next_nudge();
        tokio::pin!(waiting);
        assert!(futures::poll!(&mut waiting).is_pending());
        board.nudge(&id);
        assert_eq!(waiting.await, id);
    }

    #[tokio::test(start_paused = true)]
    async fn presence_lasts_as_long_as_the_session_and_leaving_counts_as_activity() {
        let (board, id, clock) = board();
        assert!(!board.presence(&id).ever_attached);
        let session = board.attach(&id);
        assert!(board.presence(&id).attached);
        clock.sleep(Duration::from_secs(5)).await;
        drop(session);
        let presence = board.presence(&id);
        assert!(!presence.attached && presence.ever_attached);
        assert_eq!(presence.active_at - presence.known_since, Duration::from_secs(5));
        assert_eq!(board.next_nudge().await, id);
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_are_admitted_than_there_is_room_for() {
        let (board, id, clock) = board();
        let first = board.admit(&id, 1).unwrap();
        assert!(board.admit(&clock.sandbox_id(), 1).is_none());
        let second = board.admit(&id, 1).expect("it is already here");
        drop((first, second));
        board.hold(&id, true);
        assert!(board.admit(&clock.sandbox_id(), 1).is_none());
        board.hold(&id, false);
        assert!(board.admit(&clock.sandbox_id(), 1).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_sandbox_is_forgotten_only_when_nobody_reads() {
        let (board, id, _) = board();
        let follower = board.follow(&id);
        board.post(&id, Passing::Acquiring);
        board.forget(&id);
        assert_eq!(lock(&board.lines).len(), 1);
        drop(follower);
        board.forget(&id);
        assert_eq!(lock(&board.lines).len(), 0);
    }
}
