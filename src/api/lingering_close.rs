//! Connections that close cleanly: bytes that the client still sends after the server has finished are read and
//! discarded for a moment. Closing a socket with unread bytes resets the connection, and the client would lose the
//! close frame that gives the reason.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::TcpStream,
};
use tokio_util::{sync::WaitForCancellationFutureOwned, task::TaskTracker};

use super::connections::ConnectionSlot;
use crate::clock::SharedClock;

const LINGER: Duration = Duration::from_secs(2);
const MAX_DISCARDED: u64 = 64 << 20;

/// The address that a connection comes from.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

pub struct LingeringConnection {
    /// Always `Some` until the connection is dropped.
    stream: Option<TcpStream>,
    /// Whether the client has sent its last byte.
    has_ended: bool,
    place: Option<ConnectionSlot>,
    /// Resolves when another connection takes the slot.
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    clock: SharedClock,
    tasks: TaskTracker,
}

impl std::fmt::Debug for LingeringConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("has_ended", &self.has_ended).finish_non_exhaustive()
    }
}

impl LingeringConnection {
    pub fn new(stream: TcpStream, place: ConnectionSlot, clock: SharedClock, tasks: TaskTracker) -> Self {
        let closed = Box::pin(place.closed.clone().cancelled_owned());
        Self { stream: Some(stream), has_ended: false, place: Some(place), closed, clock, tasks }
    }

    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for LingeringConnection {
    fn drop(&mut self) {
        let (Some(mut stream), Some(place)) = (self.stream.take(), self.place.take()) else { return };
        if self.has_ended || place.closed.is_cancelled() || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        place.ends();
        let clock = self.clock.clone();
        self.tasks.spawn(async move {
            let read = async {
                let _ = stream.shutdown().await;
                let _ = tokio::io::copy(&mut (&mut stream).take(MAX_DISCARDED), &mut tokio::io::sink()).await;
            };
            tokio::select! {
                _ = clock.timeout(LINGER, read) => {}
                () = place.closed.cancelled() => {}
            }
        });
    }
}

impl AsyncRead for LingeringConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (before, had_room) = (buffer.filled().len(), buffer.remaining() > 0);
        let read = self.stream()?.poll_read(context, buffer);
        let ended = match &read {
            Poll::Ready(Ok(())) => had_room && buffer.filled().len() == before,
            Poll::Ready(Err(_)) => true,
            Poll::Pending => false,
        };
        self.has_ended |= ended;
        if read.is_pending() && self.closed.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        read
    }
}

impl AsyncWrite for LingeringConnection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }
}
