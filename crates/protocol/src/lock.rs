//! `lock.json`: the lease and the committed head in one register, written by compare-and-set only.
//!
//! Instances of several versions write the same lock, so unlike a manifest it is never upgraded: keys are only added,
//! each with a default, and an instance preserves the keys that it does not know.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::id::{CheckpointId, InstanceId, Nonce, SandboxId, Sha256Name};

/// The version that this code writes.
pub const VERSION: u32 = 1;

/// The content of `lock.json`. Only compare-and-set replaces it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// The format version: [`VERSION`].
    pub v: u32,
    /// The sandbox, as a check against a misplaced object.
    pub sandbox_id: SandboxId,
    /// Incremented at every acquisition, never reset.
    pub epoch: u64,
    /// The owner sets this before the first start: `ran` without a head means that the state was lost.
    #[serde(default)]
    pub ran: bool,
    /// The sandbox kept running after its head was taken: restoring the head rolls it back.
    #[serde(default)]
    pub behind: bool,
    /// `None` when the lock is free.
    pub lease: Option<Lease>,
    /// The instance that asks the holder for the lease.
    #[serde(default)]
    pub waiter: Option<Waiter>,
    /// The committed checkpoint; `None` before the first commit.
    #[serde(default)]
    pub head: Option<Head>,
    /// The checkpoint committed before `head`, which `baton rollback` returns to.
    #[serde(default)]
    pub prev_head: Option<Head>,
    /// The checkpoint of another sandbox that this one started from.
    #[serde(default)]
    pub forked_from: Option<CheckpointId>,
    /// The stored objects are being erased. The sandbox cannot be started any more.
    #[serde(default)]
    pub purging: bool,
    /// The stored objects are erased: the lock is a tombstone.
    #[serde(default)]
    pub purged: bool,
    /// When it was purged; decides when the tombstone may be removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub purged_at: Option<String>,
    /// Keys of a later version, preserved unchanged.
    #[serde(flatten)]
    pub unknown: Map<String, Value>,
}

/// A timed hold on the lock. Its times are durations, so clocks need not agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The instance that may run the sandbox.
    pub owner: InstanceId,
    /// Changes with every write of the owner.
    pub renew: u64,
    /// Unique to each attempt of the owner to write.
    pub op: Nonce,
    /// How long the owner may run the sandbox after its last write, in milliseconds.
    pub hold_ms: u64,
    /// After how long without a change another instance may take over, in milliseconds. Longer than `hold_ms`.
    pub takeover_ms: u64,
}

/// The entry of an instance that asks for the lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiter {
    /// The instance that asks.
    pub instance: InstanceId,
    /// Unique to each attempt of the waiter to write.
    pub op: Nonce,
    /// Incremented by the waiter to show that it still waits.
    pub beat: u64,
    /// After how long without a change the entry counts as abandoned, in milliseconds.
    pub ttl_ms: u64,
    /// What the waiter may expect of the holder.
    #[serde(default)]
    pub claim: Claim,
    /// The holder's answer: an attached client is alive, so the sandbox stays where it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub declined: bool,
}

/// How an instance comes to want a sandbox that another instance may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// A client attached there, and gets the sandbox unless the client that is attached elsewhere is alive.
    Ask,
    /// An operator named the instance.
    Order,
    /// A client attached there, and gets the sandbox at once. Also the meaning of older entries, which have no claim.
    #[default]
    #[serde(other)]
    Preempt,
}

impl Claim {
    /// Every claim, for exhaustive tests and tables.
    pub const ALL: [Self; 3] = [Self::Ask, Self::Order, Self::Preempt];
}

/// The committed checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Incremented by each commit.
    pub seq: u64,
    /// The epoch of the lease under which it was committed.
    pub epoch: u64,
    /// The checkpoint that a restore uses.
    pub checkpoint_id: CheckpointId,
    /// `None` where checkpoints are stored under a mount.
    pub bucket: Option<String>,
    /// The digest of its manifest, which in turn has the digests of all its files.
    #[serde(deserialize_with = "crate::manifest::field::manifest_sha256")]
    pub manifest_sha256: Sha256Name,
}

impl Lock {
    /// Whether a checkpoint may be this sandbox's head: it is its own, or the one that the sandbox was forked from.
    pub fn may_start_from(&self, checkpoint: &CheckpointId) -> bool {
        checkpoint.sandbox() == self.sandbox_id || self.forked_from.as_ref() == Some(checkpoint)
    }

    /// The lock that a create writes: free, never run.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_starts_from_a_checkpoint_of_its_own_or_from_the_one_it_was_forked_from() {
        let id = |name: &str| SandboxId::parse(name).unwrap();
        let of = |name: &str, seq| CheckpointId::new(&id(name), 1, seq, &Nonce::from_bits([1; 16]));
        let lock = Lock { forked_from: Some(of("sandbox-b", 1)), ..Lock::new(id("sandbox-a")) };
        for (checkpoint, may) in [
            (of("sandbox-a", 1), true),
            (of("sandbox-b", 1), true),
            (of("sandbox-b", 2), false),
            (of("sandbox-a-1", 1), false),
            (of("sandbox-c", 1), false),
        ] {
            assert_eq!(lock.may_start_from(&checkpoint), may, "{checkpoint}");
        }
        assert!(!Lock::new(id("sandbox-a")).may_start_from(&of("sandbox-b", 1)));
    }

    #[test]
    fn an_entry_of_another_version_counts_as_one_that_gets_the_sandbox_at_once() {
        let entry = |more: &str| {
            let nonce = "0".repeat(32);
            let text = format!(r#"{{"instance":"inst-{nonce}","op":"{nonce}","beat":0,"ttl_ms":1{more}}}"#);
            serde_json::from_str::<Waiter>(&text).unwrap()
        };
        assert_eq!((entry("").claim, entry("").declined), (Claim::Preempt, false));
        assert_eq!(entry(r#","claim":"by decree""#).claim, Claim::Preempt);
        for claim in Claim::ALL {
            let written = serde_json::to_string(&claim).unwrap();
            assert_eq!(entry(&format!(r#","claim":{written}"#)).claim, claim);
        }
        assert!(entry(r#","declined":true"#).declined);
    }
}
