//! One WebSocket: a bounded queue out, messages in, pings and the proper end.
//!
//! Nothing here waits for the client except [`Socket::close`], which has a time limit:
//! what cannot be sent yet stands in the queue, and the session looks at
//! [`Socket::has_room`] before it takes more.

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
/// The longest one before its sandbox has a place: room for every config, however its text is escaped.
pub const MAX_FIRST_MESSAGE: usize = 256 << 10;
/// Of a client's messages: every session has a buffer of this size, which is filled with zeros before each read.
pub const READ_AT_ONCE: usize = 16 << 10;
/// What a client's library takes by default; every frame is smaller.
pub const MAX_FRAME: usize = 1 << 20;
/// What the library may hold back for a client that does not read: a message, and its own answers to pings and closes.
/// Of the answers that do not fit it keeps the newest.
pub const MAX_UNWRITTEN: usize = 2 * MAX_FRAME;
/// Above this nothing more is taken from the sandbox.
const QUEUE_BYTES: usize = 1 << 20;
const QUEUE_MESSAGES: usize = 1024;
/// A ping goes out after so much silence, and after so much output.
pub const PING_EVERY: Duration = Duration::from_secs(10);
const PING_BYTES: u64 = 256 << 10;
/// What a plain client was sent is confirmed by the pong of a ping that goes out this much later at the latest, so that
/// hardly anything is sent again when it comes back.
const CONFIRM_WITHIN: Duration = Duration::from_millis(100);
/// No sign of life for so long after a ping: the client is gone.
const PONG_WITHIN: Duration = Duration::from_secs(10);
/// For the last events, the close frame and the client's answer to it.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub enum SocketEvent {
    /// Something was written: there may be room again.
    Wrote,
    Text(String),
    Binary(Bytes),
    /// The client has everything sent before some ping; these are the newest marks it confirms.
    Pong(Vec<Mark>),
    /// A message is longer than it may be as yet. It is not read any further until it may.
    TooLong,
    /// What came is no WebSocket message, or too long a one. Nothing more can be read.
    Broken(Close),
    /// The client closed, or its connection broke.
    Gone,
}

#[derive(Debug)]
struct Sent {
    number: u64,
    at: Moment,
    marks: Vec<Mark>,
    /// Unanswered it says that the client is gone. One that only confirms comes right after any event, and a client may
    /// leave that unread for a while.
    proves_life: bool,
}

pub struct Socket {
    socket: WebSocket,
    gauge: Arc<Gauge>,
    clock: SharedClock,
    queue: VecDeque<Message>,
    queued: usize,
    unflushed: bool,
    /// Only pongs tell how far the client is.
    confirms_by_pong: bool,
    pings: VecDeque<Sent>,
    last_ping: u64,
    ping_at: Moment,
    /// When what was sent is to be confirmed.
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

    /// The sandbox has its place: messages may be as long as they like from now on.
    pub fn allow_long_messages(&self) {
        self.gauge.set_longest(MAX_MESSAGE as u64);
    }

    /// A message has come that is too long as yet.
    pub fn is_paused(&self) -> bool {
        self.gauge.is_paused()
    }

    pub fn send(&mut self, event: &Event) {
        self.push_confirmed(Message::Text(event.to_json().into()));
    }

    /// One piece of output, however it is encoded.
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

    /// Sends what is due: a ping that asks for a sign of life, or one that only confirms.
    pub fn ping_due(&mut self, marks: Vec<Mark>) -> u64 {
        let proves_life = self.is_proof_due();
        self.ping(marks, proves_life)
    }

    /// Its pong will confirm `marks`; with `proves_life` a client that does not answer is gone. Returns its number.
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

    /// The newest ping that was answered.
    pub fn ponged(&self) -> u64 {
        self.pings.front().map_or(self.last_ping, |ping| ping.number - 1)
    }

    /// When the next ping is due, or the client must count as gone.
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

    /// Nobody listened to the client for a while: its silence says nothing.
    pub fn excuse(&mut self) {
        self.alive_at = self.clock.now();
    }

    /// Sends what can be sent; then, with `listen`, waits for the client too. May be cancelled.
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
                // The library answers by itself.
                Some(Ok(Message::Ping(_) | Message::Frame(_))) => continue,
                Some(Ok(Message::Close(_))) | None => SocketEvent::Gone,
                Some(Err(error)) => fault(&error).map_or(SocketEvent::Gone, SocketEvent::Broken),
            });
        }
    }

    /// Whether anything went from the queue to the socket.
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
            // A client that takes output slowly is alive; a ping alone proves nothing.
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

    /// Says the last words, closes, and waits a bounded time for the client's answer.
    pub async fn close(mut self, close: Close) {
        self.push(Message::Close(Some(CloseFrame { code: CloseCode::from(close.code()), reason: "".into() })));
        let clock = self.clock.clone();
        // Behind a message that is not read any further no answer can be heard.
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

    /// Ends without a word of its own: the client has closed or is not there.
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

/// How to answer what could not be read; `None`: the connection itself broke.
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
