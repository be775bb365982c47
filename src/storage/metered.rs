//! A store that counts its calls and their results.

use std::{path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;

use super::store::{
    Digest, Error, Page, PollResult, Precondition, Priority, ProgressFn, Result, Store, Version, Written,
};
use crate::{
    clock::{Moment, SharedClock},
    metrics::{Direction, Metrics, StoreAnswer, StoreVerb},
};

#[derive(Debug)]
pub struct Counted {
    store: Arc<dyn Store>,
    clock: SharedClock,
    metrics: Metrics,
}

impl Counted {
    pub fn new(store: Arc<dyn Store>, clock: SharedClock, metrics: Metrics) -> Self {
        Self { store, clock, metrics }
    }

    fn call(&self, verb: StoreVerb) -> Call<'_> {
        Call { counted: self, verb, began: self.clock.now(), answer: Some(StoreAnswer::Dropped) }
    }

    fn moved<T>(&self, way: Direction, bytes: u64, answer: &Result<T>) {
        if answer.is_ok() {
            self.metrics.store_moved(way, bytes);
        }
    }
}

/// A call in progress. One that the caller cancels, for example after a timeout, is counted too.
struct Call<'a> {
    counted: &'a Counted,
    verb: StoreVerb,
    began: Moment,
    /// `None`: not counted, since the store did not perform the call.
    answer: Option<StoreAnswer>,
}

impl Call<'_> {
    fn answered<T>(mut self, answer: &Result<T>, good: StoreAnswer) {
        self.answer = Some(match answer {
            Ok(_) => good,
            Err(error) => word(error),
        });
    }

    /// Discards the call: the store did not perform it.
    fn was_none(mut self) {
        self.answer = None;
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let Counted { clock, metrics, .. } = self.counted;
        if let Some(answer) = self.answer {
            metrics.store_called(self.verb, answer, clock.now() - self.began);
        }
    }
}

fn word(error: &Error) -> StoreAnswer {
    match error {
        Error::Conflict(_) => StoreAnswer::Conflict,
        Error::NotFound(_) => StoreAnswer::NotFound,
        Error::RateLimited(_) => StoreAnswer::RateLimited,
        Error::Unavailable { .. } => StoreAnswer::Unavailable,
        Error::Denied { .. } => StoreAnswer::Denied,
        Error::Damaged { .. } | Error::Newer { .. } | Error::Unsigned(_) => StoreAnswer::Damaged,
        Error::Other { .. } => StoreAnswer::Other,
    }
}

#[async_trait]
impl Store for Counted {
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> Result<PollResult> {
        let call = self.call(StoreVerb::Poll);
        let polled = self.store.get_if_changed(key, known).await;
        let good = match &polled {
            Ok(PollResult::Unchanged) => StoreAnswer::Unchanged,
            Ok(PollResult::Missing) => StoreAnswer::NotFound,
            Ok(PollResult::Changed(bytes, _)) => {
                self.metrics.store_moved(Direction::In, bytes.len() as u64);
                StoreAnswer::Good
            }
            Err(_) => StoreAnswer::Other,
        };
        call.answered(&polled, good);
        polled
    }

    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> Result<Written> {
        self.put_as(key, bytes, condition, Priority::Commit).await
    }

    async fn put_as(&self, key: &str, bytes: Bytes, condition: Precondition, urgency: Priority) -> Result<Written> {
        let (call, size) = (self.call(StoreVerb::Put), bytes.len() as u64);
        let written = self.store.put_as(key, bytes, condition, urgency).await;
        call.answered(&written, StoreAnswer::Good);
        self.moved(Direction::Out, size, &written);
        written
    }

    async fn delete(&self, key: &str, condition: Precondition) -> Result<()> {
        let call = self.call(StoreVerb::Delete);
        let deleted = self.store.delete(key, condition).await;
        call.answered(&deleted, StoreAnswer::Good);
        deleted
    }

    async fn remove_folder(&self, name: &str) -> Result<()> {
        let call = self.call(StoreVerb::Delete);
        let removed = self.store.remove_folder(name).await;
        call.answered(&removed, StoreAnswer::Good);
        removed
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        let call = self.call(StoreVerb::List);
        let listed = self.store.list(prefix, after).await;
        call.answered(&listed, StoreAnswer::Good);
        listed
    }

    async fn list_some(&self, prefix: &str, after: Option<&str>, most: usize) -> Result<Page> {
        let call = self.call(StoreVerb::List);
        let listed = self.store.list_some(prefix, after, most).await;
        call.answered(&listed, StoreAnswer::Good);
        listed
    }

    async fn upload(
        &self,
        key: &str,
        file: &Path,
        condition: Precondition,
        digest: &Digest,
        progress: ProgressFn<'_>,
    ) -> Result<Written> {
        let call = self.call(StoreVerb::Upload);
        let written = self.store.upload(key, file, condition, digest, progress).await;
        call.answered(&written, StoreAnswer::Good);
        self.moved(Direction::Out, digest.size, &written);
        written
    }

    async fn download(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()> {
        let call = self.call(StoreVerb::Download);
        let fetched = self.store.download(key, file, digest, progress).await;
        call.answered(&fetched, StoreAnswer::Good);
        self.moved(Direction::In, digest.size, &fetched);
        fetched
    }

    async fn upload_owned(&self, key: &str, file: &Path, progress: ProgressFn<'_>) -> Option<Result<Digest>> {
        let call = self.call(StoreVerb::Upload);
        let Some(taken) = self.store.upload_owned(key, file, progress).await else {
            call.was_none();
            return None;
        };
        call.answered(&taken, StoreAnswer::Good);
        if let Ok(digest) = &taken {
            self.metrics.store_moved(Direction::Out, digest.size);
        }
        Some(taken)
    }

    async fn download_linked(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()> {
        let call = self.call(StoreVerb::Download);
        let lent = self.store.download_linked(key, file, digest, progress).await;
        call.answered(&lent, StoreAnswer::Good);
        self.moved(Direction::In, digest.size, &lent);
        lent
    }

    async fn download_unverified(&self, key: &str, file: &Path, most: u64, progress: ProgressFn<'_>) -> Result<Digest> {
        let call = self.call(StoreVerb::Download);
        let fetched = self.store.download_unverified(key, file, most, progress).await;
        call.answered(&fetched, StoreAnswer::Good);
        if let Ok(digest) = &fetched {
            self.metrics.store_moved(Direction::In, digest.size);
        }
        fetched
    }

    fn visibility_delay(&self) -> Duration {
        self.store.visibility_delay()
    }

    async fn changed(&self, key: &str) {
        self.store.changed(key).await;
    }
}
