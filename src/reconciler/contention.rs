//! Contention for a sandbox that one instance holds and another wants: how long a session here has waited for it, and
//! the probe of the client here that another instance's request has caused.

use baton_protocol::{
    id::Nonce,
    lock::{Claim, Waiter},
    metadata::Spec,
};

use super::{
    desired::{Inputs, desired},
    plan::{AttachState, Desired, LockState},
    precedence::{AttachedClient, Verdict, verdict},
    worker::Worker,
};
use crate::{
    bus::{ALIVE_WITHIN, Presence},
    clock::Moment,
    runtime::{Container, ContainerView},
    storage::lease::LeaseHandle,
};

#[derive(Debug, Default)]
pub(super) struct Contention {
    /// Since when a session here has waited for a sandbox that another instance holds.
    wait: Option<Wait>,
    /// This instance has registered as waiter since the sandbox last ran or left.
    pub(super) has_registered: bool,
    /// The number of sessions when it last did.
    pub(super) registered_under: u64,
    /// The liveness probe of the client here, sent because another instance wants the sandbox.
    pub(super) probe: Option<PendingProbe>,
}

#[derive(Clone, Debug)]
struct Wait {
    since: Moment,
    /// The lease at that time.
    lease: Option<Nonce>,
}

/// A pending liveness probe.
#[derive(Clone, Debug)]
pub(super) struct PendingProbe {
    pub(super) subject: ProbeSubject,
    pub(super) number: u64,
    pub(super) since: Moment,
}

/// The waiter entry and the session that a probe was sent for: either may change in the meantime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProbeSubject {
    pub(super) waiter: Nonce,
    pub(super) sessions: u64,
}

impl Contention {
    /// When the current probe times out.
    pub(super) fn probe_ends(&self) -> Option<Moment> {
        self.probe.as_ref().map(|probe| probe.since + ALIVE_WITHIN)
    }

    /// How long this instance has waited.
    pub(super) fn waited(&self, now: Moment) -> Option<std::time::Duration> {
        self.wait.as_ref().map(|wait| now - wait.since)
    }
}

impl Worker {
    /// The claim of the instance that `placement` names, if that is this one.
    pub(super) fn claim(&self, spec: &Spec) -> Option<Claim> {
        spec.claim_at_placement().filter(|_| spec.placement.as_ref() == Some(&self.context.who.me))
    }

    /// Whether it may be taken from another instance: the spec allows handoff, or an operator orders it.
    pub(super) fn may_move(&self, spec: &Spec) -> bool {
        let is_ordered = spec.enable_sandbox_checkpoint && self.claim(spec) == Some(Claim::Order);
        spec.enable_sandbox_handoff || is_ordered
    }

    /// Our waiter entry matches this spec, was not declined, and need not be refreshed yet.
    pub(super) fn is_waiting(&self, spec: &Spec) -> bool {
        let is_fresh = self.context.clock.now() < self.lease.beat_due;
        let entry = self.lease.handle.as_ref().and_then(LeaseHandle::entry);
        let matches = |entry: &Waiter| self.claim(spec).is_none_or(|claim| claim == entry.claim);
        is_fresh && entry.is_some_and(|entry| !entry.declined && matches(entry))
    }

    /// The decision about another instance that waits for a sandbox held here, and whether the client here must be
    /// probed first.
    pub(super) fn verdict(&mut self, seen: ContainerView, presence: &Presence) -> (Verdict, Option<ProbeSubject>) {
        let handle = self.lease.handle.as_ref().filter(|_| self.lease.is_held());
        let waiter = handle.and_then(LeaseHandle::waiter);
        let claim = waiter.map(|waiter| waiter.claim);
        let asks = waiter.filter(|waiter| waiter.claim == Claim::Ask && seen.container == Container::Running);
        let Some(waiter) = asks.filter(|_| presence.attached) else {
            self.contention.probe = None;
            let client = if presence.attached { AttachedClient::Probed } else { AttachedClient::Absent };
            return (verdict(claim, client), None);
        };
        let bus = &self.context.bus;
        let subject = ProbeSubject { waiter: waiter.op.clone(), sessions: bus.asked(&self.id) };
        let Some(probe) = self.contention.probe.as_ref().filter(|probe| probe.subject == subject) else {
            return (verdict(claim, AttachedClient::Probed), Some(subject));
        };
        let has_answered = bus.is_alive(&self.id, probe.number);
        let client = AttachedClient::decide(true, has_answered, self.context.clock.now() - probe.since);
        (verdict(claim, client), None)
    }

    /// The prospects of the session that waits here for a sandbox on another instance.
    pub(super) fn attachment(
        &mut self,
        inputs: &Inputs,
        presence: &Presence,
        lock: LockState,
        container: Container,
    ) -> AttachState {
        let is_away = matches!(lock, LockState::Free | LockState::Theirs) && container == Container::Absent;
        if !inputs.asked_here || inputs.refused || !is_away {
            self.contention.wait = None;
            return if inputs.asked_here { AttachState::Waiting } else { AttachState::None };
        }
        if self.lease.is_purged() {
            return AttachState::Deleted;
        }
        if lock == LockState::Theirs && self.is_declined() {
            return AttachState::Declined;
        }
        let was_placed_here = presence.placed.is_some_and(|placed| self.record.is_newer_than(placed));
        if was_placed_here && !inputs.placed_here {
            return AttachState::Superseded;
        }
        if desired(inputs).0 != Desired::Running || lock != LockState::Theirs {
            self.contention.wait = None;
            return AttachState::Waiting;
        }
        let may_move = self.record.spec().is_some_and(|spec| self.may_move(spec));
        let now = self.context.clock.now();
        let lease = self.lease.lock().and_then(|lock| lock.lease.as_ref()).map(|lease| lease.op.clone());
        let wait = self.contention.wait.get_or_insert(Wait { since: now, lease: lease.clone() });
        if !may_move && lease != wait.lease {
            AttachState::HeldElsewhere
        } else if now - wait.since >= self.context.times.handoff_wait {
            AttachState::TimedOut
        } else {
            AttachState::Waiting
        }
    }

    /// The holder has declined the claim of the attached session.
    fn is_declined(&self) -> bool {
        let entry = self.lease.handle.as_ref().and_then(LeaseHandle::entry);
        let is_current = self.contention.registered_under == self.context.bus.asked(&self.id);
        entry.is_some_and(|entry| entry.declined) && is_current
    }
}
