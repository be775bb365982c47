//! What happens to a sandbox on this instance, in the words of the bus: plain data.

use baton_protocol::{
    id::{CheckpointId, InstanceId},
    lock::Claim,
    reason::Reason,
};
use serde::{Deserialize, Serialize};

/// What progress is of: a snapshot or a checkpoint on its way to the store, a checkpoint or the archive
/// of a root file system on its way here.
pub const SNAPSHOT: &str = "snapshot";
pub const UPLOAD: &str = "upload";
pub const DOWNLOAD: &str = "download";
pub const EXTRACT: &str = "extract";

/// Why a sandbox left, or is about to leave, this instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaveReason {
    /// The spec says `checkpointed`.
    Checkpointed,
    /// The spec says `handed_off`.
    HandedOff,
    /// Another instance waits for it.
    Waiter,
    /// This instance is on its way out.
    Drain,
    /// Its place is wanted for another sandbox, and nobody uses it.
    Room,
    /// Nothing happened for the idle time.
    Idle,
    /// The spec says `deleted`.
    Deleted,
}

/// How a sandbox came to run here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartKind {
    Fresh,
    /// From its head. `rolled_back` when it had run on after that: work since then is lost.
    Restored {
        checkpoint_id: CheckpointId,
        age_ms: u64,
        rolled_back: bool,
    },
    /// Only the files of its last checkpoint could be used.
    Files {
        checkpoint_id: CheckpointId,
    },
}

/// What happens to a sandbox on this instance, as it happens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LifecycleEvent {
    /// The lock is about to be taken or waited for.
    Acquiring,
    Acquired,
    Running {
        boot: StartKind,
    },
    /// It will not start, for good.
    Failed {
        reason: Reason,
        message: String,
    },
    /// Another instance asked for it, and gets it.
    ReleaseRequested {
        by: InstanceId,
        claim: Claim,
    },
    /// Another instance asks for it: is the client that is attached here alive?
    Probe {
        number: u64,
    },
    Checkpointing {
        why: LeaveReason,
    },
    /// It runs on.
    CheckpointFailed {
        why: LeaveReason,
        reason: Reason,
        message: String,
    },
    /// It is not here any more. With a checkpoint it can be had again; without one it ended.
    Left {
        why: LeaveReason,
        checkpoint_id: Option<CheckpointId>,
    },
    /// It stands still because the lease could not be renewed.
    Fenced {
        message: String,
    },
    /// It goes on.
    Unfenced,
    /// Another instance has it. What ran here is gone.
    LeaseLost {
        message: String,
    },
    /// Requests were answered in the metadata.
    Answered,
    /// How far a long action has come, in bytes; `total` is 0 if nobody knows it.
    Progress {
        what: String,
        done: u64,
        total: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberedEvent {
    pub number: u64,
    pub passing: LifecycleEvent,
}
