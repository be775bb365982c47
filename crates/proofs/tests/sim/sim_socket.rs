//! Connections without a network: one end is a client's, the other stands still when its server does.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{FutureExt, future::BoxFuture};
use tokio::{
    io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

use crate::machine_clock::Machine;

/// Less than a window: who does not read is felt.
const BUFFER: usize = 4 << 10;
pub const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 1);

/// Where one server takes connections.
#[derive(Debug)]
pub struct SimListener {
    calls: mpsc::UnboundedReceiver<DuplexStream>,
    machine: Arc<Machine>,
    gone: CancellationToken,
}

/// How clients reach it.
#[derive(Clone, Debug)]
pub struct SimConnector(mpsc::UnboundedSender<DuplexStream>);

impl SimConnector {
    pub fn call(&self) -> DuplexStream {
        let (here, there) = tokio::io::duplex(BUFFER);
        // A server that has ended leaves the client with a connection that ends at once.
        let _ = self.0.send(there);
        here
    }
}

impl SimListener {
    pub fn new(machine: Arc<Machine>, gone: CancellationToken) -> (Self, SimConnector) {
        let (connector, calls) = mpsc::unbounded_channel();
        (Self { calls, machine, gone }, SimConnector(connector))
    }
}

impl axum::serve::Listener for SimListener {
    type Io = Pipe;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Pipe, SocketAddr) {
        let Some(stream) = self.calls.recv().await else { return std::future::pending().await };
        (Pipe { stream, machine: self.machine.clone(), gone: self.gone.clone(), moves: None }, ADDRESS)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(ADDRESS)
    }
}

/// The server's end.
pub struct Pipe {
    stream: DuplexStream,
    machine: Arc<Machine>,
    gone: CancellationToken,
    moves: Option<BoxFuture<'static, ()>>,
}

impl Pipe {
    /// Ready when the process goes on; never again once it is dead.
    fn poll_moves(&mut self, context: &mut Context<'_>) -> Poll<Pin<&mut DuplexStream>> {
        if self.gone.is_cancelled() {
            return Poll::Pending;
        }
        if !self.machine.moves() || self.moves.is_some() {
            let machine = self.machine.clone();
            let moves = self.moves.get_or_insert_with(|| async move { machine.process_moves().await }.boxed());
            if moves.poll_unpin(context).is_pending() {
                return Poll::Pending;
            }
            self.moves = None;
        }
        Poll::Ready(Pin::new(&mut self.stream))
    }
}

impl AsyncRead for Pipe {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut().poll_moves(context) {
            Poll::Ready(stream) => stream.poll_read(context, buffer),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncWrite for Pipe {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut().poll_moves(context) {
            Poll::Ready(stream) => stream.poll_write(context, bytes),
            Poll::Pending => Poll::Pending,
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut().poll_moves(context) {
            Poll::Ready(stream) => stream.poll_flush(context),
            Poll::Pending => Poll::Pending,
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut().poll_moves(context) {
            Poll::Ready(stream) => stream.poll_shutdown(context),
            Poll::Pending => Poll::Pending,
        }
    }
}
