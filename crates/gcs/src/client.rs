//! The two clients of the official library, made when they are first needed, and what they repeat.

use std::time::Duration;

use google_cloud_auth::credentials::anonymous;
use google_cloud_gax::{
    error::Error as Raw,
    exponential_backoff::{ExponentialBackoff, ExponentialBackoffBuilder},
    retry_policy::{RetryPolicy, RetryPolicyArg, RetryPolicyExt},
    retry_result::RetryResult,
    retry_state::RetryState,
};
use google_cloud_storage::{
    client::{Storage, StorageControl},
    retry_policy::RetryableErrors,
};
use tokio::sync::OnceCell;

use crate::{Boxed, Error, classify};

/// How often a transfer begins anew where it was cut. One that stands still is ended sooner.
const TRANSFER_ATTEMPTS: u32 = 20;

/// One way to Cloud Storage, shared by all buckets.
#[derive(Debug, Default)]
pub struct Connection {
    endpoint: Option<String>,
    client: OnceCell<Client>,
}

#[derive(Debug)]
pub struct Client {
    /// JSON over HTTP/1.1: content.
    pub(crate) data: Storage,
    /// gRPC: everything about objects but their content.
    pub(crate) control: StorageControl,
}

impl Connection {
    /// An endpoint of one's own is spoken to without credentials.
    pub fn new(endpoint: Option<String>) -> Self {
        Self { endpoint, client: OnceCell::new() }
    }

    /// `Denied` without credentials. A failed attempt is not remembered: they may turn up later.
    pub fn client(&self) -> Boxed<'_, Result<&Client, Error>> {
        Box::pin(async {
            let made = self.client.get_or_try_init(|| self.connect()).await;
            made.map_err(|error| Error::Denied(format!("no credentials for Cloud Storage: {error}")))
        })
    }

    async fn connect(&self) -> Result<Client, google_cloud_gax::client_builder::Error> {
        // Whoever came first has chosen; without a choice the library panics, also over plain HTTP.
        drop(rustls::crypto::ring::default_provider().install_default());
        let mut data = Storage::builder().with_backoff_policy(backoff());
        let mut control = StorageControl::builder().with_backoff_policy(backoff());
        if let Some(endpoint) = &self.endpoint {
            data = data.with_endpoint(endpoint).with_credentials(anonymous::Builder::new().build());
            control = control.with_endpoint(endpoint).with_credentials(anonymous::Builder::new().build());
        }
        Ok(Client { data: data.build().await?, control: control.build().await? })
    }
}

fn backoff() -> ExponentialBackoff {
    ExponentialBackoffBuilder::new()
        .with_initial_delay(Duration::from_millis(50))
        .with_maximum_delay(Duration::from_secs(5))
        .clamp()
}

/// For reads of small objects, which have little time.
pub(crate) fn small_retry() -> RetryPolicyArg {
    Unhurried.with_attempt_limit(3).into()
}

/// For files: as long as there is hope.
pub(crate) fn transfer_retry() -> RetryPolicyArg {
    Unhurried.with_attempt_limit(TRANSFER_ATTEMPTS).into()
}

/// Repeats what the service recommends, but not what was too fast: that needs a second at least,
/// and the library would be back sooner.
#[derive(Clone, Debug)]
struct Unhurried;

impl RetryPolicy for Unhurried {
    fn on_error(&self, state: &RetryState, error: Raw) -> RetryResult {
        if classify::is_too_fast(&error) {
            return RetryResult::Permanent(error);
        }
        RetryableErrors.on_error(state, error)
    }
}
