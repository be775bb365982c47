//! Requests with a nonce: each is executed once and answered once, also with an error.

use std::collections::BTreeMap;

use baton_protocol::{
    id::Nonce,
    metadata::{Answer, Committed, CompletedRequest as Fulfilled, SpecRequest},
    reason::Reason,
};

use super::{
    ActionResult, Failure,
    take_checkpoint::{After, StoredImage},
};
use crate::{bus::LifecycleEvent, reconciler::worker::Worker, storage::checkpoints::committed};

pub(super) const NOT_ENABLED: &str = "Filesystem snapshot is not enabled on the server.";

impl Worker {
    /// Commits a checkpoint while the sandbox keeps running; one checkpoint answers all pending requests.
    pub(super) async fn checkpoint_live(&mut self) -> ActionResult {
        let nonces: Vec<_> = self.record.unanswered(|request| matches!(request, SpecRequest::Checkpoint {})).collect();
        self.checkpoints.due = self.next_checkpoint();
        let StoredImage { head, taken, paused, image } = match self.save_image(After::Running).await {
            Ok(stored) => stored,
            Err(failure) => return self.answer_failure(nonces, Reason::CheckpointFailed, failure).await,
        };
        image.wipe().await;
        let shown = committed(&head, Some(taken));
        let fulfilled = Fulfilled {
            checkpoint_id: Some(head.checkpoint_id.clone()),
            paused_ms: u64::try_from(paused.as_millis()).ok(),
            ..Fulfilled::default()
        };
        let (checkpoint_id, paused_ms) = (head.checkpoint_id.clone(), fulfilled.paused_ms);
        self.lease.handle_mut()?.commit(head).await?;
        tracing::info!(sandbox = %self.id, %checkpoint_id, paused_ms, "checkpointed; the sandbox keeps running");
        self.checkpoints.has_garbage = true;
        self.checkpoints.committed = Some(shown.clone());
        self.answer(nonces, &Answer::Ok(fulfilled), Some(&shown)).await
    }

    /// Answers with an error. A container that could not be paused or saved must be resumed before anything else.
    pub(super) async fn answer_failure(
        &mut self,
        nonces: Vec<Nonce>,
        otherwise: Reason,
        failure: Failure,
    ) -> ActionResult {
        let (reason, message) = match failure {
            Failure::Stale => return Err(Failure::Stale),
            Failure::NoSpace(message) => (Reason::NoSpace, message),
            Failure::Transient(message) => (otherwise, message),
            Failure::Refused { reason, message } => (reason, message),
        };
        if let Err(error) = self.context.lifecycle.resume(&self.id).await {
            tracing::debug!(sandbox = %self.id, %error, "there was nothing to resume");
        }
        self.answer(nonces, &Answer::Error { reason: reason.into(), message }, None).await
    }

    pub(super) async fn answer(
        &mut self,
        nonces: Vec<Nonce>,
        answer: &Answer,
        news: Option<&Committed>,
    ) -> ActionResult {
        let epoch = self.lease.handle_mut()?.lock().map_or(0, |lock| lock.epoch);
        let open = self.record.spec().map(|spec| spec.requests.clone()).unwrap_or_default();
        self.context
            .records
            .report(&self.id, epoch, &|status, shown| {
                // An answer whose request is gone was collected.
                let answers: BTreeMap<_, _> = std::mem::take(&mut status.answers);
                status.answers = answers.into_iter().filter(|(nonce, _)| open.contains_key(nonce)).collect();
                status.answers.extend(nonces.iter().map(|nonce| (nonce.clone(), answer.clone())));
                if let Some(committed) = news {
                    shown.clone_from(committed);
                }
            })
            .await?;
        self.post(LifecycleEvent::Answered);
        self.read_again();
        Ok(())
    }
}
