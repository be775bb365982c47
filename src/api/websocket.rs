//! One WebSocket: a bounded outgoing queue, incoming messages, pings and the closing handshake.
//!
//! Nothing here waits for the client except [`Socket::close`], which has a timeout: messages that cannot be sent yet
//! stay in the queue, and the session checks [`Socket::has_room`] before it takes more.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use baton_protocol::event::Event;
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use tokio_tungstenite::tungstenite::{
    Error, Message,
    error::ProtocolError,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use super::{
    close_code::Close,
    inbound::{Gauge, Overdue},
    output::Mark,
    upgrade::WebSocket,
};
use crate::clock::{Moment, SharedClock};

/// The longest message a client may send.
pub const MAX_MESSAGE: usize = 16 << 20;
/// The longest message before the sandbox is admitted: enough for every config, however its text is escaped.
pub const MAX_FIRST_MESSAGE: usize = 256 << 10;
/// Read buffer size: every session has such a buffer, which is zeroed before each read.
pub const READ_AT_ONCE: usize = 16 << 10;
/// The default limit of client libraries; every frame is smaller.
pub const MAX_FRAME: usize = 1 << 20;
/// How much the library may buffer for a client that does not read: one message, and its own answers to pings and
/// closes. If the answers do not fit, the library keeps the newest.
pub const MAX_UNWRITTEN: usize = 2 * MAX_FRAME;
/// Above this nothing more is taken from the sandbox.
const QUEUE_BYTES: usize = 1 << 20;
const QUEUE_MESSAGES: usize = 1024;
/// A ping is sent after this much silence, and after this much output.
pub const PING_EVERY: Duration = Duration::from_secs(10);
const PING_BYTES: u64 = 256 << 10;
/// A plain client confirms by pong: the ping goes out at most this long after a send, so that hardly anything is sent
/// again after a reconnect.
const CONFIRM_WITHIN: Duration = Duration::from_millis(100);
/// The client counts as gone if it shows no sign of life for this long after a ping.
const PONG_WITHIN: Duration = Duration::from_secs(10);
/// Timeout for the last events, the close frame and the client's answer to it.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub enum SocketEvent {
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
    /// The client closed the connection, or it broke.
    Gone,
}

#[derive(Debug)]
struct Sent {
    number: u64,
    at: Moment,
    marks: Vec<Mark>,
    /// Whether the client counts as gone if it does not answer. A ping that only confirms may follow any event, and a
    /// client may leave that unread for a while.
    proves_life: bool,
}

pub struct Socket {
    socket: WebSocket,
    gauge: Arc<Gauge>,
    clock: SharedClock,
    queue: VecDeque<Message>,
    queued: usize,
    unflushed: bool,
    /// Whether only pongs tell how far the client has come.
    confirms_by_pong: bool,
    pings: VecDeque<Sent>,
    last_ping: u64,
    ping_at: Moment,
    /// When to send the ping that confirms what was sent.
    confirm_at: Option<Moment>,
    since_ping: u64,
    /// The client's last sign of life.
    alive_at: Moment,
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("queued", &self.queued).finish_non_exhaustive()
    }
}

impl Socket {
    pub fn new(socket: WebSocket, clock: SharedClock, confirms_by_pong: bool) -> Self {
        let now = clock.now();
        Self {
            gauge: socket.get_ref().gauge(),
            socket,
            clock,
            queue: VecDeque::new(),
            queued: 0,
            unflushed: false,
            confirms_by_pong,
            pings: VecDeque::new(),
            last_ping: 0,
            ping_at: now + PING_EVERY,
            confirm_at: None,
            since_ping: 0,
            alive_at: now,
        }
    }

    /// Allows messages of full length: the sandbox is admitted.
    pub fn allow_long_messages(&self) {
        self.gauge.set_longest(MAX_MESSAGE as u64);
    }

    /// Whether a message exceeds the current limit.
    pub fn is_paused(&self) -> bool {
        self.gauge.is_paused()
    }

    pub fn send(&mut self, event: &Event) {
        self.push_confirmed(Message::Text(event.to_json().into()));
    }

    /// Queues one piece of output, however it is encoded.
    pub fn output(&mut self, message: Message, bytes: usize) {
        self.since_ping += bytes as u64;
        self.push_confirmed(message);
    }

    fn push_confirmed(&mut self, message: Message) {
        if self.confirms_by_pong {
            self.confirm_at.get_or_insert(self.clock.now() + CONFIRM_WITHIN);
        }
        self.push(message);
    }

    fn push(&mut self, message: Message) {
        self.queued += size(&message);
        self.queue.push_back(message);
    }

    pub fn has_room(&self) -> bool {
        self.queued < QUEUE_BYTES && self.queue.len() < QUEUE_MESSAGES
    }

    pub fn is_ping_due(&self) -> bool {
        self.is_proof_due() || self.confirm_at.is_some_and(|at| self.clock.now() >= at)
    }

    fn is_proof_due(&self) -> bool {
        self.since_ping >= PING_BYTES || self.clock.now() >= self.ping_at
    }

    /// Sends the ping that is due: a liveness ping, or one that only confirms.
    pub fn ping_due(&mut self, marks: Vec<Mark>) -> u64 {
        let proves_life = self.is_proof_due();
        self.ping(marks, proves_life)
    }

    /// Sends a ping and returns its number. Its pong confirms `marks`; with `proves_life` a client that does not answer
    /// counts as gone.
    pub fn ping(&mut self, marks: Vec<Mark>, proves_life: bool) -> u64 {
        let now = self.clock.now();
        self.last_ping += 1;
        self.since_ping = 0;
        self.confirm_at = None;
        if proves_life {
            self.ping_at = now + PING_EVERY;
        }
        self.pings.push_back(Sent { number: self.last_ping, at: now, marks, proves_life });
        self.push(Message::Ping(Bytes::copy_from_slice(&self.last_ping.to_be_bytes())));
        self.last_ping
    }

    /// The number of the newest ping that was answered.
    pub fn ponged(&self) -> u64 {
        self.pings.front().map_or(self.last_ping, |ping| ping.number - 1)
    }

    /// When the next ping is due or the client counts as gone.
    pub fn wake_at(&self) -> Moment {
        [self.gone_at(), self.confirm_at].into_iter().flatten().fold(self.ping_at, Moment::min)
    }

    pub fn is_gone(&self) -> bool {
        self.gone_at().is_some_and(|gone| self.clock.now() >= gone)
    }

    fn gone_at(&self) -> Option<Moment> {
        if self.gauge.is_waiting() {
            return None;
        }
        let oldest = self.pings.iter().find(|ping| ping.proves_life);
        oldest.map(|ping| ping.at.max(self.alive_at) + PONG_WITHIN)
    }

    /// Counts the client as alive: the session was not reading from it, so its silence proves nothing.
    pub fn excuse(&mut self) {
        self.alive_at = self.clock.now();
    }

    /// Writes what can be written; then, with `listen`, also waits for the client. Cancel safe.
    pub async fn turn(&mut self, listen: bool) -> SocketEvent {
        poll_fn(|context| self.poll_turn(context, listen)).await
    }

    fn poll_turn(&mut self, context: &mut Context<'_>, listen: bool) -> Poll<SocketEvent> {
        match self.poll_write(context) {
            Ok(true) => return Poll::Ready(SocketEvent::Wrote),
            Ok(false) => {}
            Err(_) => return Poll::Ready(SocketEvent::Gone),
        }
        if !listen {
            return Poll::Pending;
        }
        loop {
            let was_waiting = self.gauge.is_waiting();
            let Poll::Ready(read) = self.socket.poll_next_unpin(context) else {
                if was_waiting || self.gauge.is_waiting() {
                    self.excuse();
                }
                return if self.gauge.is_paused() { Poll::Ready(SocketEvent::TooLong) } else { Poll::Pending };
            };
            self.alive_at = self.clock.now();
            return Poll::Ready(match read {
                Some(Ok(Message::Text(text))) => SocketEvent::Text(text.as_str().to_owned()),
                Some(Ok(Message::Binary(bytes))) => SocketEvent::Binary(bytes),
                Some(Ok(Message::Pong(number))) => match self.take_pong(&number) {
                    Some(marks) => SocketEvent::Pong(marks),
                    None => continue,
                },
                // The library answers pings itself.
                Some(Ok(Message::Ping(_) | Message::Frame(_))) => continue,
                Some(Ok(Message::Close(_))) | None => SocketEvent::Gone,
                Some(Err(error)) => fault(&error).map_or(SocketEvent::Gone, SocketEvent::Broken),
            });
        }
    }

    /// Returns whether anything moved from the queue to the socket.
    fn poll_write(&mut self, context: &mut Context<'_>) -> Result<bool, Error> {
        let mut wrote = false;
        while !self.queue.is_empty() {
            match self.socket.poll_ready_unpin(context) {
                Poll::Ready(ready) => ready?,
                Poll::Pending => return Ok(wrote),
            }
            let Some(message) = self.queue.pop_front() else { break };
            self.queued -= size(&message);
            let is_ping = matches!(message, Message::Ping(_));
            self.socket.start_send_unpin(message)?;
            self.unflushed = true;
            wrote = true;
            // A client that takes output slowly is alive; a ping that was written proves nothing.
            if !is_ping {
                self.alive_at = self.clock.now();
            }
        }
        if self.unflushed
            && let Poll::Ready(flushed) = self.socket.poll_flush_unpin(context)
        {
            flushed?;
            self.unflushed = false;
        }
        Ok(wrote)
    }

    fn take_pong(&mut self, payload: &[u8]) -> Option<Vec<Mark>> {
        let number = u64::from_be_bytes(payload.try_into().ok()?);
        let mut marks = None;
        while self.pings.front().is_some_and(|ping| ping.number <= number) {
            marks = self.pings.pop_front().map(|ping| ping.marks);
        }
        marks
    }

    /// Sends what is queued and the close frame, and waits a bounded time for the client's answer.
    pub async fn close(mut self, close: Close) {
        self.push(Message::Close(Some(CloseFrame { code: CloseCode::from(close.code()), reason: "".into() })));
        let clock = self.clock.clone();
        // The answer cannot be read while it is behind a message that is not read any further.
        let listens = !self.gauge.is_paused();
        let closed = async {
            loop {
                let is_sent = self.queue.is_empty();
                if is_sent && !listens {
                    let _ = self.socket.flush().await;
                    return;
                }
                if matches!(self.turn(is_sent).await, SocketEvent::Gone | SocketEvent::TooLong) {
                    return;
                }
            }
        };
        let _ = clock.timeout(CLOSE_WITHIN, closed).await;
    }

    /// Ends without a close frame: the client has closed the connection or is unreachable.
    pub async fn leave(mut self) {
        let clock = self.clock.clone();
        let _ = clock.timeout(CLOSE_WITHIN, async { while let Some(Ok(_)) = self.socket.next().await {} }).await;
    }
}

fn size(message: &Message) -> usize {
    match message {
        Message::Text(text) => text.len(),
        Message::Binary(bytes) | Message::Ping(bytes) | Message::Pong(bytes) => bytes.len(),
        Message::Close(_) | Message::Frame(_) => 0,
    }
}

/// The close code for a read error; `None` if the connection itself broke.
fn fault(error: &Error) -> Option<Close> {
    match error {
        Error::Capacity(_) => Some(Close::TooBig),
        Error::Utf8(_) => Some(Close::BadData),
        Error::Protocol(ProtocolError::ResetWithoutClosingHandshake) => None,
        Error::Protocol(_) => Some(Close::Protocol),
        Error::Io(error) => error.get_ref().is_some_and(|error| error.is::<Overdue>()).then_some(Close::Restart),
        Error::ConnectionClosed
        | Error::AlreadyClosed
        | Error::Tls(_)
        | Error::WriteBufferFull(_)
        | Error::AttackAttempt
        | Error::Url(_)
        | Error::Http(_)
        | Error::HttpFormat(_) => None,
    }
}
