//! The channel to the agent of one container: two pipes with one task each, carrying frames.
//!
//! ```text
//!   Link (API) ──allowed frames──▶ writer ──stdin──▶ agent
//!   Link (API) ◀──bounded queue─── reader ◀─stdout── agent     reader ──▶ AgentStatus (runtime)
//! ```
//!
//! The agent is not trusted: what it sends is bounded, and a broken frame ends the container. A link that is not
//! read blocks neither the reader nor the agent's status for the runtime: output that does not fit is dropped
//! and replayed later ([`super::output_queue`]).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use baton_protocol::{
    agent::{self, MAX_EXECS},
    frame::{Frame, FrameKind, MAX_PAYLOAD, Marker},
    id::hex,
    reason::Reason,
};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::{
    process::{ChildStdin, ChildStdout},
    sync::{mpsc, watch},
};

use super::{
    Error, FrameLink, Result, StartSpec, containers::RuntimeContext, frame_reader::FrameReader,
    frame_writer::FrameWriter, output_queue::OutputQueue,
};
use crate::{
    clock::SharedClock,
    network::{self, NetworkLink},
};

/// Capacity of a link's queue of frames to the agent.
pub const LINK_FRAMES: usize = 32;
/// Sequence numbers of the runtime's own pings start here; the API's stay below.
pub const OWN: u64 = 1 << 63;
/// Interval after which an unanswered resync is repeated.
const RESYNC: Duration = Duration::from_secs(1);

/// What the agent has reported to the runtime.
#[derive(Debug, Default)]
pub struct AgentStatus {
    /// Its frame version, from `Hello`.
    pub version: Option<u8>,
    pub pong: u64,
    /// The nonce of the resync it has answered.
    pub resynced: Option<[u8; 16]>,
    pub running: BTreeSet<u32>,
    /// Why the channel is unusable: the agent sends nothing any more, or invalid frames.
    pub broken: Option<&'static str>,
}

impl AgentStatus {
    /// Replaces the running commands by those in the agent's own report.
    pub fn learn(&mut self, state: &agent::AgentState) {
        let running = state.execs.iter().filter(|exec| exec.exit.is_none() && !exec.background);
        self.running = running.map(|exec| exec.exec).take(MAX_EXECS).collect();
    }
}

/// What the runtime sends to the writer.
#[derive(Debug)]
pub enum WriterCommand {
    Bytes(Vec<u8>),
    /// The container belongs to a sandbox from now on: the grace period for its client to attach starts.
    Begin,
    Link(mpsc::Receiver<Frame>),
    /// The container has ended.
    End,
}

/// The environment variable that tells commands in a fork that it is one.
const FORKED_FROM: &str = "BATON_FORKED_FROM";

#[derive(Debug)]
pub struct Channel {
    clock: SharedClock,
    control: mpsc::UnboundedSender<WriterCommand>,
    link: Arc<watch::Sender<Option<OutputQueue>>>,
    gate: watch::Sender<bool>,
    hunt: watch::Sender<Option<[u8; 16]>>,
    news: watch::Receiver<AgentStatus>,
    pings: std::sync::atomic::AtomicU64,
    /// Taken by the connections of the container.
    network: Mutex<Option<NetworkLink>>,
}

impl Channel {
    /// Starts the tasks. They end with the pipes, or when the channel is dropped.
    pub fn start(stdin: ChildStdin, stdout: ChildStdout, context: &RuntimeContext) -> Self {
        let RuntimeContext { settings, clock, tasks, .. } = context;
        let (control, orders) = mpsc::unbounded_channel();
        let (news, heard) = watch::channel(AgentStatus::default());
        let (gate, gated) = watch::channel(true);
        let (hunt, hunted) = watch::channel(None);
        let link = Arc::new(watch::channel(None).0);
        let (network, network_frames, network_sink) = NetworkLink::new();
        let reader = FrameReader::new(stdout, link.subscribe(), hunted, news, network_sink, settings.metrics.clone());
        let writer = FrameWriter::new(stdin, orders, gated, link.clone(), network_frames, clock.clone(), settings);
        tasks.spawn(reader.run());
        tasks.spawn(writer.run());
        let network = Mutex::new(Some(network));
        Self { clock: clock.clone(), control, link, gate, hunt, news: heard, pings: 0.into(), network }
    }

    pub fn status(&self) -> watch::Receiver<AgentStatus> {
        self.news.clone()
    }

    /// Opens the only link and closes any earlier one. Returns `None` if the channel has ended.
    pub fn open(&self) -> Option<FrameLink> {
        let (to_agent, frames) = mpsc::channel(LINK_FRAMES);
        let (output, from_agent, behind) = OutputQueue::new();
        // In this order, a writer that ends now either closes this output or refuses these frames.
        self.link.send_replace(Some(output));
        if self.control.send(WriterCommand::Link(frames)).is_err() {
            self.link.send_replace(None);
            return None;
        }
        Some(FrameLink { to_agent, from_agent, behind })
    }

    /// The frames of the network, once.
    pub fn take_network(&self) -> Option<NetworkLink> {
        self.network.lock().take()
    }

    /// Tells the agent whether programs may reach out. Without this they may not.
    pub fn set_egress(&self, egress: bool) {
        self.send(&network::access(egress));
    }

    /// Closes the link permanently.
    pub fn close(&self) {
        let _ = self.control.send(WriterCommand::End);
    }

    /// Opens or closes the gate. While it is closed, frames of the API wait.
    pub fn set_gate(&self, open: bool) {
        self.gate.send_if_modified(|gate| std::mem::replace(gate, open) != open);
    }

    /// Waits until the agent, assigned or not, has answered.
    pub async fn wait_ready(&self, limit: Duration) -> Result<()> {
        let ping = self.ping();
        self.wait_for_status("create", limit, |news| news.version.is_some() && news.pong >= ping).await
    }

    pub fn is_broken(&self) -> bool {
        self.news.borrow().broken.is_some()
    }

    /// Assigns the agent to one sandbox, and lets its programs reach out if they may. Returns once it has answered.
    pub async fn assign(&self, start: &StartSpec, has_egress: bool, limit: Duration) -> Result<()> {
        self.send(&assignment(start)?);
        if has_egress {
            self.set_egress(true);
        }
        let _ = self.control.send(WriterCommand::Begin);
        self.wait_ready(limit).await
    }

    /// Resynchronizes after a restore. Repeats with a new nonce until the agent answers.
    pub async fn resync(&self, start: &StartSpec, has_egress: bool, limit: Duration) -> Result<()> {
        let until = self.clock.now() + limit;
        let _ = self.control.send(WriterCommand::Begin);
        loop {
            let nonce = self.clock.bits();
            self.hunt.send_replace(Some(nonce));
            self.send_bytes(resync_bytes(&start.marker, &nonce)?);
            let wait = RESYNC.min(until - self.clock.now());
            match self.wait_for_status("restore", wait, |news| news.resynced == Some(nonce)).await {
                Err(Error::TimedOut { .. }) if self.clock.now() < until => {}
                Err(Error::TimedOut { what, .. }) => return Err(Error::TimedOut { what, after: limit }),
                ended => {
                    ended?;
                    break;
                }
            }
        }
        let mut env = start.env.clone();
        let kind = match &start.forked_from {
            None => FrameKind::Restored,
            Some(checkpoint) => {
                // Commands that start from now on can tell; those already running see a new
                // `/proc/gvisor/checkpoint`.
                env.insert(FORKED_FROM.to_owned(), checkpoint.clone());
                FrameKind::Forked
            }
        };
        self.send(&with_json(kind, &agent::Restored { env })?);
        // A restored sandbox has lost its addresses.
        if has_egress {
            self.set_egress(true);
        }
        self.ping();
        Ok(())
    }

    /// Writes a frame, without which a stopped or restored agent does not wake up.
    pub fn ping(&self) -> u64 {
        let ping = OWN + 1 + self.pings.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.send(&Frame::new(FrameKind::Ping).sequence(ping));
        ping
    }

    /// Tells the agent that the sandbox is over a limit, so that it ends the largest consumer. An old agent
    /// ignores this.
    pub fn relieve(&self, used: u64, why: String) {
        if let Ok(frame) = with_json(FrameKind::Relieve, &agent::Relieve { used, why }) {
            self.send(&frame);
        }
    }

    /// Waits until the agent has answered a ping.
    pub async fn ponged(&self, ping: u64, limit: Duration) -> Result<()> {
        self.wait_for_status("resume", limit, |news| news.pong >= ping).await
    }

    async fn wait_for_status(
        &self,
        what: &'static str,
        limit: Duration,
        is_so: impl Fn(&AgentStatus) -> bool,
    ) -> Result<()> {
        let mut news = self.news.clone();
        let told = self.clock.timeout(limit, news.wait_for(|news| news.broken.is_some() || is_so(news))).await;
        match told {
            Ok(Ok(news)) => match news.broken {
                None => Ok(()),
                Some(why) => Err(Error::Failed { what, why: why.to_owned() }),
            },
            Ok(Err(_)) => Err(Error::Failed { what, why: "the agent has ended".to_owned() }),
            Err(elapsed) => Err(Error::TimedOut { what, after: elapsed.0 }),
        }
    }

    fn send(&self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.send_bytes(bytes);
    }

    fn send_bytes(&self, bytes: Vec<u8>) {
        // The writer is gone only after the container has ended, which is reported elsewhere.
        let _ = self.control.send(WriterCommand::Bytes(bytes));
    }
}

/// Whether the API may send this frame. All others are reserved for the runtime.
pub fn is_allowed(frame: &Frame) -> bool {
    let kind = matches!(
        frame.kind,
        FrameKind::Exec
            | FrameKind::Stdin
            | FrameKind::StdinEof
            | FrameKind::Ack
            | FrameKind::Credit
            | FrameKind::Replay
            | FrameKind::Signal
            | FrameKind::Resize
            | FrameKind::List
    ) || (frame.kind == FrameKind::Ping && frame.sequence < OWN);
    kind && frame.payload.len() <= MAX_PAYLOAD
}

/// The frame that assigns an agent to a sandbox; an error if it does not fit into a frame.
pub fn assignment(start: &StartSpec) -> Result<Frame> {
    let assign = agent::Assign {
        marker_inverted: hex(&start.marker.map(|byte| !byte)),
        env: start.env.clone(),
        cwd: start.cwd.clone(),
        hostname: None,
        pids: start.limits.pids,
        files: start.limits.files,
    };
    with_json(FrameKind::Assign, &assign)
}

fn with_json(kind: FrameKind, payload: &impl Serialize) -> Result<Frame> {
    let refused = |message: String| Error::Refused { reason: Reason::TooLarge, message };
    let payload = serde_json::to_vec(payload).map_err(|error| refused(error.to_string()))?;
    if payload.len() > MAX_PAYLOAD {
        return Err(refused("the environment of the sandbox is too large".to_owned()));
    }
    Ok(Frame::new(kind).payload(payload))
}

fn resync_bytes(marker: &Marker, nonce: &[u8; 16]) -> Result<Vec<u8>> {
    let mut bytes = [*marker, *marker].concat();
    with_json(FrameKind::Resync, &agent::Resync { nonce: hex(nonce) })?.encode(&mut bytes);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_runtime_assigns_resyncs_and_attaches() {
        let refused: Vec<_> = FrameKind::ALL.into_iter().filter(|kind| !is_allowed(&Frame::new(*kind))).collect();
        let own = [
            FrameKind::Assign,
            FrameKind::Attached,
            FrameKind::Detached,
            FrameKind::Resync,
            FrameKind::Restored,
            FrameKind::Forked,
            FrameKind::Relieve,
            FrameKind::Network,
            FrameKind::Resolved,
            FrameKind::Connect,
            FrameKind::Connected,
            FrameKind::ConnectionInput,
            FrameKind::ConnectionInputEof,
            FrameKind::ConnectionCredit,
            FrameKind::ConnectionReset,
            FrameKind::ListPorts,
        ];
        assert_eq!(refused.iter().filter(|kind| !kind.is_from_agent()).copied().collect::<Vec<_>>(), own);
        assert!(FrameKind::ALL.into_iter().filter(|kind| kind.is_from_agent()).all(|kind| refused.contains(&kind)));
    }

    #[test]
    fn what_would_not_fit_into_a_frame_is_not_allowed() {
        assert!(!is_allowed(&Frame::new(FrameKind::Stdin).payload(vec![0; MAX_PAYLOAD + 1])));
        assert!(!is_allowed(&Frame::new(FrameKind::Ping).sequence(OWN)));
    }

    #[test]
    fn a_resync_never_carries_marker_or_nonce_as_they_are() {
        let (marker, nonce) = ([7; 16], [9; 16]);
        let bytes = resync_bytes(&marker, &nonce).unwrap();
        assert_eq!(bytes[..32], [7; 32]);
        assert!(!bytes[32..].windows(16).any(|window| window == marker || window == nonce));
    }
}
