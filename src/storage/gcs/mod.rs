//! A Cloud Storage bucket as a store.
//!
//! Conditional writes are sent once (see `crates/gcs`). If the answer is lost, the caller resolves the outcome by
//! reading. Reads and transfers are retried.

mod bucket;
mod download;
mod gcs_upload;
mod write_rate;

use std::{path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use baton_gcs::{GcsClient, ObjectAttributes, Read};
use bytes::Bytes;
use parking_lot::Mutex;

pub use baton_gcs::GcsConnection;

use self::write_rate::WriteRate;
use super::{
    local_files::Wanted,
    store::{
        Digest, Error, MAX_SMALL_OBJECT, ObjectEntry, Page, PollResult, Precondition, Priority, ProgressFn, Result,
        Store, Version, Written, check_key, check_small, too_large,
    },
};
use crate::{
    clock::{Elapsed, Moment, SharedClock},
    config::LeaseTimes,
};

/// The service returns at most a thousand names, and each request asks for two more than a page holds.
const PAGE: usize = 998;

#[derive(Debug)]
pub struct Gcs {
    clock: SharedClock,
    connection: Arc<GcsConnection>,
    /// In the client's format: `projects/_/buckets/NAME`.
    bucket: String,
    pace: WriteRate,
    /// When a call last proved that the bucket exists.
    seen: Mutex<Option<Moment>>,
    page: usize,
    call_timeout: Duration,
    stall_timeout: Duration,
}

impl Gcs {
    /// Connects on first use.
    pub fn new(connection: Arc<GcsConnection>, bucket: &str, clock: SharedClock) -> Self {
        Self {
            clock,
            connection,
            bucket: format!("projects/_/buckets/{bucket}"),
            pace: WriteRate::default(),
            seen: Mutex::default(),
            page: PAGE,
            call_timeout: LeaseTimes::DEFAULT.call,
            stall_timeout: Duration::from_secs(30),
        }
    }

    /// Sets the timeout of a call on a small object, and the stall timeout of a transfer or a single listing request.
    pub fn with_timeouts(mut self, call: Duration, stall: Duration) -> Self {
        (self.call_timeout, self.stall_timeout) = (call, stall);
        self
    }

    /// Lists in pages of `page` entries.
    pub fn with_page(mut self, page: usize) -> Self {
        self.page = page;
        self
    }

    /// Sets how often this store may write one object; by default once per second with a burst of four.
    pub fn with_write_rate(mut self, per_second: f64, burst: f64) -> Self {
        self.pace = WriteRate::new(per_second, burst);
        self
    }

    /// Applies the call timeout: the library has none of its own.
    async fn bounded<T>(&self, key: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
        let late = |elapsed: Elapsed| Error::Unavailable { key: key.to_owned(), why: elapsed.to_string() };
        self.clock.timeout(self.call_timeout, work).await.map_err(late)?
    }

    /// Records that the service rate-limited a write.
    fn heed<T>(&self, key: &str, result: Result<T>) -> Result<T> {
        if let Err(Error::RateLimited(_)) = &result {
            let now = self.clock.now();
            self.pace.bar(key, now, now + self.clock.jittered(write_rate::PENALTY));
        }
        result
    }

    async fn client(&self, key: &str) -> Result<&GcsClient> {
        self.connection.client().await.map_err(|error| named(key, error))
    }

    async fn read(&self, key: &str, known: Option<&Version>) -> Result<PollResult> {
        let known = known.map(|known| generation(key, known)).transpose()?;
        match self.client(key).await?.read(&self.bucket, key, known, MAX_SMALL_OBJECT).await {
            Ok(Read::Unchanged) => {
                self.saw_bucket();
                Ok(PollResult::Unchanged)
            }
            Ok(Read::Found(bytes, generation)) => {
                self.saw_bucket();
                if known.is_some() {
                    self.pace.noticed(key, self.clock.now());
                }
                Ok(PollResult::Changed(bytes.into(), version(generation)))
            }
            Err(baton_gcs::Error::NotFound) => self.check_bucket(key).await.map(|()| PollResult::Missing),
            Err(error) => Err(named(key, error)),
        }
    }

    /// Returns at least `wanted` entries after `after`, unless there are fewer, and the folders between them. The stall
    /// timeout applies to each request; the caller limits the listing as a whole.
    async fn names(&self, prefix: &str, after: Option<&str>, wanted: usize) -> Result<(Vec<ObjectEntry>, Vec<String>)> {
        let client = self.bounded(prefix, self.client(prefix)).await?;
        let late = |elapsed: Elapsed| Error::Unavailable { key: prefix.to_owned(), why: elapsed.to_string() };
        let (mut entries, mut folders, mut token) = (Vec::new(), Vec::new(), String::new());
        loop {
            // One more for `after` itself, since the listing starts with it.
            let asked = client.list(&self.bucket, prefix, after.unwrap_or_default(), wanted + 1, token);
            let page = self.clock.timeout(self.stall_timeout, asked).await.map_err(late)?;
            let page = page.map_err(|error| self.without_object(prefix, error))?;
            self.saw_bucket();
            let new = page.objects.into_iter().filter(|object| Some(object.name.as_str()) > after);
            for object in new {
                if object.name.ends_with('/') {
                    folders.push(object.name);
                } else {
                    entries.push(entry(object));
                }
            }
            token = page.token;
            if entries.len() >= wanted || token.is_empty() {
                return Ok((entries, folders));
            }
        }
    }

    async fn write(&self, key: &str, bytes: Bytes, condition: &Precondition) -> Result<Written> {
        let (crc32c, wanted) = (crc32c::crc32c(&bytes), wanted_generation(key, condition)?);
        let written_as = self.client(key).await?.write(&self.bucket, key, bytes, crc32c, wanted).await;
        let about = written_as.map_err(|error| self.without_object(key, error))?;
        self.saw_bucket();
        Ok(written(&about))
    }
}

#[async_trait]
impl Store for Gcs {
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> Result<PollResult> {
        check_key(key)?;
        match self.bounded(key, self.read(key, known)).await {
            Err(error) if is_damaged(&error) => self.bounded(key, self.read(key, known)).await,
            polled => polled,
        }
    }

    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> Result<Written> {
        self.put_as(key, bytes, condition, Priority::Commit).await
    }

    async fn put_as(&self, key: &str, bytes: Bytes, condition: Precondition, urgency: Priority) -> Result<Written> {
        check_key(key)?;
        check_small(key, bytes.len() as u64)?;
        let deadline = self.clock.now() + self.call_timeout;
        self.pace.turn(&self.clock, key, urgency, deadline).await?;
        let left = deadline - self.clock.now();
        let late = |_| Error::Unavailable {
            key: key.to_owned(),
            why: format!("no answer within {}", humantime::format_duration(self.call_timeout)),
        };
        let write = async {
            match self.write(key, bytes.clone(), &condition).await {
                Err(error) if is_damaged(&error) => self.write(key, bytes, &condition).await,
                written => written,
            }
        };
        let answer = self.clock.timeout(left, write).await.map_err(late);
        self.heed(key, answer.and_then(|answer| answer))
    }

    async fn delete(&self, key: &str, condition: Precondition) -> Result<()> {
        check_key(key)?;
        let work = async {
            let wanted = wanted_generation(key, &condition)?;
            let deleted = self.client(key).await?.delete(&self.bucket, key, wanted).await;
            self.with_object(key, deleted).await
        };
        self.heed(key, self.bounded(key, work).await)
    }

    async fn remove_folder(&self, name: &str) -> Result<()> {
        let work = async {
            match self.client(name).await?.delete(&self.bucket, name, None).await {
                Ok(()) | Err(baton_gcs::Error::NotFound) => Ok(()),
                Err(error) => Err(named(name, error)),
            }
        };
        self.bounded(name, work).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        self.list_some(prefix, after, self.page).await
    }

    async fn list_some(&self, prefix: &str, after: Option<&str>, most: usize) -> Result<Page> {
        let most = most.clamp(1, self.page);
        // One more, to detect whether more follow.
        let (mut entries, folders) = self.names(prefix, after, most + 1).await?;
        let more = entries.len() > most;
        entries.truncate(most);
        Ok(Page { entries, folders, more })
    }

    async fn upload(
        &self,
        key: &str,
        file: &Path,
        condition: Precondition,
        digest: &Digest,
        progress: ProgressFn<'_>,
    ) -> Result<Written> {
        check_key(key)?;
        match self.send_file(key, file, &condition, digest, progress).await {
            Err(error) if is_damaged(&error) => self.send_file(key, file, &condition, digest, progress).await,
            sent => sent,
        }
    }

    async fn download(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()> {
        check_key(key)?;
        let wanted = || Wanted::This(digest.clone());
        match self.fetch_file(key, file, wanted(), progress).await {
            Err(error) if is_damaged(&error) => self.fetch_file(key, file, wanted(), progress).await.map(drop),
            fetched => fetched.map(drop),
        }
    }

    async fn download_unverified(&self, key: &str, file: &Path, most: u64, progress: ProgressFn<'_>) -> Result<Digest> {
        check_key(key)?;
        match self.fetch_file(key, file, Wanted::AtMost(most), progress).await {
            Err(error) if is_damaged(&error) => self.fetch_file(key, file, Wanted::AtMost(most), progress).await,
            fetched => fetched,
        }
    }
}

/// Whether content was corrupted, in transit or at rest: one more transfer tells which.
fn is_damaged(error: &Error) -> bool {
    let is_damaged = matches!(error, Error::Damaged { .. });
    if is_damaged {
        tracing::warn!(%error, "a transfer had a wrong checksum; retrying once");
    }
    is_damaged
}

fn version(generation: i64) -> Version {
    Version(generation.to_string())
}

fn entry(about: ObjectAttributes) -> ObjectEntry {
    ObjectEntry { version: version(about.generation), size: about.size, updated: about.updated, key: about.name }
}

fn generation(key: &str, version: &Version) -> Result<i64> {
    version
        .0
        .parse()
        .map_err(|_| Error::Other { key: key.to_owned(), why: "the version is of another store".to_owned() })
}

/// Generation 0 means that the object must not exist.
fn wanted_generation(key: &str, condition: &Precondition) -> Result<Option<i64>> {
    match condition {
        Precondition::Any => Ok(None),
        Precondition::Absent => Ok(Some(0)),
        Precondition::Is(version) => generation(key, version).map(Some),
    }
}

fn written(about: &ObjectAttributes) -> Written {
    Written { version: version(about.generation), updated: about.updated }
}

/// Maps a client error to a store error for this key.
fn named(key: &str, error: baton_gcs::Error) -> Error {
    use baton_gcs::Error as Raw;
    let key = key.to_owned();
    match error {
        Raw::NotFound => Error::NotFound(key),
        Raw::Conflict => Error::Conflict(key),
        Raw::TooFast => Error::RateLimited(key),
        Raw::Unavailable(why) => Error::Unavailable { key, why },
        Raw::Denied(why) => Error::Denied { key, why },
        Raw::Damaged(why) => Error::Damaged { key, why },
        Raw::TooLarge(size) => too_large(&key, size),
        Raw::Other(why) => Error::Other { key, why },
    }
}
