//! The channel to the agent of one container: two pipes, one task each, frames in between.
//!
//! ```text
//!   Link (API) ──allowed frames──▶ writer ──stdin──▶ agent
//!   Link (API) ◀──bounded queue─── reader ◀─stdout── agent     reader ──▶ News (runtime)
//! ```
//!
//! The agent is not trusted: what it sends is bounded, and a broken frame ends the container.
//! A link that nobody reads holds back neither the reader nor what the agent tells the runtime:
//! output without room is left out and asked for again ([`super::outlet`]).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use baton_protocol::{
    agent::{self, MAX_EXECS},
    frame::{Frame, Kind, MAX_PAYLOAD, Marker},
    id::hex,
    reason::Reason,
};
use serde::Serialize;
use tokio::{
    process::{ChildStdin, ChildStdout},
    sync::{mpsc, watch},
};

use super::{
    Error, Link, Result, Start, containers::RuntimeContext, frame_reader::Reader, frame_writer::Writer,
    output_queue::Outlet,
};
use crate::clock::SharedClock;

/// How many frames wait in a link on their way to the agent.
pub const LINK_FRAMES: usize = 32;
/// Sequence numbers of the runtime's own pings begin here; the API's stay below.
pub const OWN: u64 = 1 << 63;
/// How long a resync waits before it is repeated.
const RESYNC: Duration = Duration::from_secs(1);

/// What the agent has told the runtime.
#[derive(Debug, Default)]
pub struct AgentStatus {
    /// Its frame version, from `Hello`.
    pub version: Option<u8>,
    pub pong: u64,
    /// The nonce of the resync it has answered.
    pub resynced: Option<[u8; 16]>,
    pub running: BTreeSet<u32>,
    /// It speaks no more, or nonsense, and why.
    pub broken: Option<&'static str>,
}

impl AgentStatus {
    /// Takes the agent's own list of what runs.
    pub fn learn(&mut self, state: &agent::State) {
        let running = state.execs.iter().filter(|exec| exec.exit.is_none());
        self.running = running.map(|exec| exec.exec).take(MAX_EXECS).collect();
    }
}

/// What the runtime tells the writer.
#[derive(Debug)]
pub enum Control {
    Bytes(Vec<u8>),
    /// It is a sandbox's from now on: a client is waited for.
    Begin,
    Link(mpsc::Receiver<Frame>),
    /// The container has ended.
    End,
}

/// The variable by which commands in a copy know that it is one.
const FORKED_FROM: &str = "BATON_FORKED_FROM";

#[derive(Debug)]
pub struct Channel {
    clock: SharedClock,
    control: mpsc::UnboundedSender<Control>,
    link: Arc<watch::Sender<Option<Outlet>>>,
    gate: watch::Sender<bool>,
    hunt: watch::Sender<Option<[u8; 16]>>,
    news: watch::Receiver<AgentStatus>,
    pings: std::sync::atomic::AtomicU64,
}

impl Channel {
    /// Its tasks end with the pipes, or when the channel is dropped.
    pub fn start(stdin: ChildStdin, stdout: ChildStdout, context: &RuntimeContext) -> Self {
        let RuntimeContext { settings, clock, tasks, .. } = context;
        let (control, orders) = mpsc::unbounded_channel();
        let (news, heard) = watch::channel(AgentStatus::default());
        let (gate, gated) = watch::channel(true);
        let (hunt, hunted) = watch::channel(None);
        let link = Arc::new(watch::channel(None).0);
        let reader = Reader::new(stdout, link.subscribe(), hunted, news, settings.metrics.clone());
        let writer = Writer::new(stdin, orders, gated, link.clone(), clock.clone(), settings);
        tasks.spawn(reader.run());
        tasks.spawn(writer.run());
        Self { clock: clock.clone(), control, link, gate, hunt, news: heard, pings: 0.into() }
    }

    pub fn news(&self) -> watch::Receiver<AgentStatus> {
        self.news.clone()
    }

    /// Opens the one link; an earlier one closes. `None` when the channel has ended.
    pub fn open(&self) -> Option<Link> {
        let (to_agent, frames) = mpsc::channel(LINK_FRAMES);
        let (output, from_agent, behind) = Outlet::new();
        // In this order: a writer that ends now either closes this output or refuses these frames.
        self.link.send_replace(Some(output));
        if self.control.send(Control::Link(frames)).is_err() {
            self.link.send_replace(None);
            return None;
        }
        Some(Link { to_agent, from_agent, behind })
    }

    /// Closes the link, for good.
    pub fn close(&self) {
        let _ = self.control.send(Control::End);
    }

    /// Closed, frames of the API wait.
    pub fn set_gate(&self, open: bool) {
        self.gate.send_if_modified(|gate| std::mem::replace(gate, open) != open);
    }

    /// Done when the agent has answered, whose it may be.
    pub async fn wait_ready(&self, limit: Duration) -> Result<()> {
        let ping = self.ping();
        self.heard("create", limit, |news| news.version.is_some() && news.pong >= ping).await
    }

    pub fn is_broken(&self) -> bool {
        self.news.borrow().broken.is_some()
    }

    /// The agent becomes the agent of one sandbox. Done when it has answered.
    pub async fn assign(&self, start: &Start, limit: Duration) -> Result<()> {
        self.send(&assignment(start)?);
        let _ = self.control.send(Control::Begin);
        self.wait_ready(limit).await
    }

    /// Begins anew after a restore. Repeated with a fresh nonce until the agent answers.
    pub async fn resync(&self, start: &Start, limit: Duration) -> Result<()> {
        let until = self.clock.now() + limit;
        let _ = self.control.send(Control::Begin);
        loop {
            let nonce = self.clock.bits();
            self.hunt.send_replace(Some(nonce));
            self.send_bytes(resync_bytes(&start.marker, &nonce)?);
            let wait = RESYNC.min(until - self.clock.now());
            match self.heard("restore", wait, |news| news.resynced == Some(nonce)).await {
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
            None => Kind::Restored,
            Some(checkpoint) => {
                // ExecTable that start from now on can tell; those that run see a new `/proc/gvisor/checkpoint`.
                env.insert(FORKED_FROM.to_owned(), checkpoint.clone());
                Kind::Forked
            }
        };
        self.send(&with_json(kind, &agent::Restored { env })?);
        self.ping();
        Ok(())
    }

    /// Writes a frame: an agent that was stopped or restored wakes only then.
    pub fn ping(&self) -> u64 {
        let ping = OWN + 1 + self.pings.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.send(&Frame::new(Kind::Ping).sequence(ping));
        ping
    }

    /// The sandbox is over a limit: the agent ends what takes most. An old one does not know how, and does nothing.
    pub fn relieve(&self, used: u64, why: String) {
        if let Ok(frame) = with_json(Kind::Relieve, &agent::Relieve { used, why }) {
            self.send(&frame);
        }
    }

    /// Waits until the agent has answered a ping.
    pub async fn ponged(&self, ping: u64, limit: Duration) -> Result<()> {
        self.heard("resume", limit, |news| news.pong >= ping).await
    }

    async fn heard(&self, what: &'static str, limit: Duration, is_so: impl Fn(&AgentStatus) -> bool) -> Result<()> {
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
        // The writer is gone only when the container is; its end is told elsewhere.
        let _ = self.control.send(Control::Bytes(bytes));
    }
}

/// What may come from the API. Everything else is the runtime's own to say.
pub fn is_allowed(frame: &Frame) -> bool {
    let kind = matches!(
        frame.kind,
        Kind::Exec
            | Kind::Stdin
            | Kind::StdinEof
            | Kind::Ack
            | Kind::Credit
            | Kind::Replay
            | Kind::Signal
            | Kind::Resize
            | Kind::List
    ) || (frame.kind == Kind::Ping && frame.sequence < OWN);
    kind && frame.payload.len() <= MAX_PAYLOAD
}

/// What makes an agent that of a sandbox; refused when it is too much for a frame.
pub fn assignment(start: &Start) -> Result<Frame> {
    let assign = agent::Assign {
        marker_inverted: hex(&start.marker.map(|byte| !byte)),
        env: start.env.clone(),
        cwd: start.cwd.clone(),
        hostname: None,
        pids: start.limits.pids,
        files: start.limits.files,
    };
    with_json(Kind::Assign, &assign)
}

fn with_json(kind: Kind, payload: &impl Serialize) -> Result<Frame> {
    let refused = |message: String| Error::Refused { reason: Reason::TooLarge, message };
    let payload = serde_json::to_vec(payload).map_err(|error| refused(error.to_string()))?;
    if payload.len() > MAX_PAYLOAD {
        return Err(refused("the environment of the sandbox is too large".to_owned()));
    }
    Ok(Frame::new(kind).payload(payload))
}

fn resync_bytes(marker: &Marker, nonce: &[u8; 16]) -> Result<Vec<u8>> {
    let mut bytes = [*marker, *marker].concat();
    with_json(Kind::Resync, &agent::Resync { nonce: hex(nonce) })?.encode(&mut bytes);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_runtime_assigns_resyncs_and_attaches() {
        let refused: Vec<_> = Kind::ALL.into_iter().filter(|kind| !is_allowed(&Frame::new(*kind))).collect();
        let own =
            [Kind::Assign, Kind::Attached, Kind::Detached, Kind::Resync, Kind::Restored, Kind::Forked, Kind::Relieve];
        assert_eq!(refused.iter().filter(|kind| !kind.is_from_agent()).copied().collect::<Vec<_>>(), own);
        assert!(Kind::ALL.into_iter().filter(|kind| kind.is_from_agent()).all(|kind| refused.contains(&kind)));
    }

    #[test]
    fn what_would_not_fit_into_a_frame_is_not_allowed() {
        assert!(!is_allowed(&Frame::new(Kind::Stdin).payload(vec![0; MAX_PAYLOAD + 1])));
        assert!(!is_allowed(&Frame::new(Kind::Ping).sequence(OWN)));
    }

    #[test]
    fn a_resync_never_carries_marker_or_nonce_as_they_are() {
        let (marker, nonce) = ([7; 16], [9; 16]);
        let bytes = resync_bytes(&marker, &nonce).unwrap();
        assert_eq!(bytes[..32], [7; 32]);
        assert!(!bytes[32..].windows(16).any(|window| window == marker || window == nonce));
    }
}
