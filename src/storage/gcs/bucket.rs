//! Whether it is the object or the whole bucket that does not exist: the service has one code for both.
//!
//! An absent bucket must not look like an absent object: that would say that the sandbox is gone. A listing settles it,
//! since only the bucket can be missing there. It takes no right that the store does not need anyway.

use std::{sync::PoisonError, time::Duration};

use super::{Gcs, named};
use crate::storage::store::{Error, Result};

/// A bucket that was there so long ago is there: buckets are not deleted under a server every day.
const TRUSTED: Duration = Duration::from_secs(10);

impl Gcs {
    /// A call was answered that only a bucket can answer.
    pub(super) fn saw_bucket(&self) {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.clock.now());
    }

    /// The answer to a call that needs no object to be there: what it did not find is the bucket.
    pub(super) fn without_object(&self, key: &str, error: baton_gcs::Error) -> Error {
        if error == baton_gcs::Error::NotFound {
            return Error::Denied { key: key.to_owned(), why: self.no_bucket() };
        }
        named(key, error)
    }

    /// The answer to a call for an object: what it did not find may be the bucket.
    pub(super) async fn with_object<T>(&self, key: &str, answer: baton_gcs::Result<T>) -> Result<T> {
        if matches!(answer, Err(baton_gcs::Error::NotFound)) {
            self.check_bucket(key).await?;
        } else if answer.is_ok() {
            self.saw_bucket();
        }
        answer.map_err(|error| named(key, error))
    }

    /// `Denied` if there is no such bucket.
    pub(super) async fn check_bucket(&self, key: &str) -> Result<()> {
        let seen = *self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.is_some_and(|seen| self.clock.now() - seen < TRUSTED) {
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
