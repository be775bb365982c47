//! Carries the frames of one link over a socket, in the format used between server and agent.

use baton_protocol::frame::{Decoder, Frame, FrameKind};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
};

use crate::runtime::{Behind, FrameLink, LeftOut, OutputQueue};

/// Size of one read. Throughput depends on the size of reads, not of frames.
const READ: usize = 256 << 10;
/// Frames that are already queued are written together, up to about this many bytes.
const BATCH: usize = 64 << 10;

/// On its way to the API, this kind means that output of the stream was left out and must be requested. An agent
/// never sends it.
const BEHIND: FrameKind = FrameKind::Replay;

/// Which side ended the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEnd {
    /// Our own end of the link was dropped.
    Ours,
    /// The socket was closed, or its data could not be decoded.
    Theirs,
}

/// Serves the reconciler's end until either side is gone. `early` is what was already read from the socket.
pub async fn serve(stream: UnixStream, early: &[u8], link: FrameLink) -> LinkEnd {
    let FrameLink { to_agent, from_agent, behind } = link;
    let (reader, writer) = stream.into_split();
    tokio::select! {
        end = read(reader, early, FrameSink::Agent(&to_agent)) => end,
        end = write(writer, from_agent, Some(&behind)) => end,
    }
}

/// Serves the API's end until either side is gone. A session that reads slowly holds back only its own output.
pub async fn use_it(stream: UnixStream, frames: mpsc::Receiver<Frame>, outlet: &OutputQueue) -> LinkEnd {
    let (reader, writer) = stream.into_split();
    tokio::select! {
        end = read(reader, &[], FrameSink::Api(outlet, LeftOut::new())) => end,
        end = write(writer, frames, None) => end,
    }
}

/// Where frames from the socket go.
enum FrameSink<'a> {
    Agent(&'a mpsc::Sender<Frame>),
    Api(&'a OutputQueue, LeftOut),
}

impl FrameSink<'_> {
    /// Passes on one frame. Returns whether the receiver takes more.
    async fn forward(&mut self, frame: Frame) -> bool {
        match self {
            Self::Agent(frames) => frames.send(frame).await.is_ok(),
            Self::Api(outlet, _) if frame.kind == BEHIND => {
                outlet.note(frame.exec, frame.stream);
                true
            }
            Self::Api(outlet, left_out) => {
                outlet.pass(frame, left_out).await;
                !outlet.is_closed()
            }
        }
    }
}

async fn read(mut socket: OwnedReadHalf, early: &[u8], mut taker: FrameSink<'_>) -> LinkEnd {
    let mut decoder = Decoder::default();
    decoder.push(early);
    let mut chunk = vec![0; READ];
    loop {
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => {
                    if !taker.forward(frame).await {
                        return LinkEnd::Ours;
                    }
                }
                Ok(None) => break,
                Err(_) => return LinkEnd::Theirs,
            }
        }
        match socket.read(&mut chunk).await {
            Ok(0) | Err(_) => return LinkEnd::Theirs,
            Ok(count) => decoder.push(&chunk[..count]),
        }
    }
}

async fn write(mut socket: OwnedWriteHalf, mut frames: mpsc::Receiver<Frame>, behind: Option<&Behind>) -> LinkEnd {
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        tokio::select! {
            frame = frames.recv() => match frame {
                Some(frame) => frame.encode(&mut bytes),
                None => return LinkEnd::Ours,
            },
            () = noted(behind) => {}
        }
        for (exec, stream) in behind.map(Behind::drain).unwrap_or_default() {
            Frame::new(BEHIND).exec(exec).stream(stream).encode(&mut bytes);
        }
        while bytes.len() < BATCH
            && let Ok(frame) = frames.try_recv()
        {
            frame.encode(&mut bytes);
        }
        if socket.write_all(&bytes).await.is_err() {
            return LinkEnd::Theirs;
        }
    }
}

async fn noted(behind: Option<&Behind>) {
    match behind {
        Some(behind) => behind.noted().await,
        None => std::future::pending().await,
    }
}
