//! Sends events and output in the dialect of the client.
//!
//! Output that arrives within two milliseconds is coalesced, so that one `print`, which may be many small writes, is
//! one event; text that does not end with a newline waits longer. Any other event is sent after the output before it.

use std::time::Duration;

use baton_protocol::{
    binary::{self, Chunk},
    event::{Event, Output},
    frame::Stream,
    id::ExecId,
    request::Refusal,
};
use tokio_tungstenite::tungstenite::Message;

use super::{
    dialect::{Dialect, without_details},
    output::StreamCursor,
    websocket::Socket,
};
use crate::clock::{Moment, SharedClock};

const JOIN: Duration = Duration::from_millis(2);
/// How long to wait for the end of a line, for busy machines. A user does not notice that a prompt is this late.
const JOIN_LINE: Duration = Duration::from_millis(20);
/// Output of this size is not held back to be coalesced.
const ENOUGH: usize = 16 << 10;
/// The longest text of one event: JSON may turn one byte into six.
const MOST_TEXT: usize = 128 << 10;
/// The longest payload of one binary message.
const MOST_BYTES: usize = 512 << 10;

#[derive(Debug)]
struct Coalesced {
    exec: u32,
    output: Output,
    offset: u64,
    said: LastEvent,
    began: Moment,
}

impl Coalesced {
    /// When the output has to be sent.
    fn due(&self) -> Moment {
        let is_open = matches!(&self.said, LastEvent::Text(text) if !text.ends_with('\n'));
        self.began + if is_open { JOIN_LINE } else { JOIN }
    }
}

#[derive(Debug)]
enum LastEvent {
    Text(String),
    Bytes(Vec<u8>),
}

impl LastEvent {
    fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }
}

#[derive(Debug)]
pub struct EventWriter {
    pub socket: Socket,
    pub dialect: Dialect,
    /// Whether a plain client gets every field and every event.
    pub details: bool,
    clock: SharedClock,
    joined: Option<Coalesced>,
}

impl EventWriter {
    pub fn new(socket: Socket, dialect: Dialect, details: bool, clock: SharedClock) -> Self {
        Self { socket, dialect, details, clock, joined: None }
    }

    pub fn is_v1(&self) -> bool {
        self.dialect.is_v1()
    }

    pub fn send(&mut self, event: &Event) {
        self.say_about(event, false);
    }

    pub fn say_all(&mut self, events: &[Event]) {
        for event in events {
            self.send(event);
        }
    }

    /// Sends an event about a command for which the client may have asked for `details`.
    pub fn say_about(&mut self, event: &Event, details: bool) {
        self.flush();
        if self.is_v1() || self.details || details {
            self.socket.send(event);
            return;
        }
        for event in without_details(event, self.dialect) {
            self.socket.send(&event);
        }
    }

    pub fn refuse(&mut self, refusal: &Refusal) {
        self.refuse_about(refusal, None);
    }

    /// Refuses a request about one command.
    pub fn refuse_about(&mut self, refusal: &Refusal, exec_id: Option<ExecId>) {
        let mut events = Event::refusal(refusal.status, &refusal.message);
        if let Event::StatusUpdate(update) = &mut events[0] {
            update.exec_id = exec_id;
        }
        self.say_all(&events);
    }

    /// Sends bytes of a command that start at `offset`. `flow` keeps the beginning of a split character.
    pub fn output(&mut self, exec: u32, output: Output, offset: u64, bytes: Vec<u8>, flow: &mut StreamCursor) {
        let other = self.joined.as_ref().is_some_and(|joined| (joined.exec, joined.output) != (exec, output));
        if other || bytes.len() >= ENOUGH {
            self.flush();
        }
        if self.is_v1() && bytes.len() >= ENOUGH {
            self.send_bytes(exec, output, offset, bytes);
            return;
        }
        let said = if self.is_v1() { LastEvent::Bytes(bytes) } else { LastEvent::Text(flow.decode(&bytes)) };
        self.join(exec, output, offset, said);
    }

    /// Ends the stream: an incomplete character at its end becomes U+FFFD.
    pub fn output_end(&mut self, exec: u32, output: Output, flow: &mut StreamCursor) {
        if !self.is_v1()
            && let Some(text) = flow.decode_rest()
        {
            self.join(exec, output, flow.next(), LastEvent::Text(text));
        }
    }

    fn join(&mut self, exec: u32, output: Output, offset: u64, said: LastEvent) {
        if said.len() == 0 {
            return;
        }
        let joined = match self.joined.take_if(|joined| (joined.exec, joined.output) == (exec, output)) {
            None => {
                self.flush();
                Coalesced { exec, output, offset, said, began: self.clock.now() }
            }
            Some(mut joined) => {
                match (&mut joined.said, said) {
                    (LastEvent::Text(text), LastEvent::Text(more)) => text.push_str(&more),
                    (LastEvent::Bytes(bytes), LastEvent::Bytes(more)) => bytes.extend_from_slice(&more),
                    (LastEvent::Text(_) | LastEvent::Bytes(_), _) => {}
                }
                joined
            }
        };
        let enough = joined.said.len() >= ENOUGH;
        self.joined = Some(joined);
        if enough {
            self.flush();
        }
    }

    /// When the coalesced output has to be sent.
    pub fn wake_at(&self) -> Option<Moment> {
        self.joined.as_ref().map(Coalesced::due)
    }

    pub fn flush_due(&mut self) {
        if self.joined.as_ref().is_some_and(|joined| self.clock.now() >= joined.due()) {
            self.flush();
        }
    }

    pub fn flush(&mut self) {
        let Some(joined) = self.joined.take() else { return };
        match joined.said {
            LastEvent::Bytes(bytes) => self.send_bytes(joined.exec, joined.output, joined.offset, bytes),
            LastEvent::Text(text) => {
                let mut rest = text;
                while !rest.is_empty() {
                    let more = rest.split_off(rest.floor_char_boundary(MOST_TEXT));
                    let data = std::mem::replace(&mut rest, more);
                    let size = data.len();
                    let event = match joined.output {
                        Output::Stdout => Event::Stdout { data },
                        Output::Stderr => Event::Stderr { data },
                    };
                    self.socket.output(Message::Text(event.to_json().into()), size);
                }
            }
        }
    }

    fn send_bytes(&mut self, exec: u32, output: Output, offset: u64, bytes: Vec<u8>) {
        let stream = match output {
            Output::Stdout => Stream::Stdout,
            Output::Stderr => Stream::Stderr,
        };
        if bytes.len() <= MOST_BYTES {
            let size = bytes.len();
            self.socket.output(Message::Binary(binary::wrap(stream, exec, offset, bytes).into()), size);
            return;
        }
        for (at, payload) in bytes.chunks(MOST_BYTES).enumerate() {
            let offset = offset.saturating_add((at * MOST_BYTES) as u64);
            let chunk = Chunk { stream, exec, offset, payload }.encode();
            self.socket.output(Message::Binary(chunk.into()), payload.len());
        }
    }
}
