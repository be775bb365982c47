//! `lock.json`: the lease and the committed head in one register, written by compare-and-set only.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::id::{CheckpointId, InstanceId, Nonce, SandboxId};

pub const VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    pub v: u32,
    pub sandbox_id: SandboxId,
    /// One more at every acquisition, never reset.
    pub epoch: u64,
    /// An owner has written this before the first start: no head and `ran` means the state was lost.
    #[serde(default)]
    pub ran: bool,
    /// It ran on after its head: whoever restores the head goes back in time.
    #[serde(default)]
    pub behind: bool,
    /// `None` is free.
    pub lease: Option<Lease>,
    #[serde(default)]
    pub waiter: Option<Waiter>,
    #[serde(default)]
    pub head: Option<Head>,
    #[serde(default)]
    pub prev_head: Option<Head>,
    #[serde(default)]
    pub forked_from: Option<CheckpointId>,
    #[serde(default)]
    pub purging: bool,
    #[serde(default)]
    pub purged: bool,
    /// When; for whoever removes the tombstone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub purged_at: Option<String>,
    /// Keys of a later version, kept as they are.
    #[serde(flatten)]
    pub unknown: Map<String, Value>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    pub owner: InstanceId,
    /// Changes with every write of the owner.
    pub renew: u64,
    /// Fresh for every attempt at a write of the owner.
    pub op: Nonce,
    pub hold_ms: u64,
    pub takeover_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiter {
    pub instance: InstanceId,
    pub op: Nonce,
    pub beat: u64,
    pub ttl_ms: u64,
}

/// The committed checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    pub seq: u64,
    pub epoch: u64,
    pub checkpoint_id: CheckpointId,
    /// `None` where checkpoints lie under a mount.
    pub bucket: Option<String>,
    pub manifest_sha256: String,
}

impl Lock {
    /// As create writes it: free, never run.
    pub fn new(sandbox_id: SandboxId) -> Self {
        Self {
            v: VERSION,
            sandbox_id,
            epoch: 0,
            ran: false,
            behind: false,
            lease: None,
            waiter: None,
            head: None,
            prev_head: None,
            forked_from: None,
            purging: false,
            purged: false,
            purged_at: None,
            unknown: Map::new(),
        }
    }
}
