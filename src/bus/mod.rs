//! Connects API and reconciler on one instance: events, wake-ups, attachment and admission.
//!
//! The API *wakes* the reconciler for a sandbox and reports which sessions are attached and active. The reconciler
//! *posts* lifecycle events, numbered and in order, to a bounded log that sessions subscribe to. Everything here is
//! plain data, so the two sides may be two processes. Nothing durable depends on it: its content may be lost at any
//! time.

mod admission;
mod admission_rules;
mod lifecycle_event;
mod liveness;
mod placements;
mod subscription;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use baton_protocol::id::SandboxId;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};

pub use self::{
    admission::{EvictionRequest, ROOM_WITHIN},
    admission_rules::Evictability,
    lifecycle_event::{DOWNLOAD, EXTRACT, LeaveReason, LifecycleEvent, NumberedEvent, SNAPSHOT, StartKind, UPLOAD},
    liveness::ALIVE_WITHIN,
    subscription::Subscription,
};
use crate::storage::lease::lease_rules::InitialLease;
use crate::{
    clock::{Moment, SharedClock},
    fair_watch::FairWatch,
};

/// How many events of a sandbox are kept for a session that reads slowly.
const EVENT_BUFFER: usize = 256;

/// Minimum time between two activity messages to the other process.
const TOUCH: std::time::Duration = std::time::Duration::from_millis(200);

/// What sessions have reported about a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Presence {
    /// A session is attached, or waits for the sandbox to run here.
    pub attached: bool,
    /// A session has been attached at some time.
    pub ever_attached: bool,
    /// When the bus first learned of the sandbox.
    pub known_since: Moment,
    /// When a client was last active, or left.
    pub active_at: Moment,
    /// The number of the placement whose session waits for an answer.
    pub placed: Option<u64>,
}

/// A message from the API to the reconciler. The bus of a separate API process forwards it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BusMessage {
    Attached(SandboxId),
    Left(SandboxId),
    Touched(SandboxId),
    Nudged(SandboxId),
    /// The attached session has placed the sandbox here.
    Placed(SandboxId),
    /// Eviction is requested: another sandbox waits for its slot.
    Wanted(SandboxId),
    Unwanted(SandboxId),
    /// The attached client has answered the probe with this number.
    Alive(SandboxId, u64),
    /// The lock of a new sandbox is about to be written, held by this instance.
    Leased {
        id: SandboxId,
        lease: InitialLease,
    },
    /// The sandbox was not created after all.
    Unleased(SandboxId),
}

/// Where a bus forwards its messages.
struct Forwarder(Box<dyn Fn(BusMessage) + Send + Sync>);

impl std::fmt::Debug for Forwarder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Forwarder")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub sessions: usize,
    /// Sandboxes that were woken and not yet observed.
    pub wakeups: usize,
}

#[derive(Debug)]
struct BusEntry {
    log: VecDeque<NumberedEvent>,
    next: u64,
    /// The newest number; subscriptions share it.
    posted: Arc<FairWatch<u64>>,
    sessions: u32,
    held: bool,
    evictability: Evictability,
    /// Number of sessions so far: a change makes the reconciler retry a refused spec.
    asked: u64,
    known_since: Moment,
    active_at: Moment,
    /// When activity was last forwarded.
    touched_at: Option<Moment>,
    /// How many placements sessions have written, and which one is not answered yet.
    placements: u64,
    placed: Option<u64>,
    /// How many probes were sent, and which was answered last.
    probes: u64,
    alive: u64,
}

#[derive(Debug)]
pub struct Bus {
    clock: SharedClock,
    /// `Some`: the reconciler is another process with its own bus.
    forwarder: Option<Forwarder>,
    entries: Mutex<BTreeMap<SandboxId, BusEntry>>,
    woken: Mutex<BTreeSet<SandboxId>>,
    /// Initial leases of sandboxes being created, until their worker takes them over.
    leases: Mutex<BTreeMap<SandboxId, InitialLease>>,
    wakeup: Notify,
    /// Counts changes of which sandboxes are held, and of their evictability.
    holds: watch::Sender<u64>,
    /// Locked after `entries`.
    queue: Mutex<admission::Queue>,
}

impl Bus {
    pub fn new(clock: SharedClock) -> Arc<Self> {
        Arc::new(Self::with(clock, None))
    }

    /// The bus of a separate API process: it forwards its messages in order. `tell` must not block.
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

    fn forward(&self, told: impl FnOnce() -> BusMessage) {
        if let Some(Forwarder(tell)) = &self.forwarder {
            tell(told());
        }
    }

    /// Asks the reconciler to observe a sandbox now. Wake-ups before the next observation are merged into one.
    pub fn wake(&self, id: &SandboxId) {
        if self.forwarder.is_some() {
            self.forward(|| BusMessage::Nudged(id.clone()));
            // Nothing else removes an entry here.
            self.forget(id);
            return;
        }
        self.woken.lock().insert(id.clone());
        self.wakeup.notify_one();
    }

    /// The lock of a new sandbox is about to be written, held by this instance. Called before the write is sent:
    /// whatever its outcome, the deadline of the lease counts from here.
    pub fn lease(&self, id: &SandboxId) -> InitialLease {
        let lease = InitialLease { op: self.clock.nonce(), sent: self.clock.now() };
        self.note_lease(id, lease.clone());
        lease
    }

    /// As [`lease`](Self::lease), for a lease that the API half has announced.
    pub fn note_lease(&self, id: &SandboxId, lease: InitialLease) {
        if self.forwarder.is_some() {
            return self.forward(|| BusMessage::Leased { id: id.clone(), lease });
        }
        self.leases.lock().insert(id.clone(), lease);
    }

    /// The sandbox was not created after all.
    pub fn unlease(&self, id: &SandboxId) {
        self.forward(|| BusMessage::Unleased(id.clone()));
        self.leases.lock().remove(id);
    }

    /// The lease under which a sandbox was created here, for the one worker that continues with it.
    pub fn take_lease(&self, id: &SandboxId) -> Option<InitialLease> {
        self.leases.lock().remove(id)
    }

    /// The next sandbox that was woken. Supports a single listener.
    pub async fn next_wakeup(&self) -> SandboxId {
        loop {
            let heard = self.wakeup.notified();
            if let Some(id) = self.woken.lock().pop_first() {
                return id;
            }
            heard.await;
        }
    }

    pub fn post(&self, id: &SandboxId, passing: LifecycleEvent) {
        let mut entries = self.entries.lock();
        let line = self.line(&mut entries, id);
        line.next += 1;
        let number = line.next;
        if passing.answers_placement() {
            line.placed = None;
        }
        line.log.push_back(NumberedEvent { number, passing });
        if line.log.len() > EVENT_BUFFER {
            line.log.pop_front();
        }
        line.posted.post(number);
    }

    /// Subscribes to events posted from now on.
    pub fn follow(self: &Arc<Self>, id: &SandboxId) -> Subscription {
        let mut entries = self.entries.lock();
        let line = self.line(&mut entries, id);
        Subscription { bus: self.clone(), id: id.clone(), seen: line.next, posted: line.posted.clone() }
    }

    /// How much is on the bus, for metrics.
    pub fn counts(&self) -> Counts {
        let sessions = self.entries.lock().values().map(|line| line.sessions as usize).sum();
        Counts { sessions, wakeups: self.woken.lock().len() }
    }

    /// How many sandboxes this instance holds.
    pub fn held_count(&self) -> usize {
        self.entries.lock().values().filter(|line| line.held).count()
    }

    /// It is on this instance, or a session waits for it here.
    pub fn is_here(&self, id: &SandboxId) -> bool {
        self.entries.lock().get(id).is_some_and(BusEntry::is_here)
    }

    /// All sandboxes on this instance, and those that a session waits for here.
    pub fn local_sandboxes(&self) -> Vec<SandboxId> {
        self.entries.lock().iter().filter(|(_, line)| line.is_here()).map(|(id, _)| id.clone()).collect()
    }

    /// This instance holds it.
    pub fn is_held(&self, id: &SandboxId) -> bool {
        self.entries.lock().get(id).is_some_and(|line| line.held)
    }

    /// Sets whether this instance holds the sandbox; called by the reconciler.
    pub fn set_held(&self, id: &SandboxId, held: bool) {
        let mut entries = self.entries.lock();
        let line = self.line(&mut entries, id);
        if std::mem::replace(&mut line.held, held) != held {
            line.evictability = Evictability::default();
            self.holds.send_modify(|count| *count += 1);
            self.reevaluate(&entries);
        }
    }

    /// Changes whenever a sandbox becomes held or released, or its evictability changes.
    pub fn holds(&self) -> watch::Receiver<u64> {
        self.holds.subscribe()
    }

    /// Registers a session for this sandbox until the guard is dropped.
    pub fn attach(self: &Arc<Self>, id: &SandboxId) -> AttachGuard {
        self.attach_to(&mut self.entries.lock(), id)
    }

    fn attach_to(self: &Arc<Self>, entries: &mut BTreeMap<SandboxId, BusEntry>, id: &SandboxId) -> AttachGuard {
        let now = self.clock.now();
        let line = self.line(entries, id);
        line.sessions += 1;
        line.asked += 1;
        line.active_at = now;
        line.placed = None;
        // Under the lock, so that attaching and leaving are forwarded in order.
        self.forward(|| BusMessage::Attached(id.clone()));
        self.reevaluate(entries);
        AttachGuard { bus: self.clone(), id: id.clone() }
    }

    /// Records client activity: the idle time starts over.
    pub fn touch(&self, id: &SandboxId) {
        let now = self.clock.now();
        if let Some(line) = self.entries.lock().get_mut(id) {
            line.active_at = now;
            if self.forwarder.is_some() && line.touched_at.is_none_or(|at| now - at >= TOUCH) {
                line.touched_at = Some(now);
                self.forward(|| BusMessage::Touched(id.clone()));
            }
        }
    }

    pub fn presence(&self, id: &SandboxId) -> Presence {
        let mut entries = self.entries.lock();
        let line = self.line(&mut entries, id);
        Presence {
            attached: line.sessions > 0,
            ever_attached: line.asked > 0,
            known_since: line.known_since,
            active_at: line.active_at,
            placed: line.placed,
        }
    }

    /// How many sessions have attached to this sandbox so far.
    pub fn asked(&self, id: &SandboxId) -> u64 {
        self.entries.lock().get(id).map_or(0, |line| line.asked)
    }

    /// Forgets a sandbox that is no longer here, unless a session is still subscribed.
    pub fn forget(&self, id: &SandboxId) {
        self.forget_but_for(id, 0);
    }

    /// Ignores this many subscriptions.
    fn forget_but_for(&self, id: &SandboxId, readers: usize) {
        let mut entries = self.entries.lock();
        let unread = |line: &BusEntry| Arc::strong_count(&line.posted) - 1 <= readers;
        if entries.get(id).is_some_and(|line| line.sessions == 0 && !line.held && unread(line)) {
            entries.remove(id);
        }
    }

    fn line<'a>(&self, entries: &'a mut BTreeMap<SandboxId, BusEntry>, id: &SandboxId) -> &'a mut BusEntry {
        // This is called all the time and the entry nearly always exists: the id is cloned only when it does not.
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
            placements: 0,
            placed: None,
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
        let mut entries = self.bus.entries.lock();
        if let Some(line) = entries.get_mut(&self.id) {
            line.sessions -= 1;
            line.active_at = now;
            self.bus.forward(|| BusMessage::Left(self.id.clone()));
            self.bus.reevaluate(&entries);
        }
        drop(entries);
        self.bus.wake(&self.id);
    }
}

#[cfg(test)]
mod tests;
