//! A connection to a port as the bus sees it: use of the sandbox while something passes, nothing while it is silent.

use std::{sync::Arc, time::Duration};

use baton_protocol::id::SandboxId;
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    bus::{AttachGuard, Bus},
    clock::{Moment, SharedClock},
};

/// After this time without a byte the sandbox may be evicted in spite of the connection.
const QUIET: Duration = Duration::from_secs(30);
/// How often a request that waits for its answer counts as use.
const WAITING: Duration = Duration::from_millis(500);

/// The use of a sandbox by one connection, until it is dropped.
#[derive(Debug)]
pub struct PortActivity {
    bus: Arc<Bus>,
    clock: SharedClock,
    id: SandboxId,
    state: Mutex<Use>,
    #[expect(dead_code, reason = "held as long as the connection is open")]
    permits: [OwnedSemaphorePermit; 2],
}

#[derive(Debug)]
struct Use {
    at: Moment,
    /// When something last passed.
    passed_at: Moment,
    /// `None` while the connection is silent.
    guard: Option<AttachGuard>,
}

impl PortActivity {
    pub fn new(
        bus: Arc<Bus>,
        clock: SharedClock,
        id: SandboxId,
        guard: AttachGuard,
        permits: [OwnedSemaphorePermit; 2],
    ) -> Arc<Self> {
        let state = Mutex::new(Use { at: clock.now(), passed_at: clock.now(), guard: Some(guard) });
        Arc::new(Self { bus, clock, id, state, permits })
    }

    /// Something passed.
    pub fn beat(&self) {
        let now = self.use_at_now();
        self.state.lock().passed_at = now;
    }

    fn use_at_now(&self) -> Moment {
        self.bus.touch(&self.id);
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.at = now;
        if state.guard.is_none() {
            state.guard = Some(self.bus.attach(&self.id));
        }
        now
    }

    /// Completes when nothing has passed for `span`.
    pub async fn silent_for(&self, span: Duration) {
        loop {
            let until = self.state.lock().passed_at + span;
            if until <= self.clock.now() {
                return;
            }
            self.clock.sleep_until(until).await;
        }
    }

    /// Completes with `work`, which is use of the sandbox for as long as it takes.
    pub async fn busy_with<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            match self.clock.timeout(WAITING, work.as_mut()).await {
                Ok(done) => return done,
                Err(_) => drop(self.use_at_now()),
            }
        }
    }

    /// Completes with `work`, and meanwhile lets go of the sandbox whenever nothing passes.
    pub async fn until<T>(&self, work: impl Future<Output = T>) -> T {
        let rests = async {
            loop {
                let quiet_at = self.state.lock().at + QUIET;
                self.clock.sleep_until(quiet_at).await;
                let released = {
                    let mut state = self.state.lock();
                    let is_quiet = self.clock.now() - state.at >= QUIET;
                    if is_quiet { state.guard.take() } else { None }
                };
                drop(released);
                if self.state.lock().guard.is_none() {
                    self.clock.sleep(QUIET).await;
                }
            }
        };
        tokio::select! {
            biased;
            done = work => done,
            () = rests => unreachable!("it never ends"),
        }
    }
}
