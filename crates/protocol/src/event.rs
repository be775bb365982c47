//! Messages from the server: one tagged enum, one JSON text per event.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::id::{CheckpointId, ExecId, InstanceId, SandboxId, SnapshotName};

/// The version number of the dialect `baton.v1`.
pub const PROTOCOL: u32 = 1;

/// A message from the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The state of the sandbox, of a command or of a request has changed.
    StatusUpdate(Update),
    /// The credentials to attach to the sandbox again. The token is sent only this once.
    SandboxId {
        /// The new sandbox.
        sandbox_id: SandboxId,
        /// The secret to attach to it with.
        sandbox_token: Token,
        /// Whether the sandbox outlives its instance; absent in the plain dialect.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        persistent: Option<bool>,
    },
    /// Output of the only command, in the plain dialect.
    Stdout {
        /// The output as text; invalid UTF-8 becomes U+FFFD.
        data: String,
    },
    /// Error output of the only command, in the plain dialect.
    Stderr {
        /// The output as text; invalid UTF-8 becomes U+FFFD.
        data: String,
    },
    /// A message for people. The close code tells whether an error is fatal, not this event.
    Error {
        /// One sentence; not meant to be parsed.
        message: String,
    },
    /// The first event of `baton.v1`.
    Hello {
        /// The version of the dialect: [`PROTOCOL`].
        protocol: u32,
        /// The largest message the server accepts, in bytes.
        max_frame: u64,
        /// How many commands a sandbox may have at once.
        max_execs: u32,
        /// The instance that serves this connection.
        instance: InstanceId,
    },
    /// Everything below `offset` of the command's stdin was accepted.
    StdinAck {
        /// The command that reads the input.
        exec_id: ExecId,
        /// How many bytes were accepted since the command started.
        offset: u64,
    },
    /// The bytes `from..to` are no longer buffered.
    OutputGap {
        /// The command that wrote them.
        exec_id: ExecId,
        /// The stream with the gap.
        stream: StdStream,
        /// The offset of the first lost byte.
        from: u64,
        /// The offset of the first byte that is still available.
        to: u64,
    },
    /// The sandbox was restored from a checkpoint that is older than the moment at which it last ran.
    RolledBack {
        /// The checkpoint that the sandbox was restored from.
        checkpoint_id: CheckpointId,
        /// The time between that checkpoint and the last moment the sandbox ran, in milliseconds.
        age_ms: u64,
    },
    /// The restored command will write everything after `to` again.
    OutputRewound {
        /// The restored command.
        exec_id: ExecId,
        /// The stream that continues earlier.
        stream: StdStream,
        /// The offset that the stream continues from.
        to: u64,
    },
    /// A program tried to reach what the network policy of the sandbox does not allow. Only a few of many are reported.
    EgressDenied {
        /// The name or the address.
        host: String,
        /// The port; absent if the program only asked for the name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        port: Option<u16>,
        /// What forbids it: `policy` of the sandbox, `ceiling` of the server, or why the address is special.
        reason: String,
    },
    /// The answer to a fork.
    Forked {
        /// The new sandboxes, in no particular order.
        sandboxes: Vec<Copied>,
    },
    /// The idle timeout was set.
    IdleTimeout {
        /// In seconds; `None` means never.
        idle_timeout: Option<u64>,
    },
}

/// Why the sandbox of a session ended or left its instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// It was idle for longer than its idle timeout.
    Idle,
    /// The client requested a checkpoint.
    Checkpoint,
    /// The client requested its end.
    Kill,
    /// An operator, or another client over HTTP, requested its checkpoint, its move or its deletion.
    Operator,
    /// Its `ttl` is over.
    Expired,
    /// The client requested a handoff.
    Handoff,
    /// Another client attached on another instance.
    Attach,
    /// The instance shuts down.
    Drain,
    /// The instance needed its place.
    Evicted,
    /// A reason of a newer server.
    #[serde(other)]
    Unknown,
}

impl EndReason {
    /// Every reason that a server sends.
    pub const ALL: [Self; 9] = [
        Self::Idle,
        Self::Checkpoint,
        Self::Kill,
        Self::Operator,
        Self::Expired,
        Self::Handoff,
        Self::Attach,
        Self::Drain,
        Self::Evicted,
    ];

    /// The reason on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Checkpoint => "checkpoint",
            Self::Kill => "kill",
            Self::Operator => "operator",
            Self::Expired => "expired",
            Self::Handoff => "handoff",
            Self::Attach => "attach",
            Self::Drain => "drain",
            Self::Evicted => "evicted",
            Self::Unknown => "unknown",
        }
    }
}

/// One of the two streams a command writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StdStream {
    /// Standard output, and everything a command on a terminal writes.
    Stdout,
    /// Standard error.
    Stderr,
}

/// One sandbox made by a fork.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    /// The copy's own id.
    pub sandbox_id: SandboxId,
    /// The secret to attach to the copy with.
    pub sandbox_token: Token,
}

/// A status and the fields that belong to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Update {
    /// What has changed.
    pub status: Status,
    /// A sentence for people, mostly why something was refused or ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// With DELETED and CHECKPOINTED that end a session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<EndReason>,
    /// The command that the update is about; `None` if it is about the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec_id: Option<ExecId>,
    /// The command's number in binary frames.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec: Option<u32>,
    /// The exit code, with EXECUTION_DONE if the command exited by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The number of the signal that killed the command, with EXECUTION_DONE.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// The command was killed at its own timeout.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub timed_out: bool,
    /// How long the command ran, in milliseconds, excluding time in which the sandbox was stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    /// The committed checkpoint, with CHECKPOINTED.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_id: Option<CheckpointId>,
    /// How long the sandbox was paused, with a snapshot or a checkpoint after which it keeps running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_ms: Option<u64>,
    /// The stored snapshot, with FILESYSTEM_SNAPSHOT_CREATED.
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

/// A command that the sandbox knows, with the offsets a client needs to continue it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecView {
    /// The name that the client gave the command, or the server's.
    pub exec_id: ExecId,
    /// The command's number in binary frames.
    pub exec: u32,
    /// Whether the command has not ended yet.
    pub running: bool,
    /// The beginning of its command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// When it was started, in milliseconds since 1970, by the clock of the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_ms: Option<u64>,
    /// Bytes of stdin accepted so far.
    pub stdin: u64,
    /// Their CRC-32 (as in zlib), by which a client recognizes its own; `None` if the sandbox cannot tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_crc32: Option<u32>,
    /// The part of stdout that can still be read.
    pub stdout: Kept,
    /// The part of stderr that can still be read.
    pub stderr: Kept,
    /// The exit code; `None` while the command runs or if a signal killed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The number of the signal that killed the command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
}

/// Bytes done, and bytes in total: 0 if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Bytes transferred so far.
    pub done: u64,
    /// Bytes to transfer; 0 if unknown.
    pub total: u64,
}

/// Which bytes of a stream are still available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The offset of the first available byte.
    pub from: u64,
    /// The offset after the last byte written so far.
    pub to: u64,
}

impl Update {
    /// An update without any of the optional fields.
    pub fn new(status: Status) -> Self {
        Self {
            status,
            message: None,
            reason: None,
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
    /// A status update without any of the optional fields.
    pub fn status(status: Status) -> Self {
        Self::StatusUpdate(Update::new(status))
    }

    /// An error status and the `error` event that follows it, both with the same text.
    pub fn refusal(status: Status, message: &str) -> [Self; 2] {
        let update = Update { message: Some(message.to_owned()), ..Update::new(status) };
        [Self::StatusUpdate(update), Self::Error { message: message.to_owned() }]
    }

    /// The event as one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("an event is plain data")
    }

    /// Parses one message. Unknown fields are ignored; an unknown event is an error.
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
        /// The statuses of the protocol, in the order in which the documentation lists them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Status {
            $($(#[$doc])* #[serde(rename = $text)] $name,)*
        }

        impl Status {
            /// Every status.
            pub const ALL: &[Status] = &[$(Status::$name),*];

            /// The name on the wire, such as `SANDBOX_RUNNING`.
            pub fn as_str(self) -> &'static str {
                match self { $(Status::$name => $text,)* }
            }
        }
    };
}

statuses! {
    /// The container is being created.
    Creating = "SANDBOX_CREATING",
    /// The sandbox runs and accepts commands.
    Running = "SANDBOX_RUNNING",
    /// No sandbox with this id exists, or it was deleted.
    NotFound = "SANDBOX_NOT_FOUND",
    /// Another client is attached, and alive.
    InUse = "SANDBOX_IN_USE",
    /// The sandbox could not be created.
    CreationError = "SANDBOX_CREATION_ERROR",
    /// The command has started.
    ExecutionRunning = "SANDBOX_EXECUTION_RUNNING",
    /// The command has ended and all its output was sent.
    ExecutionDone = "SANDBOX_EXECUTION_DONE",
    /// The command or its input was refused.
    ExecutionError = "SANDBOX_EXECUTION_ERROR",
    /// The request was refused because a command is running.
    ExecutionInProgressError = "SANDBOX_EXECUTION_IN_PROGRESS_ERROR",
    /// There is no interpreter for this language.
    ExecutionUnsupportedLanguageError = "SANDBOX_EXECUTION_UNSUPPORTED_LANGUAGE_ERROR",
    /// The command was killed at the client's request, or none was running.
    ExecutionForceKilled = "SANDBOX_EXECUTION_FORCE_KILLED",
    /// The command could not be killed.
    ExecutionForceKillError = "SANDBOX_EXECUTION_FORCE_KILL_ERROR",
    /// The input was refused.
    StdinError = "SANDBOX_STDIN_ERROR",
    /// A checkpoint is being taken.
    Checkpointing = "SANDBOX_CHECKPOINTING",
    /// The checkpoint is committed.
    Checkpointed = "SANDBOX_CHECKPOINTED",
    /// No checkpoint was taken; the sandbox keeps running.
    CheckpointError = "SANDBOX_CHECKPOINT_ERROR",
    /// The sandbox is being looked up and, if stored, restored.
    Restoring = "SANDBOX_RESTORING",
    /// The sandbox could not be restored; its checkpoint is kept.
    RestoreError = "SANDBOX_RESTORE_ERROR",
    /// A filesystem snapshot is being made.
    FilesystemSnapshotCreating = "SANDBOX_FILESYSTEM_SNAPSHOT_CREATING",
    /// The filesystem snapshot is stored.
    FilesystemSnapshotCreated = "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED",
    /// No filesystem snapshot was made; the sandbox keeps running.
    FilesystemSnapshotError = "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR",
    /// The local container is being removed.
    Deleting = "SANDBOX_DELETING",
    /// The local container is gone. With a checkpoint, the sandbox itself still exists.
    Deleted = "SANDBOX_DELETED",
    /// The sandbox is being deleted at the client's request.
    Killing = "SANDBOX_KILLING",
    /// The sandbox is deleted for good.
    Killed = "SANDBOX_KILLED",
    /// The sandbox could not be deleted.
    KillError = "SANDBOX_KILL_ERROR",
    /// This instance waits for the lease.
    LockAcquiring = "SANDBOX_LOCK_ACQUIRING",
    /// This instance holds the lease.
    LockAcquired = "SANDBOX_LOCK_ACQUIRED",
    /// Another instance asked for the lease.
    LockReleaseRequested = "SANDBOX_LOCK_RELEASE_REQUESTED",
    /// The lease was lost, so the session ends.
    LockRenewalError = "SANDBOX_LOCK_RENEWAL_ERROR",
    /// This instance is releasing the lease.
    LockReleasing = "SANDBOX_LOCK_RELEASING",
    /// This instance no longer holds the lease.
    LockReleased = "SANDBOX_LOCK_RELEASED",
    /// The sandbox is paused; only in `baton.v1`.
    Paused = "SANDBOX_PAUSED",
    /// The token does not grant access.
    PermissionDenialError = "SANDBOX_PERMISSION_DENIAL_ERROR",
    /// A request was not understood or not allowed.
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
