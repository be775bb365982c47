//! A subscription to the events of one sandbox.

use std::sync::Arc;

use baton_protocol::id::SandboxId;

use super::{Bus, NumberedEvent};
use crate::fair_watch::FairWatch;

/// Reads the events of a sandbox in order.
#[derive(Debug)]
pub struct Subscription {
    pub(super) bus: Arc<Bus>,
    pub(super) id: SandboxId,
    /// The number of the last event that was read.
    pub(super) seen: u64,
    pub(super) posted: Arc<FairWatch<u64>>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // With a local reconciler, its worker forgets the entry; on the bus of a separate API process nothing else
        // does.
        if self.bus.forwarder.is_some() {
            self.bus.forget_but_for(&self.id, 1);
        }
    }
}

impl Subscription {
    /// The next event. If this reader fell behind the log, the numbers show the gap. Cancel safe.
    pub async fn next(&mut self) -> NumberedEvent {
        self.posted.until(|newest| *newest > self.seen).await;
        let found = self
            .bus
            .entries
            .lock()
            .get(&self.id)
            .and_then(|line| line.log.iter().find(|posted| posted.number > self.seen).cloned());
        let Some(posted) = found else {
            // The entry was forgotten, so no event will follow.
            return std::future::pending().await;
        };
        self.seen = posted.number;
        posted
    }
}
