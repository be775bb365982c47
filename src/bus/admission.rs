//! Admission of one more sandbox. An applicant that finds no free slot waits in a queue; for those that can be
//! admitted, the bus requests the eviction of unused sandboxes, and the reconciler releases these.
//!
//! ```text
//!   applicant ─▶ queue ──evict──▶ (reconciler) checkpoints, releases ──▶ a slot ──▶ applicant
//!                  └─ nothing can be evicted, or not in time: refused
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use baton_protocol::id::SandboxId;
use tokio::sync::Notify;

use super::{
    AttachGuard, Bus, BusEntry, BusMessage,
    admission_rules::{Admission, Applicant, Evictability, OccupiedSlot, share},
};

/// How long an applicant waits for a slot.
pub const ROOM_WITHIN: Duration = Duration::from_secs(30);

/// Applicants waiting for a slot, in order of arrival, and the sandboxes whose eviction is requested.
#[derive(Debug, Default)]
pub(super) struct Queue {
    next: u64,
    waiting: BTreeMap<u64, Waiter>,
    wanted: BTreeSet<SandboxId>,
}

#[derive(Debug)]
struct Waiter {
    id: SandboxId,
    most: usize,
    admission: Admission,
    /// One per waiter, so that waiters are woken in order.
    wakeup: Arc<Notify>,
}

impl BusEntry {
    pub(super) fn is_here(&self) -> bool {
        self.sessions > 0 || self.held
    }

    fn evictability(&self) -> Evictability {
        match self.evictability {
            _ if self.sessions > 0 => Evictability::Stays,
            // A session that left was the last use, if this bus has seen any session.
            Evictability::Spare { since } if self.asked > 0 => Evictability::Spare { since: since.max(self.active_at) },
            evictability @ (Evictability::Spare { .. } | Evictability::Stays | Evictability::Leaves) => evictability,
        }
    }
}

impl Bus {
    /// As [`attach`](Self::attach), unless `most` others are already here or on their way. A sandbox that is here
    /// keeps its slot, even if others wait for one.
    pub fn admit(self: &Arc<Self>, id: &SandboxId, most: usize) -> Option<AttachGuard> {
        let mut entries = self.entries.lock();
        let is_here = entries.get(id).is_some_and(BusEntry::is_here);
        let taken = || entries.values().filter(|line| line.is_here()).count() + self.queue.lock().waiting.len();
        (is_here || taken() < most).then(|| self.attach_to(&mut entries, id))
    }

    /// As [`admit`](Self::admit), but waits for an eviction if there is no free slot. `None` if nothing here can be
    /// evicted, or not in time. Dropping the future withdraws the request.
    pub async fn make_room(self: &Arc<Self>, id: &SandboxId, most: usize) -> Option<AttachGuard> {
        let waiting = Waiting::new(self, id, most);
        self.clock.timeout(ROOM_WITHIN, waiting.enter()).await.ok().flatten()
    }

    /// Sets the evictability of a held sandbox; called by the reconciler.
    pub fn set_tenure(&self, id: &SandboxId, evictability: Evictability) {
        let mut entries = self.entries.lock();
        let Some(line) = entries.get_mut(id).filter(|line| line.held) else { return };
        if std::mem::replace(&mut line.evictability, evictability) != evictability {
            self.holds.send_modify(|count| *count += 1);
            self.reevaluate(&entries);
        }
    }

    /// The sandboxes held now, and the evictability of each.
    pub fn held_places(&self) -> BTreeMap<SandboxId, Evictability> {
        let entries = self.entries.lock();
        entries.iter().filter(|(_, line)| line.held).map(|(id, line)| (id.clone(), line.evictability)).collect()
    }

    /// Eviction of this sandbox is requested.
    pub fn is_wanted(&self, id: &SandboxId) -> bool {
        self.queue.lock().wanted.contains(id)
    }

    /// Requests the eviction of this sandbox on behalf of the API's own bus, until the value is dropped.
    pub fn want(self: &Arc<Self>, id: &SandboxId) -> EvictionRequest {
        self.queue.lock().wanted.insert(id.clone());
        self.wake(id);
        EvictionRequest { bus: self.clone(), id: id.clone() }
    }

    /// Something changed that waiters may depend on.
    pub(super) fn reevaluate(&self, entries: &BTreeMap<SandboxId, BusEntry>) {
        let mut queue = self.queue.lock();
        if !queue.waiting.is_empty() {
            self.rebalance(entries, &mut queue);
        }
    }

    /// Chooses again which sandboxes to evict, and wakes the waiters that have been admitted or rejected.
    fn rebalance(&self, entries: &BTreeMap<SandboxId, BusEntry>, queue: &mut Queue) {
        let places: Vec<_> = entries
            .iter()
            .filter(|(_, line)| line.is_here())
            .map(|(id, line)| OccupiedSlot { id, evictability: line.evictability(), wanted: queue.wanted.contains(id) })
            .collect();
        let newcomers: Vec<_> =
            queue.waiting.values().map(|waiter| Applicant { id: &waiter.id, most: waiter.most }).collect();
        let (hopes, wanted) = share(&places, &newcomers);
        let wanted: BTreeSet<_> = wanted.into_iter().cloned().collect();
        for (waiter, admission) in queue.waiting.values_mut().zip(hopes) {
            waiter.admission = admission;
            if admission != Admission::Wait {
                waiter.wakeup.notify_one();
            }
        }
        let before = std::mem::replace(&mut queue.wanted, wanted);
        for id in before.symmetric_difference(&queue.wanted) {
            let is_wanted = queue.wanted.contains(id);
            match &self.forwarder {
                Some(_) => self.forward(|| {
                    if is_wanted { BusMessage::Wanted(id.clone()) } else { BusMessage::Unwanted(id.clone()) }
                }),
                None => self.wake(id),
            }
        }
    }
}

/// A position in the queue.
#[derive(Debug)]
struct Waiting {
    bus: Arc<Bus>,
    ticket: u64,
    wakeup: Arc<Notify>,
}

impl Waiting {
    fn new(bus: &Arc<Bus>, id: &SandboxId, most: usize) -> Self {
        let wakeup = Arc::new(Notify::new());
        let entries = bus.entries.lock();
        let mut queue = bus.queue.lock();
        queue.next += 1;
        let ticket = queue.next;
        queue
            .waiting
            .insert(ticket, Waiter { id: id.clone(), most, admission: Admission::Wait, wakeup: wakeup.clone() });
        bus.rebalance(&entries, &mut queue);
        drop((queue, entries));
        Self { bus: bus.clone(), ticket, wakeup }
    }

    /// Waits for the slot; `None` if there will be none.
    async fn enter(self) -> Option<AttachGuard> {
        loop {
            self.wakeup.notified().await;
            let mut entries = self.bus.entries.lock();
            let mut queue = self.bus.queue.lock();
            match queue.waiting.get(&self.ticket)?.admission {
                Admission::Wait => {}
                Admission::None => return None,
                Admission::Enter => {
                    let waiter = queue.waiting.remove(&self.ticket)?;
                    drop(queue);
                    return Some(self.bus.attach_to(&mut entries, &waiter.id));
                }
            }
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let entries = self.bus.entries.lock();
        let mut queue = self.bus.queue.lock();
        queue.waiting.remove(&self.ticket);
        self.bus.rebalance(&entries, &mut queue);
    }
}

/// An eviction request of the other half.
#[derive(Debug)]
pub struct EvictionRequest {
    bus: Arc<Bus>,
    id: SandboxId,
}

impl Drop for EvictionRequest {
    fn drop(&mut self) {
        self.bus.queue.lock().wanted.remove(&self.id);
        self.bus.wake(&self.id);
    }
}
