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
    client_connection::ClientEvent,
    close_code::Close,
    inbound::{Gauge, MessageTimeout},
    pings::Pings,
    stream_cursor::Mark,
    upgrade::WebSocket,
};
use crate::clock::{Moment, SharedClock};

/// The longest message a client may send.
pub const MAX_MESSAGE: usize = 16 << 20;
/// The longest message before the sandbox is admitted: enough for every config, however its text is escaped.
pub const MAX_FIRST_MESSAGE: usize = 256 << 10;
/// Read buffer size: every session has such a buffer, which is zeroed before each read.
pub const READ_BUFFER_BYTES: usize = 16 << 10;
/// The default limit of client libraries; every frame is smaller.
pub const MAX_FRAME: usize = 1 << 20;
/// How much the library may buffer for a client that does not read: one message, and its own answers to pings and
/// closes. If the answers do not fit, the library keeps the newest.
pub const MAX_WRITE_BUFFER: usize = 2 * MAX_FRAME;
/// Above this nothing more is taken from the sandbox.
const QUEUE_BYTES: usize = 1 << 20;
const QUEUE_MESSAGES: usize = 1024;
/// Timeout for the last events, the close frame and the client's answer to it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

pub struct Socket {
    socket: WebSocket,
    gauge: Arc<Gauge>,
    clock: SharedClock,
    queue: VecDeque<Message>,
    queued: usize,
    unflushed: bool,
    pings: Pings,
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Socket").field("queued", &self.queued).finish_non_exhaustive()
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
            pings: Pings::new(now, confirms_by_pong),
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
        self.output(Message::Text(event.to_json().into()), 0);
    }

    /// Queues one piece of output, however it is encoded.
    pub fn output(&mut self, message: Message, bytes: usize) {
        self.pings.sent(bytes, self.clock.now());
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
        self.pings.is_due(self.clock.now())
    }

    /// Sends the ping that is due: a liveness ping, or one that only confirms.
    pub fn ping_due(&mut self, marks: Vec<Mark>) {
        let proves_life = self.pings.is_liveness_due(self.clock.now());
        self.ping(marks, proves_life);
    }

    /// Sends a ping and returns its number.
    pub fn ping(&mut self, marks: Vec<Mark>, proves_life: bool) -> u64 {
        let number = self.pings.ping(marks, proves_life, self.clock.now());
        self.push(Message::Ping(Bytes::copy_from_slice(&number.to_be_bytes())));
        number
    }

    /// The number of the newest ping that was answered.
    pub fn answered_ping(&self) -> u64 {
        self.pings.answered()
    }

    /// When the next ping is due or the client counts as gone.
    pub fn wake_at(&self) -> Moment {
        self.gone_at().into_iter().fold(self.pings.wake_at(), Moment::min)
    }

    pub fn is_gone(&self) -> bool {
        self.gone_at().is_some_and(|gone| self.clock.now() >= gone)
    }

    fn gone_at(&self) -> Option<Moment> {
        if self.gauge.is_waiting() { None } else { self.pings.gone_at() }
    }

    /// Counts the client as alive: the session was not reading from it, so its silence proves nothing.
    pub fn excuse_silence(&mut self) {
        self.pings.note_alive(self.clock.now());
    }

    /// Writes what can be written; then, with `is_listening`, also waits for the client.
    pub fn poll_event(&mut self, context: &mut Context<'_>, is_listening: bool) -> Poll<ClientEvent> {
        match self.poll_write(context) {
            Ok(true) => return Poll::Ready(ClientEvent::Wrote),
            Ok(false) => {}
            Err(_) => return Poll::Ready(ClientEvent::Gone),
        }
        if !is_listening {
            return Poll::Pending;
        }
        loop {
            let was_waiting = self.gauge.is_waiting();
            let Poll::Ready(read) = self.socket.poll_next_unpin(context) else {
                if was_waiting || self.gauge.is_waiting() {
                    self.excuse_silence();
                }
                return if self.gauge.is_paused() { Poll::Ready(ClientEvent::TooLong) } else { Poll::Pending };
            };
            self.pings.note_alive(self.clock.now());
            return Poll::Ready(match read {
                Some(Ok(Message::Text(text))) => ClientEvent::Text(text.as_str().to_owned()),
                Some(Ok(Message::Binary(bytes))) => ClientEvent::Binary(bytes),
                Some(Ok(Message::Pong(number))) => match self.pings.pong(&number) {
                    Some(marks) => ClientEvent::Pong(marks),
                    None => continue,
                },
                // The library answers pings itself.
                Some(Ok(Message::Ping(_) | Message::Frame(_))) => continue,
                Some(Ok(Message::Close(_))) | None => ClientEvent::Gone,
                Some(Err(error)) => fault(&error).map_or(ClientEvent::Gone, ClientEvent::Broken),
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
                self.pings.note_alive(self.clock.now());
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
                let event = poll_fn(|context| self.poll_event(context, is_sent)).await;
                if matches!(event, ClientEvent::Gone | ClientEvent::TooLong) {
                    return;
                }
            }
        };
        let _ = clock.timeout(CLOSE_TIMEOUT, closed).await;
    }

    /// Ends without a close frame: the client has closed the connection or is unreachable.
    pub async fn leave(mut self) {
        let clock = self.clock.clone();
        let _ = clock.timeout(CLOSE_TIMEOUT, async { while let Some(Ok(_)) = self.socket.next().await {} }).await;
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
        Error::Io(error) => error.get_ref().is_some_and(|error| error.is::<MessageTimeout>()).then_some(Close::Restart),
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
