//! Requests with a nonce: each is executed once and answered once, also with an error.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::{
    id::Nonce,
    metadata::{Answer, Committed, Done as Fulfilled, Request, Spec},
    reason::Reason,
};

use super::{
    actions::{Done, Failure},
    checkpoint::After,
    worker::Worker,
};
use crate::{
    bus::LifecycleEvent,
    clock::Moment,
    storage::{checkpoints::committed, lease::LeaseHandle},
};

/// An answer that is not collected within this time is dropped.
const HEARD_WITHIN: Duration = Duration::from_secs(10 * 60);
pub(super) const NOT_ENABLED: &str = "Filesystem snapshot is not enabled on the server.";

impl Worker {
    /// A checkpoint was requested and not answered yet, or a periodic one is due.
    pub(super) fn owes_checkpoint(&self) -> bool {
        self.is_save_due() || self.unanswered(|request| matches!(request, Request::Checkpoint {})).next().is_some()
    }

    pub(super) fn owes_snapshot(&self) -> bool {
        self.unanswered(|request| matches!(request, Request::Snapshot { .. })).next().is_some()
    }

    pub(super) fn unanswered(&self, kind: fn(&Request) -> bool) -> impl Iterator<Item = Nonce> + '_ {
        let metadata = self.found.as_ref().map(|found| &found.metadata);
        metadata.into_iter().flat_map(move |metadata| {
            let open = metadata
                .spec
                .requests
                .iter()
                .filter(move |(nonce, request)| kind(request) && !metadata.status.answers.contains_key(*nonce));
            open.map(|(nonce, _)| nonce.clone())
        })
    }

    /// Commits a checkpoint while the sandbox keeps running; one checkpoint answers all pending requests.
    pub(super) async fn checkpoint_live(&mut self) -> Done {
        let nonces: Vec<_> = self.unanswered(|request| matches!(request, Request::Checkpoint {})).collect();
        self.save_due = self.next_save();
        let (head, taken, paused) = match self.save_image(After::Running).await {
            Ok(saved) => {
                saved.image.wipe().await;
                (saved.head, saved.taken, saved.paused)
            }
            Err(Failure::Stale) => return Err(Failure::Stale),
            Err(Failure::Transient(message)) => {
                return self.answer_no(nonces, Reason::CheckpointFailed, &message).await;
            }
            Err(Failure::NoSpace(message)) => return self.answer_no(nonces, Reason::NoSpace, &message).await,
            Err(Failure::Refused { reason, message }) => return self.answer_no(nonces, reason, &message).await,
        };
        let shown = committed(&head, Some(taken));
        let fulfilled = Fulfilled {
            checkpoint_id: Some(head.checkpoint_id.clone()),
            paused_ms: u64::try_from(paused.as_millis()).ok(),
            ..Fulfilled::default()
        };
        let (checkpoint_id, paused_ms) = (head.checkpoint_id.clone(), fulfilled.paused_ms);
        self.lock_file()?.commit(head).await?;
        tracing::info!(sandbox = %self.id, %checkpoint_id, paused_ms, "checkpointed, and it runs on");
        self.untidy = true;
        self.committed = Some(shown.clone());
        self.answer(nonces, &Answer::Ok(fulfilled), Some(&shown)).await
    }

    /// A container that could not be paused or saved must be resumed before anything else.
    pub(super) async fn answer_no(&mut self, nonces: Vec<Nonce>, reason: Reason, message: &str) -> Done {
        if let Err(error) = self.context.lifecycle.resume(&self.id).await {
            tracing::debug!(sandbox = %self.id, %error, "there was nothing to resume");
        }
        let answer = Answer::Error { reason: reason.into(), message: message.to_owned() };
        self.answer(nonces, &answer, None).await
    }

    pub(super) async fn answer(&mut self, nonces: Vec<Nonce>, answer: &Answer, news: Option<&Committed>) -> Done {
        let epoch = self.lock_file()?.lock().map_or(0, |lock| lock.epoch);
        let open = self.found.as_ref().map(|found| found.metadata.spec.requests.clone()).unwrap_or_default();
        self.context
            .records
            .report(&self.id, epoch, &|status, shown| {
                // Answers whose request is gone were received.
                let heard: BTreeMap<_, _> = std::mem::take(&mut status.answers);
                status.answers = heard.into_iter().filter(|(nonce, _)| open.contains_key(nonce)).collect();
                status.answers.extend(nonces.iter().map(|nonce| (nonce.clone(), answer.clone())));
                if let Some(committed) = news {
                    shown.clone_from(committed);
                }
            })
            .await?;
        self.context.bus.post(&self.id, LifecycleEvent::Answered);
        self.look_again();
        Ok(())
    }

    /// [13] The lease was renewed just now.
    pub(super) fn is_renewed(&self) -> bool {
        self.lock.as_ref().is_some_and(LeaseHandle::is_renewed)
    }

    /// Erases checkpoints that nothing references. Runs after a renewal that was due anyway, so it causes no extra
    /// write of the lock.
    pub(super) async fn tidy(&mut self) -> Done {
        self.untidy = false;
        let lock = self.lock_file()?.lock().cloned().ok_or(Failure::Stale)?;
        let upkeep = self.context.upkeep();
        if let Err(error) = self.under_lease(upkeep.tidy(&lock)).await? {
            tracing::warn!(sandbox = %self.id, %error, "old checkpoints are left for the next time");
        }
        if let Err(error) = self.under_lease(upkeep.unpin_source(&lock)).await? {
            tracing::warn!(sandbox = %self.id, %error, "the checkpoint it was forked from stays pinned");
        }
        Ok(())
    }

    /// Removes requests whose answer was not collected in time: their client is gone.
    pub(super) async fn settle_answers(&mut self) {
        let now = self.context.clock.now();
        let Some(found) = self.found.as_ref().filter(|_| self.is_held()) else { return };
        let answers = &found.metadata.status.answers;
        let answered: BTreeMap<_, _> = found
            .metadata
            .spec
            .requests
            .keys()
            .filter(|nonce| answers.contains_key(*nonce))
            .map(|nonce| (nonce.clone(), self.answered.get(nonce).copied().unwrap_or(now)))
            .collect();
        self.answered = answered;
        let old: Vec<_> =
            self.answered.iter().filter(|(_, at)| now - **at >= HEARD_WITHIN).map(|(nonce, _)| nonce.clone()).collect();
        if old.is_empty() {
            return;
        }
        let change = |spec: &mut Spec| {
            let before = spec.requests.len();
            spec.requests.retain(|nonce, _| !old.contains(nonce));
            spec.requests.len() < before
        };
        match self.context.records.edit(&self.id, &change).await {
            Ok(_) => self.metadata_due = now,
            Err(error) => tracing::debug!(sandbox = %self.id, %error, "answered requests are left for the next time"),
        }
    }

    /// When the next periodic checkpoint of a running sandbox is due.
    pub(super) fn next_save(&self) -> Option<Moment> {
        let persistent = self.found.as_ref().is_some_and(|found| found.metadata.spec.enable_sandbox_checkpoint);
        let every = self.context.housekeeping.checkpoint_every.filter(|_| persistent)?;
        Some(self.context.clock.now() + self.context.clock.jittered(every))
    }

    fn is_save_due(&self) -> bool {
        self.save_due.is_some_and(|due| due <= self.context.clock.now())
    }
}
