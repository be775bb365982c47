//! One session per sandbox on this instance. A live session keeps its slot; a dead one loses it.

use std::{collections::BTreeMap, sync::Arc};

use baton_protocol::id::SandboxId;
use parking_lot::Mutex;
use tokio::sync::{Notify, futures::OwnedNotified, mpsc, oneshot};

use crate::{bus::ALIVE_WITHIN, clock::SharedClock};

/// Sent when another session wants the slot. Answered once the client has shown that it is alive.
pub type LivenessProbe = oneshot::Sender<()>;

#[derive(Debug)]
struct Entry {
    serial: u64,
    liveness_probes: mpsc::Sender<LivenessProbe>,
}

#[derive(Debug, Default)]
struct Inner {
    entries: BTreeMap<SandboxId, Entry>,
    serial: u64,
}

#[derive(Debug, Default)]
pub struct SessionRegistry {
    inner: Mutex<Inner>,
    freed: Arc<Notify>,
}

/// The slot of a session, until it is dropped or taken.
#[derive(Debug)]
pub struct SessionSlot {
    registry: Arc<SessionRegistry>,
    id: SandboxId,
    serial: u64,
    liveness_probes: mpsc::Receiver<LivenessProbe>,
}

impl SessionRegistry {
    /// Returns the slot, or `None` if a live client has it.
    pub async fn admit(self: &Arc<Self>, id: &SandboxId, clock: &SharedClock) -> Option<SessionSlot> {
        loop {
            let (serial, liveness_probes) = {
                let mut inner = self.inner.lock();
                match inner.entries.get(id) {
                    None => return Some(self.insert(&mut inner, id)),
                    Some(entry) => (entry.serial, entry.liveness_probes.clone()),
                }
            };
            let (alive, answer) = oneshot::channel();
            let probed = clock
                .timeout(ALIVE_WITHIN, async move {
                    if liveness_probes.send(alive).await.is_err() {
                        return false;
                    }
                    drop(liveness_probes);
                    answer.await.is_ok()
                })
                .await;
            match probed {
                Ok(true) => return None,
                // The other session has just ended by itself.
                Ok(false) => {}
                Err(_) => {
                    let mut inner = self.inner.lock();
                    if inner.entries.get(id).is_some_and(|entry| entry.serial == serial) {
                        return Some(self.insert(&mut inner, id));
                    }
                }
            }
        }
    }

    /// Returns the slot unless a session has it, alive or not.
    pub fn try_admit(self: &Arc<Self>, id: &SandboxId) -> Option<SessionSlot> {
        let mut inner = self.inner.lock();
        if inner.entries.contains_key(id) { None } else { Some(self.insert(&mut inner, id)) }
    }

    /// Completes when a slot is freed after this call.
    pub fn freed(&self) -> OwnedNotified {
        self.freed.clone().notified_owned()
    }

    fn insert(self: &Arc<Self>, inner: &mut Inner, id: &SandboxId) -> SessionSlot {
        inner.serial += 1;
        let serial = inner.serial;
        let (sender, liveness_probes) = mpsc::channel(8);
        inner.entries.insert(id.clone(), Entry { serial, liveness_probes: sender });
        SessionSlot { registry: self.clone(), id: id.clone(), serial, liveness_probes }
    }
}

impl SessionSlot {
    /// Whether another session has taken the slot: this one is about to be told.
    pub fn is_taken(&self) -> bool {
        self.registry.inner.lock().entries.get(&self.id).is_none_or(|entry| entry.serial != self.serial)
    }

    /// Waits for the next probe; `None` means that the slot was taken. Cancel safe.
    pub async fn next_probe(&mut self) -> Option<LivenessProbe> {
        self.liveness_probes.recv().await
    }
}

impl Drop for SessionSlot {
    fn drop(&mut self) {
        let mut inner = self.registry.inner.lock();
        if inner.entries.get(&self.id).is_some_and(|entry| entry.serial == self.serial) {
            inner.entries.remove(&self.id);
            drop(inner);
            self.registry.freed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::TestClock;

    #[tokio::test(start_paused = true)]
    async fn the_living_stay_the_dead_give_way_and_who_left_is_forgotten() {
        let clock: SharedClock = Arc::new(TestClock::new(1));
        let id = clock.sandbox_id();
        let registry = Arc::new(SessionRegistry::default());
        let mut first = registry.admit(&id, &clock).await.unwrap();
        let (second, ()) = tokio::join!(registry.admit(&id, &clock), async {
            first.next_probe().await.unwrap().send(()).unwrap();
        });
        assert!(second.is_none());
        let third = registry.admit(&id, &clock).await.expect("nobody answered");
        // The unanswered probe is still in the queue; after it the first session sees that its slot is taken.
        assert!(first.next_probe().await.unwrap().is_closed());
        assert!(first.next_probe().await.is_none());
        assert!(first.is_taken() && !third.is_taken());
        drop(first);
        assert_eq!(registry.inner.lock().entries.len(), 1);
        drop(third);
        assert_eq!(registry.inner.lock().entries.len(), 0);
    }
}
