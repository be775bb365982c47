//! Placements: an attached session writes to the spec that the sandbox runs here, and waits for an answer.
//!
//! Only then does a `placement` that names another instance mean that a later attach took precedence: until the session
//! has written its own, the metadata name whoever wanted the sandbox before.

use baton_protocol::id::SandboxId;

use super::{Bus, BusMessage, LifecycleEvent};

impl Bus {
    /// Records that the attached session has placed the sandbox here, and wakes the reconciler. Called after the write.
    pub fn placed(&self, id: &SandboxId) {
        self.forward(|| BusMessage::Placed(id.clone()));
        {
            let mut entries = self.entries.lock();
            let line = self.line(&mut entries, id);
            line.placements += 1;
            line.placed = Some(line.placements);
        }
        self.wake(id);
    }
}

impl LifecycleEvent {
    /// Whether a session that waits for the sandbox has its answer: it has the sandbox, places it anew, or ends.
    pub(super) fn answers_placement(&self) -> bool {
        matches!(self, Self::Running { .. } | Self::Failed { .. } | Self::Left { .. } | Self::LeaseLost { .. })
    }
}
