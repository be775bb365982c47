//! What the end of a connection means: reconnect, or return the error to the caller. Pure.

use baton_protocol::event::{Status, Update};

use crate::{Ending, Error};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RetryPolicy {
    /// Reconnect. The error is returned if reconnecting fails for too long.
    Retry {
        error: Error,
        elsewhere: bool,
    },
    Fatal(Error),
}

impl RetryPolicy {
    pub(crate) fn lost(text: impl Into<String>) -> Self {
        Self::Retry { error: Error::Connection(text.into()), elsewhere: false }
    }
}

/// What a connection reported that matters at its end.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectionSummary {
    /// The sandbox was deleted or handed to another client; what the last update says about it.
    deleted: Option<Ending>,
    in_use: bool,
    /// Why a checkpoint failed.
    checkpoint_failed: Option<String>,
    checkpointed: bool,
    killed: bool,
    /// The last error, for a close frame without an explanation.
    error: Option<String>,
}

impl ConnectionSummary {
    /// Some updates are final, whatever follows them.
    pub(crate) fn update(&mut self, update: &Update) -> Option<RetryPolicy> {
        #[expect(clippy::wildcard_enum_match_arm, reason = "the other statuses end nothing")]
        match update.status {
            Status::NotFound | Status::PermissionDenialError | Status::RestoreError | Status::CreationError => {
                return Some(RetryPolicy::Fatal(Error::of(update)));
            }
            Status::InUse => self.in_use = true,
            Status::CheckpointError => {
                self.checkpoint_failed = Some(update.message.clone().unwrap_or_default());
            }
            Status::Checkpointed => self.checkpointed = true,
            Status::Killed => self.killed = true,
            Status::Deleted => {
                let message = update.message.clone().unwrap_or_default();
                self.deleted = Some(Ending { message, reason: update.reason });
            }
            _ => {}
        }
        None
    }

    pub(crate) fn error(&mut self, message: String) {
        self.error = Some(message);
    }

    /// Whether only the close frame is still to come.
    pub(crate) fn is_last(&self) -> bool {
        self.deleted.is_some() || self.in_use
    }

    /// Decides at the end of the connection: closed with a code, or lost.
    pub(crate) fn verdict(self, code: Option<u16>, cause: &str) -> RetryPolicy {
        if let Some(Ending { message, reason }) = self.deleted {
            let what = match (self.killed, self.checkpointed) {
                (true, _) => "the sandbox was killed",
                (false, true) => "the sandbox was checkpointed",
                (false, false) => "the sandbox was deleted",
            };
            let message = if message.is_empty() { what.to_owned() } else { format!("{what}: {message}") };
            return RetryPolicy::Fatal(Error::Ended(Ending { message, reason }));
        }
        if self.in_use {
            return RetryPolicy::Retry { error: Error::InUse, elsewhere: false };
        }
        match code {
            // The sandbox keeps running; only the session that asked was closed.
            Some(4000) if self.checkpoint_failed.is_some() => {
                let why = self.checkpoint_failed.unwrap_or_default();
                RetryPolicy::lost(format!("the session was closed because its checkpoint was refused: {why}"))
            }
            Some(4000) => {
                let message = self.error.unwrap_or_else(|| "the server gave no reason".into());
                RetryPolicy::Fatal(Error::Refused { status: Status::Error, message })
            }
            Some(1012) => {
                RetryPolicy::Retry { error: Error::Connection("the instance is shutting down".into()), elsewhere: true }
            }
            Some(1000) => RetryPolicy::Fatal(Error::Ended("the server closed it".into())),
            Some(1007 | 1009) => RetryPolicy::Fatal(Error::Protocol("the server refused what it was sent".into())),
            Some(code) => RetryPolicy::lost(format!("closed with code {code}")),
            None => RetryPolicy::lost(cause),
        }
    }
}

/// What an HTTP response instead of a WebSocket means.
pub(crate) fn of_http(code: u16) -> RetryPolicy {
    match code {
        401 => RetryPolicy::Fatal(Error::Permission("the server wants an API key (HTTP 401)".into())),
        403 => RetryPolicy::Fatal(Error::Permission("HTTP 403".into())),
        408 | 425 | 429 => RetryPolicy::lost(format!("HTTP {code}")),
        400..=499 => RetryPolicy::Fatal(Error::Protocol(format!("HTTP {code} instead of a WebSocket"))),
        _ => RetryPolicy::lost(format!("HTTP {code}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(statuses: &[Status], code: Option<u16>) -> RetryPolicy {
        let mut said = ConnectionSummary::default();
        for status in statuses {
            if let Some(verdict) = said.update(&Update::new(*status)) {
                return verdict;
            }
        }
        said.verdict(code, "cut")
    }

    #[test]
    fn fatal_answers_end_it() {
        use Status::{CreationError, Deleted, NotFound, PermissionDenialError, RestoreError, Restoring};
        for (statuses, code) in [
            (&[Restoring, NotFound][..], None),
            (&[PermissionDenialError], Some(4000)),
            (&[Restoring, RestoreError], None),
            (&[CreationError], Some(4000)),
            (&[Deleted], Some(1000)),
            (&[Deleted], Some(1012)),
            (&[Deleted], None),
            (&[], Some(4000)),
            (&[], Some(1007)),
        ] {
            assert!(matches!(ended(statuses, code), RetryPolicy::Fatal(_)), "{statuses:?} {code:?}");
        }
    }

    #[test]
    fn everything_else_is_followed() {
        use Status::{CheckpointError, Checkpointed, Checkpointing, InUse, LockRenewalError, Running};
        for (statuses, code) in [
            (&[Running][..], None),
            (&[Running], Some(1006)),
            (&[Running], Some(1011)),
            (&[Checkpointing, Checkpointed], Some(1012)),
            (&[LockRenewalError], Some(1012)),
            (&[InUse], Some(1011)),
            (&[Checkpointing, CheckpointError], Some(4000)),
        ] {
            assert!(matches!(ended(statuses, code), RetryPolicy::Retry { .. }), "{statuses:?} {code:?}");
        }
    }

    #[test]
    fn a_server_error_is_worth_another_try_and_a_wrong_key_is_not() {
        assert!(matches!(of_http(503), RetryPolicy::Retry { .. }));
        assert!(matches!(of_http(429), RetryPolicy::Retry { .. }));
        assert!(matches!(of_http(401), RetryPolicy::Fatal(Error::Permission(_))));
        assert!(matches!(of_http(404), RetryPolicy::Fatal(Error::Protocol(_))));
    }
}
