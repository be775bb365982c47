//! `metadata.json`: the spec (from clients and operators) and a view of the observed status.
//!
//! Two kinds of writers share one object: clients and operators write everything but `status`,
//! `latest_sandbox_checkpoint` and `last_checkpointed`; the lease holder writes only those three.
//! Unknown keys are preserved.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    id::{CheckpointId, InstanceId, Nonce, SandboxId, SnapshotName, Tenant},
    limits::Limits,
    lock::Claim,
    sandbox_network::SandboxNetwork,
    trace::{self, Traceparent},
};

/// Larger objects are refused.
pub const MAX_BYTES: usize = 64 << 10;

/// The content of `metadata.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metadata {
    /// What clients and operators want.
    #[serde(flatten)]
    pub spec: Spec,
    /// The location of the committed checkpoint; `None` before the first one.
    #[serde(default)]
    pub latest_sandbox_checkpoint: Option<Latest>,
    /// When that checkpoint was taken, in RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_checkpointed: Option<String>,
    /// What the lease holder last observed.
    #[serde(default)]
    pub status: SandboxStatus,
}

/// Everything the API and operators write.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// The sandbox, as a check against a misplaced object.
    pub sandbox_id: SandboxId,
    /// The owner: the tenant of the key that created it. `None` if the server requires no keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<Tenant>,
    /// When the sandbox was created, in RFC 3339.
    pub created_timestamp: String,
    /// Seconds; `None` means never.
    #[serde(default)]
    pub idle_timeout: Option<u64>,
    /// The sandbox is stored, so it survives its instance.
    #[serde(default)]
    pub enable_sandbox_checkpoint: bool,
    /// The sandbox may move to another instance while a client is attached.
    #[serde(default)]
    pub enable_sandbox_handoff: bool,
    /// At the idle timeout a checkpoint is taken; otherwise the sandbox is stopped.
    #[serde(default)]
    pub enable_idle_timeout_auto_checkpoint: bool,
    /// The snapshot that the first start begins with; `None` uses the base root file system.
    #[serde(default)]
    pub filesystem_snapshot_name: Option<SnapshotName>,
    /// The checkpoint that the first start begins with.
    #[serde(default)]
    pub from_checkpoint: Option<CheckpointId>,
    /// Set by the client and used to filter listings; without meaning to the server.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The environment of every command.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The default working directory of commands; `None` uses the image's.
    #[serde(default)]
    pub cwd: Option<String>,
    /// What the sandbox may use.
    #[serde(default)]
    pub limits: Limits,
    /// What the sandbox may reach.
    #[serde(default, skip_serializing_if = "SandboxNetwork::is_empty")]
    pub network: SandboxNetwork,
    /// Seconds after which the sandbox is deleted; `None` uses the operator's default.
    #[serde(default)]
    pub ttl: Option<u64>,
    /// What to do if no instance can restore its memory.
    #[serde(default)]
    pub on_incompatible: OnIncompatible,
    /// Which vocabulary plain clients get for this sandbox; [`Spec::plain_words`] supplies it if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plain: Option<PlainWords>,
    /// The SHA-256 of the token, in hex. The token itself is stored nowhere.
    pub token_sha256: String,
    /// The bucket of the lock; `None` where locks are stored under a mount.
    #[serde(default)]
    pub lock_bucket: Option<String>,
    /// What the lease holder works towards.
    pub desired_state: DesiredState,
    /// The instance that should run the sandbox; `None` leaves the choice to the next attach.
    #[serde(default)]
    pub placement: Option<InstanceId>,
    /// The instance that last claimed the sandbox for itself. A `placement` that names another is an operator's order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<Claimed>,
    /// Requests that have not been withdrawn; each is answered once, in `status.answers`.
    #[serde(default)]
    pub requests: BTreeMap<Nonce, SpecRequest>,
    /// The request that last changed the spec, if traced: the work that follows is part of its trace.
    #[serde(default, deserialize_with = "trace::lenient", skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<Traceparent>,
    /// Keys of other programs, preserved unchanged.
    #[serde(flatten)]
    pub unknown: Map<String, Value>,
}

/// What should become of the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DesiredState {
    /// A container runs.
    Running,
    /// A checkpoint is stored, and no container runs.
    Checkpointed,
    /// Like `Checkpointed`, but the lease is offered to another instance.
    HandedOff,
    /// Nothing of it remains but a tombstone. Final.
    Deleted,
}

/// What happens if an instance cannot restore a checkpoint's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnIncompatible {
    /// The attach is refused, and the checkpoint is kept for an instance that can.
    #[default]
    Fail,
    /// The sandbox starts again from the files of the checkpoint.
    Files,
}

/// Which vocabulary a plain client gets: that of the documents, or that of the Python predecessor, which also reports
/// locks and the deletion that follows a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlainWords {
    /// The statuses that the documents define, without any others.
    #[default]
    Documents,
    /// Also the statuses of the Python predecessor.
    Predecessor,
}

/// An instance that claims the sandbox, and the kind of claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claimed {
    /// The instance that claims it.
    pub instance: InstanceId,
    /// How strong the claim is.
    #[serde(default)]
    pub kind: Claim,
}

/// A request that is carried out once and answered under its nonce.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum SpecRequest {
    /// Stores the file system under a name.
    Snapshot {
        /// The name, in the tenant's name space.
        name: SnapshotName,
        /// The complete file system, instead of the difference to the base.
        #[serde(default)]
        full: bool,
    },
    /// Takes a checkpoint and keeps the sandbox running.
    Checkpoint {},
}

/// A copy of the lock's head, for people to read. Nothing is restored from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latest {
    /// The bucket; `None` where checkpoints are stored under a mount.
    pub bucket: Option<String>,
    /// The prefix of its objects, with a trailing slash.
    pub path: String,
}

/// What the lease holder publishes about the committed checkpoint: its location and when it was taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Where it is; `None` if there is none.
    pub latest: Option<Latest>,
    /// When it was taken, in RFC 3339.
    pub at: Option<String>,
}

/// A view of the observed state, written by the lease holder at resting phases.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SandboxStatus {
    /// The resting phase that was reached last.
    #[serde(default)]
    pub phase: Phase,
    /// The name of a [`Reason`](crate::reason::Reason), or empty if nothing is wrong.
    #[serde(default)]
    pub reason: String,
    /// A sentence that explains the reason, with the error if there is one.
    #[serde(default)]
    pub message: String,
    /// The instance that wrote the status.
    #[serde(default)]
    pub instance: Option<InstanceId>,
    /// The epoch of the lease under which it was written.
    #[serde(default)]
    pub epoch: u64,
    /// The digest of the spec that was acted on: if it differs from the current one, the status is out of date.
    #[serde(default)]
    pub observed_spec_sha256: String,
    /// The answers to `requests`, by nonce.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub answers: BTreeMap<Nonce, Answer>,
    /// When the status was written, in RFC 3339.
    #[serde(default)]
    pub updated: String,
}

/// The phases in which a sandbox can stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Not started yet.
    #[default]
    Pending,
    /// A container runs on the instance that holds the lease.
    Running,
    /// A checkpoint is stored, and no container runs.
    Checkpointed,
    /// The sandbox cannot be started; the reason says why.
    Failed,
}

/// The result of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The request was carried out.
    Ok(CompletedRequest),
    /// The request failed or was refused; it is not tried again.
    Error {
        /// The name of a [`Reason`](crate::reason::Reason).
        reason: String,
        /// A sentence that explains it.
        message: String,
    },
}

/// The results of a request; which are set depends on its kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletedRequest {
    /// The committed checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_id: Option<CheckpointId>,
    /// The stored snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotName>,
    /// How long the sandbox was paused, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_ms: Option<u64>,
}

impl Spec {
    /// A sandbox that should run on `placement`, with defaults for everything else.
    pub fn new(sandbox_id: SandboxId, token_sha256: String, created_timestamp: String, placement: InstanceId) -> Self {
        Self {
            sandbox_id,
            tenant: None,
            created_timestamp,
            idle_timeout: Some(300),
            enable_sandbox_checkpoint: false,
            enable_sandbox_handoff: false,
            enable_idle_timeout_auto_checkpoint: false,
            filesystem_snapshot_name: None,
            from_checkpoint: None,
            labels: BTreeMap::new(),
            env: BTreeMap::new(),
            cwd: None,
            limits: Limits::default(),
            network: SandboxNetwork::default(),
            ttl: None,
            on_incompatible: OnIncompatible::Fail,
            plain: None,
            token_sha256,
            lock_bucket: None,
            desired_state: DesiredState::Running,
            claim: Some(Claimed { instance: placement.clone(), kind: Claim::Ask }),
            placement: Some(placement),
            requests: BTreeMap::new(),
            traceparent: None,
            unknown: Map::new(),
        }
    }

    /// A sandbox stored before the key existed gets the predecessor's vocabulary if it has a predecessor's flag set.
    pub fn plain_words(&self) -> PlainWords {
        let has_flag = self.enable_sandbox_handoff || self.enable_idle_timeout_auto_checkpoint;
        let implied = if has_flag { PlainWords::Predecessor } else { PlainWords::Documents };
        self.plain.unwrap_or(implied)
    }

    /// The kind of claim that the instance named by `placement` has; `None` without a placement.
    pub fn claim_at_placement(&self) -> Option<Claim> {
        let named = self.placement.as_ref()?;
        let claimed = self.claim.as_ref().filter(|claimed| claimed.instance == *named);
        Some(claimed.map_or(Claim::Order, |claimed| claimed.kind))
    }

    /// The instance that an operator named and that has not accepted the order yet.
    pub fn open_order(&self) -> Option<&InstanceId> {
        let named = self.placement.as_ref()?;
        self.claim.as_ref().is_none_or(|claimed| claimed.instance != *named).then_some(named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placement_is_an_order_unless_the_instance_it_names_has_claimed_it() {
        let [one, two] = [1, 2].map(|n| InstanceId::from_bits([n; 16]));
        let id = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
        let mut spec = Spec::new(id, String::new(), String::new(), one.clone());
        assert_eq!((spec.claim_at_placement(), spec.open_order()), (Some(Claim::Ask), None), "its own client made it");
        spec.placement = Some(two.clone());
        assert_eq!((spec.claim_at_placement(), spec.open_order()), (Some(Claim::Order), Some(&two)));
        for kind in Claim::ALL {
            spec.claim = Some(Claimed { instance: two.clone(), kind });
            assert_eq!((spec.claim_at_placement(), spec.open_order()), (Some(kind), None));
        }
        spec.claim = None;
        assert_eq!(spec.open_order(), Some(&two));
        spec.placement = None;
        assert_eq!((spec.claim_at_placement(), spec.open_order()), (None, None));
    }
}
