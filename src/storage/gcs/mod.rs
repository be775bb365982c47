//! A bucket of Cloud Storage as a store.
//!
//! Conditional writes are sent once: the client library would repeat one whose reply was lost and
//! then report the success of the first as a conflict. What happened is for the caller to settle, by
//! reading. Reads and transfers are repeated.

mod classify;
mod client;
mod download;
mod pace;
mod upload;

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use bytes::Bytes;
use google_cloud_gax::{options::RequestOptionsBuilder, retry_policy::NeverRetry};
use google_cloud_storage::model::Object;

pub use self::client::Connection;
use self::pace::Pace;
use super::store::{
    Digest, Entry, Error, If, Page, Poll, Progress, Result, Store, Urgency, Version, Written, check_key, check_small,
};
use crate::clock::SharedClock;

/// The service gives a thousand names at most, and two more are asked for than a page has.
const PAGE: usize = 998;

#[derive(Debug)]
pub struct Gcs {
    clock: SharedClock,
    connection: Arc<Connection>,
    /// As the client wants it: `projects/_/buckets/NAME`.
    bucket: String,
    pace: Pace,
    page: usize,
    call_timeout: Duration,
    stall_timeout: Duration,
}

impl Gcs {
    /// Connects at first use.
    pub fn new(connection: Arc<Connection>, bucket: &str, clock: SharedClock) -> Self {
        Self {
            clock,
            connection,
            bucket: format!("projects/_/buckets/{bucket}"),
            pace: Pace::default(),
            page: PAGE,
            call_timeout: Duration::from_secs(2),
            stall_timeout: Duration::from_secs(30),
        }
    }

    /// The most a call on a small object may take, and how long a transfer may stand still.
    pub fn with_timeouts(mut self, call: Duration, stall: Duration) -> Self {
        (self.call_timeout, self.stall_timeout) = (call, stall);
        self
    }

    /// Lists in pages of `page` entries.
    pub fn with_page(mut self, page: usize) -> Self {
        self.page = page;
        self
    }

    /// How often one object may be written by this store: one per second and four at once, if nothing is said.
    pub fn with_write_rate(mut self, per_second: f64, burst: f64) -> Self {
        self.pace = Pace::new(per_second, burst);
        self
    }

    /// Bounds a call: the library sets no limit of its own.
    async fn bounded<T>(&self, key: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
        let late =
            |elapsed: crate::clock::Elapsed| Error::Unavailable { key: key.to_owned(), why: elapsed.to_string() };
        self.clock.timeout(self.call_timeout, work).await.map_err(late)?
    }

    /// Remembers that the service found a writer too fast.
    fn heed<T>(&self, key: &str, result: Result<T>) -> Result<T> {
        if let Err(Error::RateLimited(_)) = &result {
            self.pace.bar(key, self.clock.now() + self.clock.jittered(pace::PENALTY));
        }
        result
    }

    async fn read(&self, key: &str, known: Option<&Version>) -> Result<Poll> {
        let clients = self.connection.clients(key).await?;
        let mut request = clients.data.read_object(&self.bucket, key).with_retry_policy(client::small_retry());
        if let Some(known) = known {
            request = request.set_if_generation_not_match(generation(key, known)?);
        }
        let mut response = match request.send().await {
            Ok(response) => response,
            Err(error) if classify::is_unchanged(&error) => return Ok(Poll::Unchanged),
            Err(error) => {
                let error = classify::error(key, &error);
                return if matches!(error, Error::NotFound(_)) { Ok(Poll::Missing) } else { Err(error) };
            }
        };
        let about = response.object();
        check_small(key, about.size.unsigned_abs())?;
        let mut bytes = Vec::with_capacity(about.size.unsigned_abs() as usize);
        // To its very end: only there the checksum is compared.
        while let Some(chunk) = response.next().await {
            bytes.extend_from_slice(&chunk.map_err(|error| classify::error(key, &error))?);
        }
        Ok(Poll::Changed(bytes.into(), version(about.generation)))
    }

    async fn write(&self, key: &str, bytes: Bytes, condition: &If) -> Result<Written> {
        let clients = self.connection.clients(key).await?;
        let crc32c = crc32c::crc32c(&bytes);
        let mut request = clients
            .data
            .write_object(&self.bucket, key, bytes)
            .set_content_type(if key.ends_with(".json") { "application/json" } else { "application/octet-stream" })
            .with_known_crc32c(crc32c)
            .with_retry_policy(NeverRetry);
        if let Some(generation) = wanted_generation(key, condition)? {
            request = request.set_if_generation_match(generation);
        }
        let object = request.send_unbuffered().await.map_err(|error| classify::error(key, &error))?;
        Ok(written(&object))
    }
}

#[async_trait]
impl Store for Gcs {
    async fn poll(&self, key: &str, known: Option<&Version>) -> Result<Poll> {
        check_key(key)?;
        self.bounded(key, self.read(key, known)).await
    }

    async fn put(&self, key: &str, bytes: Bytes, condition: If) -> Result<Written> {
        self.put_as(key, bytes, condition, Urgency::Commit).await
    }

    async fn put_as(&self, key: &str, bytes: Bytes, condition: If, urgency: Urgency) -> Result<Written> {
        check_key(key)?;
        check_small(key, bytes.len() as u64)?;
        let deadline = self.clock.now() + self.call_timeout;
        self.pace.turn(&self.clock, key, urgency, deadline).await?;
        let left = deadline - self.clock.now();
        let late = |_| Error::Unavailable {
            key: key.to_owned(),
            why: format!("no answer within {}", humantime::format_duration(self.call_timeout)),
        };
        let answer = self.clock.timeout(left, self.write(key, bytes, &condition)).await.map_err(late);
        self.heed(key, answer.and_then(|answer| answer))
    }

    async fn delete(&self, key: &str, condition: If) -> Result<()> {
        check_key(key)?;
        let work = async {
            let clients = self.connection.clients(key).await?;
            let mut request =
                clients.control.delete_object().set_bucket(&self.bucket).set_object(key).with_retry_policy(NeverRetry);
            if let Some(generation) = wanted_generation(key, &condition)? {
                request = request.set_if_generation_match(generation);
            }
            request.send().await.map_err(|error| classify::error(key, &error))
        };
        self.heed(key, self.bounded(key, work).await)
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        let work = async {
            let clients = self.connection.clients(prefix).await?;
            let mut entries: Vec<Entry> = Vec::new();
            let mut token = String::new();
            // One more than a page, to know whether there is more; and one for `after` itself,
            // since the service begins with it.
            let wanted = self.page + 1;
            loop {
                let answer = clients
                    .control
                    .list_objects()
                    .set_parent(&self.bucket)
                    .set_prefix(prefix)
                    .set_lexicographic_start(after.unwrap_or_default())
                    .set_page_size(i32::try_from(wanted + 1).unwrap_or(i32::MAX))
                    .set_page_token(token)
                    .with_retry_policy(client::small_retry())
                    .send()
                    .await
                    .map_err(|error| classify::error(prefix, &error))?;
                entries.extend(answer.objects.into_iter().filter(|object| Some(object.name.as_str()) > after).map(
                    |object| Entry {
                        version: version(object.generation),
                        size: object.size.unsigned_abs(),
                        key: object.name,
                    },
                ));
                token = answer.next_page_token;
                if entries.len() >= wanted || token.is_empty() {
                    break;
                }
            }
            let more = entries.len() > self.page;
            entries.truncate(self.page);
            Ok(Page { entries, more })
        };
        self.bounded(prefix, work).await
    }

    async fn upload(
        &self,
        key: &str,
        file: &Path,
        condition: If,
        digest: &Digest,
        progress: Progress<'_>,
    ) -> Result<Written> {
        check_key(key)?;
        self.send_file(key, file, &condition, digest, progress).await
    }

    async fn download(&self, key: &str, file: &Path, digest: &Digest, progress: Progress<'_>) -> Result<()> {
        check_key(key)?;
        self.fetch_file(key, file, digest, progress).await
    }
}

fn version(generation: i64) -> Version {
    Version(generation.to_string())
}

fn generation(key: &str, version: &Version) -> Result<i64> {
    version
        .0
        .parse()
        .map_err(|_| Error::Other { key: key.to_owned(), why: "the version is of another store".to_owned() })
}

/// Generation 0 stands for an object that does not exist.
fn wanted_generation(key: &str, condition: &If) -> Result<Option<i64>> {
    match condition {
        If::Any => Ok(None),
        If::Absent => Ok(Some(0)),
        If::Is(version) => generation(key, version).map(Some),
    }
}

fn written(object: &Object) -> Written {
    let updated = object.update_time.map(|time| {
        let nanos = time.nanos().unsigned_abs();
        SystemTime::UNIX_EPOCH + Duration::new(time.seconds().unsigned_abs(), nanos)
    });
    Written { version: version(object.generation), updated }
}
