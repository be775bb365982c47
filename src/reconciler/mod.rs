//! The reconciler: one loop per sandbox that makes what is wanted so. It hears of sandboxes
//! through wake-ups on the bus and knows nothing of who wants what, or why.
//!
//! ```text
//!   look ──▶ desired ──▶ plan ──▶ act ──▶ report
//!    ▲                                      │
//!    └────────── something changed ◀────────┘
//! ```

mod action_trace;
mod actions;
mod base_upload;
mod checkpoint;
mod contend;
pub mod desired;
mod eviction;
mod fetch;
mod metric_labels;
mod observe;
pub mod plan;
pub mod precedence;
mod report;
mod requests;
mod restore;
mod rootfs_source;
mod runtimes;
mod snapshot;
mod staging;
pub mod sweep;
mod worker;

use std::{
    collections::HashMap,
    path::PathBuf,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use baton_protocol::id::SandboxId;
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

pub use self::base_upload::Deposit;
use self::worker::Worker;
use crate::{
    bus::Bus,
    clock::SharedClock,
    config::Quotas,
    fair_watch::FairWatch,
    metrics::Metrics,
    runtime::Lifecycle,
    storage::{
        checkpoints::Checkpoints,
        gc::Upkeep,
        lease::rules::{Identity, Times},
        records::Records,
        snapshots::Snapshots,
    },
    traces::Traces,
};
use desired::Drain;
pub use runtimes::AllowedRuntimes;
use sweep::SweepContext;

/// What every loop works with.
#[derive(Debug)]
pub struct ReconcilerContext {
    pub who: Identity,
    pub clock: SharedClock,
    pub records: Records,
    pub bus: Arc<Bus>,
    pub lifecycle: Arc<dyn Lifecycle>,
    /// `None`: nothing can be stored.
    pub checkpoints: Option<Checkpoints>,
    /// `None`: there is no place for them.
    pub snapshots: Option<Snapshots>,
    pub quotas: Quotas,
    /// The most an archive may have that is fetched to become a root file system.
    pub archive_size: u64,
    pub deposit: Deposit,
    pub runtimes: AllowedRuntimes,
    /// Where images lie on their way to and from the store.
    pub staging: PathBuf,
    pub times: Times,
    pub drain: Arc<FairWatch<Drain>>,
    pub rhythm: PollIntervals,
    pub housekeeping: Housekeeping,
    pub metrics: Metrics,
    pub traces: Traces,
}

/// What is done without anybody's asking. `None` is never.
#[derive(Clone, Copy, Debug)]
pub struct Housekeeping {
    /// How often the whole store is looked at.
    pub sweep: Option<Duration>,
    /// After which time sandboxes without a `ttl` of their own are deleted.
    pub retention: Option<Duration>,
    /// Committed checkpoints kept per sandbox.
    pub keep_checkpoints: usize,
    /// How often a running sandbox is checkpointed.
    pub checkpoint_every: Option<Duration>,
    /// So many sandboxes may be on this instance.
    pub room: usize,
}

impl Housekeeping {
    /// Nothing but what a holder does for its own sandbox.
    pub const OFF: Housekeeping =
        Housekeeping { sweep: None, retention: None, keep_checkpoints: 2, checkpoint_every: None, room: 64 };
}

impl ReconcilerContext {
    fn upkeep(&self) -> Upkeep {
        Upkeep {
            records: self.records.clone(),
            checkpoints: self.checkpoints.clone(),
            clock: self.clock.clone(),
            keep: self.housekeeping.keep_checkpoints,
        }
    }

    fn ground(&self) -> SweepContext {
        SweepContext {
            who: self.who.clone(),
            clock: self.clock.clone(),
            records: self.records.clone(),
            bus: self.bus.clone(),
            upkeep: self.upkeep(),
            retention: self.housekeeping.retention,
            room: self.housekeeping.room,
            abandoned_after: sweep::sweep_rules::ABANDONED,
            tombstones_for: sweep::sweep_rules::TOMBSTONE,
        }
    }
}

/// How often to poll when nothing wakes the loop.
#[derive(Clone, Copy, Debug)]
pub struct PollIntervals {
    /// At the lock, while it is about to be let go: docs/adr/0009 counts what that costs.
    pub lock_now: Duration,
    /// At the lock, for a while after a client left or while we want it.
    pub lock_soon: Duration,
    pub lock: Duration,
    /// How long after a client left, or after we began to wait, `lock_now` applies; `lock_soon` six times as long.
    pub now: Duration,
    pub metadata: Duration,
    /// A sandbox to which no session ever came ends after this time.
    pub unattended: Duration,
}

impl PollIntervals {
    pub const DEFAULT: PollIntervals = PollIntervals {
        lock_now: Duration::from_millis(60),
        lock_soon: Duration::from_millis(250),
        lock: Duration::from_secs(1),
        now: Duration::from_secs(10),
        metadata: Duration::from_secs(5),
        unattended: Duration::from_secs(60),
    };

    /// Until the next look at a lock. `left`: how long ago the last client left; `waited`: how long we
    /// have been named as waiter.
    fn lock_in(&self, held: bool, movable: bool, left: Option<Duration>, waited: Option<Duration>) -> Duration {
        let is_now = |since: Option<Duration>| since.is_some_and(|since| since < self.now);
        let is_soon = left.is_some_and(|left| left < self.now * 6);
        if is_now(waited) || (held && movable && is_now(left)) {
            self.lock_now
        } else if is_soon || !held {
            self.lock_soon
        } else {
            self.lock
        }
    }
}

/// Wakes one loop, and remembers that it did: a loop that is just ending is begun anew.
#[derive(Debug, Default)]
struct Wakeup {
    rung: AtomicBool,
    notify: Notify,
}

impl Wakeup {
    fn ring(&self) {
        self.rung.store(true, Ordering::SeqCst);
        self.notify.notify_one();
    }

    async fn heard(&self) {
        self.notify.notified().await;
        self.rung.store(false, Ordering::SeqCst);
    }
}

/// Runs until `stop`, or, while draining, until every loop has come to its end.
pub async fn run(context: Arc<ReconcilerContext>, stop: CancellationToken) {
    let mut loops: JoinSet<()> = JoinSet::new();
    let mut wakeups: HashMap<SandboxId, Arc<Wakeup>> = HashMap::new();
    let mut names: HashMap<tokio::task::Id, SandboxId> = HashMap::new();
    let (found, mut assignments) = mpsc::channel(1);
    let mut sweeping = pin!(sweep::run(context.clone(), found));
    let mut sweeps = true;
    let deposit = base_upload::run(context.clone());
    tokio::pin!(deposit);
    let mut is_stored = false;
    loop {
        let drain = context.drain.read();
        // What was begun for those who come after us is seen through, as long as there is time.
        if drain != Drain::No && loops.is_empty() && (is_stored || !context.deposit.has_begun()) {
            return;
        }
        let woken = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = context.drain.until(|now| *now != drain) => continue,
            id = context.bus.next_wakeup() => id,
            () = &mut deposit, if !is_stored => {
                is_stored = true;
                continue;
            }
            Some(ended) = loops.join_next_with_id() => {
                let task = match &ended {
                    Ok((task, ())) => *task,
                    Err(error) => {
                        tracing::error!(%error, "a sandbox's loop broke off; it is begun anew");
                        error.id()
                    }
                };
                let Some(id) = names.remove(&task) else { continue };
                let rung = wakeups.remove(&id).is_some_and(|wakeup| wakeup.rung.load(Ordering::SeqCst));
                if !rung && ended.is_ok() {
                    continue;
                }
                id
            }
            Some(assignment) = assignments.recv() => {
                // A loop that is there looks after its sandbox itself.
                if !wakeups.contains_key(&assignment.id) {
                    let (id, wakeup) = (assignment.id.clone(), Arc::new(Wakeup::default()));
                    wakeups.insert(id.clone(), wakeup.clone());
                    names.insert(loops.spawn(assignment.run(context.clone(), wakeup)).id(), id);
                }
                continue;
            }
            () = &mut sweeping, if sweeps => {
                sweeps = false;
                continue;
            }
        };
        if let Some(wakeup) = wakeups.get(&woken) {
            wakeup.ring();
            continue;
        }
        let wakeup = Arc::new(Wakeup::default());
        wakeups.insert(woken.clone(), wakeup.clone());
        let sandbox = Worker::new(woken.clone(), context.clone(), wakeup);
        names.insert(loops.spawn(sandbox.run()).id(), woken);
    }
}
