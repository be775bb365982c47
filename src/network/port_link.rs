//! SandboxConnections to ports inside running sandboxes, as the API sees them.

use std::fmt;

use async_trait::async_trait;
use baton_protocol::id::SandboxId;
use tokio::io::DuplexStream;

/// How many bytes a [`PortStream`] buffers in each direction.
pub const PORT_BUFFER: usize = 64 << 10;

/// The bytes of a connection to a port inside. End of file passes in each direction by itself. If the connection
/// breaks, reading fails or ends early and writing fails; dropping it resets the connection.
pub type PortStream = DuplexStream;

/// Why there is no connection to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PortError {
    #[error("the sandbox does not run on this instance")]
    NotRunning,
    #[error("nothing listens on this port in the sandbox")]
    Refused,
    #[error("the sandbox has too many connections")]
    Busy,
    #[error("the sandbox was started by a version without this function; a new sandbox has it")]
    Unsupported,
    #[error("the sandbox does not answer")]
    TimedOut,
}

/// The network of a running sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NetworkView {
    /// The TCP ports on which programs inside listen, in ascending order.
    pub listening: Vec<u16>,
    /// How many connections and names were refused since it runs on this instance.
    pub denied: u64,
}

/// Opens connections to ports inside the sandboxes that run on this instance.
#[async_trait]
pub trait PortLinks: fmt::Debug + Send + Sync + 'static {
    /// Connects to a port of the sandbox's loopback.
    async fn connect(&self, id: &SandboxId, port: u16) -> Result<PortStream, PortError>;
    /// What the network of the sandbox looks like at this moment.
    async fn view(&self, id: &SandboxId) -> Result<NetworkView, PortError>;
}
