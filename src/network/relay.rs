//! Moves the bytes of one connection between a stream and the frames of the agent, each direction by itself.

use std::{
    io,
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
};

use baton_protocol::{
    agent::MAX_CONNECTION_PAYLOAD,
    frame::{Frame, FrameKind},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    sync::{mpsc, watch},
};
use tokio_util::sync::PollSender;

use super::{credit_pool::CreditWindow, traffic::Traffic};
use crate::metrics::Direction;

/// What the agent sent for a connection.
#[derive(Debug)]
pub enum FromProgram {
    Bytes(Vec<u8>),
    Eof,
}

/// The agent's end of one connection.
#[derive(Debug)]
pub struct AgentEnd {
    pub number: u32,
    pub frames: mpsc::Sender<Frame>,
    /// Bounded by the credit that was granted.
    pub received: mpsc::UnboundedReceiver<FromProgram>,
    /// The offset up to which we may send.
    pub credit: watch::Receiver<u64>,
    /// The credit that we grant.
    pub window: CreditWindow,
    pub traffic: Traffic,
}

/// The agent's channel has ended.
fn gone<E>(_: E) -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}

impl AgentEnd {
    /// Relays until both directions have ended. On an error neither side has been told.
    pub async fn relay(self, stream: impl AsyncRead + AsyncWrite) -> io::Result<()> {
        let (outer_read, outer_write) = tokio::io::split(stream);
        let Self { number, frames, received, credit, window, traffic } = self;
        let input = send_input(outer_read, number, &frames, credit, traffic.clone());
        let output = send_output(outer_write, number, &frames, received, window, traffic);
        // The first error ends both.
        futures::future::try_join(input, output).await.map(drop)
    }
}

/// From the stream to the program.
async fn send_input(
    mut stream: impl AsyncRead + Unpin,
    number: u32,
    frames: &mpsc::Sender<Frame>,
    mut credit: watch::Receiver<u64>,
    traffic: Traffic,
) -> io::Result<()> {
    let mut sender = PollSender::new(frames.clone());
    let mut sent = 0_u64;
    loop {
        let granted = *credit.wait_for(|granted| *granted > sent).await.map_err(gone)?;
        let most = usize::try_from(granted - sent).unwrap_or(usize::MAX).min(MAX_CONNECTION_PAYLOAD);
        let bytes = std::future::poll_fn(|cx| poll_chunk(cx, Pin::new(&mut stream), &mut sender, most)).await?;
        let frame = Frame::new(FrameKind::ConnectionInput).exec(number).offset(sent);
        if bytes.is_empty() {
            let eof = Frame { kind: FrameKind::ConnectionInputEof, ..frame };
            return sender.send_item(eof).map_err(gone);
        }
        sent += bytes.len() as u64;
        let count = bytes.len();
        sender.send_item(frame.payload(bytes)).map_err(gone)?;
        traffic.pass(Direction::In, count).await?;
    }
}

/// Reads a chunk once the agent can take a frame, so that a connection holds no bytes while it waits.
fn poll_chunk(
    cx: &mut Context<'_>,
    stream: Pin<&mut impl AsyncRead>,
    sender: &mut PollSender<Frame>,
    most: usize,
) -> Poll<io::Result<Vec<u8>>> {
    ready!(sender.poll_reserve(cx)).map_err(gone)?;
    let mut space = [const { MaybeUninit::<u8>::uninit() }; MAX_CONNECTION_PAYLOAD];
    let mut buffer = ReadBuf::uninit(&mut space[..most]);
    match stream.poll_read(cx, &mut buffer) {
        Poll::Ready(read) => Poll::Ready(read.map(|()| buffer.filled().to_vec())),
        Poll::Pending => {
            sender.abort_send();
            Poll::Pending
        }
    }
}

/// From the program to the stream.
async fn send_output(
    mut stream: impl AsyncWrite + Unpin,
    number: u32,
    frames: &mpsc::Sender<Frame>,
    mut received: mpsc::UnboundedReceiver<FromProgram>,
    mut window: CreditWindow,
    traffic: Traffic,
) -> io::Result<()> {
    loop {
        match received.recv().await.ok_or_else(|| gone(()))? {
            FromProgram::Eof => return stream.shutdown().await,
            FromProgram::Bytes(bytes) => {
                stream.write_all(&bytes).await?;
                if received.is_empty() {
                    stream.flush().await?;
                }
                traffic.pass(Direction::Out, bytes.len()).await?;
                if let Some(granted) = window.pass(bytes.len()) {
                    let credit = Frame::new(FrameKind::ConnectionCredit).exec(number).offset(granted);
                    frames.send(credit).await.map_err(gone)?;
                }
            }
        }
    }
}
