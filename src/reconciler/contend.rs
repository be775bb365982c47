//! Contending: why a session that waits here for a sandbox another instance has waits in vain.

use baton_protocol::reason::Reason;

use super::{
    act::{DELETED, Failure},
    desired::Wish,
    plan::{Desired, Observed, Standing},
    sandbox::{Contention, Sandbox},
};
use crate::{
    runtime::Container,
    storage::{lease::LockFile, rules::Stand},
};

impl Sandbox {
    /// Why the session that waits here waits in vain.
    pub(super) fn turned_away(&mut self, desired: Desired, wish: &Wish, seen: &Observed) -> Option<Failure> {
        let refuse = |reason: Reason, message: &str| Some(Failure::Refused { reason, message: message.to_owned() });
        let away = seen.container == Container::Absent && matches!(seen.standing, Standing::Free | Standing::Theirs);
        if seen.refused || !away || !wish.asked_here {
            self.contention = None;
            return None;
        }
        let stand = self.lock.as_ref().and_then(LockFile::stand);
        if desired == Desired::Deleted || stand == Some(Stand::Purged) {
            return refuse(Reason::Deleted, DELETED);
        }
        // What cannot move is only watched, and nobody was told of that.
        let wanted = self.told.acquiring || self.contention.is_some();
        if wanted && desired == Desired::HandedOff && !wish.placed_here {
            return refuse(Reason::Superseded, "A later attach on another instance took precedence.");
        }
        if desired != Desired::Running || seen.standing != Standing::Theirs {
            self.contention = None;
            return None;
        }
        let now = self.tools.clock.now();
        let lease = self.lock.as_ref().and_then(|lock| Some(lock.lock()?.lease.as_ref()?.op.clone()));
        let contention = self.contention.get_or_insert(Contention { since: now, lease: lease.clone() });
        if !wish.movable && lease != contention.lease {
            return refuse(
                Reason::RunningElsewhere,
                "The sandbox runs on another instance, and handoff is not enabled for it.",
            );
        }
        if now - contention.since >= self.tools.times.handoff_wait {
            return refuse(Reason::HandoffTimeout, "The instance that runs the sandbox did not let go in time.");
        }
        None
    }
}
