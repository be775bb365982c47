//! One WebSocket: a queue of outgoing messages, and incoming messages. Writing never blocks reading.

use std::{
    collections::VecDeque,
    future::poll_fn,
    task::{Context, Poll},
    time::Duration,
};

use baton_protocol::request::Request;
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use tokio_tungstenite::tungstenite::{
    self, Message, Utf8Bytes,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use crate::{client_clock, connect::ServerSocket};

/// Above this size, no more requests are accepted from callers.
const QUEUE_BYTES: usize = 512 << 10;
/// The timeout for the close frame and its answer.
const CLOSE_WITHIN: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) enum ClientSocketEvent {
    /// Something was written: the queue may have free space again.
    Wrote,
    Text(Utf8Bytes),
    Binary(Bytes),
    /// A ping or pong: the server is alive.
    Alive,
    Closed(Option<u16>),
    Broken(String),
}

#[derive(Debug)]
pub(crate) struct ClientSocket {
    socket: ServerSocket,
    queue: VecDeque<Message>,
    queued: usize,
    is_unflushed: bool,
}

impl ClientSocket {
    pub(crate) fn new(socket: ServerSocket) -> Self {
        Self { socket, queue: VecDeque::new(), queued: 0, is_unflushed: false }
    }

    pub(crate) fn send_request(&mut self, request: &Request) {
        self.push(Message::Text(request.to_json().into()));
    }

    pub(crate) fn send(&mut self, frame: Vec<u8>) {
        self.push(Message::Binary(frame.into()));
    }

    fn push(&mut self, message: Message) {
        self.queued += message.len();
        self.queue.push_back(message);
    }

    pub(crate) fn has_room(&self) -> bool {
        self.queued < QUEUE_BYTES
    }

    /// Sends what can be sent; then, with `listen`, also waits for the server. Cancel-safe.
    pub(crate) async fn turn(&mut self, listen: bool) -> ClientSocketEvent {
        poll_fn(|context| self.poll_turn(context, listen)).await
    }

    fn poll_turn(&mut self, context: &mut Context<'_>, listen: bool) -> Poll<ClientSocketEvent> {
        match self.poll_write(context) {
            Ok(true) => return Poll::Ready(ClientSocketEvent::Wrote),
            Ok(false) => {}
            // Messages that the server sent before it closed can still be read.
            Err(error) if !listen => return Poll::Ready(ClientSocketEvent::Broken(error.to_string())),
            Err(_) => {}
        }
        if !listen {
            return Poll::Pending;
        }
        self.socket.poll_next_unpin(context).map(|message| match message {
            Some(Ok(Message::Text(text))) => ClientSocketEvent::Text(text),
            Some(Ok(Message::Binary(bytes))) => ClientSocketEvent::Binary(bytes),
            Some(Ok(Message::Close(frame))) => ClientSocketEvent::Closed(frame.map(|frame| frame.code.into())),
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => ClientSocketEvent::Alive,
            Some(Err(error)) => ClientSocketEvent::Broken(error.to_string()),
            None => ClientSocketEvent::Broken("the server hung up".into()),
        })
    }

    /// Returns whether anything moved from the queue to the socket.
    fn poll_write(&mut self, context: &mut Context<'_>) -> Result<bool, tungstenite::Error> {
        let mut wrote = false;
        while !self.queue.is_empty() {
            match self.socket.poll_ready_unpin(context) {
                Poll::Ready(ready) => ready?,
                Poll::Pending => return Ok(wrote),
            }
            let Some(message) = self.queue.pop_front() else { break };
            self.queued -= message.len();
            self.socket.start_send_unpin(message)?;
            self.is_unflushed = true;
            wrote = true;
        }
        if self.is_unflushed
            && let Poll::Ready(flushed) = self.socket.poll_flush_unpin(context)
        {
            flushed?;
            self.is_unflushed = false;
        }
        Ok(wrote)
    }

    /// Closes the connection cleanly, within a bounded time.
    pub(crate) async fn close(mut self) {
        self.push(Message::Close(Some(CloseFrame { code: CloseCode::Normal, reason: Utf8Bytes::default() })));
        self.answer_close().await;
    }

    /// Sends the answer to the server's close frame.
    pub(crate) async fn answer_close(mut self) {
        let ended = async { while !matches!(self.turn(true).await, ClientSocketEvent::Broken(_)) {} };
        client_clock::timeout(CLOSE_WITHIN, ended).await;
    }
}
