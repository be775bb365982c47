//! Ports of sandboxes without sandboxes: each is a listener of the test on 127.0.0.1.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use baton::network::{NetworkView, PORT_BUFFER, PortBytes, PortError, PortLinks, PortStream};
use baton_protocol::id::SandboxId;
use tokio::net::TcpStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The sandboxes that run, each with its ports and the addresses that stand for them.
#[derive(Debug, Default)]
pub struct FakePorts {
    sandboxes: Mutex<BTreeMap<SandboxId, Ports>>,
    tasks: TaskTracker,
}

#[derive(Debug, Default)]
struct Ports {
    is_running: bool,
    listening: BTreeMap<u16, SocketAddr>,
    /// Cancelled to reset the connections that are open.
    epoch: CancellationToken,
}

impl FakePorts {
    fn sandboxes(&self) -> MutexGuard<'_, BTreeMap<SandboxId, Ports>> {
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the sandbox runs, or does not. Its listeners outlast that, as they outlast a checkpoint; its
    /// connections are reset.
    pub fn set_running(&self, id: &SandboxId, is_running: bool) {
        let mut sandboxes = self.sandboxes();
        let ports = sandboxes.entry(id.clone()).or_default();
        ports.is_running = is_running;
        std::mem::take(&mut ports.epoch).cancel();
    }

    /// A program in the sandbox listens on the port: it is the one behind `address`.
    pub fn listen(&self, id: &SandboxId, port: u16, address: SocketAddr) {
        self.sandboxes().entry(id.clone()).or_default().listening.insert(port, address);
    }

    fn find(&self, id: &SandboxId, port: u16) -> Result<(SocketAddr, CancellationToken), PortError> {
        let sandboxes = self.sandboxes();
        let ports = sandboxes.get(id).filter(|ports| ports.is_running).ok_or(PortError::NotRunning)?;
        let address = ports.listening.get(&port).copied().ok_or(PortError::Refused)?;
        Ok((address, ports.epoch.clone()))
    }
}

#[async_trait]
impl PortLinks for FakePorts {
    async fn connect(&self, id: &SandboxId, port: u16) -> Result<PortStream, PortError> {
        let (address, epoch) = self.find(id, port)?;
        let mut outside = TcpStream::connect(address).await.map_err(|_| PortError::Refused)?;
        let (ours, theirs) = tokio::io::duplex(PORT_BUFFER);
        let mut theirs = PortBytes::new(theirs);
        self.tasks.spawn(async move {
            let is_whole = tokio::select! {
                copied = tokio::io::copy_bidirectional(&mut outside, &mut theirs) => copied.is_ok(),
                () = epoch.cancelled() => false,
            };
            if !is_whole {
                // Either side reset the connection, or the sandbox left: the other one is to notice.
                let _ = outside.set_zero_linger();
            }
        });
        Ok(ours)
    }

    async fn view(&self, id: &SandboxId) -> Result<NetworkView, PortError> {
        let sandboxes = self.sandboxes();
        let ports = sandboxes.get(id).filter(|ports| ports.is_running).ok_or(PortError::NotRunning)?;
        Ok(NetworkView { listening: ports.listening.keys().copied().collect(), denied: 0 })
    }
}
