//! What is known about the checkpoints of the sandbox, and when the next periodic one is due.

use baton_protocol::metadata::{Committed, SpecRequest};

use super::worker::Worker;
use crate::{clock::Moment, storage::checkpoints::committed};

#[derive(Debug, Default)]
pub(super) struct CheckpointState {
    /// What to write to the metadata about the head, if this instance has seen it.
    pub(super) committed: Option<Committed>,
    /// There may be checkpoints that nothing references any more.
    pub(super) has_garbage: bool,
    /// When the next periodic checkpoint is due.
    pub(super) due: Option<Moment>,
}

impl Worker {
    /// What is known about the head that the lock names now.
    pub(super) fn committed_head(&self) -> Option<Committed> {
        let head = self.lease.head()?;
        self.checkpoints.committed.clone().filter(|shown| shown.latest == committed(head, None).latest)
    }

    /// A checkpoint was requested and not answered yet, or a periodic one is due.
    pub(super) fn is_checkpoint_requested(&self) -> bool {
        let is_due = self.checkpoints.due.is_some_and(|due| due <= self.context.clock.now());
        is_due || self.record.unanswered(|request| matches!(request, SpecRequest::Checkpoint {})).next().is_some()
    }

    /// When the next periodic checkpoint of a running sandbox is due.
    pub(super) fn next_checkpoint(&self) -> Option<Moment> {
        let every = self.context.housekeeping.checkpoint_every.filter(|_| self.record.is_persistent())?;
        Some(self.context.clock.now() + self.context.clock.jittered(every))
    }
}
