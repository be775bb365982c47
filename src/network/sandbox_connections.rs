//! The connections of one container: takes the agent's frames of the network, and never waits for any connection.
//!
//! Each connection and each query is a task of its own that sends its own frames; only those tasks wait. So one that is
//! stuck holds back nothing else, and the reader of the agent's frames is never held up.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use baton_protocol::{
    agent::{Dial, ListeningPorts, MAX_CONNECTIONS, NetworkAccess, PORT_CONNECTION},
    frame::{Frame, FrameKind},
    id::SandboxId,
    sandbox_network::{Egress, host_name},
};
use tokio::{
    io::DuplexStream,
    sync::{Semaphore, mpsc, oneshot, watch},
};
use tokio_util::task::TaskTracker;

use super::{
    NetworkContext, NetworkView, PortError,
    credit_pool::{CreditPool, CreditWindow},
    egress_connection::{DialTarget, EgressConnection},
    egress_rules::{Destination, EgressPolicy},
    fate::Fate,
    name_query::NameQuery,
    port_connection,
    relay::{AgentEnd, FromProgram},
    traffic::{SandboxTraffic, Traffic},
};
use crate::clock::Moment;

/// Frames of the network that wait for the agent.
const TO_AGENT: usize = 32;
/// Frames of the agent that wait for the table, which never waits itself.
const FROM_AGENT: usize = 1024;
const REQUESTS: usize = 64;
/// Queries of a sandbox at once; further ones are not answered, and programs ask again.
const MAX_QUERIES: usize = 256;
/// Time for an answer of the agent.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for the agent to reset the connections of a sandbox that leaves.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// The frames of the network, between the channel of a container and its connections.
#[derive(Debug)]
pub struct NetworkLink {
    pub to_agent: mpsc::Sender<Frame>,
    pub from_agent: mpsc::Receiver<Frame>,
}

impl NetworkLink {
    /// A link, and the channel's ends of it.
    pub fn new() -> (Self, mpsc::Receiver<Frame>, mpsc::Sender<Frame>) {
        let (to_agent, frames) = mpsc::channel(TO_AGENT);
        let (sink, from_agent) = mpsc::channel(FROM_AGENT);
        (Self { to_agent, from_agent }, frames, sink)
    }
}

/// What is asked of the table.
enum Request {
    Connect {
        port: u16,
        answer: oneshot::Sender<Result<DuplexStream, PortError>>,
    },
    List {
        answer: oneshot::Sender<Vec<u16>>,
    },
    /// Reset the connections to the outside; answered when the agent has done it.
    Leave {
        answer: oneshot::Sender<Vec<u16>>,
    },
}

/// The connections of one container. Dropping this resets all of them.
pub struct SandboxConnections {
    requests: mpsc::Sender<Request>,
    policy: watch::Sender<Egress>,
    traffic: Arc<SandboxTraffic>,
    is_leaving: Arc<AtomicBool>,
}

impl fmt::Debug for SandboxConnections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SandboxConnections").field("policy", &*self.policy.borrow()).finish_non_exhaustive()
    }
}

/// The frame that tells an agent whether programs may reach out.
pub fn access(egress: bool) -> Frame {
    let payload = serde_json::to_vec(&NetworkAccess { egress }).unwrap_or_default();
    Frame::new(FrameKind::Network).payload(payload)
}

impl SandboxConnections {
    /// Serves the link until the container ends.
    pub fn start(
        id: &SandboxId,
        link: NetworkLink,
        egress: &Egress,
        context: &Arc<NetworkContext>,
        tasks: &TaskTracker,
    ) -> Self {
        let (requests, received) = mpsc::channel(REQUESTS);
        let (policy, policy_seen) = watch::channel(egress.clone());
        let traffic = SandboxTraffic::new(context.clock.clone(), context.metrics.clone(), context.settings.limits);
        let (ended, ends) = mpsc::unbounded_channel();
        let is_leaving = Arc::new(AtomicBool::new(false));
        let shared = Shared {
            id: id.clone(),
            context: context.clone(),
            tasks: tasks.clone(),
            to_agent: link.to_agent,
            pool: CreditPool::default(),
            traffic: traffic.clone(),
            ended,
        };
        let table = Table {
            shared,
            policy: policy_seen,
            opens: Opens::new(context),
            open: BTreeMap::new(),
            queries: Arc::new(Semaphore::new(MAX_QUERIES)),
            listings: Vec::new(),
            next_port: 0,
            is_leaving: is_leaving.clone(),
        };
        tasks.spawn(table.run(link.from_agent, received, ends));
        Self { requests, policy, traffic, is_leaving }
    }

    /// Applies a policy to new connections, and ends those that it does not allow any more.
    pub fn set_egress(&self, egress: &Egress) {
        self.policy.send_if_modified(|current| {
            let is_other = current != egress;
            current.clone_from(egress);
            is_other
        });
    }

    /// Resets the connections to the outside, and refuses new ones until [`Self::stay`]. In a restored sandbox the
    /// kernel would end them, and a program would take the part of an answer that it has for the whole.
    pub async fn leave(&self) {
        self.is_leaving.store(true, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let asked = self.ask(Request::Leave { answer }, answered);
        if !matches!(self.traffic.clock().timeout(LEAVE_TIMEOUT, asked).await, Ok(Ok(_))) {
            tracing::debug!("the agent did not say that it has reset the connections");
        }
    }

    /// Takes new connections again.
    pub fn stay(&self) {
        self.is_leaving.store(false, Ordering::Relaxed);
    }

    pub async fn connect(&self, port: u16) -> Result<DuplexStream, PortError> {
        let (answer, answered) = oneshot::channel();
        self.ask(Request::Connect { port, answer }, answered).await?
    }

    pub async fn view(&self) -> Result<NetworkView, PortError> {
        let (answer, answered) = oneshot::channel();
        let listening = self.ask(Request::List { answer }, answered).await?;
        Ok(NetworkView { listening, denied: self.traffic.denied() })
    }

    async fn ask<T>(&self, request: Request, answered: oneshot::Receiver<T>) -> Result<T, PortError> {
        let asked = async {
            self.requests.send(request).await.map_err(|_| PortError::NotRunning)?;
            answered.await.map_err(|_| PortError::NotRunning)
        };
        self.traffic.clock().timeout(ANSWER_TIMEOUT, asked).await.map_err(|_| PortError::TimedOut)?
    }
}

/// Limits how many connections are opened per second.
struct Opens {
    rate: Option<(f64, f64)>,
    tokens: f64,
    refilled_at: Moment,
}

impl Opens {
    fn new(context: &NetworkContext) -> Self {
        let rate = context.settings.limits.opens.map(|rate| {
            let count = f64::from(rate.count);
            (count, count / rate.per.as_secs_f64())
        });
        Self { rate, tokens: rate.map_or(0.0, |(burst, _)| burst), refilled_at: context.clock.now() }
    }

    fn take(&mut self, now: Moment) -> bool {
        let Some((burst, per_second)) = self.rate else { return true };
        self.tokens = burst.min(self.tokens + (now - self.refilled_at).as_secs_f64() * per_second);
        self.refilled_at = now;
        let has_one = self.tokens >= 1.0;
        if has_one {
            self.tokens -= 1.0;
        }
        has_one
    }
}

/// What the tasks of a table share.
struct Shared {
    id: SandboxId,
    context: Arc<NetworkContext>,
    tasks: TaskTracker,
    to_agent: mpsc::Sender<Frame>,
    pool: CreditPool,
    traffic: Arc<SandboxTraffic>,
    /// The numbers of connections that are over.
    ended: mpsc::UnboundedSender<u32>,
}

/// The table's end of one connection.
struct Entry {
    received: mpsc::UnboundedSender<FromProgram>,
    credit: watch::Sender<u64>,
    /// The offset up to which the agent may send, and up to which it has sent.
    granted: Arc<AtomicU64>,
    arrived: u64,
    /// `None`: a connection to a port inside.
    target: Option<Arc<DialTarget>>,
    fate: watch::Sender<Fate>,
}

struct Table {
    shared: Shared,
    policy: watch::Receiver<Egress>,
    opens: Opens,
    open: BTreeMap<u32, Entry>,
    queries: Arc<Semaphore>,
    /// Who waits for the list of ports.
    listings: Vec<oneshot::Sender<Vec<u16>>>,
    next_port: u32,
    is_leaving: Arc<AtomicBool>,
}

impl Table {
    async fn run(
        mut self,
        mut frames: mpsc::Receiver<Frame>,
        mut requests: mpsc::Receiver<Request>,
        mut ends: mpsc::UnboundedReceiver<u32>,
    ) {
        loop {
            tokio::select! {
                frame = frames.recv() => match frame {
                    Some(frame) => self.handle(frame),
                    // The container has ended: dropping the entries ends their tasks.
                    None => return,
                },
                Some(number) = ends.recv() => drop(self.open.remove(&number)),
                request = requests.recv() => match request {
                    Some(request) => self.answer(request),
                    None => return,
                },
                Ok(()) = self.policy.changed() => self.apply_policy(),
            }
        }
    }

    fn handle(&mut self, frame: Frame) {
        #[expect(clippy::wildcard_enum_match_arm, reason = "the reader passes on only frames of the network")]
        match frame.kind {
            FrameKind::Resolve => self.resolve(&frame),
            FrameKind::Dial => self.dial(&frame),
            FrameKind::Accepted | FrameKind::ConnectionInputCredit => {
                if let Some(entry) = self.open.get(&frame.exec) {
                    entry
                        .credit
                        .send_if_modified(|credit| std::mem::replace(credit, frame.offset.max(*credit)) < frame.offset);
                }
            }
            FrameKind::ConnectionOutput => self.output(frame),
            FrameKind::ConnectionOutputEof => {
                if let Some(entry) = self.open.get(&frame.exec) {
                    let _ = entry.received.send(FromProgram::Eof);
                }
            }
            FrameKind::ConnectionClosed => {
                if let Some(entry) = self.open.remove(&frame.exec) {
                    entry.fate.send_replace(Fate::ClosedInside);
                }
            }
            FrameKind::Ports => {
                let list = serde_json::from_slice::<ListeningPorts>(&frame.payload).unwrap_or_default();
                for listing in self.listings.drain(..) {
                    let _ = listing.send(list.ports.clone());
                }
            }
            kind => {
                tracing::debug!(sandbox = %self.shared.id, ?kind, "the agent sent a frame that is not of the network")
            }
        }
    }

    fn resolve(&self, frame: &Frame) {
        let Ok(permit) = self.queries.clone().try_acquire_owned() else { return };
        let name = str::from_utf8(&frame.payload).ok().and_then(host_name);
        let query = NameQuery {
            id: self.shared.id.clone(),
            number: frame.exec,
            context: self.shared.context.clone(),
            policy: self.policy(),
            traffic: self.shared.traffic.clone(),
        };
        let to_agent = self.shared.to_agent.clone();
        self.shared.tasks.spawn(async move {
            let answer = query.answer(name).await;
            let _ = to_agent.send(answer).await;
            drop(permit);
        });
    }

    fn dial(&mut self, frame: &Frame) {
        let Ok(dial) = serde_json::from_slice::<Dial>(&frame.payload) else { return };
        let is_ours = frame.exec & PORT_CONNECTION != 0;
        // An agent that keeps to its bounds never does this.
        if is_ours || self.open.contains_key(&frame.exec) || self.open.len() >= MAX_CONNECTIONS {
            return;
        }
        let destination = match dial.name.as_deref() {
            Some(name) => host_name(name).map(Destination::Name),
            None => Some(Destination::Address(dial.address.into())),
        };
        let Some(destination) = destination else { return };
        let target = Arc::new(DialTarget::new(destination, dial.port));
        let refused = self.refused();
        let traffic = Traffic::new(&self.shared.context.clock, Some(self.shared.traffic.clone()));
        let (end, fate) = self.add(frame.exec, frame.offset, Some(target.clone()), traffic);
        let connection = EgressConnection {
            id: self.shared.id.clone(),
            context: self.shared.context.clone(),
            policy: self.policy.clone(),
            sandbox: self.shared.traffic.clone(),
            target,
            fate,
        };
        let ended = self.shared.ended.clone();
        self.shared.tasks.spawn(async move {
            let number = end.number;
            connection.run(end, refused).await;
            let _ = ended.send(number);
        });
    }

    /// Why no connection may be opened now, whatever the destination.
    fn refused(&mut self) -> Option<&'static str> {
        if self.is_leaving.load(Ordering::Relaxed) {
            return Some("the sandbox leaves this instance");
        }
        let has_room = self.open.len() < self.shared.context.settings.limits.connections as usize;
        let may_open =
            has_room && !self.shared.traffic.is_used_up() && self.opens.take(self.shared.context.clock.now());
        (!may_open).then_some("too many connections")
    }

    fn leave(&mut self, answer: oneshot::Sender<Vec<u16>>) {
        // Dropping the entries ends their tasks, which say nothing to the agent.
        let numbers: Vec<u32> =
            self.open.extract_if(.., |_, entry| entry.target.is_some()).map(|(number, _)| number).collect();
        if numbers.is_empty() {
            let _ = answer.send(Vec::new());
            return;
        }
        self.listings.push(answer);
        let to_agent = self.shared.to_agent.clone();
        self.shared.tasks.spawn(async move {
            for number in numbers {
                let _ = to_agent.send(Frame::new(FrameKind::ConnectionReset).exec(number)).await;
            }
            // The agent handles frames in order: its answer comes after the resets.
            let _ = to_agent.send(Frame::new(FrameKind::ListPorts)).await;
        });
    }

    /// Enters a connection into the table. Returns what its task needs.
    fn add(
        &mut self,
        number: u32,
        credit: u64,
        target: Option<Arc<DialTarget>>,
        traffic: Traffic,
    ) -> (AgentEnd, watch::Receiver<Fate>) {
        let (received, receiver) = mpsc::unbounded_channel();
        let (credit, credit_seen) = watch::channel(credit);
        let (fate, fate_seen) = watch::channel(Fate::Open);
        let window = CreditWindow::new(&self.shared.pool);
        let entry = Entry { received, credit, granted: window.watch(), arrived: 0, target, fate };
        self.open.insert(number, entry);
        let frames = self.shared.to_agent.clone();
        (AgentEnd { number, frames, received: receiver, credit: credit_seen, window, traffic }, fate_seen)
    }

    fn output(&mut self, frame: Frame) {
        let Some(entry) = self.open.get_mut(&frame.exec) else { return };
        let end = frame.offset.saturating_add(frame.payload.len() as u64);
        if frame.offset != entry.arrived || end > entry.granted.load(Ordering::Relaxed) {
            // More than it was granted, or bytes are missing: nothing of this connection can be trusted.
            if let Some(entry) = self.open.remove(&frame.exec) {
                entry.fate.send_replace(Fate::Violated);
            }
            return;
        }
        entry.arrived = end;
        let _ = entry.received.send(FromProgram::Bytes(frame.payload));
    }

    fn answer(&mut self, request: Request) {
        match request {
            Request::List { answer } => {
                self.listings.retain(|listing| !listing.is_closed());
                self.listings.push(answer);
                // One answer is for all that wait.
                let to_agent = self.shared.to_agent.clone();
                self.shared.tasks.spawn(async move { to_agent.send(Frame::new(FrameKind::ListPorts)).await });
            }
            Request::Leave { answer } => self.leave(answer),
            Request::Connect { answer, .. } if self.open.len() >= MAX_CONNECTIONS => {
                let _ = answer.send(Err(PortError::Busy));
            }
            Request::Connect { port, answer } => {
                let number = self.next_port | PORT_CONNECTION;
                self.next_port = self.next_port.wrapping_add(1) & !PORT_CONNECTION;
                let traffic = Traffic::new(&self.shared.context.clock, None);
                let (end, fate) = self.add(number, 0, None, traffic);
                let ended = self.shared.ended.clone();
                self.shared.tasks.spawn(async move {
                    port_connection::run(end, port, fate, answer).await;
                    let _ = ended.send(number);
                });
            }
        }
    }

    fn policy(&self) -> EgressPolicy {
        self.shared.context.policy(&self.policy.borrow())
    }

    fn apply_policy(&mut self) {
        let policy = {
            let egress = self.policy.borrow_and_update();
            self.shared.context.policy(&egress)
        };
        for entry in self.open.values() {
            if let Some(target) = &entry.target
                && !target.is_allowed(&policy)
            {
                entry.fate.send_replace(Fate::Revoked);
            }
        }
    }
}
