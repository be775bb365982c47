//! Room for another sandbox: whether this one could make it, whether it is asked to, and what ends that.

use baton_protocol::metadata::DesiredState;

use super::{
    plan::{Action, LockState},
    worker::Worker,
};
use crate::{
    bus::{Evictability, LeaveReason},
    runtime::{Container, Seen},
};

impl Worker {
    /// Its place is wanted, and it can be let go without loss.
    pub(super) fn should_evict(&self, seen: Seen) -> bool {
        self.context.bus.is_wanted(&self.id) && !self.is_attended() && self.is_evictable(seen)
    }

    /// Says on the bus how the place stands. `leaves`: the next action lets it go.
    pub(super) fn tell_tenure(&self, seen: Seen, leaves: bool) {
        let evictability = if leaves {
            Evictability::Leaves
        } else if self.is_evictable(seen) {
            Evictability::Spare { since: self.used_at() }
        } else {
            Evictability::Stays
        };
        self.context.bus.set_tenure(&self.id, evictability);
    }

    /// A checkpoint would keep all of it, and has not just failed. While a session is attached its commands are
    /// not looked at: they begin and end all the time, and the bus lets nothing go that has a session.
    fn is_evictable(&self, seen: Seen) -> bool {
        let persistent = self.found.as_ref().is_some_and(|found| found.metadata.spec.enable_sandbox_checkpoint);
        persistent
            && self.context.checkpoints.is_some()
            && self.standing() == LockState::Ours
            && seen.container == Container::Running
            && (seen.running_execs == 0 || self.is_attended())
            && !self.is_refused()
            && !self.must_wait(Action::Checkpoint)
    }

    /// A session is attached, or waits for it here.
    pub(super) fn is_attended(&self) -> bool {
        self.context.bus.presence(&self.id).attached
    }

    /// Ends when what is under way is not wanted any more: the sandbox is to be deleted, or somebody came for one
    /// that was to make room. Watches by itself.
    pub(super) fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        let (context, id, wakeup) = (self.context.clone(), self.id.clone(), self.wakeup.clone());
        let makes_room = self.why == LeaveReason::Room;
        async move {
            while !makes_room || !context.bus.presence(&id).attached {
                tokio::select! {
                    biased;
                    () = wakeup.heard() => {}
                    () = context.clock.sleep(context.rhythm.metadata) => {}
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
