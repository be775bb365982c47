//! What the runtime is told once, by `main`: it reads no environment of its own.

use std::{path::PathBuf, time::Duration};

use baton_protocol::{id::Sha256Name, limits::Limits};

use super::archive;
use crate::metrics::Metrics;

/// Where everything is.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This program itself: it is also the guard and the wrapper that dies with the server.
    pub exe: PathBuf,
    pub runsc: PathBuf,
    /// Sockets, bundles and overlays; one server at a time. A short path: sockets lie below it.
    pub state_dir: PathBuf,
    /// The base root file system, never changed while it is used.
    pub rootfs: PathBuf,
    pub rootfs_digest: Sha256Name,
    /// Where root file systems are kept that were made from archives, and how many bytes of them.
    pub rootfs_cache: PathBuf,
    pub rootfs_cache_size: u64,
    /// Where further runsc binaries are kept, by digest.
    pub runtimes: PathBuf,
    /// What an archive may hold.
    pub archive_limits: archive::Limits,
    /// The static program that becomes PID 1 of every sandbox.
    pub agent: PathBuf,
    /// How long output is held back for a client that may come again.
    pub detach_grace: Duration,
    /// How long the guard waits until every thread of a stopped container stands.
    pub confirm: Duration,
    /// What a checkpoint may ask of a CPU; `None` is all this machine has.
    pub cpu_features: Option<Vec<String>>,
    pub warm: Warm,
    pub metrics: Metrics,
}

/// The directory below the state directory for files on their way to and from the store.
pub const STAGING: &str = "staging";

/// Containers that are ready before anybody asks.
#[derive(Clone, Debug, Default)]
pub struct Warm {
    /// How many; zero is none.
    pub count: usize,
    /// For how many sandboxes there is room in all.
    pub room: usize,
    /// What a sandbox gets that asks for nothing.
    pub limits: Limits,
}

impl Settings {
    /// runsc's own directory.
    pub fn root(&self) -> PathBuf {
        self.state_dir.join("runsc")
    }

    /// Where files are on their way to and from the store.
    pub fn staging(&self) -> PathBuf {
        self.state_dir.join(STAGING)
    }

    /// Where what sandboxes write to their files lies, in unlinked files.
    pub fn overlay(&self) -> PathBuf {
        self.state_dir.join("overlay")
    }

    /// The log files of runsc's short commands.
    pub fn logs(&self) -> PathBuf {
        self.state_dir.join("logs")
    }

    /// A runsc that was added, by the SHA-256 of it.
    pub fn runtime(&self, sha256: &Sha256Name) -> PathBuf {
        self.runtimes.join(sha256.as_str())
    }

    pub fn bundles(&self) -> PathBuf {
        self.state_dir.join("bundles")
    }

    pub fn bundle(&self, container: &str) -> PathBuf {
        self.bundles().join(container)
    }

    /// Where runsc writes down what it knows of a container.
    pub fn state_file(&self, container: &str) -> PathBuf {
        self.root().join(format!("{container}_sandbox:{container}.state"))
    }

    /// Where the sentry of a container listens. The state directory's path is short enough for it.
    pub fn control_socket(&self, container: &str) -> PathBuf {
        self.root().join(format!("runsc-{container}.sock"))
    }
}
