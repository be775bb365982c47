//! Waiting for admission: the session keeps reading from the client, and its request ends with it.

use std::sync::Arc;

use baton_protocol::{
    event::{Status, Token},
    id::SandboxId,
    metadata::Spec,
    request::{Refusal, Request},
};

use super::{
    Session,
    attachment::Attachment,
    incoming::{IncomingRequests, Probes},
};
use crate::{
    api::{
        Api,
        client_connection::{ClientConnection, ClientEvent},
        close_code::{Close, SessionEnd},
        intent::{NO_ROOM, SHUTTING_DOWN},
        session_registry::{LivenessProbe, SessionSlot},
        status_machine::StatusMachine,
    },
    bus::{AttachGuard, Subscription},
};

/// A client that has its session slot while its sandbox waits for admission.
pub struct PendingSession {
    pub client: Box<dyn ClientConnection>,
    requests: IncomingRequests,
    probes: Probes,
    slot: SessionSlot,
}

/// Why a sandbox is not admitted or created.
#[derive(Debug)]
pub enum AdmissionRejection {
    /// No sandbox here can be evicted, or none was in time.
    Full,
    /// The instance is draining.
    Draining,
    /// The quota of the tenant is used up.
    Quota(String),
    Failed(String),
    /// The session has ended meanwhile.
    Ended(SessionEnd),
}

impl AdmissionRejection {
    pub fn message(&self) -> &str {
        match self {
            Self::Full => NO_ROOM,
            Self::Draining => SHUTTING_DOWN,
            Self::Quota(message) | Self::Failed(message) => message,
            Self::Ended(_) => "The session has ended.",
        }
    }
}

/// Tells the client why it gets no sandbox, and ends the connection.
pub async fn reject(mut client: Box<dyn ClientConnection>, status: Status, rejection: &AdmissionRejection) {
    let end = match rejection {
        AdmissionRejection::Ended(end) => *end,
        AdmissionRejection::Full
        | AdmissionRejection::Draining
        | AdmissionRejection::Quota(_)
        | AdmissionRejection::Failed(_) => {
            client.reject(status, rejection);
            SessionEnd::Close(Close::Fatal)
        }
    };
    client.end(end).await;
}

impl PendingSession {
    pub fn new(client: Box<dyn ClientConnection>, requests: IncomingRequests, slot: SessionSlot) -> Self {
        Self { client, requests, probes: Probes::default(), slot }
    }

    /// Waits until the sandbox is admitted, which may take the eviction of another one.
    pub async fn wait_for_room(&mut self, api: &Api, id: &SandboxId) -> Result<AttachGuard, AdmissionRejection> {
        let mut room = std::pin::pin!(api.bus.make_room(id, api.settings.max_sandboxes));
        let mut drain = api.settings.drain.clone();
        loop {
            let is_held_back = self.requests.is_full() || self.client.is_paused();
            if is_held_back {
                self.client.excuse_silence();
            }
            let wake_at = self.client.wake_at();
            let drains = async { drain.wait_for(|drain| *drain).await.is_ok() };
            let end = tokio::select! {
                biased;
                () = api.closing.cancelled() => Some(SessionEnd::Close(Close::Restart)),
                true = drains => return Err(AdmissionRejection::Draining),
                probe = self.slot.next_probe() => self.handle_probe(probe),
                admitted = &mut room => return admitted.ok_or(AdmissionRejection::Full),
                event = self.client.next_event(!is_held_back) => self.handle_client(event),
                () = api.sleep_until(wake_at) => None,
            };
            if let Some(end) = end.or_else(|| self.check_timers()) {
                return Err(AdmissionRejection::Ended(end));
            }
        }
    }

    fn handle_probe(&mut self, probe: Option<LivenessProbe>) -> Option<SessionEnd> {
        // Another client has taken the slot.
        let Some(probe) = probe else { return Some(SessionEnd::Close(Close::Unavailable)) };
        self.probes.add_session(self.client.ping(vec![], true), probe);
        None
    }

    fn handle_client(&mut self, event: ClientEvent) -> Option<SessionEnd> {
        let refusal = match event {
            // A message that is still too long is read after admission.
            ClientEvent::Wrote | ClientEvent::TooLong => return None,
            ClientEvent::Pong(_) => {
                self.probes.answer(self.client.answered_ping());
                return None;
            }
            ClientEvent::Text(text) => match Request::parse(&text) {
                Err(refusal) if refusal.malformed => refusal,
                parsed => {
                    self.requests.push(parsed, text.len());
                    return None;
                }
            },
            ClientEvent::Binary(_) => Refusal::malformed("Until the sandbox runs, messages must be text."),
            ClientEvent::Broken(close) => return Some(SessionEnd::Close(close)),
            ClientEvent::Gone => return Some(SessionEnd::Gone),
        };
        self.requests.reject_malformed(&mut *self.client, &refusal)
    }

    fn check_timers(&mut self) -> Option<SessionEnd> {
        if self.client.is_gone() {
            return Some(SessionEnd::Gone);
        }
        if self.client.is_ping_due() {
            self.client.ping_due(vec![]);
        }
        None
    }

    /// Lifts the limits of a waiting client and subscribes to the events of its sandbox.
    pub fn admitted(mut self, api: &Api, id: &SandboxId, guard: AttachGuard) -> AdmittedSession {
        self.client.admitted();
        AdmittedSession { pending: self, guard, subscription: api.bus.follow(id) }
    }

    /// Frees the slot before the client sees the close frame: it may reconnect at once.
    pub fn release_slot(self) -> Box<dyn ClientConnection> {
        self.client
    }
}

/// A client whose sandbox is admitted; its spec is not written yet.
pub struct AdmittedSession {
    pending: PendingSession,
    guard: AttachGuard,
    subscription: Subscription,
}

impl AdmittedSession {
    pub fn client(&mut self) -> &mut dyn ClientConnection {
        &mut *self.pending.client
    }

    /// Gives up the sandbox.
    pub fn release(self) -> Box<dyn ClientConnection> {
        self.pending.release_slot()
    }

    /// The one place that builds a session. `token` is set if the client does not have it yet.
    pub fn into_session(
        self,
        api: Arc<Api>,
        spec: Spec,
        token: Option<Token>,
        status_machine: StatusMachine,
    ) -> Session {
        let PendingSession { client, requests, probes, slot } = self.pending;
        let sandbox = Attachment::new(spec, token, slot, self.guard, self.subscription, api.start_deadline());
        Session::new(api, client, requests, probes, sandbox, status_machine)
    }
}
