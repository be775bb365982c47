//! When the sandbox was last used, and what depends on that.

use std::time::Duration;

use super::{desired::idle_in, worker::Worker};
use crate::{
    bus::AttachGuard,
    clock::Moment,
    runtime::{Container, ContainerView},
};

#[derive(Debug)]
pub(super) struct Activity {
    /// When a command was last seen running.
    busy_at: Moment,
    was_busy: bool,
    /// The number of sessions when it began to end because of idleness.
    idle_under: Option<u64>,
    /// Counts as a session until the sandbox runs: the sweep has taken it.
    pub(super) attach_guard: Option<AttachGuard>,
}

impl Activity {
    pub(super) fn new(now: Moment, attach_guard: Option<AttachGuard>) -> Self {
        Self { busy_at: now, was_busy: false, idle_under: None, attach_guard }
    }

    /// Records that a command is running, or was at the last observation.
    pub(super) fn note(&mut self, seen: ContainerView, now: Moment) {
        let is_busy = seen.running_execs > 0 || seen.container == Container::Fenced;
        if is_busy || self.was_busy {
            self.busy_at = now;
        }
        self.was_busy = is_busy;
    }
}

impl Worker {
    /// When a client was last active or a command last ran.
    pub(super) fn used_at(&self) -> Moment {
        self.context.bus.presence(&self.id).active_at.max(self.activity.busy_at)
    }

    /// A session is attached, or waits for the sandbox here.
    pub(super) fn is_attended(&self) -> bool {
        self.context.bus.presence(&self.id).attached
    }

    /// How many sessions have attached so far.
    pub(super) fn sessions(&self) -> u64 {
        self.context.bus.asked(&self.id)
    }

    /// Time until the sandbox counts as idle.
    pub(super) fn idle_in(&self, seen: ContainerView) -> Option<Duration> {
        let timeout = self.record.spec()?.idle_timeout.map(Duration::from_secs);
        idle_in(timeout, self.context.clock.now() - self.used_at(), seen.running_execs)
    }

    /// The idle timeout has passed. Once the sandbox begins to end, it continues unless a session attaches.
    pub(super) fn is_idle(&mut self, seen: ContainerView, is_unattended: bool) -> bool {
        let sessions = self.sessions();
        if seen.container == Container::Running {
            let is_idle = is_unattended || self.idle_in(seen).is_some_and(|left| left.is_zero());
            self.activity.idle_under = is_idle.then_some(sessions);
        }
        self.activity.idle_under == Some(sessions)
    }
}
