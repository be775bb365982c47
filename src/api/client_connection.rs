//! The client of a session, as the session sees it: a WebSocket ([`EventWriter`](super::event_writer::EventWriter)), or
//! the caller of `POST /execute` ([`ResponseWriter`](super::response_writer::ResponseWriter)).

use std::{
    future::poll_fn,
    task::{Context, Poll},
};

use baton_protocol::{
    event::{Event, Status, StdStream},
    id::ExecId,
    request::Refusal,
};
use bytes::Bytes;
use futures::future::BoxFuture;

use super::{
    close_code::{Close, SessionEnd},
    dialect::Dialect,
    session::AdmissionRejection,
    stream_cursor::{Mark, StreamCursor},
};
use crate::{clock::Moment, traces::Traceparent};

/// What happened on a connection.
#[derive(Debug)]
pub enum ClientEvent {
    /// Something was written: the queue may have room again.
    Wrote,
    Text(String),
    Binary(Bytes),
    /// The client has everything sent before some ping; these are the newest marks it confirms.
    Pong(Vec<Mark>),
    /// A message exceeds the current limit. It is not read any further until the limit is raised.
    TooLong,
    /// The client sent something that is not a WebSocket message, or one that is too long. Nothing more can be read.
    Broken(Close),
    /// The client closed the connection, the connection broke, or the client needs nothing more.
    Gone,
}

/// Where events and the output of commands go. Nothing here waits for the client: what cannot be written yet is queued.
pub trait EventSink: Send {
    fn dialect(&self) -> Dialect;

    fn is_v1(&self) -> bool {
        self.dialect().is_v1()
    }

    /// Sends an event about a command for which the client may have asked for `details`.
    fn send_about(&mut self, event: &Event, details: bool);

    fn send(&mut self, event: &Event) {
        self.send_about(event, false);
    }

    fn send_all(&mut self, events: &[Event]) {
        for event in events {
            self.send(event);
        }
    }

    /// Refuses a request about one command.
    fn refuse_about(&mut self, refusal: &Refusal, exec_id: Option<ExecId>);

    fn refuse(&mut self, refusal: &Refusal) {
        self.refuse_about(refusal, None);
    }

    /// Sends bytes of a command that start at `offset`. `cursor` keeps the beginning of a split character.
    fn output(&mut self, exec: u32, output: StdStream, offset: u64, bytes: Vec<u8>, cursor: &mut StreamCursor);

    /// Ends a stream after all its output.
    fn end_output(&mut self, exec: u32, output: StdStream, cursor: &mut StreamCursor);

    /// Sends a ping after all output before it and returns its number. Its pong confirms `marks`; with `proves_life` a
    /// client that does not answer counts as gone.
    fn ping(&mut self, marks: Vec<Mark>, proves_life: bool) -> u64;
}

/// Both directions of a connection.
pub trait ClientConnection: EventSink {
    /// Writes what can be written; then, with `is_listening`, also waits for the client.
    fn poll_event(&mut self, context: &mut Context<'_>, is_listening: bool) -> Poll<ClientEvent>;

    /// Whether more output can be queued.
    fn has_room(&self) -> bool;

    /// Whether a message exceeds the current limit.
    fn is_paused(&self) -> bool;

    /// Whether the client counts as gone because it answers no pings.
    fn is_gone(&self) -> bool;

    /// Counts the client as alive: the session was not reading from it, so its silence proves nothing.
    fn excuse_silence(&mut self);

    fn is_ping_due(&self) -> bool;

    /// Sends the ping that is due: a liveness ping, or one that only confirms.
    fn ping_due(&mut self, marks: Vec<Mark>);

    /// The number of the newest ping that was answered.
    fn answered_ping(&self) -> u64;

    /// When to call [`flush_due`](Self::flush_due) and to check for due pings.
    fn wake_at(&self) -> Option<Moment>;

    /// Sends coalesced output whose time has come.
    fn flush_due(&mut self);

    /// The sandbox was admitted: limits for clients that wait for admission end.
    fn admitted(&mut self);

    /// The sandbox runs and the session is open.
    fn opened(&mut self);

    /// The trace of the request that opened the session.
    fn traceparent(&self) -> Option<Traceparent>;

    /// Whether the sandbox exists for one command of this client only and is deleted with the session.
    fn is_one_shot(&self) -> bool;

    /// Tells the client that its sandbox is not admitted.
    fn reject(&mut self, status: Status, rejection: &AdmissionRejection) {
        self.refuse(&Refusal::of(status, rejection.message()));
    }

    /// Writes what is queued and ends the connection; takes a bounded time.
    fn end(self: Box<Self>, end: SessionEnd) -> BoxFuture<'static, ()>;
}

impl dyn ClientConnection {
    /// See [`ClientConnection::poll_event`]. Cancel safe.
    pub async fn next_event(&mut self, is_listening: bool) -> ClientEvent {
        poll_fn(|context| self.poll_event(context, is_listening)).await
    }
}
