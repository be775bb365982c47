//! Contention for a sandbox that one instance holds and another wants: what a waiter here claims and when it is
//! refused, and how a holder here responds to a waiter elsewhere.

use baton_protocol::{
    id::Nonce,
    lock::{Claim, Waiter},
    metadata::Spec,
    reason::Reason,
};

use super::{
    actions::{DELETED, Done, Failure},
    desired::Inputs,
    plan::{Desired, LockState, Observed},
    precedence::{Client, Verdict, verdict},
    worker::{Contention, Worker},
};
use crate::{
    bus::{ALIVE_WITHIN, Presence},
    clock::Moment,
    runtime::{Container, Seen},
    storage::lease::{LeaseHandle, rules::LeaseState},
};

const IN_USE: &str = "Another client is attached to the sandbox.";

/// A pending liveness probe.
#[derive(Clone, Debug)]
pub(super) struct Probe {
    /// The waiter entry and the session it was sent for: either may change in the meantime.
    of: (Nonce, u64),
    number: u64,
    since: Moment,
}

impl Worker {
    /// The claim of the instance that `placement` names, if that is this one.
    fn claim(&self, spec: &Spec) -> Option<Claim> {
        spec.claim_at_placement().filter(|_| spec.placement.as_ref() == Some(&self.context.who.me))
    }

    /// Whether it may be taken from another instance: the spec allows handoff, or an operator orders it.
    pub(super) fn may_move(&self, spec: &Spec) -> bool {
        let is_ordered = spec.enable_sandbox_checkpoint && self.claim(spec) == Some(Claim::Order);
        spec.enable_sandbox_handoff || is_ordered
    }

    /// Our waiter entry matches this spec and was not declined.
    pub(super) fn is_waiting(&self, spec: &Spec) -> bool {
        let entry = self.lock.as_ref().and_then(LeaseHandle::entry);
        entry.is_some_and(|entry| !entry.declined && self.claim(spec).is_none_or(|claim| claim == entry.claim))
    }

    /// Registers as waiter on behalf of the attached session.
    pub(super) async fn wait(&mut self) -> Done {
        self.tell_acquiring();
        let claim = self.found.as_ref().and_then(|found| self.claim(&found.metadata.spec)).unwrap_or_default();
        self.waited_under = self.context.bus.asked(&self.id);
        self.lock_file()?.wait(claim).await?;
        self.waited = true;
        self.beat_due = self.context.clock.now() + self.context.times.beat;
        Ok(())
    }

    /// The decision about another instance that waits for a sandbox held here.
    pub(super) fn verdict(&mut self, seen: Seen, presence: &Presence) -> Verdict {
        let waiter = self.lock.as_ref().and_then(LeaseHandle::waiter).filter(|_| self.is_held()).cloned();
        let asks = |waiter: &Waiter| waiter.claim == Claim::Ask && seen.container == Container::Running;
        let client = match &waiter {
            Some(waiter) if asks(waiter) && presence.attached => self.probed(waiter),
            Some(_) | None => {
                self.probe = None;
                if presence.attached { Client::Probed } else { Client::Absent }
            }
        };
        verdict(waiter.map(|waiter| waiter.claim), client)
    }

    /// Probes the attached client, once per waiter entry and session.
    fn probed(&mut self, waiter: &Waiter) -> Client {
        let (bus, now) = (&self.context.bus, self.context.clock.now());
        let of = (waiter.op.clone(), bus.asked(&self.id));
        let known = self.probe.take().filter(|probe| probe.of == of);
        let probe = known.unwrap_or_else(|| Probe { of, number: bus.probe(&self.id), since: now });
        let client = Client::judge(true, bus.is_alive(&self.id, probe.number), now - probe.since);
        self.probe = Some(probe);
        client
    }

    /// When the current probe times out.
    pub(super) fn probe_ends(&self) -> Option<Moment> {
        let ends = self.probe.as_ref().map(|probe| probe.since + ALIVE_WITHIN);
        ends.filter(|ends| *ends > self.context.clock.now())
    }

    /// Tells the probed waiter that the sandbox is in use.
    pub(super) async fn decline(&mut self) -> Done {
        let Some(Probe { of: (waiter, _), .. }) = self.probe.clone() else { return Err(Failure::Stale) };
        self.lock_file()?.decline(&waiter).await?;
        self.extend().await;
        tracing::info!(sandbox = %self.id, "a waiter was declined: the attached client is alive");
        Ok(())
    }

    /// The holder has declined the claim of the attached session.
    fn is_declined(&self) -> bool {
        let entry = self.lock.as_ref().and_then(LeaseHandle::entry);
        entry.is_some_and(|entry| entry.declined) && self.waited_under == self.context.bus.asked(&self.id)
    }

    /// Why the session waiting here cannot get the sandbox, if it cannot.
    pub(super) fn refusal_for_waiter(&mut self, desired: Desired, inputs: &Inputs, seen: &Observed) -> Option<Failure> {
        let refuse = |reason: Reason, message: &str| Some(Failure::Refused { reason, message: message.to_owned() });
        let away = seen.container == Container::Absent && matches!(seen.standing, LockState::Free | LockState::Theirs);
        if seen.refused || !away || !inputs.asked_here {
            self.contention = None;
            return None;
        }
        let stand = self.lock.as_ref().and_then(LeaseHandle::stand);
        if desired == Desired::Deleted || stand == Some(LeaseState::Purged) {
            return refuse(Reason::Deleted, DELETED);
        }
        if seen.standing == LockState::Theirs && self.is_declined() {
            return refuse(Reason::InUse, IN_USE);
        }
        // A sandbox that cannot move is only watched, and that was not announced.
        let wanted = self.told.acquiring || self.contention.is_some();
        if wanted && desired == Desired::HandedOff && !inputs.placed_here {
            return refuse(Reason::Superseded, "A later attach on another instance took precedence.");
        }
        if desired != Desired::Running || seen.standing != LockState::Theirs {
            self.contention = None;
            return None;
        }
        let may_move = self.found.as_ref().is_some_and(|found| self.may_move(&found.metadata.spec));
        let now = self.context.clock.now();
        let lease = self.lock.as_ref().and_then(|lock| Some(lock.lock()?.lease.as_ref()?.op.clone()));
        let contention = self.contention.get_or_insert(Contention { since: now, lease: lease.clone() });
        if !may_move && lease != contention.lease {
            return refuse(
                Reason::RunningElsewhere,
                "The sandbox runs on another instance, and handoff is not enabled for it.",
            );
        }
        if now - contention.since >= self.context.times.handoff_wait {
            return refuse(Reason::HandoffTimeout, "The instance that runs the sandbox did not let go in time.");
        }
        None
    }
}
