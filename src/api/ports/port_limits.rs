//! How many connections to ports may be open at once.

use std::{collections::HashMap, sync::Arc};

use baton_protocol::id::SandboxId;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::port_activity::PortPermits;

/// Of one server, and of one sandbox.
const MOST: usize = 4_096;
const MOST_OF_SANDBOX: usize = 512;

#[derive(Debug)]
pub struct PortLimits {
    all: Arc<Semaphore>,
    of_sandboxes: Mutex<HashMap<SandboxId, Arc<Semaphore>>>,
}

impl Default for PortLimits {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(MOST)), of_sandboxes: Mutex::default() }
    }
}

impl PortLimits {
    /// Permits for one more connection, or `None` if there are too many.
    pub fn enter(&self, id: &SandboxId) -> Option<PortPermits> {
        let of_sandbox = {
            let mut of_sandboxes = self.of_sandboxes.lock();
            if !of_sandboxes.contains_key(id) {
                // Permits that are out hold their semaphore.
                of_sandboxes.retain(|_, semaphore| Arc::strong_count(semaphore) > 1);
            }
            of_sandboxes.entry(id.clone()).or_insert_with(|| Arc::new(Semaphore::new(MOST_OF_SANDBOX))).clone()
        };
        Some([of_sandbox.try_acquire_owned().ok()?, self.all.clone().try_acquire_owned().ok()?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{SharedClock, SystemClock};

    #[test]
    fn one_sandbox_leaves_connections_for_others_and_none_are_lost() {
        let clock: SharedClock = Arc::new(SystemClock);
        let (limits, one, other) = (PortLimits::default(), clock.sandbox_id(), clock.sandbox_id());
        let mut held: Vec<_> = (0..MOST_OF_SANDBOX).map(|_| limits.enter(&one).expect("there is room")).collect();
        assert!(limits.enter(&one).is_none());
        assert!(limits.enter(&other).is_some());
        held.pop();
        assert!(limits.enter(&one).is_some());
        held.clear();
        assert_eq!(limits.all.available_permits(), MOST);
        assert!(limits.enter(&clock.sandbox_id()).is_some());
        assert_eq!(limits.of_sandboxes.lock().len(), 1, "the others are forgotten");
    }
}
