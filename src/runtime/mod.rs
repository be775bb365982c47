//! The local containers: one half makes and ends them, the other talks to what runs inside.
//!
//! The reconciler sees [`Lifecycle`], the API sees [`AgentLinks`], and neither sees the
//! other's. Between the API and the agent inside a sandbox there are only frames,
//! so that the two halves may later be two processes.

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
pub mod fake;
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
mod sentry;
mod settings;
pub mod spawn;
mod startup;
mod upper;

pub use self::disk_space::FILES as IMAGE_FILES;
pub use self::output_queue::{Behind, LeftOut, OUTPUT_FRAMES, Outlet};
pub use self::rootfs_cache::RootfsGuard;
pub use self::startup::{check_root, predecessor, sign};
pub use cgroup::{Shares, probe as probe_cgroups};
pub use containers::Containers;
pub use settings::{STAGING, Settings, Warm};

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
    /// Its tasks stand, in the middle of a checkpoint.
    Paused,
    /// By the guard. No runsc command answers until the guard lets it go on.
    Fenced,
    /// It ended by itself or was killed; its remains are still here.
    Stopped,
}

impl Container {
    pub const ALL: [Self; 6] = [Self::Absent, Self::Partial, Self::Running, Self::Paused, Self::Fenced, Self::Stopped];
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
    /// What it may have of this machine.
    pub limits: Limits,
    /// Digest of the root file system, which must be here; `None` is the base.
    pub rootfs: Option<Sha256Name>,
    /// SHA-256 of the runsc to use, which must be here; `None` is the usual one.
    pub runsc: Option<Sha256Name>,
    /// It is the copy of another sandbox, made from this checkpoint, and runs for the first time.
    pub forked_from: Option<String>,
    /// Until when it may run.
    pub deadline: Moment,
}

/// A root file system to be made from an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extract {
    /// By which it will be known.
    pub digest: Sha256Name,
    pub from: Source,
}

/// What an archive holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// What changed on the root file system of this digest, which must be here.
    Layer {
        base_digest: Sha256Name,
    },
    Complete,
    /// A base root file system, whose digest tells everything that is in it.
    Base,
}

/// How much a snapshot is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// What changed, where there is a base that others have too.
    Layer,
    Complete,
}

/// A snapshot that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The base of a layer; `None` is a complete archive.
    pub base_digest: Option<Sha256Name>,
    /// How long the sandbox stood still.
    pub paused: Duration,
}

/// What a checkpoint restores with; checked before runsc sees a byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    pub runsc_version: String,
    pub runsc_sha256: Sha256Name,
    pub platform: String,
    pub flags: Vec<String>,
    pub cpu_features: Vec<String>,
    pub oci_sha256: String,
    pub rootfs_digest: Sha256Name,
}

/// By what the caller can do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The sandbox is as it was; it may succeed later.
    #[error("{what} failed: {why}")]
    Failed { what: &'static str, why: String },
    #[error("{what} did not end within {}", humantime::format_duration(*.after))]
    TimedOut { what: &'static str, after: Duration },
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
    /// Writes the file system of a running sandbox into the tar file `archive`, as it is at one moment.
    /// The sandbox goes on as soon as that moment is on disk.
    async fn snapshot(&self, id: &SandboxId, archive: &Path, shape: Shape) -> Result<Taken>;
    /// How many entries such an archive has.
    async fn count_entries(&self, archive: &Path) -> Result<u64>;
    /// The root file system of this digest, if it is here; it stays as long as the value lives.
    fn hold(&self, digest: &Sha256Name) -> Option<RootfsGuard>;
    /// Makes a root file system, unless it is here already. What fails leaves nothing.
    async fn extract(&self, archive: &Path, wanted: &Extract) -> Result<RootfsGuard>;
    /// Whether sandboxes can be started with the runsc of this digest.
    fn has_runtime(&self, sha256: &Sha256Name) -> bool;
    /// From now on they can. The file must be what the digest says.
    async fn add_runtime(&self, file: &Path, sha256: &Sha256Name) -> Result<()>;
    /// Where the usual runsc is.
    fn runtime_file(&self) -> PathBuf;
    /// Writes the base root file system into the `.tar.zst` file `archive`.
    async fn pack(&self, archive: &Path) -> Result<()>;
    /// Ends the container, if any, or its start that is under way, and wipes what is left. Safe to repeat.
    async fn remove(&self, id: &SandboxId) -> Result<()>;
    /// Until when the sandbox may run. Told to the guard, who stops it then.
    async fn extend(&self, id: &SandboxId, deadline: Moment) -> Result<()>;
    /// Has the guard stop it now.
    async fn fence(&self, id: &SandboxId) -> Result<()>;
}

/// Talks to the agent of a running sandbox.
pub trait AgentLinks: fmt::Debug + Send + Sync + 'static {
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
