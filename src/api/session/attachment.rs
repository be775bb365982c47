//! What a session holds of its sandbox: the slot, the attachment on the bus, the spec, and how long to wait for it.

use std::time::{Duration, SystemTime};

use baton_protocol::{
    event::{Event, Token},
    id::SandboxId,
    metadata::Spec,
};

use crate::{
    api::session_registry::{LivenessProbe, SessionSlot},
    bus::{AttachGuard, LifecycleEvent, StartKind, Subscription},
    clock::Moment,
};

/// What happens to the sandbox, or to its slot.
pub enum SandboxEvent {
    Lifecycle(LifecycleEvent),
    /// Another session wants the slot; `None` means that it was taken.
    Probe(Option<LivenessProbe>),
}

pub struct Attachment {
    pub id: SandboxId,
    pub spec: Spec,
    /// The sandbox token, until the client has received it.
    token: Option<Token>,
    slot: SessionSlot,
    guard: AttachGuard,
    subscription: Subscription,
    /// How the container was started, until the session is open.
    pub start: Option<StartKind>,
    /// Deadline for the sandbox to run or to report why it does not.
    pub start_deadline: Option<Moment>,
    /// A live client on another instance holds the sandbox.
    pub is_declined: bool,
}

impl Attachment {
    pub fn new(
        spec: Spec,
        token: Option<Token>,
        slot: SessionSlot,
        guard: AttachGuard,
        subscription: Subscription,
        start_deadline: Moment,
    ) -> Self {
        let (id, start_deadline) = (spec.sandbox_id.clone(), Some(start_deadline));
        Self { id, spec, token, slot, guard, subscription, start: None, start_deadline, is_declined: false }
    }

    /// The next event. Cancel safe.
    pub async fn next_event(&mut self) -> SandboxEvent {
        tokio::select! {
            biased;
            probe = self.slot.next_probe() => SandboxEvent::Probe(probe),
            event = self.subscription.next() => SandboxEvent::Lifecycle(event.passing),
        }
    }

    /// Whether another session has taken the slot.
    pub fn is_slot_taken(&self) -> bool {
        self.slot.is_taken()
    }

    pub fn is_overdue(&self, now: Moment) -> bool {
        self.start_deadline.is_some_and(|deadline| now >= deadline)
    }

    /// Whether the client has not received the token: then no client can ever attach.
    pub fn has_unsent_token(&self) -> bool {
        self.token.is_some()
    }

    /// The id and the token, once.
    pub fn take_id_event(&mut self) -> Option<Event> {
        let sandbox_token = self.token.take()?;
        let persistent = Some(self.spec.enable_sandbox_checkpoint);
        Some(Event::SandboxId { sandbox_id: self.id.clone(), sandbox_token, persistent })
    }

    /// Whether the `ttl` of the sandbox is over.
    pub fn has_expired(&self, now: SystemTime) -> bool {
        let created = humantime::parse_rfc3339_weak(&self.spec.created_timestamp).ok();
        let due = self.spec.ttl.zip(created).and_then(|(ttl, created)| created.checked_add(Duration::from_secs(ttl)));
        due.is_some_and(|due| due <= now)
    }

    /// Leaves the sandbox, except for its slot.
    pub fn detach(self) -> (SandboxId, SessionSlot) {
        drop((self.guard, self.subscription));
        (self.id, self.slot)
    }
}
