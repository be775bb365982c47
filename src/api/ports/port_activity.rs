//! Connections to ports as the bus sees them: all of a sandbox together are one session, while something passes.
//!
//! A page is many requests, and every session that comes or goes makes the reconciler look. So the session outlasts
//! its connections for a while; it ends at once when the sandbox leaves.

use std::{collections::HashMap, sync::Arc, time::Duration};

use baton_protocol::id::SandboxId;
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    api::Api,
    bus::{AttachGuard, Bus, LifecycleEvent, Subscription},
    clock::{Moment, SharedClock},
};

/// After this time without a byte the sandbox may be evicted in spite of its connections.
const QUIET: Duration = Duration::from_secs(30);
/// How often a request that waits for its answer counts as use.
const WAITING: Duration = Duration::from_millis(500);

/// The sandboxes whose ports are in use here.
#[derive(Debug, Default)]
pub struct PortUses(Mutex<HashMap<SandboxId, Arc<SandboxUse>>>);

impl PortUses {
    /// Whether nobody but the map and its task has the use; then it is forgotten.
    fn retire(&self, used: &Arc<SandboxUse>) -> bool {
        let mut uses = self.0.lock();
        let is_unused = Arc::strong_count(used) <= 2;
        if is_unused {
            Self::remove(&mut uses, used);
        }
        is_unused
    }

    fn remove(uses: &mut HashMap<SandboxId, Arc<SandboxUse>>, used: &Arc<SandboxUse>) {
        if uses.get(&used.id).is_some_and(|known| Arc::ptr_eq(known, used)) {
            uses.remove(&used.id);
        }
    }
}

/// The use of one sandbox, from its arrival until it leaves or nothing has passed for a while.
#[derive(Debug)]
struct SandboxUse {
    bus: Arc<Bus>,
    clock: SharedClock,
    id: SandboxId,
    state: Mutex<UseState>,
}

#[derive(Debug)]
struct UseState {
    at: Moment,
    /// `None` while nothing passes.
    guard: Option<AttachGuard>,
    has_left: bool,
}

impl SandboxUse {
    fn touch(&self) -> Moment {
        self.bus.touch(&self.id);
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.at = now;
        if state.guard.is_none() && !state.has_left {
            state.guard = Some(self.bus.attach(&self.id));
        }
        now
    }

    fn release(&self, has_left: bool) {
        let guard = {
            let mut state = self.state.lock();
            state.has_left |= has_left;
            state.guard.take()
        };
        drop(guard);
    }

    /// Ends with the stay of the sandbox here, or of its connections.
    async fn watch(self: Arc<Self>, api: Arc<Api>, mut subscription: Subscription) {
        let mut checked_at = self.clock.now();
        loop {
            let quiet_at = self.state.lock().at.max(checked_at) + QUIET;
            tokio::select! {
                event = subscription.next() => {
                    if matches!(event.passing, LifecycleEvent::Left { .. } | LifecycleEvent::LeaseLost { .. }) {
                        break;
                    }
                }
                () = api.closing.cancelled() => break,
                () = self.clock.sleep_until(quiet_at) => {
                    checked_at = self.clock.now();
                    if checked_at - self.state.lock().at >= QUIET {
                        self.release(false);
                        if api.port_uses.retire(&self) {
                            return;
                        }
                    }
                }
            }
        }
        PortUses::remove(&mut api.port_uses.0.lock(), &self);
        self.release(true);
    }
}

impl Api {
    /// The use of a sandbox that is in use already.
    pub(super) fn join_use(&self, id: &SandboxId, permits: PortPermits) -> Result<Arc<PortActivity>, PortPermits> {
        match self.port_uses.0.lock().get(id) {
            Some(used) => Ok(PortActivity::new(used.clone(), permits)),
            None => Err(permits),
        }
    }

    /// The use of a sandbox that runs here, by a connection that has waited for it as a session.
    pub(super) fn begin_use(
        self: &Arc<Self>,
        id: &SandboxId,
        guard: AttachGuard,
        permits: PortPermits,
    ) -> Arc<PortActivity> {
        let mut uses = self.port_uses.0.lock();
        if let Some(used) = uses.get(id) {
            let activity = PortActivity::new(used.clone(), permits);
            drop(uses);
            // The use has one of its own.
            drop(guard);
            return activity;
        }
        let state = Mutex::new(UseState { at: self.clock.now(), guard: Some(guard), has_left: false });
        let used = Arc::new(SandboxUse { bus: self.bus.clone(), clock: self.clock.clone(), id: id.clone(), state });
        uses.insert(id.clone(), used.clone());
        drop(uses);
        self.tasks.spawn(used.clone().watch(self.clone(), self.bus.follow(id)));
        PortActivity::new(used, permits)
    }
}

/// What the limits allow one connection.
pub type PortPermits = [OwnedSemaphorePermit; 2];

/// One connection, until it is dropped.
#[derive(Debug)]
pub struct PortActivity {
    used: Arc<SandboxUse>,
    /// When something last passed.
    passed_at: Mutex<Moment>,
    #[expect(dead_code, reason = "held as long as the connection is open")]
    permits: PortPermits,
}

impl PortActivity {
    fn new(used: Arc<SandboxUse>, permits: PortPermits) -> Arc<Self> {
        let passed_at = Mutex::new(used.touch());
        Arc::new(Self { used, passed_at, permits })
    }

    /// Something passed.
    pub fn beat(&self) {
        *self.passed_at.lock() = self.used.touch();
    }

    /// Completes when nothing has passed for `span`.
    pub async fn silent_for(&self, span: Duration) {
        let clock = &self.used.clock;
        loop {
            let until = *self.passed_at.lock() + span;
            if until <= clock.now() {
                return;
            }
            clock.sleep_until(until).await;
        }
    }

    /// Completes with `work`, which is use of the sandbox for as long as it takes.
    pub async fn busy_with<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            match self.used.clock.timeout(WAITING, work.as_mut()).await {
                Ok(done) => return done,
                Err(_) => drop(self.used.touch()),
            }
        }
    }
}
