//! Writes the view of what is so, at resting phases. A failed report changes nothing: the next
//! owner repairs it from the lock.

use baton_protocol::{
    id::CheckpointId,
    metadata::{Latest, Phase, Status},
    reason::Reason,
};

use super::{
    plan::{Desired, Observed, Standing},
    sandbox::Sandbox,
};
use crate::{
    runtime::Container,
    storage::{lease::LockFile, records},
};

impl Sandbox {
    pub(super) async fn report_running(&self) {
        let me = self.tools.who.me.clone();
        self.report(Phase::Running, "", "", &|status, _| status.instance = Some(me.clone())).await;
    }

    pub(super) async fn report_checkpointed(&self, checkpoint_id: &CheckpointId) {
        let bucket = self.lock.as_ref().and_then(|lock| lock.lock()?.head.as_ref()?.bucket.clone());
        let latest = Latest { bucket, path: crate::storage::layout::checkpoint_prefix(checkpoint_id) };
        self.report(Phase::Checkpointed, "", "", &|status, copy| {
            status.instance = None;
            *copy = Some(latest.clone());
        })
        .await;
    }

    /// It runs, though not as wanted.
    pub(super) async fn report_trouble(&self, reason: Reason, message: &str) {
        let me = self.tools.who.me.clone();
        self.report(Phase::Running, reason.name(), message, &|status, _| status.instance = Some(me.clone())).await;
    }

    /// It runs and nothing is to be done: the status says so of the spec as it is now. Somebody else's
    /// placement is on its way to be fulfilled, and then the next holder reports.
    pub(super) async fn report_at_rest(&mut self, desired: Desired, seen: &Observed) {
        let Some(found) = self.found.as_ref().filter(|_| !self.amiss) else { return };
        let runs = seen.standing == Standing::Ours && seen.container == Container::Running && self.told.running;
        let (spec, status) = (&found.metadata.spec, &found.metadata.status);
        if !runs || spec.placement.as_ref().is_some_and(|at| *at != self.tools.who.me) {
            return;
        }
        let unfit = matches!(desired, Desired::Checkpointed | Desired::HandedOff) && !seen.checkpointable;
        let is_trying = matches!(desired, Desired::Checkpointed | Desired::HandedOff) && !unfit;
        let reason = if unfit { Reason::NotCheckpointable.name() } else { "" };
        let is_told = status.phase == Phase::Running
            && (status.reason == reason || is_trying)
            && status.observed_spec_sha256 == self.spec_sha256
            && status.instance.as_ref() == Some(&self.tools.who.me);
        if is_told {
            return;
        }
        if unfit {
            let message = "The sandbox was not created to be checkpointed; it runs on.";
            self.report_trouble(Reason::NotCheckpointable, message).await;
        } else if is_trying {
            return;
        } else {
            self.report_running().await;
        }
        self.metadata_due = self.tools.clock.now();
    }

    /// Metadata that cannot be used says so as far as it can; the last good spec stays in force.
    pub(super) async fn complain(&mut self, error: &records::Error) {
        let Some(reason) = error.reason().filter(|_| !self.amiss) else { return };
        tracing::warn!(sandbox = %self.id, %error, "the last good spec stays in force");
        let held = self.lock.as_ref().and_then(LockFile::held).map(|held| held.epoch).filter(|_| self.is_held());
        let Some(epoch) = held else { return };
        let message = error.to_string();
        let message = message.strip_prefix(&format!("{reason}: ")).unwrap_or(&message);
        match self.tools.records.complain(&self.id, epoch, reason, message).await {
            Ok(()) => self.amiss = true,
            Err(error) => tracing::warn!(sandbox = %self.id, %error, "the status cannot be written"),
        }
    }

    pub(super) async fn report_failed(&self, reason: Reason, message: &str) {
        self.report(Phase::Failed, reason.name(), message, &|status, _| status.instance = None).await;
    }

    async fn report(
        &self,
        phase: Phase,
        reason: &str,
        message: &str,
        change: &(dyn Fn(&mut Status, &mut Option<Latest>) + Send + Sync),
    ) {
        // Only whoever held it may speak, and only of that time: another may have had it since.
        let Some(epoch) = self.lock.as_ref().and_then(LockFile::epoch) else { return };
        let spec = self.spec_sha256();
        let written = self
            .tools
            .records
            .report(&self.id, epoch, &|status, latest| {
                status.phase = phase;
                reason.clone_into(&mut status.reason);
                message.clone_into(&mut status.message);
                spec.clone_into(&mut status.observed_spec_sha256);
                change(status, latest);
            })
            .await;
        match written {
            Ok(()) => tracing::info!(sandbox = %self.id, epoch, ?phase, reason, "phase"),
            Err(error) => tracing::warn!(sandbox = %self.id, epoch, ?phase, %error, "the status cannot be written"),
        }
    }
}
