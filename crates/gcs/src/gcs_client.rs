//! The two clients of the official library, created on first use, and their retry policies.

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

/// How often a transfer is resumed. A stalled transfer ends sooner.
const TRANSFER_ATTEMPTS: u32 = 20;

/// A connection to Cloud Storage, shared by all buckets.
#[derive(Debug, Default)]
pub struct GcsConnection {
    endpoint: Option<String>,
    client: OnceCell<GcsClient>,
}

#[derive(Debug)]
pub struct GcsClient {
    /// JSON over HTTP/1.1, for content.
    pub(crate) data: Storage,
    /// gRPC, for everything but content.
    pub(crate) control: StorageControl,
}

impl GcsConnection {
    /// A custom endpoint is used without credentials.
    pub fn new(endpoint: Option<String>) -> Self {
        Self { endpoint, client: OnceCell::new() }
    }

    /// Returns `Denied` without credentials. A failed attempt is not cached: credentials may become available later.
    pub fn client(&self) -> Boxed<'_, Result<&GcsClient, Error>> {
        Box::pin(async {
            let made = self.client.get_or_try_init(|| self.connect()).await;
            made.map_err(|error| Error::Denied(format!("no credentials for Cloud Storage: {error}")))
        })
    }

    async fn connect(&self) -> Result<GcsClient, google_cloud_gax::client_builder::Error> {
        // The first installed provider wins; without one the library panics, even over plain HTTP.
        drop(rustls::crypto::ring::default_provider().install_default());
        let mut data = Storage::builder().with_backoff_policy(backoff());
        let mut control = StorageControl::builder().with_backoff_policy(backoff());
        if let Some(endpoint) = &self.endpoint {
            data = data.with_endpoint(endpoint).with_credentials(anonymous::Builder::new().build());
            control = control.with_endpoint(endpoint).with_credentials(anonymous::Builder::new().build());
        }
        Ok(GcsClient { data: data.build().await?, control: control.build().await? })
    }
}

fn backoff() -> ExponentialBackoff {
    ExponentialBackoffBuilder::new()
        .with_initial_delay(Duration::from_millis(50))
        .with_maximum_delay(Duration::from_secs(5))
        .clamp()
}

/// The retry policy for small objects, whose calls have short timeouts.
pub(crate) fn small_retry() -> RetryPolicyArg {
    Unhurried.with_attempt_limit(3).into()
}

/// The retry policy for files, which is more persistent.
pub(crate) fn transfer_retry() -> RetryPolicyArg {
    Unhurried.with_attempt_limit(TRANSFER_ATTEMPTS).into()
}

/// Retries what the service recommends except rate-limited calls: those need at least a second, and the library would
/// retry sooner.
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
