//! The reconciler: one loop per sandbox that brings the observed state to the desired one. Wake-ups on the bus tell
//! it which sandboxes to reconcile; it does not know which client caused them, or why.
//!
//! ```text
//!   observe ──▶ desired ──▶ plan ──▶ act ──▶ report
//!      ▲                                       │
//!      └─────────── something changed ◀────────┘
//! ```

mod actions;
mod activity;
mod allowed_runtimes;
mod announced;
mod base_upload;
mod checkpoint_state;
mod contention;
pub mod desired;
mod eviction;
mod lease_view;
mod observe;
pub mod plan;
pub mod precedence;
mod record_view;
mod report;
mod retry;
mod start_state;
pub mod sweep;
mod worker;
mod worker_telemetry;
mod workers;

use std::{path::PathBuf, pin::pin, sync::Arc, time::Duration};

use baton_protocol::sandbox_network::Egress;
use futures::{FutureExt, future::FusedFuture};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use self::workers::Workers;
pub use self::{base_upload::BaseUpload, record_view::spec_sha256};
use crate::{
    bus::Bus,
    clock::SharedClock,
    config::{LeaseTimes, Quotas},
    fair_watch::FairWatch,
    metrics::Metrics,
    runtime::Lifecycle,
    storage::{
        checkpoints::Checkpoints, garbage_collector::GarbageCollector, lease::lease_rules::Identity, records::Records,
        snapshots::Snapshots,
    },
    traces::Traces,
};
pub use allowed_runtimes::AllowedRuntimes;
use desired::Drain;
use sweep::SweepContext;

/// Shared by all workers.
#[derive(Debug)]
pub struct ReconcilerContext {
    pub who: Identity,
    pub clock: SharedClock,
    pub records: Records,
    pub bus: Arc<Bus>,
    pub lifecycle: Arc<dyn Lifecycle>,
    /// `None`: no checkpoints can be stored.
    pub checkpoints: Option<Checkpoints>,
    /// `None`: no snapshots can be stored.
    pub snapshots: Option<Snapshots>,
    pub quotas: Quotas,
    /// Where a sandbox may connect to if its spec says nothing.
    pub egress: Egress,
    /// Maximum size of an archive that is fetched to become a root file system.
    pub archive_size: u64,
    pub base_upload: BaseUpload,
    pub runtimes: AllowedRuntimes,
    /// Local directory for images on their way to and from the store.
    pub staging: PathBuf,
    pub times: LeaseTimes,
    pub drain: Arc<FairWatch<Drain>>,
    pub housekeeping: Housekeeping,
    pub metrics: Metrics,
    pub traces: Traces,
}

/// Periodic work that no client requests. `None` disables it.
#[derive(Clone, Copy, Debug)]
pub struct Housekeeping {
    /// How often to sweep the whole store.
    pub sweep: Option<Duration>,
    /// Sandboxes without a `ttl` of their own are deleted after this time.
    pub retention: Option<Duration>,
    /// Committed checkpoints kept per sandbox.
    pub keep_checkpoints: usize,
    /// How often a running sandbox is checkpointed.
    pub checkpoint_every: Option<Duration>,
    /// Maximum number of sandboxes on this instance.
    pub room: usize,
}

impl Housekeeping {
    /// Only what a holder does for its own sandbox.
    pub const OFF: Housekeeping =
        Housekeeping { sweep: None, retention: None, keep_checkpoints: 2, checkpoint_every: None, room: 64 };
}

impl ReconcilerContext {
    fn upkeep(&self) -> GarbageCollector {
        GarbageCollector {
            records: self.records.clone(),
            checkpoints: self.checkpoints.clone(),
            clock: self.clock.clone(),
            keep: self.housekeeping.keep_checkpoints,
        }
    }

    fn sweep_context(&self) -> SweepContext {
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

/// Runs until `stop` or, while draining, until every worker has ended.
pub async fn run(context: Arc<ReconcilerContext>, stop: CancellationToken) {
    let mut workers = Workers::new(context.clone());
    let (found, mut assignments) = mpsc::channel(1);
    let mut sweep = pin!(sweep::run(context.clone(), found).fuse());
    let mut base_upload = pin!(base_upload::run(context.clone()).fuse());
    loop {
        let drain = context.drain.read();
        // An upload for later instances that has begun is finished, as long as there is time.
        let is_uploading = context.base_upload.has_begun() && !base_upload.is_terminated();
        if drain != Drain::No && workers.is_empty() && !is_uploading {
            return;
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = context.drain.until(|now| *now != drain) => {}
            id = context.bus.next_wakeup() => workers.wake(id),
            () = &mut base_upload, if !base_upload.is_terminated() => {}
            Some(ended) = workers.join_next() => ended.into_iter().for_each(|id| workers.wake(id)),
            Some(assignment) = assignments.recv() => workers.assign(assignment),
            () = &mut sweep, if !sweep.is_terminated() => {}
        }
    }
}
