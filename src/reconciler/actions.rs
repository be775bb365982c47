//! One short function per action. Each may be interrupted anywhere: the next pass observes what it left, and the plan
//! continues from there.

use std::future::Future;

use baton_protocol::{id::CheckpointId, reason::Reason};

use super::{
    desired::Drain,
    plan::{Action, Desired, LockState, Observed, Saved},
    worker::{LockRead, Worker},
};
use crate::{
    bus::{LeaveReason, LifecycleEvent, StartKind},
    runtime::{self, Container, Start},
    storage::{
        lease::{self, Lapse, LeaseHandle},
        records::{self, Place},
    },
};

pub(super) const DELETED: &str = "The sandbox was deleted.";
const LOST: &str = "The sandbox ended without a checkpoint; its state is lost.";

/// Why an action failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The state has changed: observe again immediately.
    Stale,
    /// A retry may succeed.
    Transient(String),
    /// As in `LifecycleEvent`: the local disk is full.
    NoSpace(String),
    /// It cannot succeed until the spec changes or a session attaches.
    Refused { reason: Reason, message: String },
}

impl From<lease::Error> for Failure {
    fn from(error: lease::Error) -> Self {
        match error {
            lease::Error::Changed | lease::Error::Missing | lease::Error::Unusable(_) => Self::Stale,
            error @ (lease::Error::Sealed | lease::Error::Unencoded(_) | lease::Error::Store(_)) => {
                Self::Transient(error.to_string())
            }
        }
    }
}

impl From<Lapse> for Failure {
    fn from(_: Lapse) -> Self {
        Self::Stale
    }
}

impl From<records::Error> for Failure {
    fn from(error: records::Error) -> Self {
        Self::Transient(error.to_string())
    }
}

impl From<runtime::Error> for Failure {
    fn from(error: runtime::Error) -> Self {
        match error {
            runtime::Error::NotIn(_) => Self::Stale,
            runtime::Error::Refused { reason, message } => Self::Refused { reason, message },
            error @ runtime::Error::NoSpace { .. } => Self::NoSpace(error.to_string()),
            error @ (runtime::Error::Failed { .. } | runtime::Error::TimedOut { .. }) => {
                Self::Transient(error.to_string())
            }
        }
    }
}

pub(super) type Done = Result<(), Failure>;

impl Worker {
    pub(super) async fn act(&mut self, action: Action, desired: Desired, seen: &Observed) -> Done {
        match action {
            Action::Acquire => self.acquire(desired).await,
            Action::Wait => self.wait().await,
            Action::Withdraw => Ok(self.lock_file()?.withdraw().await?),
            Action::Decline => self.decline().await,
            Action::Renew => self.renew().await,
            Action::Create => self.create().await,
            Action::Refuse => self.refuse(seen),
            Action::Fence => self.fence().await,
            Action::Resume => self.resume().await,
            Action::Remove => self.remove(seen).await,
            Action::Release => self.release(seen).await,
            Action::Purge => self.purge().await,
            Action::Restore => self.restore().await,
            Action::Checkpoint => self.checkpoint().await,
            Action::Save => self.checkpoint_live().await,
            Action::Snapshot => self.snapshot().await,
            Action::Extract => self.extract().await,
            Action::Rest => Ok(()),
        }
    }

    async fn acquire(&mut self, desired: Desired) -> Done {
        self.tell_acquiring();
        if desired == Desired::Running {
            self.acquire_to_run().await?;
        } else {
            self.lock_file()?.acquire(false).await?;
        }
        self.context.bus.post(&self.id, LifecycleEvent::Acquired);
        Ok(())
    }

    async fn renew(&mut self) -> Done {
        self.lock_file()?.renew().await?;
        self.extend().await;
        Ok(())
    }

    async fn create(&mut self) -> Done {
        let start = self.start()?;
        let (context, id) = (self.context.clone(), self.id.clone());
        let began = context.clock.now();
        self.boot = Some(StartKind::Fresh);
        let created = self.under_lease(async { context.lifecycle.create(&id, &start).await }).await?;
        created.map_err(|error| refused(Reason::CreateFailed, error))?;
        self.ran = true;
        tracing::info!(sandbox = %self.id, took = ?(context.clock.now() - began), "created");
        self.tell_running(StartKind::Fresh).await;
        Ok(())
    }

    fn refuse(&mut self, seen: &Observed) -> Done {
        if seen.standing == LockState::Missing {
            let reason = match self.lock_read {
                LockRead::Unusable(reason) => reason,
                LockRead::Never | LockRead::Good | LockRead::Failed => Reason::LockMissing,
            };
            return Err(no_lock(reason));
        }
        Err(Failure::Refused { reason: Reason::Lost, message: LOST.to_owned() })
    }

    async fn fence(&mut self) -> Done {
        Ok(self.context.lifecycle.fence(&self.id).await?)
    }

    async fn resume(&mut self) -> Done {
        // A container is resumed only under a lease that was just proven.
        self.renew().await?;
        Ok(self.context.lifecycle.resume(&self.id).await?)
    }

    async fn remove(&mut self, seen: &Observed) -> Done {
        self.context.lifecycle.remove(&self.id).await?;
        self.boot = None;
        if seen.standing != LockState::Ours {
            self.ran = false;
            self.tell_lost();
        }
        Ok(())
    }

    async fn release(&mut self, seen: &Observed) -> Done {
        let lost = seen.saved == Saved::Lost && self.told.running;
        self.release_until_settled(None).await?;
        if lost {
            self.report_failed(Reason::Lost, LOST).await;
        }
        self.tell_left(None);
        Ok(())
    }

    async fn purge(&mut self) -> Done {
        let place = self.found.as_ref().map_or(Place::Memory, |found| found.place);
        if place == Place::Durable {
            self.lock_file()?.purging().await?;
            self.erase_checkpoints().await?;
            let lock = self.lock_file()?.lock().cloned().ok_or(Failure::Stale)?;
            let let_go = self.context.upkeep().unpin_source(&lock).await;
            let_go.map_err(|error| Failure::Transient(error.to_string()))?;
        }
        self.context.records.erase(&self.id, place).await?;
        if place == Place::Durable {
            self.write_tombstone().await?;
        } else {
            self.lock = None;
        }
        self.found = None;
        self.tell_left(None);
        // Attached sessions have received the event.
        self.refuse_until_asked();
        Ok(())
    }

    async fn erase_checkpoints(&self) -> Done {
        let erased = self.context.upkeep().erase_checkpoints(&self.id).await;
        erased.map_err(|error| Failure::Transient(error.to_string()))
    }

    pub(super) fn start(&mut self) -> Result<Start, Failure> {
        let deadline = self.lock_file()?.held().ok_or(Failure::Stale)?.deadline;
        let marker = *self.marker.get_or_insert_with(|| self.context.clock.bits());
        let spec = &self.found.as_ref().ok_or(Failure::Stale)?.metadata.spec;
        let rootfs = self.root.as_ref().map(|root| root.rootfs.digest.clone());
        Ok(Start {
            marker,
            env: spec.env.clone(),
            cwd: spec.cwd.clone(),
            limits: spec.limits.clone(),
            rootfs,
            runsc: None,
            forked_from: None,
            deadline,
        })
    }

    /// Runs work that needs the lease while renewing it, and sends every new deadline to the guard. Drops the work
    /// when the drain time is up: the sandbox must be released by then.
    pub(super) async fn under_lease<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        let (context, id) = (self.context.clone(), self.id.clone());
        let lock = self.lock_file()?;
        let mut deadlines = lock.deadline();
        deadlines.mark_unchanged();
        let forward = async {
            while deadlines.changed().await.is_ok() {
                let deadline = *deadlines.borrow_and_update();
                if let Some(deadline) = deadline
                    && let Err(error) = context.lifecycle.extend(&id, deadline).await
                {
                    tracing::debug!(sandbox = %id, %error, "the guard knows nothing of it yet");
                }
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            biased;
            done = lock.hold(work) => Ok(done?),
            () = forward => Err(Failure::Stale),
            _ = context.drain.until(|drain| *drain == Drain::Over) => Err(Failure::Stale),
        }
    }

    pub(super) fn lock_file(&mut self) -> Result<&mut LeaseHandle, Failure> {
        self.lock.as_mut().ok_or(Failure::Stale)
    }

    pub(super) fn tell_acquiring(&mut self) {
        if !std::mem::replace(&mut self.told.acquiring, true) {
            self.context.bus.post(&self.id, LifecycleEvent::Acquiring);
        }
    }

    /// The sandbox was created under an initial lease: clients receive the same events as for any other lease.
    pub(super) fn tell_leased(&mut self) {
        if self.is_held() && !self.told.acquiring {
            self.tell_acquiring();
            self.context.bus.post(&self.id, LifecycleEvent::Acquired);
        }
    }

    /// Announces a change between fenced and running, whatever caused it.
    pub(super) fn tell_fence(&mut self, container: Container) {
        let fenced = container == Container::Fenced;
        if self.told.running
            && fenced != self.told.fenced
            && matches!(container, Container::Fenced | Container::Running)
        {
            self.told.fenced = fenced;
            let message = "The sandbox stands still until its lease can be renewed.".to_owned();
            self.context
                .bus
                .post(&self.id, if fenced { LifecycleEvent::Fenced { message } } else { LifecycleEvent::Unfenced });
        }
    }

    /// A start that was interrupted may have succeeded all the same.
    pub(super) async fn tell_started(&mut self, seen: &Observed) {
        if seen.standing == LockState::Ours
            && seen.container == Container::Running
            && let Some(boot) = self.boot.take()
        {
            self.tell_running(boot).await;
        }
    }

    pub(super) async fn tell_running(&mut self, boot: StartKind) {
        self.boot = None;
        self.attach_guard = None;
        self.save_due = self.next_save();
        self.waited = false;
        // Time spent waiting for the start does not count as idle.
        self.context.bus.touch(&self.id);
        self.told.running = true;
        if self.found.as_ref().is_some_and(|found| found.place == Place::Durable) {
            self.context.deposit.begin();
        }
        self.context.bus.post(&self.id, LifecycleEvent::Running { boot });
        self.report_running().await;
    }

    pub(super) fn tell_lost(&mut self) {
        if std::mem::take(&mut self.told).running {
            let message = "Another instance took the sandbox over.".to_owned();
            self.context.bus.post(&self.id, LifecycleEvent::LeaseLost { message });
        }
    }

    /// The sandbox does not exist, or no longer does: tells the waiting sessions.
    pub(super) fn tell_gone(&self) {
        if !self.told.running && !self.is_refused() && self.is_attended() {
            let message = DELETED.to_owned();
            self.context.bus.post(&self.id, LifecycleEvent::Failed { reason: Reason::Deleted, message });
        }
    }

    pub(super) fn tell_left(&mut self, checkpoint_id: Option<CheckpointId>) {
        self.told = super::worker::Announced::default();
        self.waited = false;
        if self.why == LeaveReason::Idle {
            self.refuse_until_asked();
        }
        let (sandbox, why) = (&self.id, self.why);
        match &checkpoint_id {
            Some(checkpoint) => tracing::info!(%sandbox, ?why, %checkpoint, "the sandbox left this instance"),
            None => tracing::info!(%sandbox, ?why, "the sandbox ended without a checkpoint"),
        }
        self.context.metrics.sandbox_left(&self.why);
        self.context.bus.post(&self.id, LifecycleEvent::Left { why: self.why, checkpoint_id });
    }
}

/// The lock is missing or unusable, for this reason.
pub(super) fn no_lock(reason: Reason) -> Failure {
    let message = if reason == Reason::Unsigned {
        "The sandbox's lock is not signed with a key of this server; an operator has to look at it."
    } else if reason == Reason::InvalidLock {
        "The sandbox's lock cannot be read; an operator has to repair it."
    } else {
        "The sandbox's lock is missing; an operator has to repair it."
    };
    Failure::Refused { reason, message: message.to_owned() }
}

/// A failed start is not retried until a session attaches.
fn refused(reason: Reason, error: runtime::Error) -> Failure {
    match error {
        runtime::Error::Refused { reason, message } => Failure::Refused { reason, message },
        error @ runtime::Error::NoSpace { .. } => {
            Failure::Refused { reason: Reason::NoSpace, message: error.to_string() }
        }
        error @ (runtime::Error::Failed { .. } | runtime::Error::TimedOut { .. } | runtime::Error::NotIn(_)) => {
            Failure::Refused { reason, message: error.to_string() }
        }
    }
}
