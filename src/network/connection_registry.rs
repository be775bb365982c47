//! Every open connection of one container: takes the agent's frames of the network and never waits.
//!
//! Each connection and each query is a task of its own that sends its own frames; only those tasks wait. So one that is
//! stuck holds back nothing else, and the reader of the agent's frames is never held up.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use baton_protocol::{
    agent::{Dial, ListeningPorts, MAX_CONNECTIONS, PORT_CONNECTION},
    frame::{Frame, FrameKind},
    id::SandboxId,
    sandbox_network::{Egress, host_name},
};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio_util::task::TaskTracker;

use super::{
    NetworkContext, PortError,
    credit_pool::{CreditPool, CreditWindow},
    egress_connection::{DialTarget, EgressConnection},
    egress_rules::{Destination, EgressPolicy},
    fate::Fate,
    name_query::NameQuery,
    open_rate::OpenRate,
    port_connection,
    relay::{AgentEnd, FromProgram},
    sandbox_connections::NetworkRequest,
    traffic::{SandboxTraffic, Traffic},
};

/// Queries of a sandbox at once; further ones are not answered, and programs ask again.
const MAX_QUERIES: usize = 256;

/// What the tasks of a registry share.
pub(super) struct Shared {
    pub id: SandboxId,
    pub context: Arc<NetworkContext>,
    pub tasks: TaskTracker,
    pub to_agent: mpsc::Sender<Frame>,
    pub pool: CreditPool,
    pub traffic: Arc<SandboxTraffic>,
    /// The numbers of connections that are over.
    pub ended: mpsc::UnboundedSender<u32>,
}

/// The registry's end of one connection.
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

/// Every open connection of a container.
pub(super) struct ConnectionRegistry {
    shared: Shared,
    policy: watch::Receiver<Egress>,
    opens: OpenRate,
    open: BTreeMap<u32, Entry>,
    queries: Arc<Semaphore>,
    /// Who waits for the list of ports, by the number of the request for it.
    listings: BTreeMap<u64, oneshot::Sender<Vec<u16>>>,
    last_listing: u64,
    next_port: u32,
    /// No new connections to the outside.
    is_leaving: Arc<AtomicBool>,
}

impl ConnectionRegistry {
    pub fn new(shared: Shared, policy: watch::Receiver<Egress>, is_leaving: Arc<AtomicBool>) -> Self {
        Self {
            opens: OpenRate::new(shared.context.settings.limits.opens, shared.context.clock.now()),
            shared,
            policy,
            open: BTreeMap::new(),
            queries: Arc::new(Semaphore::new(MAX_QUERIES)),
            listings: BTreeMap::new(),
            last_listing: 0,
            next_port: 0,
            is_leaving,
        }
    }

    /// Serves frames and requests until the container has ended.
    pub async fn run(
        mut self,
        mut frames: mpsc::Receiver<Frame>,
        mut requests: mpsc::Receiver<NetworkRequest>,
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
                if let Some(listing) = self.listings.remove(&frame.sequence) {
                    let _ = listing.send(list.ports);
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
        let resets = numbers.into_iter().map(|number| Frame::new(FrameKind::ConnectionReset).exec(number));
        // The agent handles frames in order: its answer comes after the resets.
        self.list(answer, resets.collect());
    }

    /// Asks the agent for the list of ports, after it has handled the frames in `before`.
    fn list(&mut self, answer: oneshot::Sender<Vec<u16>>, before: Vec<Frame>) {
        self.listings.retain(|_, listing| !listing.is_closed());
        self.last_listing += 1;
        self.listings.insert(self.last_listing, answer);
        let question = Frame::new(FrameKind::ListPorts).sequence(self.last_listing);
        let to_agent = self.shared.to_agent.clone();
        self.shared.tasks.spawn(async move {
            for frame in before.into_iter().chain([question]) {
                let _ = to_agent.send(frame).await;
            }
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

    fn answer(&mut self, request: NetworkRequest) {
        match request {
            NetworkRequest::List { answer } => self.list(answer, Vec::new()),
            NetworkRequest::Leave { answer } => self.leave(answer),
            NetworkRequest::Connect { answer, .. } if self.open.len() >= MAX_CONNECTIONS => {
                let _ = answer.send(Err(PortError::Busy));
            }
            NetworkRequest::Connect { port, answer } => {
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
