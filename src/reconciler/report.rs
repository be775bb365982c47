//! Writes the observed state to the metadata whenever it settles. A failed report changes nothing: the next holder
//! repairs it from the lock.

use std::sync::Arc;

use baton_protocol::{
    id::{InstanceId, SandboxId},
    lock::Claim,
    metadata::{Committed, Phase, Spec},
    reason::Reason,
};

use super::{
    ReconcilerContext,
    plan::{Desired, LockState, Observed},
    worker::Worker,
};
use crate::runtime::Container;

/// One status update of a sandbox. A separate value, so that it can be written while the worker continues.
#[derive(Clone, Debug)]
pub(super) struct StatusReport {
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

impl StatusReport {
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
            Err(error) => tracing::warn!(sandbox = %id, epoch, ?phase, %error, "the status could not be written"),
        }
    }
}

impl Worker {
    /// `None` if this instance never held the lock: only a holder may report, and only for its own epoch, since
    /// another instance may have held it since.
    fn report(&self, phase: Phase) -> Option<StatusReport> {
        Some(StatusReport {
            context: self.context.clone(),
            id: self.id.clone(),
            epoch: self.lease.epoch()?,
            observed_spec: self.record.spec_sha256().to_owned(),
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
            StatusReport { committed: self.committed_head(), ..report }.write().await;
        }
    }

    /// It was released with this checkpoint. The caller writes the report when it chooses.
    pub(super) fn report_checkpointed(&self) -> Option<StatusReport> {
        let report = self.report(Phase::Checkpointed)?;
        Some(StatusReport { committed: self.checkpoints.committed.clone(), ..report })
    }

    /// It runs, but not as desired.
    pub(super) async fn report_trouble(&self, reason: Reason, message: &str) {
        if let Some(report) = self.report(Phase::Running) {
            StatusReport { reason: Some(reason), message: message.to_owned(), ..report }.write().await;
        }
    }

    pub(super) async fn report_failed(&self, reason: Reason, message: &str) {
        if let Some(report) = self.report(Phase::Failed) {
            StatusReport { reason: Some(reason), message: message.to_owned(), ..report }.write().await;
        }
    }

    /// Reports the current spec as observed once the sandbox runs and nothing is left to do.
    pub(super) async fn report_at_rest(&mut self, desired: Desired, seen: &Observed) {
        let Some(metadata) = self.record.metadata().filter(|_| !self.record.is_fault_reported()) else { return };
        let runs = seen.lock == LockState::Ours && seen.container == Container::Running && self.announced.running;
        if !runs {
            return;
        }
        let rest = RestReport::of(desired, seen.checkpointable, &metadata.spec, &self.context.who.me);
        let status = &metadata.status;
        let is_current = status.phase == Phase::Running
            && status.observed_spec_sha256 == self.record.spec_sha256()
            && status.instance.as_ref() == Some(&self.context.who.me);
        match rest {
            None => return,
            Some(rest) if is_current && status.reason == rest.reason() => return,
            Some(RestReport::Running) => self.report_running().await,
            Some(RestReport::NotCheckpointable) => {
                let message = "The sandbox was not created with checkpointing enabled; it keeps running.";
                self.report_trouble(Reason::NotCheckpointable, message).await;
            }
            Some(RestReport::PlacementPending(instance)) => {
                let message = format!("{instance} has not asked for the sandbox yet; it runs on here until then.");
                self.report_trouble(Reason::PlacementPending, &message).await;
            }
        }
        self.record.due = self.context.clock.now();
    }
}

/// What the status says about a sandbox that runs here while there is nothing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RestReport {
    Running,
    /// It should leave, but cannot be checkpointed.
    NotCheckpointable,
    /// An operator ordered it to this instance, which has not asked for it yet.
    PlacementPending(InstanceId),
}

impl RestReport {
    /// `None`: a checkpoint is being retried, or another instance where a client attached is the next holder and
    /// reports.
    fn of(desired: Desired, checkpointable: bool, spec: &Spec, me: &InstanceId) -> Option<Self> {
        let elsewhere = spec.placement.as_ref().filter(|at| *at != me);
        let order = elsewhere.filter(|_| spec.claim_at_placement() == Some(Claim::Order));
        if elsewhere.is_some() && order.is_none() {
            return None;
        }
        let leaves = matches!(desired, Desired::Checkpointed | Desired::HandedOff);
        match (leaves, checkpointable, order) {
            (true, false, _) | (_, false, Some(_)) => Some(Self::NotCheckpointable),
            (true, true, _) => None,
            (false, _, Some(instance)) => Some(Self::PlacementPending(instance.clone())),
            (false, _, None) => Some(Self::Running),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Running => "",
            Self::NotCheckpointable => Reason::NotCheckpointable.name(),
            Self::PlacementPending(_) => Reason::PlacementPending.name(),
        }
    }
}
