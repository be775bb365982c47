//! Lifecycle events of a sandbox on this instance: plain data.

use baton_protocol::{
    id::{CheckpointId, InstanceId},
    lock::Claim,
    reason::Reason,
};
use serde::{Deserialize, Serialize};

/// What a progress event is about: a snapshot or a checkpoint being uploaded, a checkpoint being downloaded, or the
/// archive of a root file system being fetched.
pub const SNAPSHOT: &str = "snapshot";
pub const UPLOAD: &str = "upload";
pub const DOWNLOAD: &str = "download";
pub const EXTRACT: &str = "extract";

/// Why a sandbox left, or is about to leave, this instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum LeaveReason {
    /// The spec says `checkpointed`.
    Checkpointed,
    /// The spec says `handed_off`.
    HandedOff,
    /// Another instance waits for it.
    Waiter,
    /// This instance drains.
    Drain,
    /// It was evicted: another sandbox needs its slot, and it is unused.
    Room,
    /// The idle timeout passed.
    Idle,
    /// The spec says `deleted`.
    Deleted,
}

/// How a sandbox came to run here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartKind {
    Fresh,
    /// From its head. `rolled_back` if it had run on after that checkpoint: the work since then is lost.
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

/// An event in the life of a sandbox on this instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LifecycleEvent {
    /// The lock is about to be acquired or waited for.
    Acquiring,
    Acquired,
    Running {
        boot: StartKind,
    },
    /// It cannot start, permanently.
    Failed {
        reason: Reason,
        message: String,
    },
    /// Another instance asked for it and will get it.
    ReleaseRequested {
        by: InstanceId,
        claim: Claim,
    },
    /// Another instance asks for it: is the client attached here alive?
    Probe {
        number: u64,
    },
    Checkpointing {
        why: LeaveReason,
    },
    /// It keeps running.
    CheckpointFailed {
        why: LeaveReason,
        reason: Reason,
        message: String,
    },
    /// It is no longer here. With a checkpoint it can be restored; without one it has ended.
    Left {
        why: LeaveReason,
        checkpoint_id: Option<CheckpointId>,
    },
    /// It is stopped because the lease could not be renewed.
    Fenced {
        message: String,
    },
    /// It continues.
    Unfenced,
    /// Another instance holds it. The container here is gone.
    LeaseLost {
        message: String,
    },
    /// The network policy does not allow a connection of the sandbox, or a name.
    EgressDenied {
        host: String,
        /// `None`: a program only asked for the name.
        port: Option<u16>,
        why: String,
    },
    /// Requests were answered in the metadata.
    Answered,
    /// Progress of a long action, in bytes; `total` is 0 if it is unknown.
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
