//! Writes the observed state to the metadata whenever it settles. A failed report changes nothing: the next holder
//! repairs it from the lock.

use std::sync::Arc;

use baton_protocol::{
    id::{InstanceId, SandboxId},
    lock::Claim,
    metadata::{Committed, Phase},
    reason::Reason,
};

use super::{
    ReconcilerContext,
    plan::{Desired, LockState, Observed},
    worker::Worker,
};
use crate::{
    runtime::Container,
    storage::{checkpoints::committed, lease::LeaseHandle, records},
};

/// One status update of a sandbox. A separate value, so that it can be written while the worker continues.
#[derive(Clone, Debug)]
pub(super) struct Report {
    context: Arc<ReconcilerContext>,
    id: SandboxId,
    epoch: u64,
    observed_spec: String,
    phase: Phase,
    /// Where it runs.
    instance: Option<InstanceId>,
    reason: Option<Reason>,
    message: String,
    /// What to write about the committed checkpoint, if anything.
    committed: Option<Committed>,
}

impl Report {
    /// Writes the status unless it already shows a later epoch. Idempotent.
    pub(super) async fn write(self) {
        let Self { context, id, epoch, observed_spec, phase, instance, reason, message, committed } = self;
        let reason = reason.map_or("", Reason::name);
        let written = context
            .records
            .report(&id, epoch, &|status, shown| {
                status.phase = phase;
                status.instance.clone_from(&instance);
                reason.clone_into(&mut status.reason);
                message.clone_into(&mut status.message);
                observed_spec.clone_into(&mut status.observed_spec_sha256);
                if let Some(committed) = &committed {
                    shown.clone_from(committed);
                }
            })
            .await;
        match written {
            Ok(()) => tracing::info!(sandbox = %id, epoch, ?phase, reason, "phase"),
            Err(error) => tracing::warn!(sandbox = %id, epoch, ?phase, %error, "the status cannot be written"),
        }
    }
}

impl Worker {
    /// `None` if this instance never held the lock: only a holder may report, and only for its own epoch, since
    /// another instance may have held it since.
    fn report(&self, phase: Phase) -> Option<Report> {
        Some(Report {
            context: self.context.clone(),
            id: self.id.clone(),
            epoch: self.lock.as_ref().and_then(LeaseHandle::epoch)?,
            observed_spec: self.spec_sha256().to_owned(),
            phase,
            instance: (phase == Phase::Running).then(|| self.context.who.me.clone()),
            reason: None,
            message: String::new(),
            committed: None,
        })
    }

    /// Reports that it runs. A previous holder may not have reported the checkpoint it started from.
    pub(super) async fn report_running(&self) {
        if let Some(report) = self.report(Phase::Running) {
            Report { committed: self.committed_head(), ..report }.write().await;
        }
    }

    /// What is known about the head that the lock names now.
    fn committed_head(&self) -> Option<Committed> {
        let head = self.lock.as_ref()?.lock()?.head.as_ref()?;
        self.committed.clone().filter(|shown| shown.latest == committed(head, None).latest)
    }

    /// It was released with this checkpoint. The caller writes the report when it chooses.
    pub(super) fn report_checkpointed(&self) -> Option<Report> {
        let report = self.report(Phase::Checkpointed)?;
        Some(Report { committed: self.committed.clone(), ..report })
    }

    /// It runs, but not as desired.
    pub(super) async fn report_trouble(&self, reason: Reason, message: &str) {
        if let Some(report) = self.report(Phase::Running) {
            Report { reason: Some(reason), message: message.to_owned(), ..report }.write().await;
        }
    }

    pub(super) async fn report_failed(&self, reason: Reason, message: &str) {
        if let Some(report) = self.report(Phase::Failed) {
            Report { reason: Some(reason), message: message.to_owned(), ..report }.write().await;
        }
    }

    /// Reports the current spec as observed once the sandbox runs and nothing is left to do. If a client attached on
    /// another instance, that instance becomes the next holder and reports.
    pub(super) async fn report_at_rest(&mut self, desired: Desired, seen: &Observed) {
        let Some(found) = self.found.as_ref().filter(|_| !self.amiss) else { return };
        let runs = seen.standing == LockState::Ours && seen.container == Container::Running && self.told.running;
        let (spec, status) = (&found.metadata.spec, &found.metadata.status);
        let elsewhere = spec.placement.as_ref().filter(|at| **at != self.context.who.me);
        let is_ordered = elsewhere.is_some() && spec.claim_at_placement() == Some(Claim::Order);
        if !runs || (elsewhere.is_some() && !is_ordered) {
            return;
        }
        let leaves = matches!(desired, Desired::Checkpointed | Desired::HandedOff);
        let unfit = (leaves || is_ordered) && !seen.checkpointable;
        let is_trying = leaves && !unfit;
        let reason = match (unfit, is_ordered) {
            (true, _) => Reason::NotCheckpointable.name(),
            (false, true) => Reason::PlacementPending.name(),
            (false, false) => "",
        };
        let is_told = status.phase == Phase::Running
            && (status.reason == reason || is_trying)
            && status.observed_spec_sha256 == self.spec_sha256
            && status.instance.as_ref() == Some(&self.context.who.me);
        if is_told {
            return;
        }
        if unfit {
            let message = "The sandbox was not created to be checkpointed; it runs on.";
            self.report_trouble(Reason::NotCheckpointable, message).await;
        } else if is_trying {
            return;
        } else if let Some(named) = elsewhere {
            let message = format!("{named} has not asked for the sandbox yet; it runs on here until then.");
            self.report_trouble(Reason::PlacementPending, &message).await;
        } else {
            self.report_running().await;
        }
        self.metadata_due = self.context.clock.now();
    }

    /// Reports invalid metadata in its status where possible; the last valid spec stays in force.
    pub(super) async fn complain(&mut self, error: &records::Error) {
        let Some(reason) = error.reason().filter(|_| !self.amiss) else { return };
        tracing::warn!(sandbox = %self.id, %error, "the last good spec stays in force");
        let held = self.lock.as_ref().and_then(LeaseHandle::held).map(|held| held.epoch).filter(|_| self.is_held());
        let Some(epoch) = held else { return };
        let message = error.to_string();
        let message = message.strip_prefix(&format!("{reason}: ")).unwrap_or(&message);
        match self.context.records.complain(&self.id, epoch, reason, message).await {
            Ok(()) => self.amiss = true,
            Err(error) => tracing::warn!(sandbox = %self.id, %error, "the status cannot be written"),
        }
    }
}
