//! Eviction: whether this sandbox can free its slot for another, whether it is asked to, and what cancels that.

use baton_protocol::metadata::DesiredState;

use super::{
    plan::{Action, Desired, LockState},
    worker::Worker,
};
use crate::{
    bus::{Evictability, LeaveReason},
    runtime::{Container, ContainerView},
};

impl Worker {
    /// Eviction was requested, and the sandbox can be released without loss.
    pub(super) fn should_evict(&self, seen: ContainerView) -> bool {
        self.context.bus.is_wanted(&self.id) && !self.is_attended() && self.is_evictable(seen)
    }

    /// Publishes the sandbox's evictability on the bus, given the next action. Upkeep changes nothing about it.
    pub(super) fn publish_evictability(&self, seen: ContainerView, action: Action, desired: Desired) {
        if action.is_upkeep() {
            return;
        }
        let rests = matches!(action, Action::Rest | Action::Finish);
        if rests || desired == Desired::Running {
            self.publish_evictability_at_rest(seen);
        } else {
            self.context.bus.set_tenure(&self.id, Evictability::Leaves);
        }
    }

    pub(super) fn publish_evictability_at_rest(&self, seen: ContainerView) {
        let evictability =
            if self.is_evictable(seen) { Evictability::Spare { since: self.used_at() } } else { Evictability::Stays };
        self.context.bus.set_tenure(&self.id, evictability);
    }

    /// A checkpoint would keep all of its state, and none has just failed. While a session is attached its commands
    /// are ignored: they start and end all the time, and the bus never evicts a sandbox that has a session.
    fn is_evictable(&self, seen: ContainerView) -> bool {
        self.record.is_persistent()
            && self.context.checkpoints.is_some()
            && self.lease.state() == LockState::Ours
            && seen.container == Container::Running
            && (seen.running_execs == 0 || self.is_attended())
            && !self.is_refused()
            && !self.retry.defers(Action::Checkpoint, self.context.clock.now())
    }

    /// Completes when the current action is no longer wanted: the sandbox is to be deleted, or a session attached to
    /// one that was being evicted. Reads the metadata itself, independently of the worker.
    pub(super) fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        let (context, id, wakeup) = (self.context.clone(), self.id.clone(), self.wakeup.clone());
        let makes_room = self.announced.leave_reason == LeaveReason::Room;
        async move {
            while !makes_room || !context.bus.presence(&id).attached {
                tokio::select! {
                    biased;
                    () = wakeup.woken() => {}
                    () = context.clock.sleep(context.times.poll.metadata) => {}
                }
                if let Ok(Some(metadata)) = context.records.find(&id).await
                    && metadata.spec.desired_state == DesiredState::Deleted
                {
                    return;
                }
            }
        }
    }
}
