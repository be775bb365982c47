//! What can go wrong, by what the caller can do about it.

use std::time::Duration;

use baton_protocol::event::{Status, Update};

/// Cheap to clone: the end of a connection is told to everybody who waits on it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It never was, or it was deleted.
    #[error("there is no such sandbox")]
    NotFound,
    /// Somebody else is attached to it, and alive.
    #[error("another client is attached to the sandbox")]
    InUse,
    /// The token or the API key does not open this.
    #[error("permission denied: {0}")]
    Permission(String),
    /// There are no credentials for what stands in front of the server.
    #[error("no credentials: {0}")]
    Auth(String),
    #[error("the sandbox could not be created: {0}")]
    Creation(String),
    #[error("the sandbox could not be restored: {0}")]
    Restore(String),
    /// The sandbox goes on as it was.
    #[error("no checkpoint was made: {0}")]
    Checkpoint(String),
    /// The server's no to one request. The sandbox goes on as it was.
    #[error("refused: {message}")]
    Refused { status: Status, message: String },
    /// A command did not end with exit code 0, where that was asked for.
    #[error("the command ended with {how}{said}")]
    Failed { how: String, said: String },
    /// What is wrong with a file, in the sandbox or here: an errno's name such as `ENOENT`, and a text.
    #[error("{message}")]
    File { code: String, message: String },
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The server cannot be reached, or not any more.
    #[error("no connection: {0}")]
    Connection(String),
    /// The other side does not speak `baton.v1`, or not well.
    #[error("not the protocol baton.v1: {0}")]
    Protocol(String),
    /// This session is over as it should be; says why.
    #[error("the session has ended: {0}")]
    Ended(String),
}

impl Error {
    /// The error an update stands for.
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
