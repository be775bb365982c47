//! The local containers: one half makes and ends them, the other talks to what runs inside.
//!
//! The reconciler sees [`Lifecycle`], the API sees [`Execs`], and neither sees the
//! other's. Between the API and the agent inside a sandbox there are only frames,
//! so that the two halves may later be two processes.

mod agent;
mod argv;
mod bundle;
mod containers;
pub mod fake;
mod guard_link;
mod life;
mod live;
mod opening;
mod outlet;
mod reader;
pub mod rootfs;
mod runsc;
mod settings;
mod space;
pub mod spawn;
mod writer;

pub use containers::Containers;
pub use opening::{predecessor, sign};
pub use outlet::{Behind, OUTPUT_FRAMES};
pub use settings::Settings;
pub use space::FILES as IMAGE_FILES;

use std::{collections::BTreeMap, fmt, path::Path};

use async_trait::async_trait;
use baton_protocol::{
    frame::{Frame, Marker},
    id::SandboxId,
    reason::Reason,
};
use tokio::sync::{mpsc, watch};

use crate::clock::Moment;

/// What is here of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Container {
    Absent,
    /// Left over from an interrupted action: a bundle or a mount, no live container.
    Partial,
    Running,
    /// By `runsc pause`, in the middle of a checkpoint.
    Paused,
    /// By the guard. No runsc command answers until the guard lets it go on.
    Fenced,
    /// It ended by itself or was killed; its remains are still here.
    Stopped,
}

/// What the runtime knows of a sandbox at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    pub container: Container,
    /// Commands that run inside, as far as the agent has told.
    pub running_execs: u32,
}

impl Seen {
    pub const NOTHING: Seen = Seen { container: Container::Absent, running_execs: 0 };
}

/// How a sandbox is to be started.
#[derive(Clone, Debug)]
pub struct Start {
    /// Fixed for the sandbox's whole life.
    pub marker: Marker,
    pub env: BTreeMap<String, String>,
    pub cwd: Option<String>,
    /// Digest of the root file system; `None` is the base.
    pub rootfs: Option<String>,
    /// Until when it may run.
    pub deadline: Moment,
}

/// What a checkpoint restores with; checked before runsc sees a byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    pub runsc_version: String,
    pub runsc_sha256: String,
    pub platform: String,
    pub flags: Vec<String>,
    pub cpu_features: Vec<String>,
    pub oci_sha256: String,
    pub rootfs_digest: String,
}

/// By what the caller can do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The sandbox is as it was; it may succeed later.
    #[error("{what} failed: {why}")]
    Failed { what: &'static str, why: String },
    #[error("{what} did not end within {}", humantime::format_duration(*.after))]
    TimedOut { what: &'static str, after: std::time::Duration },
    /// Not enough room on the local disk.
    #[error("no space left for {what}")]
    NoSpace { what: &'static str },
    /// It will never succeed here.
    #[error("{reason}: {message}")]
    Refused { reason: Reason, message: String },
    /// Nothing of this sandbox is here, or not in a state for it.
    #[error("the container is not {0}")]
    NotIn(&'static str),
}

pub type Result<T> = std::result::Result<T, Error>;

/// Makes and ends the container of a sandbox. One action at a time per sandbox; every
/// action has a timeout; what fails leaves the sandbox as it was.
#[async_trait]
pub trait Lifecycle: fmt::Debug + Send + Sync + 'static {
    /// What is here now, and whenever it changes: also when a container ends by itself.
    fn watch(&self, id: &SandboxId) -> watch::Receiver<Seen>;
    /// Every sandbox of which anything is here.
    fn here(&self) -> Vec<SandboxId>;
    fn facts(&self) -> Facts;

    /// First start. Done when the agent has answered.
    async fn create(&self, id: &SandboxId, start: &Start) -> Result<()>;
    /// Start from the checkpoint in `image`. Done when the agent has answered a resync.
    async fn restore(&self, id: &SandboxId, start: &Start, image: &Path) -> Result<()>;
    /// Stops input, then the sandbox.
    async fn pause(&self, id: &SandboxId) -> Result<()>;
    /// Lets it go on, whoever stopped it, and wakes the agent with a frame. A fenced one
    /// goes on only with a deadline in the future.
    async fn resume(&self, id: &SandboxId) -> Result<()>;
    /// Writes memory and files of a paused sandbox into the fresh directory `image`. It stays paused.
    async fn checkpoint(&self, id: &SandboxId, image: &Path) -> Result<()>;
    /// Writes what changed in the root file system into the tar file `archive`.
    async fn snapshot(&self, id: &SandboxId, archive: &Path) -> Result<()>;
    /// Ends the container, if any, and wipes what is left. Safe to repeat.
    async fn remove(&self, id: &SandboxId) -> Result<()>;
    /// Until when the sandbox may run. Told to the guard, who stops it then.
    async fn extend(&self, id: &SandboxId, deadline: Moment) -> Result<()>;
    /// Has the guard stop it now.
    async fn fence(&self, id: &SandboxId) -> Result<()>;
}

/// Talks to the agent of a running sandbox.
pub trait Execs: fmt::Debug + Send + Sync + 'static {
    /// Opens the one link to the agent; an earlier one is closed. `None` when nothing runs here.
    ///
    /// While the container is paused or fenced frames wait; when it ends, the link closes.
    /// Frames that only the runtime may send (assign, resync) are dropped.
    fn open(&self, id: &SandboxId) -> Option<Link>;
}

/// Frames to and from the agent of one sandbox.
#[derive(Debug)]
pub struct Link {
    pub to_agent: mpsc::Sender<Frame>,
    pub from_agent: mpsc::Receiver<Frame>,
    /// Streams of which output was left out because it was not read: a replay brings it.
    pub behind: Behind,
}
