//! What connects API and reconciler on one instance: events, wake-ups, attachment and admission.
//!
//! The API *wakes* the reconciler for a sandbox and says who is attached and active.
//! The reconciler *posts* passing phases, numbered, in order, in a bounded log that
//! sessions follow. Everything here is plain data, so that the two sides may later
//! be two processes. Nothing durable hangs on it: it may be lost at any moment.

mod admission;
mod admission_rules;
mod lifecycle_event;
mod liveness;
mod subscription;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use baton_protocol::id::SandboxId;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};

pub use self::{
    admission::{EvictionRequest, ROOM_WITHIN},
    admission_rules::Evictability,
    lifecycle_event::{DOWNLOAD, EXTRACT, LeaveReason, LifecycleEvent, NumberedEvent, SNAPSHOT, StartKind, UPLOAD},
    liveness::ALIVE_WITHIN,
    subscription::Subscription,
};
use crate::storage::lease::rules::InitialLease;
use crate::{
    clock::{Moment, SharedClock},
    fair_watch::FairWatch,
};

/// How many passing phases of a sandbox are kept for a session that reads slowly.
const KEPT: usize = 256;

/// Activity is passed on to another process no more often than this.
const TOUCH: std::time::Duration = std::time::Duration::from_millis(200);

/// What sessions have told about a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Presence {
    /// A session is attached, or waits for the sandbox to run here.
    pub attached: bool,
    /// One was, at some time.
    pub ever_attached: bool,
    /// When the bus first heard of the sandbox.
    pub known_since: Moment,
    /// When a client last did something, or left.
    pub active_at: Moment,
}

/// What the API says to the reconciler. A bus of the API's own process passes it on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BusMessage {
    Attached(SandboxId),
    Left(SandboxId),
    Touched(SandboxId),
    Nudged(SandboxId),
    /// Somebody waits for its place.
    Wanted(SandboxId),
    Unwanted(SandboxId),
    /// The attached client has answered the probe of this number.
    Alive(SandboxId, u64),
    /// Its lock is about to be written, held by this instance.
    Leased {
        id: SandboxId,
        lease: InitialLease,
    },
    /// That came to nothing.
    Unleased(SandboxId),
}

/// Where a bus passes on what it is told.
struct Forwarder(Box<dyn Fn(BusMessage) + Send + Sync>);

impl std::fmt::Debug for Forwarder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Forwarder")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub sessions: usize,
    /// Sandboxes that were woken and not yet looked at.
    pub wakeups: usize,
}

#[derive(Debug)]
struct BusEntry {
    log: VecDeque<NumberedEvent>,
    next: u64,
    /// The newest number; who follows holds it too.
    posted: Arc<FairWatch<u64>>,
    sessions: u32,
    held: bool,
    evictability: Evictability,
    /// Sessions so far: a change makes the reconciler forget that it refused.
    asked: u64,
    known_since: Moment,
    active_at: Moment,
    /// When activity was last passed on.
    touched_at: Option<Moment>,
    /// How often a sign of life was asked for, and which probe was answered last.
    probes: u64,
    alive: u64,
}

#[derive(Debug)]
pub struct Bus {
    clock: SharedClock,
    /// Some: the reconciler is another process, and has a bus of its own.
    forwarder: Option<Forwarder>,
    entries: Mutex<BTreeMap<SandboxId, BusEntry>>,
    woken: Mutex<BTreeSet<SandboxId>>,
    /// Leases of sandboxes that are being created, until their loop takes them over.
    leases: Mutex<BTreeMap<SandboxId, InitialLease>>,
    wakeup: Notify,
    /// Counts changes of what is held, and of how it is held.
    holds: watch::Sender<u64>,
    /// Locked after the lines.
    queue: Mutex<admission::Queue>,
}

impl Bus {
    pub fn new(clock: SharedClock) -> Arc<Self> {
        Arc::new(Self::with(clock, None))
    }

    /// A bus of the API alone: what it is told it passes on, in order. `tell` must not wait.
    pub fn telling(clock: SharedClock, tell: impl Fn(BusMessage) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self::with(clock, Some(Forwarder(Box::new(tell)))))
    }

    fn with(clock: SharedClock, forwarder: Option<Forwarder>) -> Self {
        let holds = watch::Sender::new(0);
        Self {
            clock,
            forwarder,
            entries: Mutex::default(),
            woken: Mutex::default(),
            leases: Mutex::default(),
            wakeup: Notify::new(),
            holds,
            queue: Mutex::default(),
        }
    }

    fn tell(&self, told: impl FnOnce() -> BusMessage) {
        if let Some(Forwarder(tell)) = &self.forwarder {
            tell(told());
        }
    }

    /// Asks the reconciler to look at a sandbox now. Many wake-ups before the look are one.
    pub fn wake(&self, id: &SandboxId) {
        if self.forwarder.is_some() {
            self.tell(|| BusMessage::Nudged(id.clone()));
            // Nobody else ends a line here.
            self.forget(id);
            return;
        }
        lock(&self.woken).insert(id.clone());
        self.wakeup.notify_one();
    }

    /// The lock of a new sandbox is about to be written, held by this instance. Said before the write is sent: whatever
    /// becomes of it, the deadline of the lease counts from here.
    pub fn lease(&self, id: &SandboxId) -> InitialLease {
        let lease = InitialLease { op: self.clock.nonce(), sent: self.clock.now() };
        self.note_lease(id, lease.clone());
        lease
    }

    /// The same, as the API's half said it.
    pub fn note_lease(&self, id: &SandboxId, lease: InitialLease) {
        if self.forwarder.is_some() {
            return self.tell(|| BusMessage::Leased { id: id.clone(), lease });
        }
        lock(&self.leases).insert(id.clone(), lease);
    }

    /// The sandbox was not created after all.
    pub fn unlease(&self, id: &SandboxId) {
        self.tell(|| BusMessage::Unleased(id.clone()));
        lock(&self.leases).remove(id);
    }

    /// The lease under which a sandbox was created here, for the one loop that goes on with it.
    pub fn take_lease(&self, id: &SandboxId) -> Option<InitialLease> {
        lock(&self.leases).remove(id)
    }

    /// The next sandbox somebody woken. For one listener.
    pub async fn next_wakeup(&self) -> SandboxId {
        loop {
            let heard = self.wakeup.notified();
            if let Some(id) = lock(&self.woken).pop_first() {
                return id;
            }
            heard.await;
        }
    }

    pub fn post(&self, id: &SandboxId, passing: LifecycleEvent) {
        let mut entries = lock(&self.entries);
        let line = self.line(&mut entries, id);
        line.next += 1;
        let number = line.next;
        line.log.push_back(NumberedEvent { number, passing });
        if line.log.len() > KEPT {
            line.log.pop_front();
        }
        line.posted.post(number);
    }

    /// Follows what is posted from now on.
    pub fn follow(self: &Arc<Self>, id: &SandboxId) -> Subscription {
        let mut entries = lock(&self.entries);
        let line = self.line(&mut entries, id);
        Subscription { bus: self.clone(), id: id.clone(), seen: line.next, posted: line.posted.clone() }
    }

    /// How much there is on the bus, for whoever measures.
    pub fn counts(&self) -> Counts {
        let sessions = lock(&self.entries).values().map(|line| line.sessions as usize).sum();
        Counts { sessions, wakeups: lock(&self.woken).len() }
    }

    /// How many sandboxes this instance holds.
    pub fn held(&self) -> usize {
        lock(&self.entries).values().filter(|line| line.held).count()
    }

    /// It is on this instance, or a session waits for it here.
    pub fn is_here(&self, id: &SandboxId) -> bool {
        lock(&self.entries).get(id).is_some_and(BusEntry::is_here)
    }

    /// What is on this instance, and what a session waits for here.
    pub fn here(&self) -> Vec<SandboxId> {
        lock(&self.entries).iter().filter(|(_, line)| line.is_here()).map(|(id, _)| id.clone()).collect()
    }

    /// The reconciler of this instance holds it.
    pub fn is_held(&self, id: &SandboxId) -> bool {
        lock(&self.entries).get(id).is_some_and(|line| line.held)
    }

    /// The reconciler says whether it holds a sandbox.
    pub fn hold(&self, id: &SandboxId, held: bool) {
        let mut entries = lock(&self.entries);
        let line = self.line(&mut entries, id);
        if std::mem::replace(&mut line.held, held) != held {
            line.evictability = Evictability::default();
            self.holds.send_modify(|count| *count += 1);
            self.settle(&entries);
        }
    }

    /// Tells when something is held, let go, or held otherwise than before.
    pub fn holds(&self) -> watch::Receiver<u64> {
        self.holds.subscribe()
    }

    /// Says that a session is here for this sandbox, until the value is dropped.
    pub fn attach(self: &Arc<Self>, id: &SandboxId) -> AttachGuard {
        self.attach_to(&mut lock(&self.entries), id)
    }

    fn attach_to(self: &Arc<Self>, entries: &mut BTreeMap<SandboxId, BusEntry>, id: &SandboxId) -> AttachGuard {
        let now = self.clock.now();
        let line = self.line(entries, id);
        line.sessions += 1;
        line.asked += 1;
        line.active_at = now;
        // Under the lock, so that a coming and a going are told in their order.
        self.tell(|| BusMessage::Attached(id.clone()));
        self.settle(entries);
        AttachGuard { bus: self.clone(), id: id.clone() }
    }

    /// A client did something: the idle time begins anew.
    pub fn touch(&self, id: &SandboxId) {
        let now = self.clock.now();
        if let Some(line) = lock(&self.entries).get_mut(id) {
            line.active_at = now;
            if self.forwarder.is_some() && line.touched_at.is_none_or(|at| now - at >= TOUCH) {
                line.touched_at = Some(now);
                self.tell(|| BusMessage::Touched(id.clone()));
            }
        }
    }

    pub fn presence(&self, id: &SandboxId) -> Presence {
        let mut entries = lock(&self.entries);
        let line = self.line(&mut entries, id);
        Presence {
            attached: line.sessions > 0,
            ever_attached: line.asked > 0,
            known_since: line.known_since,
            active_at: line.active_at,
        }
    }

    /// How many sessions have come for this sandbox so far.
    pub fn asked(&self, id: &SandboxId) -> u64 {
        lock(&self.entries).get(id).map_or(0, |line| line.asked)
    }

    /// Forgets a sandbox that is not here any more, unless a session still reads.
    pub fn forget(&self, id: &SandboxId) {
        self.forget_but_for(id, 0);
    }

    /// So many readers do not count.
    fn forget_but_for(&self, id: &SandboxId, readers: usize) {
        let mut entries = lock(&self.entries);
        let unread = |line: &BusEntry| Arc::strong_count(&line.posted) - 1 <= readers;
        if entries.get(id).is_some_and(|line| line.sessions == 0 && !line.held && unread(line)) {
            entries.remove(id);
        }
    }

    fn line<'a>(&self, entries: &'a mut BTreeMap<SandboxId, BusEntry>, id: &SandboxId) -> &'a mut BusEntry {
        // Asked for all the time, and nearly always there: its name is copied only when it is not.
        if !entries.contains_key(id) {
            entries.insert(id.clone(), BusEntry::new(self.clock.now()));
        }
        entries.get_mut(id).expect("it is there")
    }
}

impl BusEntry {
    fn new(now: Moment) -> Self {
        Self {
            log: VecDeque::new(),
            next: 0,
            posted: Arc::default(),
            sessions: 0,
            held: false,
            evictability: Evictability::default(),
            asked: 0,
            known_since: now,
            active_at: now,
            touched_at: None,
            probes: 0,
            alive: 0,
        }
    }
}

/// A session's presence on the bus.
#[derive(Debug)]
pub struct AttachGuard {
    bus: Arc<Bus>,
    id: SandboxId,
}

impl Drop for AttachGuard {
    fn drop(&mut self) {
        let now = self.bus.clock.now();
        let mut entries = lock(&self.bus.entries);
        if let Some(line) = entries.get_mut(&self.id) {
            line.sessions -= 1;
            line.active_at = now;
            self.bus.tell(|| BusMessage::Left(self.id.clone()));
            self.bus.settle(&entries);
        }
        drop(entries);
        self.bus.wake(&self.id);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
