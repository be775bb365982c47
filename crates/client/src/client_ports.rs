//! Ports inside a sandbox: a link for a browser, and raw connections.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use baton_protocol::{event::Token, id::SandboxId};
use bytes::{Bytes, BytesMut};
use futures::{SinkExt, StreamExt};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf},
    task::JoinSet,
};
use tokio_tungstenite::tungstenite::{self, Message};

use crate::{
    Connection, Error, Sandbox, client_clock,
    client_state::SandboxRef,
    connect::{Address, Cookies, HandshakeFailure, ServerSocket, connect_to},
    retry_policy::RetryPolicy,
};

/// How much a connection buffers in each direction, and how much one message carries.
const PIECE: usize = 64 << 10;

impl Sandbox {
    /// A link to a web server in the sandbox, for a browser. It contains the token: who has it has the sandbox. The
    /// first request replaces it by a cookie.
    pub fn url(&self, port: u16) -> String {
        self.port(port).url()
    }

    /// A port in the sandbox.
    pub fn port(&self, port: u16) -> Port {
        let Self { place, address, options, .. } = self;
        Port { place: place.clone(), address: address.clone(), options: options.clone(), port }
    }
}

/// A port in a sandbox. Using it needs no session: it works while another client is attached, too.
#[derive(Clone, Debug)]
pub struct Port {
    place: SandboxRef,
    address: Address,
    options: Connection,
    port: u16,
}

impl Port {
    /// A port of any sandbox whose token is known.
    pub fn of(url: &str, id: SandboxId, token: Token, port: u16, connection: Connection) -> Result<Self, Error> {
        Ok(Self { place: SandboxRef { id, token }, address: Address::parse(url)?, options: connection, port })
    }

    /// See [`Sandbox::url`].
    pub fn url(&self) -> String {
        let Self { place: SandboxRef { id, token }, address, port, .. } = self;
        format!("{}/sandboxes/{id}/ports/{port}/?sandbox_token={}", address.http(), token.0)
    }

    /// Opens a TCP connection to the port. A sandbox that is stored or on another instance comes first; while that is
    /// not possible the attempt is repeated, for as long as [`Connection::reconnect_for`] says.
    pub async fn connect(&self) -> Result<PortConnection, Error> {
        let path = format!("/sandboxes/{}/port-forward/{}", self.place.id, self.port);
        let give_up = self.options.reconnect_for.map(|patience| client_clock::now() + patience);
        // Restoring a sandbox may take longer than a handshake.
        let options = Connection { connect_within: self.options.start_within, ..self.options.clone() };
        for attempt in 0.. {
            let opened = connect_to(&self.address, &path, Some(&self.place), &mut Cookies::default(), &options).await;
            let error = match opened.map_err(refusal) {
                Ok(socket) => return Ok(PortConnection::new(socket)),
                Err(RetryPolicy::Fatal(error)) => return Err(error),
                Err(RetryPolicy::Retry { error, .. }) => error,
            };
            let now = client_clock::now();
            if give_up.is_none_or(|give_up| now >= give_up) {
                return Err(error);
            }
            client_clock::sleep_until(now + client_clock::pause(attempt, client_clock::dice())).await;
        }
        unreachable!("the loop only ends with a result")
    }
}

/// What an answer other than a WebSocket means.
fn refusal(failure: HandshakeFailure) -> RetryPolicy {
    let error = match failure {
        HandshakeFailure::Unsent(policy) => return policy,
        HandshakeFailure::Answer(error) => error,
    };
    let tungstenite::Error::Http(response) = error else { return RetryPolicy::lost(error.to_string()) };
    let status = response.status().as_u16();
    let body = response.body().as_deref().map(String::from_utf8_lossy).unwrap_or_default();
    let said = match body.trim() {
        "" => format!("HTTP {status}"),
        said => said.to_owned(),
    };
    match status {
        401 | 403 => RetryPolicy::Fatal(Error::Permission(said)),
        404 => RetryPolicy::Fatal(Error::NotFound),
        409 => RetryPolicy::Fatal(Error::InUse),
        502 => RetryPolicy::Fatal(Error::Connection(said)),
        429 | 500.. => RetryPolicy::Retry { error: Error::Connection(said), elsewhere: false },
        _ => RetryPolicy::Fatal(Error::Protocol(format!("{said} instead of a WebSocket"))),
    }
}

/// A TCP connection to a port in a sandbox. Either direction can be shut down by itself. When the connection is reset,
/// as when the sandbox moves, reading fails; dropping it resets it.
#[derive(Debug)]
pub struct PortConnection {
    stream: DuplexStream,
    is_reset: Arc<AtomicBool>,
    /// Ends with this value.
    _carrier: JoinSet<()>,
}

impl PortConnection {
    fn new(socket: ServerSocket) -> Self {
        let (stream, inner) = tokio::io::duplex(PIECE);
        let is_reset = Arc::new(AtomicBool::new(false));
        let mut carrier = JoinSet::new();
        let reset = is_reset.clone();
        carrier.spawn(async move {
            if carry(socket, inner, &reset).await.is_none() {
                reset.store(true, Ordering::Release);
            }
        });
        Self { stream, is_reset, _carrier: carrier }
    }
}

/// Carries the bytes until both directions have ended; `None` if the connection is reset.
async fn carry(socket: ServerSocket, stream: DuplexStream, is_reset: &AtomicBool) -> Option<()> {
    let (mut sink, mut messages) = socket.split();
    let (mut reader, mut writer) = tokio::io::split(stream);
    let from_server = async {
        let mut has_ended = false;
        loop {
            match messages.next().await {
                Some(Ok(Message::Binary(bytes))) if !has_ended => writer.write_all(&bytes).await.ok()?,
                Some(Ok(Message::Text(_))) if !has_ended => {
                    has_ended = true;
                    writer.shutdown().await.ok()?;
                }
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Ok(Message::Close(_))) if has_ended => return Some(()),
                Some(Ok(Message::Binary(_) | Message::Text(_) | Message::Close(_)) | Err(_)) | None => {
                    // Before the reader can see the end.
                    is_reset.store(true, Ordering::Release);
                    return None;
                }
            }
        }
    };
    let to_server = async {
        let mut buffer = BytesMut::new();
        loop {
            buffer.reserve(PIECE);
            let read = reader.read_buf(&mut buffer).await.ok()?;
            let bytes: Bytes = buffer.split().freeze();
            let message = if read == 0 { Message::text("") } else { Message::Binary(bytes) };
            sink.send(message).await.ok()?;
            if read == 0 {
                return std::future::pending::<Option<()>>().await;
            }
        }
    };
    tokio::select! {
        end = from_server => end,
        end = to_server => end,
    }
}

impl AsyncRead for PortConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let has_ended = buffer.filled().len() == before && buffer.remaining() > 0;
        if has_ended && self.is_reset.load(Ordering::Acquire) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PortConnection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
