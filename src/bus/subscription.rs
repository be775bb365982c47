//! Follows what is posted about one sandbox.

use std::sync::Arc;

use baton_protocol::id::SandboxId;

use super::{Bus, NumberedEvent, lock};
use crate::fair_watch::FairWatch;

/// Reads a sandbox's passing phases in order.
#[derive(Debug)]
pub struct Subscription {
    pub(super) bus: Arc<Bus>,
    pub(super) id: SandboxId,
    /// The number of the last that was read.
    pub(super) seen: u64,
    pub(super) posted: Arc<FairWatch<u64>>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // With a reconciler here its loop forgets the line; on a bus of the API alone nobody does.
        if self.bus.forwarder.is_some() {
            self.bus.forget_but_for(&self.id, 1);
        }
    }
}

impl Subscription {
    /// The next phase. If this reader fell behind the log, the numbers show the gap. May be cancelled.
    pub async fn next(&mut self) -> NumberedEvent {
        self.posted.until(|newest| *newest > self.seen).await;
        let found = lock(&self.bus.entries)
            .get(&self.id)
            .and_then(|line| line.log.iter().find(|posted| posted.number > self.seen).cloned());
        let Some(posted) = found else {
            // The line was forgotten; nothing will ever come.
            return std::future::pending().await;
        };
        self.seen = posted.number;
        posted
    }
}
