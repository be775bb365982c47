//! Local containers: one half manages their lifecycle, the other talks to the agents inside them.
//!
//! The reconciler uses [`Lifecycle`], the API uses [`AgentLinks`], and neither sees the other's trait. The API
//! and the agent inside a sandbox exchange only frames, so the two halves can run as two processes.

pub mod archive;
mod argv;
mod bundle;
mod cache;
mod cgroup;
mod channel;
mod container;
mod container_actions;
mod containers;
mod disk_space;
mod frame_reader;
mod frame_writer;
mod guard_link;
mod launch;
mod memory_watch;
mod output_queue;
mod pool;
mod rootfs_cache;
pub mod rootfs_digest;
mod runsc;
mod runtime_settings;
mod sentry;
pub mod spawner;
mod startup;
mod upper;

pub use self::disk_space::FILES as IMAGE_FILES;
pub use self::output_queue::{Behind, LeftOut, OUTPUT_FRAMES, OutputQueue};
pub use self::rootfs_cache::RootfsGuard;
pub use self::startup::{check_root, predecessor, sign};
pub use bundle::Layout;
pub use cgroup::{Shares, probe as probe_cgroups};
pub use channel::{LINK_FRAMES, is_allowed};
pub use containers::Containers;
pub use runtime_settings::{RuntimeSettings, STAGING, WarmSettings};

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use async_trait::async_trait;
use baton_protocol::{
    frame::{Frame, Marker},
    id::{SandboxId, Sha256Name},
    limits::Limits,
    reason::Reason,
    sandbox_network::Egress,
};
use tokio::sync::{mpsc, watch};

use crate::clock::Moment;

/// The local state of a sandbox's container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Container {
    Absent,
    /// Left over from an interrupted action: a bundle or a mount, no live container.
    Partial,
    Running,
    /// Its tasks are paused for a checkpoint.
    Paused,
    /// Stopped by the guard. runsc commands get no answer until the guard resumes it.
    Fenced,
    /// It exited or was killed; its files and mounts are still here.
    Stopped,
}

impl Container {
    pub const ALL: [Self; 6] = [Self::Absent, Self::Partial, Self::Running, Self::Paused, Self::Fenced, Self::Stopped];
}

/// What the runtime observes of a sandbox at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerView {
    pub container: Container,
    /// Commands running inside, as last reported by the agent.
    pub running_execs: u32,
}

impl ContainerView {
    pub const NOTHING: ContainerView = ContainerView { container: Container::Absent, running_execs: 0 };
}

/// How to start a sandbox.
#[derive(Clone, Debug)]
pub struct StartSpec {
    /// Fixed for the sandbox's lifetime.
    pub marker: Marker,
    pub env: BTreeMap<String, String>,
    pub cwd: Option<String>,
    /// The resources of this machine it may use.
    pub limits: Limits,
    /// Digest of the root file system, which must be present locally; `None` selects the base.
    pub rootfs: Option<Sha256Name>,
    /// SHA-256 of the runsc binary to use, which must be present locally; `None` selects the default one.
    pub runsc: Option<Sha256Name>,
    /// The layout of the container; a checkpoint restores only into the one it was made with.
    pub layout: Layout,
    /// Where programs inside may connect to.
    pub egress: Egress,
    /// Set when this is the first run of a fork: the checkpoint of the other sandbox it was copied from.
    pub forked_from: Option<String>,
    /// The sandbox may run until this moment.
    pub deadline: Moment,
}

/// A root file system to make from an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extract {
    /// Identifies the resulting root file system.
    pub digest: Sha256Name,
    pub from: ArchiveSource,
}

/// What an archive holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArchiveSource {
    /// The changes on top of the root file system with this digest, which must be present locally.
    Layer {
        base_digest: Sha256Name,
    },
    Complete,
    /// A base root file system; its digest covers its entire content.
    Base,
}

/// How much a snapshot contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Only the changes, if the base is one that other instances have too.
    Layer,
    Complete,
}

/// A snapshot that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenSnapshot {
    /// The base of a layer; `None` is a complete archive.
    pub base_digest: Option<Sha256Name>,
    /// How long the sandbox was paused.
    pub paused: Duration,
}

/// What a checkpoint needs in order to be restored; checked before runsc reads any of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    pub runsc_version: String,
    pub runsc_sha256: Sha256Name,
    pub platform: String,
    pub cpu_features: Vec<String>,
    pub rootfs_digest: Sha256Name,
}

/// Errors, grouped by what the caller can do about them.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The sandbox is unchanged; a retry may succeed.
    #[error("{what} failed: {why}")]
    Failed { what: &'static str, why: String },
    #[error("{what} did not end within {}", humantime::format_duration(*.after))]
    TimedOut { what: &'static str, after: Duration },
    /// Not enough free space on the local disk.
    #[error("no space left for {what}")]
    NoSpace { what: &'static str },
    /// It can never succeed here.
    #[error("{reason}: {message}")]
    Refused { reason: Reason, message: String },
    /// The sandbox has no local container, or the container is in the wrong state for the action.
    #[error("the container is not {0}")]
    NotIn(&'static str),
}

pub type Result<T> = std::result::Result<T, Error>;

/// Manages the container of a sandbox. Actions on one sandbox run one at a time, each with a timeout; a failed
/// action leaves the sandbox unchanged.
#[async_trait]
pub trait Lifecycle: fmt::Debug + Send + Sync + 'static {
    /// Watches the local state of a sandbox, including a container that exits on its own.
    fn watch(&self, id: &SandboxId) -> watch::Receiver<ContainerView>;
    /// Every sandbox with any local state.
    fn local_sandboxes(&self) -> Vec<SandboxId>;
    fn facts(&self) -> Facts;

    /// Starts a sandbox for the first time. Returns once the agent has answered.
    async fn create(&self, id: &SandboxId, start: &StartSpec) -> Result<()>;
    /// Starts a sandbox from the checkpoint in `image`. Returns once the agent has answered a resync.
    async fn restore(&self, id: &SandboxId, start: &StartSpec, image: &Path) -> Result<()>;
    /// Stops input, then pauses the sandbox.
    async fn pause(&self, id: &SandboxId) -> Result<()>;
    /// Resumes a paused or fenced sandbox and wakes the agent with a frame. A fenced sandbox resumes only if its
    /// deadline is in the future.
    async fn resume(&self, id: &SandboxId) -> Result<()>;
    /// Writes memory and files of a paused sandbox into the new directory `image`. The sandbox stays paused.
    async fn checkpoint(&self, id: &SandboxId, image: &Path) -> Result<()>;
    /// Writes a point-in-time copy of a running sandbox's file system into the tar file `archive`. The sandbox
    /// resumes as soon as that state is on disk.
    async fn snapshot(&self, id: &SandboxId, archive: &Path, shape: Shape) -> Result<WrittenSnapshot>;
    /// Counts the entries of such an archive.
    async fn count_entries(&self, archive: &Path) -> Result<u64>;
    /// Returns the root file system with this digest if it is present, and keeps it until the guard is dropped.
    fn acquire_rootfs(&self, digest: &Sha256Name) -> Option<RootfsGuard>;
    /// Makes a root file system unless it is already present. A failure leaves nothing behind.
    async fn extract(&self, archive: &Path, wanted: &Extract) -> Result<RootfsGuard>;
    /// Whether sandboxes can be started with the runsc binary of this digest.
    fn has_runtime(&self, sha256: &Sha256Name) -> bool;
    /// Adds a runsc binary. The file must match the digest.
    async fn add_runtime(&self, file: &Path, sha256: &Sha256Name) -> Result<()>;
    /// Path of the default runsc binary.
    fn runtime_file(&self) -> PathBuf;
    /// Writes the base root file system into the `.tar.zst` file `archive`.
    async fn pack(&self, archive: &Path) -> Result<()>;
    /// Ends the container or its pending start, if any, and deletes everything that is left. Idempotent.
    async fn remove(&self, id: &SandboxId) -> Result<()>;
    /// Sets the deadline until which the sandbox may run. The guard stops it then.
    async fn extend(&self, id: &SandboxId, deadline: Moment) -> Result<()>;
    /// Has the guard stop the sandbox now.
    async fn fence(&self, id: &SandboxId) -> Result<()>;
    /// Sets where programs inside may connect to. Ends the connections that are not allowed any more.
    async fn set_egress(&self, id: &SandboxId, egress: &Egress) -> Result<()>;
    /// Resets the connections of a sandbox that leaves, and refuses new ones until it is resumed. Best effort.
    async fn reset_connections(&self, id: &SandboxId);
}

/// Talks to the agent of a running sandbox.
pub trait AgentLinks: fmt::Debug + Send + Sync + 'static {
    /// Opens the only link to the agent and closes any earlier one. Returns `None` if no container runs here.
    ///
    /// Frames wait while the container is paused or fenced; the link closes when the container ends. Frames
    /// reserved for the runtime (assign, resync) are dropped.
    fn open(&self, id: &SandboxId) -> Option<FrameLink>;
}

/// Frames to and from the agent of one sandbox.
#[derive(Debug)]
pub struct FrameLink {
    pub to_agent: mpsc::Sender<Frame>,
    pub from_agent: mpsc::Receiver<Frame>,
    /// Streams whose output was dropped because the link was not read; a replay delivers it.
    pub behind: Behind,
}
