//! Tells a missing object from a missing bucket: the service uses one code for both.
//!
//! A missing bucket must not look like a missing object, which would mean that the sandbox is gone. A listing decides,
//! since there only the bucket can be missing. It needs no permission beyond those of the store.

use std::time::Duration;

use super::{Gcs, named};
use crate::storage::store::{Error, Result};

/// A bucket seen this recently is assumed to exist: buckets are rarely deleted under a running server.
const TRUSTED_FOR: Duration = Duration::from_secs(10);

impl Gcs {
    /// Records that a call proved the bucket to exist.
    pub(super) fn saw_bucket(&self) {
        *self.seen.lock() = Some(self.clock.now());
    }

    /// Maps the error of a call that needs no object: `NotFound` then means the bucket.
    pub(super) fn without_object(&self, key: &str, error: baton_gcs::Error) -> Error {
        if error == baton_gcs::Error::NotFound {
            return Error::Denied { key: key.to_owned(), why: self.no_bucket() };
        }
        named(key, error)
    }

    /// Maps the answer of a call for an object: `NotFound` may mean the object or the bucket.
    pub(super) async fn with_object<T>(&self, key: &str, answer: baton_gcs::Result<T>) -> Result<T> {
        if matches!(answer, Err(baton_gcs::Error::NotFound)) {
            self.check_bucket(key).await?;
        } else if answer.is_ok() {
            self.saw_bucket();
        }
        answer.map_err(|error| named(key, error))
    }

    /// Returns `Denied` if the bucket does not exist.
    pub(super) async fn check_bucket(&self, key: &str) -> Result<()> {
        let seen = *self.seen.lock();
        if seen.is_some_and(|seen| self.clock.now() - seen < TRUSTED_FOR) {
            return Ok(());
        }
        let listed = self.client(key).await?.list(&self.bucket, key, key, 1, String::new()).await;
        listed.map_err(|error| self.without_object(key, error))?;
        self.saw_bucket();
        Ok(())
    }

    fn no_bucket(&self) -> String {
        let name = self.bucket.rsplit('/').next().unwrap_or(&self.bucket);
        format!("the bucket does not exist: {name}")
    }
}
