//! Messages from the server: one tagged enum, one JSON text per event.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::id::{CheckpointId, ExecId, InstanceId, SandboxId, SnapshotName};

/// The version number of the dialect `baton.v1`.
pub const PROTOCOL: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    StatusUpdate(Update),
    /// The credentials to attach to the sandbox again. The token is sent only this once.
    SandboxId {
        sandbox_id: SandboxId,
        sandbox_token: Token,
    },
    Stdout {
        data: String,
    },
    Stderr {
        data: String,
    },
    /// A message for people. The close code tells whether an error is fatal, not this event.
    Error {
        message: String,
    },
    /// The first event of `baton.v1`.
    Hello {
        protocol: u32,
        max_frame: u64,
        max_execs: u32,
        instance: InstanceId,
    },
    /// Everything below `offset` of the command's stdin was accepted.
    StdinAck {
        exec_id: ExecId,
        offset: u64,
    },
    /// The bytes `from..to` are no longer buffered.
    OutputGap {
        exec_id: ExecId,
        stream: StdStream,
        from: u64,
        to: u64,
    },
    /// The sandbox was restored from a checkpoint that is older than the moment at which it last ran.
    RolledBack {
        checkpoint_id: CheckpointId,
        age_ms: u64,
    },
    /// The restored command will write everything after `to` again.
    OutputRewound {
        exec_id: ExecId,
        stream: StdStream,
        to: u64,
    },
    Forked {
        sandboxes: Vec<Copied>,
    },
}

/// One of the two streams a command writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StdStream {
    Stdout,
    Stderr,
}

/// One sandbox made by a fork.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    pub sandbox_id: SandboxId,
    pub sandbox_token: Token,
}

/// A status and the fields that belong to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Update {
    pub status: Status,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec_id: Option<ExecId>,
    /// The command's number in binary frames.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// The command was killed at its own timeout.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub timed_out: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_id: Option<CheckpointId>,
    /// How long the sandbox was paused, with a snapshot or a checkpoint after which it keeps running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotName>,
    /// `files`, with RUNNING: the sandbox was started again from the files of its last checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
    /// The progress, with repeated CREATING, RESTORING, CHECKPOINTING and FILESYSTEM_SNAPSHOT_CREATING;
    /// only in `baton.v1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// The commands that the sandbox knows, with RUNNING after an attach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execs: Option<Vec<ExecView>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecView {
    pub exec_id: ExecId,
    pub exec: u32,
    pub running: bool,
    /// Bytes of stdin accepted so far.
    pub stdin: u64,
    pub stdout: Kept,
    pub stderr: Kept,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
}

/// Bytes done, and bytes in total: 0 if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    pub done: u64,
    pub total: u64,
}

/// Which bytes of a stream are still available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    pub from: u64,
    pub to: u64,
}

impl Update {
    pub fn new(status: Status) -> Self {
        Self {
            status,
            message: None,
            exec_id: None,
            exec: None,
            exit_code: None,
            signal: None,
            timed_out: false,
            duration_ms: None,
            checkpoint_id: None,
            paused_ms: None,
            snapshot: None,
            boot: None,
            progress: None,
            execs: None,
        }
    }
}

impl Event {
    pub fn status(status: Status) -> Self {
        Self::StatusUpdate(Update::new(status))
    }

    /// An error status and the `error` event that follows it, both with the same text.
    pub fn refusal(status: Status, message: &str) -> [Self; 2] {
        let update = Update { message: Some(message.to_owned()), ..Update::new(status) };
        [Self::StatusUpdate(update), Self::Error { message: message.to_owned() }]
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("an event is plain data")
    }

    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }
}

/// The secret that allows its bearer to attach. Never printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(pub String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Status {
            $($(#[$doc])* #[serde(rename = $text)] $name,)*
        }

        impl Status {
            pub const ALL: &[Status] = &[$(Status::$name),*];

            pub fn as_str(self) -> &'static str {
                match self { $(Status::$name => $text,)* }
            }
        }
    };
}

statuses! {
    Creating = "SANDBOX_CREATING",
    Running = "SANDBOX_RUNNING",
    NotFound = "SANDBOX_NOT_FOUND",
    InUse = "SANDBOX_IN_USE",
    CreationError = "SANDBOX_CREATION_ERROR",
    ExecutionRunning = "SANDBOX_EXECUTION_RUNNING",
    ExecutionDone = "SANDBOX_EXECUTION_DONE",
    ExecutionError = "SANDBOX_EXECUTION_ERROR",
    ExecutionInProgressError = "SANDBOX_EXECUTION_IN_PROGRESS_ERROR",
    ExecutionUnsupportedLanguageError = "SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR",
    ExecutionForceKilled = "SANDBOX_EXECUTION_FORCE_KILLED",
    ExecutionForceKillError = "SANDBOX_EXECUTION_FORCE_KILL_ERROR",
    StdinError = "SANDBOX_STDIN_ERROR",
    Checkpointing = "SANDBOX_CHECKPOINTING",
    Checkpointed = "SANDBOX_CHECKPOINTED",
    CheckpointError = "SANDBOX_CHECKPOINT_ERROR",
    Restoring = "SANDBOX_RESTORING",
    RestoreError = "SANDBOX_RESTORE_ERROR",
    FilesystemSnapshotCreating = "SANDBOX_FILESYSTEM_SNAPSHOT_CREATING",
    FilesystemSnapshotCreated = "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED",
    FilesystemSnapshotError = "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR",
    Deleting = "SANDBOX_DELETING",
    Deleted = "SANDBOX_DELETED",
    Killing = "SANDBOX_KILLING",
    Killed = "SANDBOX_KILLED",
    KillError = "SANDBOX_KILL_ERROR",
    LockAcquiring = "SANDBOX_LOCK_ACQUIRING",
    LockAcquired = "SANDBOX_LOCK_ACQUIRED",
    LockReleaseRequested = "SANDBOX_LOCK_RELEASE_REQUESTED",
    LockRenewalError = "SANDBOX_LOCK_RENEWAL_ERROR",
    LockReleasing = "SANDBOX_LOCK_RELEASING",
    LockReleased = "SANDBOX_LOCK_RELEASED",
    /// The sandbox is paused; only in `baton.v1`.
    Paused = "SANDBOX_PAUSED",
    PermissionDenialError = "SANDBOX_PERMISSION_DENIAL_ERROR",
    Error = "SANDBOX_ERROR",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_status_and_its_event_carry_the_same_text() {
        let texts = Event::refusal(Status::CreationError, "no").map(|event| event.to_json());
        assert_eq!(texts[0], r#"{"event":"status_update","status":"SANDBOX_CREATION_ERROR","message":"no"}"#);
        assert_eq!(texts[1], r#"{"event":"error","message":"no"}"#);
    }

    #[test]
    fn a_token_is_never_printed() {
        assert_eq!(format!("{:?}", Token("secret".into())), "Token(…)");
    }

    #[test]
    fn every_status_begins_with_the_prefix() {
        assert!(Status::ALL.iter().all(|status| status.as_str().starts_with("SANDBOX_")));
        assert_eq!(Status::ALL.len(), 35);
    }
}
