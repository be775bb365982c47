//! Actions on the lease, and those that start, stop or remove a container without its image.

use baton_protocol::{reason::Reason, sandbox_network::Egress};

use super::{ActionResult, Failure, STATE_LOST, refusal, start_failed};
use crate::{
    bus::{LifecycleEvent, StartKind},
    reconciler::{
        contention::PendingProbe,
        plan::{Desired, LockState, Observed, Saved},
        worker::Worker,
    },
    runtime::{self, Layout, StartSpec},
    storage::{lease::LeaseHandle, records::StoreKind},
};

impl Worker {
    /// Acquires the lease. If the sandbox is going to run, its head is being fetched meanwhile.
    pub(super) async fn acquire(&mut self, desired: Desired) -> ActionResult {
        self.announce_acquiring();
        let runs = desired == Desired::Running;
        if runs {
            self.fetch_ahead();
        }
        let acquired = self.lease.handle_mut()?.acquire(runs).await;
        if acquired.is_err() {
            self.start.abandon_fetch().await;
        }
        acquired?;
        self.post(LifecycleEvent::Acquired);
        Ok(())
    }

    /// Registers as waiter on behalf of the attached session, or refreshes our entry: a waiter that shows no sign of
    /// life is skipped.
    pub(super) async fn wait(&mut self) -> ActionResult {
        self.announce_acquiring();
        let claim = self.record.spec().and_then(|spec| self.claim(spec));
        let entry = self.lease.handle.as_ref().and_then(LeaseHandle::entry).map(|entry| entry.claim);
        self.contention.registered_under = self.sessions();
        self.lease.handle_mut()?.wait(claim.or(entry).unwrap_or_default()).await?;
        self.contention.has_registered = true;
        self.lease.beat_due = self.context.clock.now() + self.context.times.beat;
        Ok(())
    }

    /// Tells the waiter for which the client here was probed that the sandbox is in use.
    pub(super) async fn decline(&mut self) -> ActionResult {
        let Some(PendingProbe { subject, .. }) = self.contention.probe.clone() else { return Err(Failure::Stale) };
        self.lease.handle_mut()?.decline(&subject.waiter).await?;
        self.extend_deadline().await;
        tracing::info!(sandbox = %self.id, "a waiter was declined: the attached client is alive");
        Ok(())
    }

    pub(super) async fn renew(&mut self) -> ActionResult {
        self.lease.handle_mut()?.renew().await?;
        self.lease.due = self.context.clock.now() + self.lock_interval();
        self.extend_deadline().await;
        Ok(())
    }

    /// Sends the guard the container's current deadline.
    pub(super) async fn extend_deadline(&self) {
        let deadline = self.lease.handle.as_ref().and_then(|lease| *lease.deadline().borrow());
        let Some(deadline) = deadline else { return };
        match self.context.lifecycle.extend(&self.id, deadline).await {
            Ok(()) | Err(runtime::Error::NotIn(_)) => {}
            Err(error) => tracing::error!(sandbox = %self.id, %error, "the guard did not accept the deadline"),
        }
    }

    pub(super) async fn create(&mut self) -> ActionResult {
        let start = self.start_spec()?;
        let (context, id) = (self.context.clone(), self.id.clone());
        let began = context.clock.now();
        self.start.kind = Some(StartKind::Fresh);
        let created = self.under_lease(async { context.lifecycle.create(&id, &start).await }).await?;
        created.map_err(|error| {
            if matches!(error, runtime::Error::NotIn(_)) {
                refusal(Reason::CreateFailed, &error.to_string())
            } else {
                start_failed(Reason::CreateFailed)(error.into())
            }
        })?;
        self.lease.ran = true;
        tracing::info!(sandbox = %self.id, took = ?(context.clock.now() - began), "created");
        self.announce_running(StartKind::Fresh).await;
        Ok(())
    }

    /// What the runtime has to know to start the container.
    pub(super) fn start_spec(&mut self) -> Result<StartSpec, Failure> {
        let deadline = self.lease.handle_mut()?.held().ok_or(Failure::Stale)?.deadline;
        let marker = *self.start.marker.get_or_insert_with(|| self.context.clock.bits());
        let egress = self.egress().ok_or(Failure::Stale)?;
        (self.start.layout, self.start.egress) = (Layout::default(), Some(egress.clone()));
        let spec = self.record.spec().ok_or(Failure::Stale)?;
        Ok(StartSpec {
            marker,
            env: spec.env.clone(),
            cwd: spec.cwd.clone(),
            limits: spec.limits.clone(),
            rootfs: self.start.rootfs.as_ref().map(|held| held.rootfs.digest.clone()),
            runsc: None,
            layout: self.start.layout,
            egress,
            forked_from: None,
            deadline,
        })
    }

    /// Where the sandbox may connect to.
    pub(in crate::reconciler) fn egress(&self) -> Option<Egress> {
        let own = &self.record.spec()?.network.egress;
        Some(own.clone().unwrap_or_else(|| self.context.egress.clone()))
    }

    pub(super) async fn resume(&mut self) -> ActionResult {
        // A container is resumed only under a lease that was just proven.
        self.renew().await?;
        Ok(self.context.lifecycle.resume(&self.id).await?)
    }

    pub(super) async fn remove(&mut self, seen: &Observed) -> ActionResult {
        self.context.lifecycle.remove(&self.id).await?;
        self.start.kind = None;
        if seen.lock != LockState::Ours {
            self.lease.ran = false;
            self.announce_lost();
        }
        Ok(())
    }

    pub(super) async fn release(&mut self, seen: &Observed) -> ActionResult {
        let is_lost = seen.saved == Saved::Lost && self.announced.running;
        self.release_until_settled(None).await?;
        if is_lost {
            self.report_failed(Reason::Lost, STATE_LOST).await;
        }
        self.announce_left(None);
        Ok(())
    }

    pub(super) async fn purge(&mut self) -> ActionResult {
        let place = self.record.store_kind().unwrap_or(StoreKind::Memory);
        if place == StoreKind::Durable {
            self.purge_checkpoints().await?;
        }
        self.context.records.erase(&self.id, place).await?;
        if place == StoreKind::Durable {
            self.write_tombstone().await?;
        } else {
            self.lease.handle = None;
        }
        self.record.erased();
        self.announce_left(None);
        // Attached sessions have received the event.
        self.refuse_until_asked();
        Ok(())
    }

    async fn purge_checkpoints(&mut self) -> ActionResult {
        self.lease.handle_mut()?.purging().await?;
        let upkeep = self.context.upkeep();
        upkeep.erase_checkpoints(&self.id).await.map_err(|error| Failure::Transient(error.to_string()))?;
        let lock = self.lease.lock().cloned().ok_or(Failure::Stale)?;
        upkeep.unpin_source(&lock).await.map_err(|error| Failure::Transient(error.to_string()))
    }
}
