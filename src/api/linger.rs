//! Connections that begin in time and end properly. Who opens one and says nothing is closed.
//! What the client still sends after the server's last word is
//! read and thrown away for a moment. A socket closed with unread bytes resets the connection,
//! and the client would lose the close frame that tells it why.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    extract::connect_info::Connected,
    serve::{IncomingStream, Listener},
};
use futures::{FutureExt, future::BoxFuture};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::task::TaskTracker;

use crate::clock::SharedClock;

/// For the first answer: a request that has not come by then does not come.
const FIRST_WITHIN: Duration = Duration::from_secs(30);
const LINGER: Duration = Duration::from_secs(2);
const MOST: u64 = 64 << 20;

#[derive(Debug)]
pub struct Lingering {
    listener: TcpListener,
    clock: SharedClock,
    tasks: TaskTracker,
    places: Arc<Semaphore>,
}

impl Lingering {
    /// Takes so many connections at once; more wait in the kernel's queue.
    pub fn new(listener: TcpListener, connections: usize, clock: SharedClock, tasks: TaskTracker) -> Self {
        Self { listener, clock, tasks, places: Arc::new(Semaphore::new(connections)) }
    }
}

impl Listener for Lingering {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let place = self.places.clone().acquire_owned().await.ok();
        let (stream, peer) = Listener::accept(&mut self.listener).await;
        // One event is one small write: it must not wait for the next.
        let _ = stream.set_nodelay(true);
        let clock = self.clock.clone();
        let connection = Connection {
            stream: Some(stream),
            has_ended: false,
            too_late: Some(Box::pin(async move { clock.sleep(FIRST_WITHIN).await })),
            place,
            clock: self.clock.clone(),
            tasks: self.tasks.clone(),
        };
        (connection, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Whom a connection comes from.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

impl Connected<IncomingStream<'_, Lingering>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Lingering>) -> Self {
        Self(*stream.remote_addr())
    }
}

pub struct Connection {
    /// Always there until the connection is dropped.
    stream: Option<TcpStream>,
    /// The client has sent its last byte.
    has_ended: bool,
    /// Until something was answered.
    too_late: Option<BoxFuture<'static, ()>>,
    place: Option<OwnedSemaphorePermit>,
    clock: SharedClock,
    tasks: TaskTracker,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("has_ended", &self.has_ended).finish_non_exhaustive()
    }
}

impl Connection {
    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(mut stream) = self.stream.take() else { return };
        if self.has_ended || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let (clock, place) = (self.clock.clone(), self.place.take());
        self.tasks.spawn(async move {
            let _ = clock
                .timeout(LINGER, async {
                    let _ = stream.shutdown().await;
                    let _ = tokio::io::copy(&mut (&mut stream).take(MOST), &mut tokio::io::sink()).await;
                })
                .await;
            drop(place);
        });
    }
}

impl AsyncRead for Connection {
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
        if read.is_pending() && self.too_late.as_mut().is_some_and(|late| late.poll_unpin(context).is_ready()) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.too_late = None;
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
        self.too_late = None;
        self.stream()?.poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }
}
