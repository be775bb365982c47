//! One session, from the request to the close frame: an actor that waits for many events at once and handles them one
//! at a time. Its client is a WebSocket, or the caller of `POST /execute`.
//!
//! ```text
//!   client ──requests──▶ client_requests ──spec──▶ records, wake ──▶ (reconciler)
//!   client ◀──events──── status_machine ◀───────── bus ◀──posts───── (reconciler)
//!   client ◀─▶ execs ◀─frames─▶ agent
//! ```
//! Nothing in the loop waits for the store or the client: store calls are separate futures, and a client that does not
//! read applies back-pressure to the sandbox, not to the loop.

mod attach_session;
mod attachment;
mod client_requests;
mod create_session;
mod first_request;
mod incoming;
mod pending;
mod session_lifecycle;
mod spec_edits;

use std::sync::Arc;

use baton_protocol::{
    agent,
    binary::BinaryChunk,
    event::{Event, PROTOCOL, Status},
    frame::{Frame, Stream},
    id::SandboxId,
    request::{Refusal, Request},
};
use bytes::Bytes;
use futures::FutureExt;
use tracing::field;

pub use self::{
    attach_session::{attach, give_back, runs_elsewhere},
    create_session::{create, execute},
    pending::AdmissionRejection,
};
use self::{
    attachment::{Attachment, SandboxEvent},
    incoming::{IncomingRequests, MAX_WAITING_BYTES, Probes},
    spec_edits::{SpecEdits, StoreResult},
};
use super::{
    Api, Tracked,
    agent_link::LinkEvent,
    caller::Caller,
    client_connection::{ClientConnection, ClientEvent, EventSink},
    close_code::{Close, SessionEnd},
    delivered::Marks,
    dialect::Dialect,
    event_writer::EventWriter,
    exec_table::ExecTable,
    status_machine::{OpenStage, StatusMachine},
    upgrade::WebSocket,
    websocket::{MAX_FRAME, Socket},
};
use crate::{clock::Moment, traces};

/// What the upgrade request says about the session.
pub struct Upgrade {
    pub dialect: Dialect,
    /// Whether a plain client asked for every field and event.
    pub details: bool,
    pub request: traces::Span,
    pub caller: Caller,
    pub connection: Tracked,
}

/// The fields of every log line of a session.
fn log_span(id: &SandboxId, request: &traces::Span) -> tracing::Span {
    let span = tracing::info_span!("session", sandbox = %id, trace = field::Empty);
    if let Some(context) = request.traceparent() {
        span.record("trace", context.trace_id());
    }
    span
}

impl Api {
    /// The writer of a new WebSocket. A `baton.v1` client is greeted at once.
    fn open_writer(&self, socket: WebSocket, upgrade: Upgrade) -> EventWriter {
        let Upgrade { dialect, details, request, .. } = upgrade;
        let socket = Socket::new(socket, self.clock.clone(), !dialect.is_v1());
        let mut writer = EventWriter::new(socket, dialect, details, self.clock.clone(), request);
        if dialect.is_v1() {
            writer.send(&Event::Hello {
                protocol: PROTOCOL,
                max_frame: MAX_FRAME as u64,
                max_execs: agent::MAX_EXECS as u32,
                instance: self.settings.instance.clone(),
            });
        }
        writer
    }

    /// Until when a session waits for its sandbox.
    pub(super) fn start_deadline(&self) -> Moment {
        self.clock.now() + self.settings.handoff_wait
    }

    /// Sleeps until the moment, or forever.
    async fn sleep_until(&self, moment: Option<Moment>) {
        match moment {
            Some(moment) => self.clock.sleep_until(moment).await,
            None => std::future::pending().await,
        }
    }
}

/// What the session loop waits for.
enum SessionEvent {
    Client(ClientEvent),
    Sandbox(SandboxEvent),
    Agent(LinkEvent),
    Store(Box<StoreResult>),
    Timer,
    Shutdown,
}

struct Session {
    api: Arc<Api>,
    client: Box<dyn ClientConnection>,
    requests: IncomingRequests,
    probes: Probes,
    sandbox: Attachment,
    execs: ExecTable,
    /// How far the client had come in earlier sessions.
    delivered: Marks,
    status_machine: StatusMachine,
    spec_edits: SpecEdits,
    alternation: Alternation,
}

/// Alternates between client and agent as the one polled first.
#[derive(Debug, Default)]
struct Alternation {
    is_second_first: bool,
}

impl Alternation {
    /// Resolves with whichever is ready first; if both are, with the one whose turn it is.
    fn select<T>(&mut self, one: impl Future<Output = T>, other: impl Future<Output = T>) -> impl Future<Output = T> {
        self.is_second_first = !self.is_second_first;
        let is_second_first = self.is_second_first;
        async move {
            if is_second_first {
                tokio::select! { biased; done = other => done, done = one => done }
            } else {
                tokio::select! { biased; done = one => done, done = other => done }
            }
        }
    }
}

impl Session {
    fn new(
        api: Arc<Api>,
        client: Box<dyn ClientConnection>,
        requests: IncomingRequests,
        probes: Probes,
        sandbox: Attachment,
        status_machine: StatusMachine,
    ) -> Self {
        Self {
            execs: ExecTable::new(api.clock.clone()),
            delivered: api.marks.remove(&sandbox.id),
            spec_edits: SpecEdits::default(),
            alternation: Alternation::default(),
            api,
            client,
            requests,
            probes,
            sandbox,
            status_machine,
        }
    }

    async fn run(mut self) {
        let end = loop {
            let event = self.next_event().await;
            if let Some(end) = self.handle(event).or_else(|| self.check_timers()) {
                break end;
            }
        };
        self.finish(end).await;
    }

    async fn next_event(&mut self) -> SessionEvent {
        let is_held_back = self.requests.is_full() || self.execs.buffered() >= MAX_WAITING_BYTES;
        if is_held_back {
            self.client.excuse_silence();
        }
        let has_room = self.client.has_room();
        let wake_at = self.wake_at();
        let bytes = self.alternation.select(
            self.client.next_event(!is_held_back && has_room).map(SessionEvent::Client),
            self.execs.next_event(has_room).map(SessionEvent::Agent),
        );
        // The order is fixed so that a simulation can replay it. Everything but bytes is rare, and bytes from both
        // sides take turns, so nothing starves.
        tokio::select! {
            biased;
            () = self.api.closing.cancelled() => SessionEvent::Shutdown,
            event = self.sandbox.next_event() => SessionEvent::Sandbox(event),
            result = self.spec_edits.next_result() => SessionEvent::Store(Box::new(result)),
            event = bytes => event,
            () = self.api.sleep_until(wake_at) => SessionEvent::Timer,
        }
    }

    fn handle(&mut self, event: SessionEvent) -> Option<SessionEnd> {
        match event {
            SessionEvent::Client(event) => self.handle_client(event),
            SessionEvent::Sandbox(SandboxEvent::Lifecycle(event)) => self.handle_lifecycle(&event),
            SessionEvent::Sandbox(SandboxEvent::Probe(Some(probe))) => {
                let ping = self.execs.ping(&mut *self.client);
                self.probes.add_session(ping, probe);
                None
            }
            // The client did not answer the probe, and another one has taken its slot.
            SessionEvent::Sandbox(SandboxEvent::Probe(None)) => Some(SessionEnd::Close(Close::Unavailable)),
            SessionEvent::Agent(LinkEvent::Frame(frame)) => self.handle_frame(frame),
            SessionEvent::Agent(LinkEvent::Closed) => self.handle_link_closed(),
            SessionEvent::Agent(LinkEvent::Sent) | SessionEvent::Timer => None,
            SessionEvent::Store(result) => self.handle_store_result(*result),
            SessionEvent::Shutdown => Some(SessionEnd::Close(Close::Restart)),
        }
    }

    fn wake_at(&self) -> Option<Moment> {
        let wakes =
            [self.client.wake_at(), self.execs.wake_at(), self.spec_edits.poll_at(), self.sandbox.start_deadline];
        wakes.into_iter().flatten().min()
    }

    fn check_timers(&mut self) -> Option<SessionEnd> {
        self.client.flush_due();
        self.execs.check_ends_due();
        self.execs.catch_up(self.client.has_room());
        self.poll_answers_if_due();
        if self.client.is_gone() {
            return Some(SessionEnd::Gone);
        }
        self.execs.ping_if_due(&mut *self.client);
        self.sandbox.is_overdue(self.api.clock.now()).then(|| self.give_up())
    }

    fn handle_client(&mut self, event: ClientEvent) -> Option<SessionEnd> {
        match event {
            ClientEvent::Wrote => None,
            ClientEvent::Text(text) => {
                self.api.bus.touch(&self.sandbox.id);
                match Request::parse(&text) {
                    Err(refusal) if refusal.malformed => self.reject_malformed(&refusal),
                    parsed => self.handle_or_keep(parsed, text.len()),
                }
            }
            ClientEvent::Binary(bytes) => {
                self.api.bus.touch(&self.sandbox.id);
                self.handle_binary(&bytes)
            }
            ClientEvent::Pong(marks) => {
                self.execs.confirm(&marks, self.client.is_v1());
                for probe in self.probes.answer(self.client.answered_ping()) {
                    self.api.bus.alive(&self.sandbox.id, probe);
                }
                None
            }
            ClientEvent::TooLong => Some(SessionEnd::Close(Close::TooBig)),
            ClientEvent::Broken(close) => Some(SessionEnd::Close(close)),
            ClientEvent::Gone => Some(SessionEnd::Gone),
        }
    }

    fn reject_malformed(&mut self, refusal: &Refusal) -> Option<SessionEnd> {
        self.requests.reject_malformed(&mut *self.client, refusal)
    }

    fn handle_binary(&mut self, bytes: &Bytes) -> Option<SessionEnd> {
        if !self.client.is_v1() {
            return self
                .reject_malformed(&Refusal::malformed("A message must be text: this client asked for no `baton.v1`."));
        }
        let chunk = match BinaryChunk::decode(bytes) {
            Ok(chunk) if chunk.stream == Stream::Stdin => chunk,
            Ok(_) => {
                return self.reject_malformed(&Refusal::malformed("A client sends binary messages for stdin only."));
            }
            Err(malformed) => return self.reject_malformed(&Refusal::malformed(malformed.to_string())),
        };
        if self.status_machine.stage != OpenStage::Open || self.status_machine.is_leaving() {
            self.client.refuse(&Refusal::of(Status::ExecutionError, "The sandbox accepts no input now."));
            return None;
        }
        if let Err(refusal) = self.execs.stdin_of(chunk.exec, Some(chunk.offset), chunk.payload, false) {
            let about = self.execs.name_of(chunk.exec);
            self.refuse_stdin(&refusal, about);
        }
        None
    }

    /// Handles a request now, or keeps it until the sandbox runs. `bytes` is the length of its text.
    fn handle_or_keep(&mut self, parsed: Result<Request, Refusal>, bytes: usize) -> Option<SessionEnd> {
        if self.status_machine.stage != OpenStage::Open {
            self.requests.push(parsed, bytes);
            return None;
        }
        match parsed {
            Ok(request) => self.handle_request(request),
            Err(refusal) => {
                self.refuse_unparsed(&refusal);
                None
            }
        }
    }

    fn handle_frame(&mut self, frame: Frame) -> Option<SessionEnd> {
        let mut next = Some(frame);
        // Frames that have arrived already are handled in one go, as long as the client's queue has room.
        while let Some(frame) = next.take() {
            if self.execs.handle_frame(frame, &mut *self.client)
                && let Some(end) = self.handle_opened()
            {
                return Some(end);
            }
            if self.client.has_room() {
                next = self.execs.try_next_frame();
            }
        }
        None
    }

    async fn finish(self, end: SessionEnd) {
        let Self { api, mut client, sandbox, execs, delivered, status_machine, spec_edits, .. } = self;
        let (is_one_shot, is_declined) = (client.is_one_shot(), sandbox.is_declined);
        let has_failed_to_start = status_machine.stage == OpenStage::Creating && end == SessionEnd::Close(Close::Fatal);
        if is_one_shot {
            // Its caller may send the next request once it has all of the output: by then the sandbox must not count.
            api.occupancy.note(&sandbox.id, None);
        } else {
            let marks = execs.marks(&delivered);
            if !marks.is_empty() {
                api.marks.insert(&sandbox.id, marks);
            }
            if sandbox.has_unsent_token() || has_failed_to_start {
                // The client never got the token, or was told that the creation failed: no session will attach again.
                api.delete_unattended(&sandbox.id, client.traceparent()).await;
            }
        }
        let traceparent = client.traceparent();
        let (id, slot) = sandbox.detach();
        drop(execs);
        if is_declined {
            // The slot is still held, so no other session here can claim the sandbox before this claim is withdrawn.
            futures::join!(give_back(&api, &id), api.clock.sleep(attach_session::RETRY_DELAY));
            attach_session::send_in_use(&mut *client);
        }
        // The slot is free before the client sees the close frame: it may reconnect at once.
        drop(slot);
        client.end(end).await;
        if is_one_shot {
            api.delete_unattended(&id, traceparent).await;
        }
        // Writes that have started are completed, within the time limits of the records.
        spec_edits.complete().await;
    }
}
