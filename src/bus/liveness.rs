//! Liveness probes: the reconciler asks whether an attached client is alive, and its session answers for it.
//!
//! ```text
//!   reconciler ──probe──▶ session ──ping──▶ client
//!   reconciler ◀──alive── session ◀──pong── client
//! ```

use std::time::Duration;

use baton_protocol::id::SandboxId;

use super::{Bus, BusMessage, LifecycleEvent};

/// A client that does not answer a ping within this time counts as dead when another client wants the sandbox.
pub const ALIVE_WITHIN: Duration = Duration::from_secs(1);

impl Bus {
    /// Probes the attached client; the number distinguishes the answer from those to earlier probes.
    pub fn probe(&self, id: &SandboxId) -> u64 {
        let number = {
            let mut entries = self.entries.lock();
            let line = self.line(&mut entries, id);
            line.probes += 1;
            line.probes
        };
        self.post(id, LifecycleEvent::Probe { number });
        number
    }

    /// Records that the attached client has answered this probe.
    pub fn alive(&self, id: &SandboxId, number: u64) {
        if self.forwarder.is_some() {
            return self.forward(|| BusMessage::Alive(id.clone(), number));
        }
        if let Some(line) = self.entries.lock().get_mut(id) {
            line.alive = line.alive.max(number);
        }
        self.wake(id);
    }

    /// Whether this probe, or a later one, was answered.
    pub fn is_alive(&self, id: &SandboxId, number: u64) -> bool {
        self.entries.lock().get(id).is_some_and(|line| line.alive >= number)
    }
}
