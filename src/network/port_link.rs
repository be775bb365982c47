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

/// Opens connections to ports inside the sandboxes that run on this instance.
#[async_trait]
pub trait PortLinks: fmt::Debug + Send + Sync + 'static {
    /// Connects to a port of the sandbox's loopback.
    async fn connect(&self, id: &SandboxId, port: u16) -> Result<PortStream, PortError>;
    /// The TCP ports on which programs inside listen, in ascending order.
    async fn listening(&self, id: &SandboxId) -> Result<Vec<u16>, PortError>;
}
