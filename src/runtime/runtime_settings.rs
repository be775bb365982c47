//! Settings of the runtime, passed once by `main`: the runtime reads no environment variables.

use std::{path::PathBuf, sync::Arc, time::Duration};

use baton_protocol::{id::Sha256Name, limits::Limits};

use super::archive;
use crate::{metrics::Metrics, network::NetworkContext};

/// Paths and limits of the runtime.
#[derive(Clone, Debug)]
pub struct RuntimeSettings {
    /// This executable, which is also the guard and the wrapper that dies with the server.
    pub exe: PathBuf,
    pub runsc: PathBuf,
    /// Sockets, bundles and overlays; used by one server at a time. Must be short, because socket paths are
    /// below it.
    pub state_dir: PathBuf,
    /// The base root file system, never changed while in use.
    pub rootfs: PathBuf,
    pub rootfs_digest: Sha256Name,
    /// Directory for root file systems made from archives, and its maximum size in bytes.
    pub rootfs_cache: PathBuf,
    pub rootfs_cache_size: u64,
    /// Directory for additional runsc binaries, named by digest.
    pub runtimes: PathBuf,
    /// Limits for the content of an archive.
    pub archive_limits: archive::ArchiveLimits,
    /// The static executable that becomes PID 1 of every sandbox.
    pub agent: PathBuf,
    /// How long output is retained for a client that may reconnect.
    pub detach_grace: Duration,
    /// How long the guard waits until every thread of a stopped container has stopped.
    pub confirm: Duration,
    /// CPU features a checkpoint may depend on; `None` means all that this machine has.
    pub cpu_features: Option<Vec<String>>,
    pub warm: WarmSettings,
    pub network: Arc<NetworkContext>,
    pub metrics: Metrics,
}

/// The directory below the state directory for files on their way to and from the store.
pub const STAGING: &str = "staging";

/// Containers started in advance.
#[derive(Clone, Debug, Default)]
pub struct WarmSettings {
    /// How many to keep; zero disables them.
    pub count: usize,
    /// The maximum number of sandboxes on this instance.
    pub room: usize,
    /// The limits of a sandbox that requests none.
    pub limits: Limits,
}

impl RuntimeSettings {
    /// runsc's own directory.
    pub fn root(&self) -> PathBuf {
        self.state_dir.join("runsc")
    }

    /// Directory for files on their way to and from the store.
    pub fn staging(&self) -> PathBuf {
        self.state_dir.join(STAGING)
    }

    /// Directory for the files written by sandboxes, as unlinked files.
    pub fn overlay(&self) -> PathBuf {
        self.state_dir.join("overlay")
    }

    /// The log files of runsc's short commands.
    pub fn logs(&self) -> PathBuf {
        self.state_dir.join("logs")
    }

    /// Path of an added runsc binary with this SHA-256.
    pub fn runtime(&self, sha256: &Sha256Name) -> PathBuf {
        self.runtimes.join(sha256.as_str())
    }

    pub fn bundles(&self) -> PathBuf {
        self.state_dir.join("bundles")
    }

    pub fn bundle(&self, container: &str) -> PathBuf {
        self.bundles().join(container)
    }

    /// The file in which runsc records the state of a container.
    pub fn state_file(&self, container: &str) -> PathBuf {
        self.root().join(format!("{container}_sandbox:{container}.state"))
    }

    /// The control socket of a container's sentry. The state directory's path is short enough for it.
    pub fn control_socket(&self, container: &str) -> PathBuf {
        self.root().join(format!("runsc-{container}.sock"))
    }
}
