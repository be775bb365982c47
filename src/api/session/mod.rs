//! One WebSocket session, from the request to the close frame: an actor that waits for many events at once and handles
//! them one at a time.
//!
//! ```text
//!   client ──requests──▶ ask ──spec──▶ records, wake ──▶ (reconciler)
//!   client ◀──events──── tell ◀──────── bus ◀──posts─── (reconciler)
//!   client ◀─▶ commands ◀─frames─▶ agent
//! ```
//! Nothing in the loop waits for the store or the client: store calls are separate futures, and a client that does not
//! read applies back-pressure to the sandbox, not to the loop.

mod client_requests;
mod lifecycle;
mod open;
mod pending;
mod spec_edits;

use std::{collections::VecDeque, sync::Arc};

use baton_protocol::{
    binary::Chunk,
    event::{Status, Token},
    frame::{Frame, Stream},
    id::SandboxId,
    metadata::Spec,
    request::{Refusal, Request},
};
use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};

pub use self::open::{Upgrade, attach, create};
use self::spec_edits::{Done, SpecEdits};
use super::{
    Api, agent_link,
    close_code::Close,
    delivered::Marks,
    event_writer::EventWriter,
    execs::ExecTable,
    session_registry::{LivenessProbe, SessionSlot},
    status_machine::{Stage, StatusMachine},
    websocket::SocketEvent,
};
use crate::{
    bus::{AttachGuard, NumberedEvent, StartKind, Subscription},
    clock::Moment,
    traces,
};

/// The session ends after this many messages that could not be parsed.
const MOST_MALFORMED: u32 = 10;
/// How many requests may wait for the sandbox to run before the session stops reading from the client.
const MOST_WAITING: usize = 64;
/// How many bytes may wait for the sandbox to take them before the session stops reading from the client.
const MOST_WAITING_BYTES: usize = 1 << 20;

/// How a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Close(Close),
    /// The client closed the connection or is unreachable.
    Gone,
}

/// Requests that arrived before the sandbox ran.
#[derive(Debug, Default)]
struct Waiting {
    requests: VecDeque<Result<Request, Refusal>>,
    bytes: usize,
}

impl Waiting {
    /// Whether the session stops reading from the client.
    fn is_full(&self) -> bool {
        self.requests.len() >= MOST_WAITING || self.bytes >= MOST_WAITING_BYTES
    }

    fn push(&mut self, request: Result<Request, Refusal>, bytes: usize) {
        self.bytes += bytes;
        self.requests.push_back(request);
    }

    fn pop(&mut self) -> Option<Result<Request, Refusal>> {
        let request = self.requests.pop_front();
        if self.requests.is_empty() {
            self.bytes = 0;
        }
        request
    }
}

/// What the session loop waits for.
enum Heard {
    Turn(SocketEvent),
    Posted(NumberedEvent),
    Agent(agent_link::LinkEvent),
    Knock(Option<LivenessProbe>),
    Done(Box<Done>),
    Timer,
    Closing,
}

struct Session {
    api: Arc<Api>,
    id: SandboxId,
    spec: Spec,
    /// The sandbox token, until the client has received it.
    token: Option<Token>,
    writer: EventWriter,
    commands: ExecTable,
    status_machine: StatusMachine,
    boot: Option<StartKind>,
    slot: SessionSlot,
    presence: AttachGuard,
    subscription: Subscription,
    /// Requests that arrived before the sandbox ran.
    waiting: Waiting,
    liveness_probes: Vec<(u64, LivenessProbe)>,
    /// Pings sent for the reconciler's probes: the number of the ping and of the probe.
    probes: Vec<(u64, u64)>,
    /// A live client on another instance holds the sandbox.
    is_declined: bool,
    malformed: u32,
    work: FuturesUnordered<BoxFuture<'static, Done>>,
    spec_edits: SpecEdits,
    marks: Marks,
    /// Deadline for the sandbox to run or to report why it does not.
    patience: Option<Moment>,
    takes_turns: Turns,
    /// The request that opened the session, open until the sandbox runs. Later requests are part of its trace.
    request: traces::Span,
}

/// Alternates between client and agent as the one polled first.
#[derive(Debug, Default)]
struct Turns {
    second: bool,
}

impl Turns {
    /// Resolves with whichever is ready first; if both are, with the one whose turn it is.
    fn first<T>(&mut self, one: impl Future<Output = T>, other: impl Future<Output = T>) -> impl Future<Output = T> {
        self.second = !self.second;
        let second = self.second;
        async move {
            if second {
                tokio::select! { biased; done = other => done, done = one => done }
            } else {
                tokio::select! { biased; done = one => done, done = other => done }
            }
        }
    }
}

impl Session {
    async fn run(mut self) {
        let end = loop {
            if let Some(end) = self.hear().await {
                break end;
            }
        };
        self.finish(end).await;
    }

    /// Waits for the next event and handles it.
    async fn hear(&mut self) -> Option<End> {
        let held_back = self.waiting.is_full() || self.commands.waiting() >= MOST_WAITING_BYTES;
        if held_back {
            self.writer.socket.excuse();
        }
        let has_room = self.writer.socket.has_room();
        let wake_at = self.wake_at();
        let bytes = self.takes_turns.first(
            self.writer.socket.turn(!held_back && has_room).map(Heard::Turn),
            self.commands.line.turn(has_room).map(Heard::Agent),
        );
        // The order is fixed so that a simulation can replay it. Everything but bytes is rare, and bytes from both
        // sides take turns, so nothing starves.
        let heard = tokio::select! {
            biased;
            () = self.api.closing.cancelled() => Heard::Closing,
            knock = self.slot.knock() => Heard::Knock(knock),
            posted = self.subscription.next() => Heard::Posted(posted),
            Some(done) = self.work.next(), if !self.work.is_empty() => Heard::Done(Box::new(done)),
            heard = bytes => heard,
            () = self.api.clock.sleep_until(wake_at) => Heard::Timer,
        };
        let end = match heard {
            Heard::Turn(turn) => self.turn(turn),
            Heard::Posted(posted) => self.posted(&posted.passing),
            Heard::Agent(agent_link::LinkEvent::Frame(frame)) => self.frame(frame),
            Heard::Agent(agent_link::LinkEvent::Closed) => self.unlinked(),
            Heard::Agent(agent_link::LinkEvent::Sent) | Heard::Timer => None,
            Heard::Knock(Some(knock)) => {
                let number = self.commands.ping(&mut self.writer);
                self.liveness_probes.push((number, knock));
                None
            }
            // The client did not answer the probe, and another one has taken its slot.
            Heard::Knock(None) => Some(End::Close(Close::Unavailable)),
            Heard::Done(done) => self.done(*done),
            Heard::Closing => Some(End::Close(Close::Restart)),
        };
        end.or_else(|| self.look_at_the_clock())
    }

    fn wake_at(&self) -> Moment {
        let wakes = [self.writer.wake_at(), self.commands.wake_at(), self.spec_edits.look_at(), self.patience];
        wakes.into_iter().flatten().fold(self.writer.socket.wake_at(), Moment::min)
    }

    fn look_at_the_clock(&mut self) -> Option<End> {
        self.writer.flush_due();
        self.commands.ask_due();
        self.commands.catch_up(self.writer.socket.has_room());
        self.look_for_answers();
        if self.writer.socket.is_gone() {
            return Some(End::Gone);
        }
        self.commands.ping_if_due(&mut self.writer);
        let now = self.api.clock.now();
        if self.patience.is_some_and(|patience| now >= patience) { Some(self.give_up()) } else { None }
    }

    fn turn(&mut self, turn: SocketEvent) -> Option<End> {
        match turn {
            SocketEvent::Wrote => None,
            SocketEvent::Text(text) => {
                self.api.bus.touch(&self.id);
                match Request::parse(&text) {
                    Err(refusal) if refusal.malformed => self.reject_malformed(&refusal),
                    parsed => self.take(parsed, text.len()),
                }
            }
            SocketEvent::Binary(bytes) => {
                self.api.bus.touch(&self.id);
                self.binary(&bytes)
            }
            SocketEvent::Pong(marks) => {
                self.commands.confirm(&marks, self.writer.is_v1());
                let ponged = self.writer.socket.ponged();
                for (_, knock) in self.liveness_probes.extract_if(.., |(number, _)| *number <= ponged) {
                    // The session that sent the probe may have ended meanwhile.
                    let _ = knock.send(());
                }
                for (_, probe) in self.probes.extract_if(.., |(number, _)| *number <= ponged) {
                    self.api.bus.alive(&self.id, probe);
                }
                None
            }
            SocketEvent::TooLong => Some(End::Close(Close::TooBig)),
            SocketEvent::Broken(close) => Some(End::Close(close)),
            SocketEvent::Gone => Some(End::Gone),
        }
    }

    /// Refuses a message that could not be parsed.
    fn reject_malformed(&mut self, refusal: &Refusal) -> Option<End> {
        self.writer.refuse(refusal);
        self.malformed += 1;
        (self.malformed >= MOST_MALFORMED).then_some(End::Close(Close::BadData))
    }

    fn binary(&mut self, bytes: &Bytes) -> Option<End> {
        if !self.writer.is_v1() {
            return self
                .reject_malformed(&Refusal::malformed("A message must be text: this client asked for no `baton.v1`."));
        }
        let chunk = match Chunk::decode(bytes) {
            Ok(chunk) if chunk.stream == Stream::Stdin => chunk,
            Ok(_) => {
                return self.reject_malformed(&Refusal::malformed("A client sends binary messages for stdin only."));
            }
            Err(malformed) => return self.reject_malformed(&Refusal::malformed(malformed.to_string())),
        };
        if self.status_machine.stage != Stage::Open || self.status_machine.is_leaving() {
            self.writer.refuse(&Refusal::of(Status::ExecutionError, "The sandbox takes no input now."));
            return None;
        }
        if let Err(refusal) = self.commands.stdin_of(chunk.exec, Some(chunk.offset), chunk.payload, false) {
            let about = self.commands.name_of(chunk.exec);
            self.refuse_stdin(&refusal, about);
        }
        None
    }

    /// Handles a request now, or keeps it until the sandbox runs. `bytes` is the length of its text.
    fn take(&mut self, parsed: Result<Request, Refusal>, bytes: usize) -> Option<End> {
        if self.status_machine.stage != Stage::Open {
            self.waiting.push(parsed, bytes);
            return None;
        }
        match parsed {
            Ok(request) => self.ask(request),
            Err(refusal) => {
                self.refuse_unread(&refusal);
                None
            }
        }
    }

    fn frame(&mut self, frame: Frame) -> Option<End> {
        let mut end = None;
        if self.commands.hear(frame, &mut self.writer) {
            end = self.opened();
        }
        // Frames that have arrived already are handled in one go, as long as the client's queue has room.
        while end.is_none()
            && self.writer.socket.has_room()
            && let Some(frame) = self.commands.line.try_next()
        {
            if self.commands.hear(frame, &mut self.writer) {
                end = self.opened();
            }
        }
        end
    }

    async fn finish(mut self, end: End) {
        self.writer.flush();
        let marks = self.commands.marks(&self.marks);
        if !marks.is_empty() {
            self.api.marks.keep(&self.id, marks);
        }
        let failed_to_start = self.status_machine.stage == Stage::Creating && end == End::Close(Close::Fatal);
        if self.token.is_some() || failed_to_start {
            // The client never got the token, or was told that the creation failed: no session will attach again.
            self.api.delete(&self.id, self.request.traceparent()).await;
        }
        let Self { api, id, mut writer, is_declined, slot, presence, subscription, commands, work, .. } = self;
        drop((presence, subscription, commands));
        if is_declined {
            // The slot is still held, so no other session here can claim the sandbox before this claim is withdrawn.
            futures::join!(open::give_back(&api, &id), api.clock.sleep(open::LATE));
            open::say_in_use(&mut writer);
        }
        // The slot is free before the client sees the close frame: it may reconnect at once.
        drop(slot);
        match end {
            End::Close(close) => writer.socket.close(close).await,
            End::Gone => writer.socket.leave().await,
        }
        // Writes that have started are completed, within the time limits of the records.
        work.for_each(|_| async {}).await;
    }
}
