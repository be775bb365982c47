//! Work that becomes due while the lease is held, and that leaves the container alone.

use baton_protocol::metadata::{DesiredState, Metadata, Phase, SandboxStatus, Spec};

use super::{ActionResult, Failure};
use crate::{
    reconciler::{
        contention::{PendingProbe, ProbeSubject},
        record_view::{MetadataFault, is_expired},
        sweep::since_1970,
        worker::Worker,
    },
    storage::{lease::LeaseHandle, records::StoreKind},
};

impl Worker {
    /// Asks the attached client for a sign of life, once per waiter entry and session.
    pub(super) fn probe(&mut self) -> ActionResult {
        let waiter = self.lease.handle.as_ref().and_then(LeaseHandle::waiter).ok_or(Failure::Stale)?;
        let subject = ProbeSubject { waiter: waiter.op.clone(), sessions: self.sessions() };
        let number = self.context.bus.probe(&self.id);
        self.contention.probe = Some(PendingProbe { subject, number, since: self.context.clock.now() });
        Ok(())
    }

    /// Sets `deleted` in the spec, as an operator would: the sandbox has outlived its `ttl`.
    pub(super) async fn expire(&mut self) -> ActionResult {
        let now = since_1970(&self.context.clock);
        let change = |spec: &mut Spec| {
            let is_expired = is_expired(spec, now);
            if is_expired {
                spec.desired_state = DesiredState::Deleted;
            }
            is_expired
        };
        self.context.records.edit_for_request(&self.id, None, &change).await?;
        tracing::info!(sandbox = %self.id, "the ttl of the sandbox has expired");
        self.record.due = self.context.clock.now();
        Ok(())
    }

    /// Gives the running container the network policy of the spec.
    pub(super) async fn set_egress(&mut self) -> ActionResult {
        let egress = self.egress().ok_or(Failure::Stale)?;
        self.context.lifecycle.set_egress(&self.id, &egress).await?;
        tracing::info!(sandbox = %self.id, %egress, "the network policy has changed");
        self.start.egress = Some(egress);
        Ok(())
    }

    /// Writes metadata that has disappeared. Existing metadata is not overwritten.
    pub(super) async fn recreate_metadata(&mut self) -> ActionResult {
        let (metadata, place) = self.remembered().ok_or(Failure::Stale)?;
        self.context.records.recreate(&metadata, place).await?;
        tracing::warn!(sandbox = %self.id, "the metadata was missing and was recreated");
        self.record.due = self.context.clock.now();
        Ok(())
    }

    /// The metadata as we know it, with a status of our own: we must not write an older holder's status.
    fn remembered(&self) -> Option<(Metadata, StoreKind)> {
        let (metadata, place) = (self.record.metadata()?, self.record.store_kind()?);
        let status = SandboxStatus {
            phase: if self.announced.running { Phase::Running } else { Phase::Pending },
            instance: Some(self.context.who.me.clone()),
            epoch: self.held_epoch()?,
            observed_spec_sha256: self.record.spec_sha256().to_owned(),
            updated: self.context.clock.timestamp(),
            ..SandboxStatus::default()
        };
        Some((Metadata { status, ..metadata.clone() }, place))
    }

    fn held_epoch(&self) -> Option<u64> {
        Some(self.lease.handle.as_ref()?.held()?.epoch)
    }

    /// Writes to the status of invalid metadata what is wrong with it; the last valid spec stays in force.
    pub(super) async fn report_invalid(&mut self) -> ActionResult {
        let Some(MetadataFault::Invalid { reason, message }) = self.record.fault().cloned() else {
            return Err(Failure::Stale);
        };
        let epoch = self.held_epoch().ok_or(Failure::Stale)?;
        self.context.records.complain(&self.id, epoch, reason, &message).await?;
        self.record.fault_reported();
        Ok(())
    }

    /// Removes requests whose answer was not collected in time: their client is gone.
    pub(super) async fn forget_answers(&mut self) -> ActionResult {
        let now = self.context.clock.now();
        let stale = self.record.stale_answers(now);
        let change = |spec: &mut Spec| {
            let before = spec.requests.len();
            spec.requests.retain(|nonce, _| !stale.contains(nonce));
            spec.requests.len() < before
        };
        self.context.records.edit(&self.id, &change).await?;
        self.record.due = now;
        Ok(())
    }

    /// Erases checkpoints that nothing references. Runs after a renewal that was due anyway, so it causes no extra
    /// write of the lock.
    pub(super) async fn collect_garbage(&mut self) -> ActionResult {
        self.checkpoints.has_garbage = false;
        let lock = self.lease.lock().cloned().ok_or(Failure::Stale)?;
        let upkeep = self.context.upkeep();
        if let Err(error) = self.under_lease(upkeep.collect_garbage(&lock)).await? {
            tracing::warn!(sandbox = %self.id, %error, "unreferenced checkpoints could not be erased");
        }
        if let Err(error) = self.under_lease(upkeep.unpin_source(&lock)).await? {
            tracing::warn!(sandbox = %self.id, %error, "the checkpoint it was forked from could not be unpinned");
        }
        Ok(())
    }
}
