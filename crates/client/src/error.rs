//! Errors, grouped by what the caller can do about them.

use std::{fmt, time::Duration};

use baton_protocol::event::{EndReason, Status, Update};

/// Cheap to clone: every waiting caller gets the error that ended a connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The sandbox never existed, or it was deleted.
    #[error("there is no such sandbox")]
    NotFound,
    /// Another client is attached to it, and alive.
    #[error("another client is attached to the sandbox")]
    InUse,
    /// The token or the API key does not grant access.
    #[error("permission denied: {0}")]
    Permission(String),
    /// There are no credentials for the proxy in front of the server.
    #[error("no credentials: {0}")]
    Auth(String),
    /// No sandbox was created; the text says why. Creating again is safe.
    #[error("the sandbox could not be created: {0}")]
    Creation(String),
    /// The sandbox exists but could not be started again. Its checkpoint is kept.
    #[error("the sandbox could not be restored: {0}")]
    Restore(String),
    /// The sandbox keeps running.
    #[error("no checkpoint was made: {0}")]
    Checkpoint(String),
    /// The server refused one request. The sandbox keeps running.
    #[error("refused: {message}")]
    Refused {
        /// The status that the server answered with.
        status: Status,
        /// The server's explanation.
        message: String,
    },
    /// A command did not end with exit code 0, where the caller required that.
    #[error("the command ended with {how}{said}")]
    Failed {
        /// The exit code, signal or timeout, in words.
        how: String,
        /// The end of stderr after a colon, or empty.
        said: String,
    },
    /// A file error, in the sandbox or on this machine: an errno's name such as `ENOENT`, and a text.
    #[error("{message}")]
    File {
        /// The errno's name; `EIO` for anything unusual.
        code: String,
        /// A text for people, which names the file.
        message: String,
    },
    /// The server did not answer in time. The request may still be carried out.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The server cannot be reached, or no longer.
    #[error("no connection: {0}")]
    Connection(String),
    /// The server does not support `baton.v1`, or violates it.
    #[error("not the protocol baton.v1: {0}")]
    Protocol(String),
    /// The session ended normally.
    #[error("the session has ended: {0}")]
    Ended(Ending),
}

/// How a session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Why it ended, for a person.
    pub message: String,
    /// What happened to the sandbox, as the server reported it; `None` if it may be running as before.
    pub reason: Option<EndReason>,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.reason.map_or(Ok(()), |reason| write!(f, " (reason: {})", reason.as_str()))
    }
}

impl<T: Into<String>> From<T> for Ending {
    fn from(message: T) -> Self {
        Self { message: message.into(), reason: None }
    }
}

impl Error {
    /// The error that corresponds to an update.
    pub(crate) fn of(update: &Update) -> Self {
        let message = update.message.clone().unwrap_or_else(|| update.status.as_str().to_owned());
        #[expect(clippy::wildcard_enum_match_arm, reason = "what has no kind of its own is a refusal")]
        match update.status {
            Status::NotFound => Self::NotFound,
            Status::InUse => Self::InUse,
            Status::PermissionDenialError => Self::Permission(message),
            Status::CreationError => Self::Creation(message),
            Status::RestoreError => Self::Restore(message),
            Status::CheckpointError | Status::ExecutionInProgressError => Self::Checkpoint(message),
            status => Self::Refused { status, message },
        }
    }
}
