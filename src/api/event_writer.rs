//! Sends events and output over a WebSocket, in the dialect of the client.
//!
//! Output that arrives within two milliseconds is coalesced, so that one `print`, which may be many small writes, is
//! one event; text that does not end with a newline waits longer. Any other event is sent after the output before it.

use std::{
    future::poll_fn,
    task::{Context, Poll},
    time::Duration,
};

use baton_protocol::{
    binary::{self, BinaryChunk},
    event::{Event, StdStream},
    id::ExecId,
    request::{Refusal, SandboxConfig},
};
use futures::future::BoxFuture;
use tokio_tungstenite::tungstenite::Message;

use super::{
    client_connection::{ClientConnection, ClientEvent, EventSink},
    close_code::SessionEnd,
    dialect::{Dialect, without_details},
    stream_cursor::{Mark, StreamCursor, stream_of},
    websocket::Socket,
};
use crate::{
    clock::{Moment, SharedClock},
    metrics::ActionOutcome,
    traces::{self, Traceparent},
};

const COALESCE: Duration = Duration::from_millis(2);
/// How long to wait for the end of a line, for busy machines. A user does not notice that a prompt is this late.
const COALESCE_LINE: Duration = Duration::from_millis(20);
/// Output of this size is not held back to be coalesced.
const COALESCE_MAX_BYTES: usize = 16 << 10;
/// The longest text of one event: JSON may turn one byte into six.
const MAX_TEXT: usize = 128 << 10;
/// The longest payload of one binary message.
const MAX_BINARY: usize = 512 << 10;

/// Output that waits for more of the same stream.
#[derive(Debug)]
struct Coalesced {
    exec: u32,
    output: StdStream,
    offset: u64,
    payload: Payload,
    since: Moment,
}

impl Coalesced {
    fn is_of(&self, exec: u32, output: StdStream) -> bool {
        (self.exec, self.output) == (exec, output)
    }

    /// When the output has to be sent.
    fn due_at(&self) -> Moment {
        let is_open = matches!(&self.payload, Payload::Text(text) if !text.ends_with('\n'));
        self.since + if is_open { COALESCE_LINE } else { COALESCE }
    }
}

#[derive(Debug)]
enum Payload {
    Text(String),
    Bytes(Vec<u8>),
}

impl Payload {
    fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    fn append(&mut self, more: Self) {
        match (self, more) {
            (Self::Text(text), Self::Text(more)) => text.push_str(&more),
            (Self::Bytes(bytes), Self::Bytes(more)) => bytes.extend_from_slice(&more),
            (Self::Text(_) | Self::Bytes(_), _) => {}
        }
    }
}

#[derive(Debug)]
pub struct EventWriter {
    socket: Socket,
    dialect: Dialect,
    /// Whether a plain client gets every field and every event.
    has_details: bool,
    clock: SharedClock,
    coalesced: Option<Coalesced>,
    /// The request that opened the session, open until the sandbox runs. Later requests are part of its trace.
    request: traces::Span,
}

impl EventWriter {
    pub fn new(socket: Socket, dialect: Dialect, has_details: bool, clock: SharedClock, request: traces::Span) -> Self {
        Self { socket, dialect, has_details, clock, coalesced: None, request }
    }

    /// Switches to the dialect that the config of a new sandbox asks for.
    pub fn apply_config(&mut self, config: &SandboxConfig) {
        self.has_details |= config.details;
        self.dialect = self.dialect.of_create(config);
    }

    pub fn set_dialect(&mut self, dialect: Dialect) {
        self.dialect = dialect;
    }

    /// See [`ClientConnection::poll_event`]. Cancel safe.
    pub async fn next_event(&mut self) -> ClientEvent {
        poll_fn(|context| self.socket.poll_event(context, true)).await
    }

    /// Sends what is queued and ends the connection.
    pub async fn close(mut self, end: SessionEnd) {
        self.flush();
        match end {
            SessionEnd::Close(close) => self.socket.close(close).await,
            SessionEnd::Gone => self.socket.leave().await,
        }
    }

    fn coalesce(&mut self, exec: u32, output: StdStream, offset: u64, payload: Payload) {
        if payload.len() == 0 {
            return;
        }
        let coalesced = match self.coalesced.take_if(|coalesced| coalesced.is_of(exec, output)) {
            None => {
                self.flush();
                Coalesced { exec, output, offset, payload, since: self.clock.now() }
            }
            Some(mut coalesced) => {
                coalesced.payload.append(payload);
                coalesced
            }
        };
        let is_enough = coalesced.payload.len() >= COALESCE_MAX_BYTES;
        self.coalesced = Some(coalesced);
        if is_enough {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let Some(Coalesced { exec, output, offset, payload, .. }) = self.coalesced.take() else { return };
        match payload {
            Payload::Bytes(bytes) => self.send_bytes(exec, output, offset, bytes),
            Payload::Text(text) => self.send_text(output, text),
        }
    }

    fn send_text(&mut self, output: StdStream, text: String) {
        let mut rest = text;
        while !rest.is_empty() {
            let more = rest.split_off(rest.floor_char_boundary(MAX_TEXT));
            let data = std::mem::replace(&mut rest, more);
            let size = data.len();
            let event = match output {
                StdStream::Stdout => Event::Stdout { data },
                StdStream::Stderr => Event::Stderr { data },
            };
            self.socket.output(Message::Text(event.to_json().into()), size);
        }
    }

    fn send_bytes(&mut self, exec: u32, output: StdStream, offset: u64, bytes: Vec<u8>) {
        let stream = stream_of(output);
        if bytes.len() <= MAX_BINARY {
            let size = bytes.len();
            self.socket.output(Message::Binary(binary::wrap(stream, exec, offset, bytes).into()), size);
            return;
        }
        for (index, payload) in bytes.chunks(MAX_BINARY).enumerate() {
            let offset = offset.saturating_add((index * MAX_BINARY) as u64);
            let chunk = BinaryChunk { stream, exec, offset, payload }.encode();
            self.socket.output(Message::Binary(chunk.into()), payload.len());
        }
    }
}

impl EventSink for EventWriter {
    fn dialect(&self) -> Dialect {
        self.dialect
    }

    fn send_about(&mut self, event: &Event, details: bool) {
        self.flush();
        if self.is_v1() || self.has_details || details {
            self.socket.send(event);
            return;
        }
        for event in without_details(event, self.dialect) {
            self.socket.send(&event);
        }
    }

    fn refuse_about(&mut self, refusal: &Refusal, exec_id: Option<ExecId>) {
        let mut events = Event::refusal(refusal.status, &refusal.message);
        if let Event::StatusUpdate(update) = &mut events[0] {
            update.exec_id = exec_id;
        }
        self.send_all(&events);
    }

    fn output(&mut self, exec: u32, output: StdStream, offset: u64, bytes: Vec<u8>, cursor: &mut StreamCursor) {
        let is_other = self.coalesced.as_ref().is_some_and(|coalesced| !coalesced.is_of(exec, output));
        if is_other || bytes.len() >= COALESCE_MAX_BYTES {
            self.flush();
        }
        if self.is_v1() && bytes.len() >= COALESCE_MAX_BYTES {
            self.send_bytes(exec, output, offset, bytes);
            return;
        }
        let payload = if self.is_v1() { Payload::Bytes(bytes) } else { Payload::Text(cursor.decode(&bytes)) };
        self.coalesce(exec, output, offset, payload);
    }

    /// An incomplete character at the end of the stream becomes U+FFFD.
    fn end_output(&mut self, exec: u32, output: StdStream, cursor: &mut StreamCursor) {
        if !self.is_v1()
            && let Some(text) = cursor.decode_rest()
        {
            self.coalesce(exec, output, cursor.next(), Payload::Text(text));
        }
    }

    fn ping(&mut self, marks: Vec<Mark>, proves_life: bool) -> u64 {
        self.flush();
        self.socket.ping(marks, proves_life)
    }
}

impl ClientConnection for EventWriter {
    fn poll_event(&mut self, context: &mut Context<'_>, is_listening: bool) -> Poll<ClientEvent> {
        self.socket.poll_event(context, is_listening)
    }

    fn has_room(&self) -> bool {
        self.socket.has_room()
    }

    fn is_paused(&self) -> bool {
        self.socket.is_paused()
    }

    fn is_gone(&self) -> bool {
        self.socket.is_gone()
    }

    fn excuse_silence(&mut self) {
        self.socket.excuse_silence();
    }

    fn is_ping_due(&self) -> bool {
        self.socket.is_ping_due()
    }

    fn ping_due(&mut self, marks: Vec<Mark>) {
        self.flush();
        self.socket.ping_due(marks);
    }

    fn answered_ping(&self) -> u64 {
        self.socket.answered_ping()
    }

    fn wake_at(&self) -> Option<Moment> {
        let flush_at = self.coalesced.as_ref().map(Coalesced::due_at);
        Some(flush_at.into_iter().fold(self.socket.wake_at(), Moment::min))
    }

    fn flush_due(&mut self) {
        if self.coalesced.as_ref().is_some_and(|coalesced| self.clock.now() >= coalesced.due_at()) {
            self.flush();
        }
    }

    fn admitted(&mut self) {
        self.socket.allow_long_messages();
    }

    fn opened(&mut self) {
        self.request.end(ActionOutcome::Done);
    }

    fn traceparent(&self) -> Option<Traceparent> {
        self.request.traceparent()
    }

    fn is_one_shot(&self) -> bool {
        false
    }

    fn end(self: Box<Self>, end: SessionEnd) -> BoxFuture<'static, ()> {
        Box::pin(self.close(end))
    }
}
