//! The sweep: periodically examines every sandbox in the store and starts a task for each one that needs work and has
//! no worker. So an edit of the metadata takes effect even if no instance holds the sandbox, and nothing accumulates.
//!
//! ```text
//!   list ──▶ read what changed ──▶ task ──▶ runs in place of the sandbox's worker
//! ```
//!
//! The sweep itself writes nothing. A task runs where the sandbox's worker would, so that one instance has one writer
//! per lock; if there is a worker, it takes care of the sandbox and the task is dropped.

pub mod sweep_rules;
mod sweep_tasks;

use std::{collections::HashMap, sync::Arc, time::Duration};

use baton_protocol::id::SandboxId;
use futures::{StreamExt, stream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use self::sweep_rules::{Placement, SweepDesired, SweepLock, SweepObservation, SweepTask, UnixTime, task_for};
use super::{ReconcilerContext, desired::Drain};
use crate::{
    bus::Bus,
    clock::{Moment, SharedClock},
    storage::{
        garbage_collector::GarbageCollector,
        lease::{
            self, LeaseHandle,
            lease_rules::{Identity, LeaseState, is_initial},
        },
        records::{self, Records, SandboxObjects, StoreKind},
    },
};

/// How many sandboxes are examined, and how many tasks run, concurrently.
const AT_ONCE: usize = 8;
/// How often to check a free sandbox for unreferenced checkpoints.
const TIDY_AGAIN: Duration = Duration::from_secs(60 * 60);

/// Shared by the sweep and its tasks.
#[derive(Clone, Debug)]
pub struct SweepContext {
    pub who: Identity,
    pub clock: SharedClock,
    pub records: Records,
    /// Which sandboxes have a worker on this instance.
    pub bus: Arc<Bus>,
    pub upkeep: GarbageCollector,
    /// Sandboxes without a `ttl` are deleted after this time.
    pub retention: Option<Duration>,
    /// Maximum number of sandboxes on this instance.
    pub room: usize,
    /// A lock without metadata counts as abandoned after this time.
    pub abandoned_after: Duration,
    pub tombstones_for: Duration,
}

/// One task, ready to run.
#[derive(Debug)]
pub struct Assignment {
    pub id: SandboxId,
    pub task: SweepTask,
    lock: LeaseHandle,
    objects: SandboxObjects,
    /// Released when the task is done.
    permit: Option<OwnedSemaphorePermit>,
}

/// What the sweep remembers about a sandbox.
#[derive(Debug)]
struct Known {
    objects: SandboxObjects,
    lock: SweepLock,
    /// Kept while the lock has a holder or a waiter: watching it shows whether they are alive.
    file: Option<LeaseHandle>,
    purging: bool,
    started: bool,
    purged_at: Option<UnixTime>,
    untidy: bool,
    tidy_at: Option<Moment>,
    desired: SweepDesired,
    placement: Placement,
    due: Option<UnixTime>,
    is_said_to_run: bool,
    unnamed_since: Option<Moment>,
}

impl Known {
    fn new() -> Self {
        Self {
            objects: SandboxObjects::default(),
            lock: SweepLock::Unknown,
            file: None,
            purging: false,
            started: false,
            purged_at: None,
            untidy: false,
            tidy_at: None,
            desired: SweepDesired::Invalid,
            placement: Placement::Other,
            due: None,
            is_said_to_run: false,
            unnamed_since: None,
        }
    }
}

#[derive(Debug)]
pub struct Sweep {
    sweep_context: SweepContext,
    known: HashMap<SandboxId, Known>,
}

/// Sweeps periodically, until the instance drains or the receiver of tasks is gone.
pub(super) async fn run(context: Arc<ReconcilerContext>, assignments: mpsc::Sender<Assignment>) {
    let Some(every) = context.housekeeping.sweep.filter(|_| context.records.can_checkpoint()) else { return };
    let mut sweep = Sweep::new(context.sweep_context());
    let permits = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        context.clock.sleep(context.clock.jittered(every)).await;
        if context.drain.read() != Drain::No {
            return;
        }
        let found = match sweep.pass().await {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(%error, "the sweep could not list the sandboxes");
                continue;
            }
        };
        for mut assignment in found {
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            assignment.permit = Some(permit);
            if assignments.send(assignment).await.is_err() {
                return;
            }
        }
    }
}

impl Sweep {
    pub fn new(sweep_context: SweepContext) -> Self {
        Self { sweep_context, known: HashMap::new() }
    }

    /// Examines every sandbox once and returns the tasks to run.
    pub async fn pass(&mut self) -> records::Result<Vec<Assignment>> {
        let listed = match self.sweep_context.records.survey().await {
            Ok(listed) => listed,
            Err(error) => {
                // Time in which nothing could be read says nothing about whether a holder is alive.
                self.known.values_mut().filter_map(|known| known.file.as_mut()).for_each(LeaseHandle::missed);
                return Err(error);
            }
        };
        let mut before = std::mem::take(&mut self.known);
        let looked: Vec<_> = {
            let this = &*self;
            let looks = listed.into_iter().map(|(id, objects)| {
                let known = before.remove(&id);
                async move {
                    let known = this.observe(&id, objects, known).await;
                    (id, known)
                }
            });
            stream::iter(looks.collect::<Vec<_>>()).buffered(AT_ONCE).collect().await
        };
        let mut assignments = Vec::new();
        for (id, mut known) in looked {
            let task = task_for(&self.seen(&known));
            if task != SweepTask::Rest {
                match known.file.take().map_or_else(|| self.lock_file(&id), Ok) {
                    Ok(lock) => {
                        let objects = known.objects.clone();
                        // The result is checked again in the next sweep.
                        known.tidy_at = None;
                        assignments.push(Assignment { id: id.clone(), task, lock, objects, permit: None });
                    }
                    Err(error) => tracing::warn!(sandbox = %id, %error, "the sweep skips a sandbox"),
                }
            }
            self.known.insert(id, known);
        }
        Ok(assignments)
    }

    fn lock_file(&self, id: &SandboxId) -> records::Result<LeaseHandle> {
        self.sweep_context.records.lock_file(id, StoreKind::Durable, &self.sweep_context.who)
    }

    /// What is known about a sandbox now. Unchanged objects are not read again.
    async fn observe(&self, id: &SandboxId, objects: SandboxObjects, before: Option<Known>) -> Known {
        // It has a worker.
        if self.sweep_context.bus.is_here(id) {
            return Known::new();
        }
        let mut known = before.unwrap_or_else(Known::new);
        self.look_at_metadata(id, &objects, &mut known).await;
        self.look_at_lock(id, &objects, &mut known).await;
        known.objects = objects;
        known
    }

    async fn look_at_metadata(&self, id: &SandboxId, objects: &SandboxObjects, known: &mut Known) {
        let now = self.sweep_context.clock.now();
        if objects.metadata.is_none() {
            known.desired = SweepDesired::Missing;
            known.unnamed_since.get_or_insert(now);
            return;
        }
        known.unnamed_since = None;
        if objects.metadata == known.objects.metadata && known.desired != SweepDesired::Invalid {
            return;
        }
        known.desired = match self.sweep_context.records.find(id).await {
            Ok(Some(found)) => {
                known.placement = Placement::of(&found.spec, &self.sweep_context.who.me);
                known.due = sweep_rules::expires_at(&found.spec, &found.status, self.sweep_context.retention);
                known.is_said_to_run = sweep_rules::is_said_to_run(&found.status);
                SweepDesired::Is(found.spec.desired_state)
            }
            Ok(None) => SweepDesired::Missing,
            Err(error) => {
                tracing::debug!(sandbox = %id, %error, "the sweep could not parse the metadata");
                SweepDesired::Invalid
            }
        };
    }

    async fn look_at_lock(&self, id: &SandboxId, objects: &SandboxObjects, known: &mut Known) {
        let Some(version) = &objects.lock else {
            (known.lock, known.file) = (SweepLock::Missing, None);
            return;
        };
        let now = self.sweep_context.clock.now();
        let first = known.objects == SandboxObjects::default();
        let still = known.objects.lock.as_ref() == Some(version);
        if !first && !still && known.placement != Placement::Ordered {
            // The lock was written since the last sweep, so its writer is alive. If that was a release, the lock will
            // be unchanged next time.
            (known.lock, known.file) = (SweepLock::Held, None);
            return;
        }
        let settled = still && matches!(known.lock, SweepLock::Free | SweepLock::Purged);
        if settled && known.tidy_at.is_some_and(|at| now < at) {
            return;
        }
        let file = known.file.take().map_or_else(|| self.lock_file(id), Ok);
        let Ok(mut file) = file else { return };
        known.lock = match file.read().await {
            Ok(()) => self.lock_state(&file),
            Err(lease::Error::Missing) => SweepLock::Missing,
            Err(error) => {
                tracing::warn!(sandbox = %id, %error, "the sweep could not read the lock");
                SweepLock::Unknown
            }
        };
        if let Some(lock) = file.lock() {
            known.purging = lock.purging;
            // Under a lease that was never renewed, there was no time to produce anything worth keeping.
            known.started = (lock.ran && !is_initial(lock)) || lock.head.is_some();
            known.purged_at = lock.purged_at.as_deref().and_then(sweep_rules::wall);
        }
        let is_waited_for = file.lock().is_some_and(|lock| lock.waiter.is_some());
        let is_free = matches!(known.lock, SweepLock::Free | SweepLock::Purged);
        if is_free {
            known.untidy = self.is_untidy(id, &file).await;
            known.tidy_at = Some(now + TIDY_AGAIN);
        }
        // A task may only pass over a waiter that it has watched being silent.
        if !is_free || is_waited_for {
            known.file = Some(file);
        }
    }

    fn lock_state(&self, file: &LeaseHandle) -> SweepLock {
        let is_leased = file.lock().is_some_and(|lock| lock.lease.is_some());
        match file.state() {
            None => SweepLock::Unknown,
            Some(LeaseState::Purged) => SweepLock::Purged,
            Some(LeaseState::Free) if is_leased => SweepLock::Dead,
            Some(LeaseState::Free) => SweepLock::Free,
            Some(LeaseState::Theirs | LeaseState::Ours | LeaseState::Late) => SweepLock::Held,
        }
    }

    async fn is_untidy(&self, id: &SandboxId, file: &LeaseHandle) -> bool {
        let Some(lock) = file.lock().filter(|lock| lock.epoch > 0) else { return false };
        let mut lock = lock.clone();
        // As the next holder will see it.
        lock.epoch += 1;
        match self.sweep_context.upkeep.unreferenced(&lock).await {
            Ok(found) => !found.is_empty(),
            Err(error) => {
                tracing::debug!(sandbox = %id, %error, "the sweep could not list the checkpoints");
                false
            }
        }
    }

    fn seen(&self, known: &Known) -> SweepObservation {
        let clock = &self.sweep_context.clock;
        let wall = since_1970(clock);
        SweepObservation {
            lock: known.lock,
            purging: known.purging,
            started: known.started,
            desired: known.desired,
            placement: known.placement,
            is_abandoned: known
                .unnamed_since
                .is_some_and(|since| clock.now() - since >= self.sweep_context.abandoned_after),
            is_overdue: known.due.is_some_and(|due| due <= wall),
            is_said_to_run: known.is_said_to_run,
            is_untidy: known.untidy,
            is_past: known.purged_at.is_some_and(|at| wall.saturating_sub(at) >= self.sweep_context.tombstones_for),
            has_room: self.sweep_context.bus.held_count() < self.sweep_context.room,
        }
    }
}

/// The wall clock, in the format of the records.
pub(super) fn since_1970(clock: &SharedClock) -> UnixTime {
    clock.wall().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
}
