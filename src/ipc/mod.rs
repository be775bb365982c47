//! The two halves of an instance as two processes: `baton api` serves clients and needs no privileges,
//! `baton reconciler` runs containers. They share the storage and one socket.
//!
//! ```text
//!   api                                 reconciler
//!   bus    ──attached, woken, wanted──▶ bus        one connection, as long as both live
//!   bus    ◀──events, holds, lives───── bus
//!   link   ◀─────────frames───────────▶ link       one connection per link to an agent
//!   memory ──────────calls────────────▶ memory     one connection per call
//!   ports  ◀─────────bytes────────────▶ ports      one connection per connection to a port
//! ```
//!
//! The reconciler half owns the instance's id, its containers, and the records of sandboxes that end with it. When
//! the API half dies, none of that is lost: clients reconnect. When the reconciler half dies, its containers die with
//! it, and the lease decides what happens next.

mod ipc_client;
mod ipc_frames;
mod ipc_ports;
mod ipc_server;
mod ipc_socket;
mod remote_store;

use std::time::Duration;

use baton_protocol::id::{InstanceId, SandboxId};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::net::UnixStream;
use tokio_util::codec::{Framed, LengthDelimitedCodec};

pub use self::ipc_client::{IpcClient, connect};
pub use self::ipc_server::IpcServer;
pub use self::ipc_socket::listen;

use crate::{
    bus::{BusMessage, Evictability, LifecycleEvent},
    config::LeaseTimes,
    runtime::Shares,
};

/// Halves of different builds refuse each other: both come from one image.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "/5");

/// Maximum message size: a small object in base64, and its envelope.
const MAX_MESSAGE: usize = 2 << 20;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the socket {path} {why}")]
    Socket { path: String, why: String },
    #[error("the other half has version {theirs}, this one has {VERSION}: start both from the same image")]
    Version { theirs: String },
    #[error("the connection to the other half broke: {0}")]
    Broken(String),
}

/// The first message of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Handshake {
    Board {
        version: String,
    },
    /// Carries the frames of a link that was opened on the bus connection.
    Link {
        number: u64,
    },
    Memory(remote_store::Call),
    Port(ipc_ports::PortCall),
}

/// A message from the API half.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FromApi {
    Told(BusMessage),
    /// Sent in the order of opening, so that the newest link wins.
    Open {
        id: SandboxId,
        number: u64,
    },
}

/// A message from the reconciler half.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FromReconciler {
    Hello(IpcHello),
    /// Everything held when the connection was opened has been sent.
    Ready,
    Held {
        id: SandboxId,
        held: bool,
    },
    /// The evictability of a held sandbox. Both halves share one machine's clock.
    Tenure {
        id: SandboxId,
        evictability: Evictability,
    },
    /// A link can be opened to its container; a different number means a different container.
    Live {
        id: SandboxId,
        life: Option<u64>,
    },
    Posted {
        id: SandboxId,
        passing: LifecycleEvent,
    },
    Draining,
}

/// What the API half asks for once, when it connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpcHello {
    version: String,
    pub instance: InstanceId,
    pub runsc_version: String,
    pub cgroups: Result<Shares, String>,
    /// Times of the leases that the API writes for new sandboxes: the reconciler, which holds them, sets these.
    pub hold: Duration,
    pub takeover: Duration,
}

impl IpcHello {
    pub fn new(
        instance: InstanceId,
        runsc_version: String,
        cgroups: Result<Shares, String>,
        LeaseTimes { hold, takeover, .. }: LeaseTimes,
    ) -> Self {
        Self { version: VERSION.to_owned(), instance, runsc_version, cgroups, hold, takeover }
    }
}

type IpcStream = Framed<UnixStream, LengthDelimitedCodec>;

fn wire(stream: UnixStream) -> IpcStream {
    let codec = LengthDelimitedCodec::builder().max_frame_length(MAX_MESSAGE).little_endian().new_codec();
    Framed::new(stream, codec)
}

fn packed(message: &impl Serialize) -> std::io::Result<bytes::Bytes> {
    serde_json::to_vec(message).map(Into::into).map_err(std::io::Error::other)
}

fn unpacked<T: DeserializeOwned>(bytes: std::io::Result<bytes::BytesMut>) -> std::io::Result<T> {
    serde_json::from_slice(&bytes?).map_err(std::io::Error::other)
}

#[cfg(test)]
mod tests;
