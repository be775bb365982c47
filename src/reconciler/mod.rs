//! The reconciler: one loop per sandbox that makes what is wanted so. It hears of sandboxes
//! through nudges on the board and knows nothing of who wants what, or why.
//!
//! ```text
//!   look ──▶ desired ──▶ plan ──▶ act ──▶ report
//!    ▲                                      │
//!    └────────── something changed ◀────────┘
//! ```

mod act;
mod checkpoint;
mod contend;
pub mod desired;
mod look;
pub mod plan;
mod report;
mod requests;
mod sandbox;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use baton_protocol::id::SandboxId;
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{
    clock::SharedClock,
    runtime::Lifecycle,
    storage::{
        board::Board,
        checkpoints::Checkpoints,
        records::Records,
        rules::{Identity, Times},
    },
};
use desired::Drain;
use sandbox::Sandbox;

/// What every loop works with.
#[derive(Debug)]
pub struct Tools {
    pub who: Identity,
    pub clock: SharedClock,
    pub records: Records,
    pub board: Arc<Board>,
    pub lifecycle: Arc<dyn Lifecycle>,
    /// `None`: nothing can be stored.
    pub checkpoints: Option<Checkpoints>,
    /// Where images lie on their way to and from the store.
    pub staging: PathBuf,
    pub times: Times,
    pub drain: watch::Receiver<Drain>,
    pub rhythm: Rhythm,
}

/// How often is looked without a nudge.
#[derive(Clone, Copy, Debug)]
pub struct Rhythm {
    /// At the lock, shortly after a client left or while we wait for it.
    pub lock_soon: Duration,
    pub lock: Duration,
    /// How long after a client left `lock_soon` applies.
    pub soon: Duration,
    pub metadata: Duration,
    /// A sandbox to which no session ever came ends after this time.
    pub unattended: Duration,
}

impl Rhythm {
    pub const DEFAULT: Rhythm = Rhythm {
        lock_soon: Duration::from_millis(250),
        lock: Duration::from_secs(1),
        soon: Duration::from_secs(60),
        metadata: Duration::from_secs(5),
        unattended: Duration::from_secs(60),
    };
}

/// Wakes one loop, and remembers that it did: a loop that is just ending is begun anew.
#[derive(Debug, Default)]
struct Bell {
    rung: AtomicBool,
    notify: Notify,
}

impl Bell {
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
pub async fn run(tools: Arc<Tools>, stop: CancellationToken) {
    let mut loops: JoinSet<()> = JoinSet::new();
    let mut bells: HashMap<SandboxId, Arc<Bell>> = HashMap::new();
    let mut names: HashMap<tokio::task::Id, SandboxId> = HashMap::new();
    let mut drain = tools.drain.clone();
    loop {
        if *drain.borrow() != Drain::No && loops.is_empty() {
            return;
        }
        let nudged = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            changed = drain.changed() => {
                if changed.is_err() {
                    return;
                }
                continue;
            }
            id = tools.board.next_nudge() => id,
            Some(ended) = loops.join_next_with_id() => {
                let task = match &ended {
                    Ok((task, ())) => *task,
                    Err(error) => {
                        tracing::error!(%error, "a sandbox's loop broke off; it is begun anew");
                        error.id()
                    }
                };
                let Some(id) = names.remove(&task) else { continue };
                let rung = bells.remove(&id).is_some_and(|bell| bell.rung.load(Ordering::SeqCst));
                if !rung && ended.is_ok() {
                    continue;
                }
                id
            }
        };
        if let Some(bell) = bells.get(&nudged) {
            bell.ring();
            continue;
        }
        let bell = Arc::new(Bell::default());
        bells.insert(nudged.clone(), bell.clone());
        let sandbox = Sandbox::new(nudged.clone(), tools.clone(), bell);
        names.insert(loops.spawn(sandbox.run()).id(), nudged);
    }
}
