//! Reads the frames of the agent: passes those for the API to the link and records those for the runtime in its
//! status.

use baton_protocol::{
    agent::{self, MAX_EXECS},
    frame::{Decoder, Frame, FrameKind, Long, Stream},
};
use bytes::BufMut;
use tokio::{
    io::AsyncReadExt,
    process::ChildStdout,
    sync::{mpsc, watch},
};

use super::{
    channel::{AgentStatus, OWN},
    output_queue::{LeftOut, OutputQueue},
};
use crate::metrics::{ExecEnd, ExecPipe, Metrics};

/// Size of a read where a frame may begin. The rest of a long frame is read directly into its final buffer.
const READ: usize = 16 << 10;
const BROKEN: &str = "the agent sent a broken frame";

#[derive(Debug)]
pub struct FrameReader {
    stdout: ChildStdout,
    decoder: Decoder,
    link: watch::Receiver<Option<OutputQueue>>,
    /// The dropped streams of that link.
    left_out: LeftOut,
    hunt: watch::Receiver<Option<[u8; 16]>>,
    /// The nonce that was found: the bytes after it are in sync.
    found: Option<[u8; 16]>,
    news: watch::Sender<AgentStatus>,
    /// Frames of the network.
    network: mpsc::Sender<Frame>,
    metrics: Metrics,
}

impl FrameReader {
    pub fn new(
        stdout: ChildStdout,
        link: watch::Receiver<Option<OutputQueue>>,
        hunt: watch::Receiver<Option<[u8; 16]>>,
        news: watch::Sender<AgentStatus>,
        network: mpsc::Sender<Frame>,
        metrics: Metrics,
    ) -> Self {
        let left_out = LeftOut::new();
        Self { stdout, decoder: Decoder::default(), link, left_out, hunt, found: None, news, network, metrics }
    }

    pub async fn run(mut self) {
        let why = self.read().await;
        self.news.send_modify(|news| news.broken = Some(why));
    }

    async fn read(&mut self) -> &'static str {
        let mut chunk = vec![0; READ];
        let mut long: Option<Long> = None;
        loop {
            let read = match &mut long {
                Some(long) => {
                    let missing = long.missing();
                    self.stdout.read_buf(&mut long.payload().limit(missing)).await
                }
                None => self.stdout.read(&mut chunk).await,
            };
            match read {
                Ok(0) => return "the agent has ended",
                Ok(count) if long.is_none() => self.decoder.push(&chunk[..count]),
                Ok(_) => {}
                Err(_) => return "the agent's output cannot be read",
            }
            if let Some(begun) = long.take() {
                if !self.is_in_step() {
                    self.decoder.put_back(begun);
                } else if begun.missing() > 0 {
                    long = Some(begun);
                    continue;
                } else {
                    match begun.finish() {
                        Ok(Some(frame)) => {
                            if let Err(why) = self.handle(frame).await {
                                return why;
                            }
                        }
                        Ok(None) => {}
                        Err(_) => return BROKEN,
                    }
                }
            }
            if !self.is_in_step() {
                continue;
            }
            loop {
                match self.decoder.next_frame() {
                    Ok(Some(frame)) => {
                        if let Err(why) = self.handle(frame).await {
                            return why;
                        }
                    }
                    Ok(None) => break,
                    Err(_) => return BROKEN,
                }
                // A new resync has begun: the remaining bytes precede it.
                if !self.is_in_step() {
                    break;
                }
            }
            if self.is_in_step() {
                long = self.decoder.take_long();
            }
        }
    }

    /// After a restore, everything before the nonce of the latest resync is discarded.
    fn is_in_step(&mut self) -> bool {
        let Some(nonce) = *self.hunt.borrow() else { return true };
        if self.found == Some(nonce) {
            return true;
        }
        if let Some(place) = self.decoder.find(&nonce) {
            self.decoder.skip(place + nonce.len());
            self.found = Some(nonce);
            return true;
        }
        let rest = self.decoder.pending().len().saturating_sub(nonce.len() - 1);
        self.decoder.skip(rest);
        false
    }

    async fn handle(&mut self, frame: Frame) -> Result<(), &'static str> {
        match frame.kind {
            FrameKind::Hello => {
                let hello: agent::Hello = parse(&frame)?;
                self.news.send_modify(|news| news.version = Some(hello.version));
            }
            FrameKind::ResyncAck => {
                let state: agent::AgentState = parse(&frame)?;
                self.news.send_modify(|news| {
                    news.learn(&state);
                    news.version = Some(state.version);
                    news.resynced = self.found;
                });
            }
            FrameKind::Pong if frame.sequence >= OWN => self.news.send_modify(|news| news.pong = frame.sequence),
            // For debugging the agent; truncated, and without terminal control characters.
            FrameKind::Log => {
                let text = String::from_utf8_lossy(&frame.payload[..frame.payload.len().min(200)]);
                tracing::debug!(agent = %text.escape_debug(), "agent log");
            }
            FrameKind::Started => {
                self.metrics.exec_started();
                let is_background = parse::<agent::ExecStarted>(&frame).is_ok_and(|started| started.background);
                self.news.send_if_modified(|news| {
                    !is_background && news.running.len() < MAX_EXECS && news.running.insert(frame.exec)
                });
                self.pass(frame).await;
            }
            FrameKind::Exit => {
                self.metrics.exec_ended(how(&frame));
                self.news.send_if_modified(|news| news.running.remove(&frame.exec));
                self.pass(frame).await;
            }
            FrameKind::Execs => {
                let state: agent::AgentState = parse(&frame)?;
                self.news.send_modify(|news| news.learn(&state));
                self.pass(frame).await;
            }
            FrameKind::Data => {
                let pipe = if frame.stream == Stream::Stderr { ExecPipe::Stderr } else { ExecPipe::Stdout };
                self.metrics.exec_moved(pipe, frame.payload.len());
                self.pass(frame).await;
            }
            FrameKind::Eof | FrameKind::Pong | FrameKind::StdinAck => self.pass(frame).await,
            FrameKind::Resolve
            | FrameKind::Dial
            | FrameKind::Accepted
            | FrameKind::ConnectionOutput
            | FrameKind::ConnectionOutputEof
            | FrameKind::ConnectionInputCredit
            | FrameKind::ConnectionClosed
            | FrameKind::Ports => {
                // Whoever reads them never waits for a connection, so this is no wait either.
                let _ = self.network.send(frame).await;
            }
            FrameKind::Assign
            | FrameKind::Exec
            | FrameKind::Stdin
            | FrameKind::StdinEof
            | FrameKind::Ack
            | FrameKind::Credit
            | FrameKind::Replay
            | FrameKind::Signal
            | FrameKind::Resize
            | FrameKind::Attached
            | FrameKind::Detached
            | FrameKind::Resync
            | FrameKind::List
            | FrameKind::Restored
            | FrameKind::Forked
            | FrameKind::Ping
            | FrameKind::Relieve
            | FrameKind::Network
            | FrameKind::Resolved
            | FrameKind::Connect
            | FrameKind::Connected
            | FrameKind::ConnectionInput
            | FrameKind::ConnectionInputEof
            | FrameKind::ConnectionCredit
            | FrameKind::ConnectionReset
            | FrameKind::ListPorts => return Err("the agent sent a frame that is not its to send"),
        }
        Ok(())
    }

    /// Passes a frame to the link. Without one the frame is dropped: the agent keeps what is not acknowledged. A
    /// newer link ends the wait for the old one.
    async fn pass(&mut self, frame: Frame) {
        if self.link.has_changed().unwrap_or(false) {
            self.left_out.clear();
        }
        // Not kept between two frames, so that the reader of a replaced link sees it close at once.
        let Some(outlet) = self.link.borrow_and_update().clone() else { return };
        tokio::select! {
            biased;
            () = outlet.pass(frame, &mut self.left_out) => {}
            _ = self.link.changed() => self.link.mark_changed(),
        }
    }
}

/// How a command ended, as reported by the agent.
fn how(frame: &Frame) -> ExecEnd {
    let Ok(exit) = parse::<agent::Exit>(frame) else { return ExecEnd::NotStarted };
    match (exit.error, exit.timed_out, exit.code) {
        (Some(_), _, _) => ExecEnd::NotStarted,
        (None, true, _) => ExecEnd::TimedOut,
        (None, false, Some(0)) => ExecEnd::Zero,
        (None, false, Some(_)) => ExecEnd::NonZero,
        (None, false, None) => ExecEnd::Signal,
    }
}

fn parse<'a, T: serde::Deserialize<'a>>(frame: &'a Frame) -> Result<T, &'static str> {
    serde_json::from_slice(&frame.payload).map_err(|_| "the agent sent a frame that cannot be read")
}
