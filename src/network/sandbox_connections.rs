//! The connections of one container, as the runtime sees them.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use baton_protocol::{
    agent::NetworkAccess,
    frame::{Frame, FrameKind},
    id::SandboxId,
    sandbox_network::Egress,
};
use tokio::{
    io::DuplexStream,
    sync::{mpsc, oneshot, watch},
};
use tokio_util::task::TaskTracker;

use super::{
    NetworkContext, NetworkView, PortError,
    connection_registry::{ConnectionRegistry, Shared},
    credit_pool::CreditPool,
    traffic::SandboxTraffic,
};

/// Frames of the network that wait for the agent.
const TO_AGENT: usize = 32;
/// Frames of the agent that wait for the registry, which never waits itself.
const FROM_AGENT: usize = 1024;
const REQUESTS: usize = 64;
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

/// What is asked of the registry.
pub(super) enum NetworkRequest {
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
    requests: mpsc::Sender<NetworkRequest>,
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
        let registry = ConnectionRegistry::new(shared, policy_seen, is_leaving.clone());
        tasks.spawn(registry.run(link.from_agent, received, ends));
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
        let asked = self.ask(NetworkRequest::Leave { answer }, answered);
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
        self.ask(NetworkRequest::Connect { port, answer }, answered).await?
    }

    pub async fn view(&self) -> Result<NetworkView, PortError> {
        let (answer, answered) = oneshot::channel();
        let listening = self.ask(NetworkRequest::List { answer }, answered).await?;
        Ok(NetworkView { listening, denied: self.traffic.denied() })
    }

    async fn ask<T>(&self, request: NetworkRequest, answered: oneshot::Receiver<T>) -> Result<T, PortError> {
        let asked = async {
            self.requests.send(request).await.map_err(|_| PortError::NotRunning)?;
            answered.await.map_err(|_| PortError::NotRunning)
        };
        self.traffic.clock().timeout(ANSWER_TIMEOUT, asked).await.map_err(|_| PortError::TimedOut)?
    }
}
