//! `manifest.json` of checkpoints and snapshots: what the other files are, written last.

use serde::{Deserialize, Serialize};

use crate::id::{CheckpointId, Nonce, SandboxId};

pub const VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    pub name: String,
    pub size: u64,
    pub sha256: String,
    pub crc32c: u32,
}

/// Of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    pub version: u32,
    pub checkpoint_id: CheckpointId,
    pub sandbox_id: SandboxId,
    pub epoch: u64,
    pub seq: u64,
    pub parent: Option<CheckpointId>,
    pub files: Vec<File>,
    pub runsc: Runsc,
    pub cpu_features: Vec<String>,
    /// SHA-256 of the OCI spec with everything that may differ left out.
    pub oci_sha256: String,
    /// The marker the agent looks for, in hex.
    pub agent_marker: String,
    pub created: String,
    pub rootfs: Rootfs,
    /// The file system once more, for those who cannot use the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<Layer>,
}

impl Checkpoint {
    /// Bytes of all its files; what a manifest says may be more than there can be.
    pub fn size(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.size))
    }
}

/// What `files.tar` of a checkpoint is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// The root file system it lies on; `None` is a complete one.
    #[serde(default)]
    pub base_digest: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runsc {
    pub version: String,
    pub platform: String,
    pub flags: Vec<String>,
    #[serde(default)]
    pub sha256: Option<String>,
}

/// Where the root file system can be had by an instance that never saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rootfs {
    pub digest: String,
    pub base_digest: String,
    #[serde(default)]
    pub archive: Option<Archive>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Archive {
    pub bucket: Option<String>,
    pub path: String,
    pub sha256: String,
}

/// Of a filesystem snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub version: u32,
    pub kind: SnapshotKind,
    /// The root file system a layer lies on.
    #[serde(default)]
    pub base_digest: Option<String>,
    pub size: u64,
    pub sha256: String,
    pub entries: u64,
    /// Of the request that made it.
    pub nonce: Nonce,
    pub created: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    Layer,
    Rootfs,
}
