//! Writes the view of what is so, at resting phases. A failed report changes nothing: the next
//! owner repairs it from the lock.

use baton_protocol::{
    id::CheckpointId,
    metadata::{Latest, Phase, Status},
    reason::Reason,
};

use super::sandbox::Sandbox;

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
        let Some(epoch) = self.lock.as_ref().and_then(|lock| lock.lock()).map(|lock| lock.epoch) else { return };
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
