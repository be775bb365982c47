//! The object store: four operations on small objects, two on files. Cloud Storage, a directory and memory implement it
//! and pass one test suite (`tests/storage`).

use std::{
    fmt,
    path::Path,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use bytes::Bytes;

/// `get_if_changed` and `put` accept objects of up to this many bytes.
pub const MAX_SMALL_OBJECT: u64 = 1 << 20;

/// An opaque version of an object's content. Versions compare for equality only; they have no order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Version(pub String);

/// The condition under which a write or a deletion is applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Precondition {
    Any,
    Absent,
    Is(Version),
}

impl Precondition {
    /// Whether the condition holds for an object at version `current`; `None` means that the object is absent.
    pub fn holds(&self, current: Option<&Version>) -> bool {
        match self {
            Self::Any => true,
            Self::Absent => current.is_none(),
            Self::Is(version) => current == Some(version),
        }
    }
}

/// Which write goes first when the write rate of an object is limited, and which writes must survive a crash of the
/// whole machine once they have returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    Waiter,
    Renewal,
    /// The spec, and the status, which is a view: both can be written again.
    View,
    /// Commits, acquisitions, releases and new objects.
    Commit,
}

impl Priority {
    /// Whether the write must survive a machine crash. Where store and instances share one machine, a crash also ends
    /// the instances behind all other writes, so the object may fall back to its previous content. It is never torn.
    pub fn lasts(self) -> bool {
        self == Self::Commit
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PollResult {
    /// The object still has the known version.
    Unchanged,
    Changed(Bytes, Version),
    Missing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub version: Version,
    /// The time of the write by the store's clock, if it has one.
    pub updated: Option<SystemTime>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectEntry {
    pub key: String,
    pub version: Version,
    pub size: u64,
    /// The time of the last write by the store's clock, if it has one. For display only: no decision depends on it.
    pub updated: Option<SystemTime>,
}

/// One page of a listing, in the order of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    pub entries: Vec<ObjectEntry>,
    /// Directories under the prefix, with a trailing slash. In a bucket these are empty placeholder objects left by a
    /// mount; they are not keys.
    pub folders: Vec<String>,
    /// There may be more: list again `after` the last key.
    pub more: bool,
}

/// Size and checksums of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digest {
    pub size: u64,
    /// In hex.
    pub sha256: String,
    pub crc32c: u32,
}

/// Errors of a store, grouped by what the caller can do about them.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The precondition apparently did not hold: read again and decide again.
    #[error("{0} was changed by another writer")]
    Conflict(String),
    #[error("{0} does not exist")]
    NotFound(String),
    /// Wait at least a second.
    #[error("too many writes to {0}")]
    RateLimited(String),
    /// A write may or may not have been applied: read back. Reads can simply be retried.
    #[error("storage does not answer for {key}: {why}")]
    Unavailable { key: String, why: String },
    /// An operator has to act.
    #[error("storage refuses access to {key}: {why}")]
    Denied { key: String, why: String },
    /// The content read differs from the content written.
    #[error("{key} is damaged: {why}")]
    Damaged { key: String, why: String },
    /// A later version of this server wrote the object, and this one cannot read it.
    #[error("{key} cannot be read: {why}")]
    Newer { key: String, why: String },
    /// The object is not signed with a key of this instance.
    #[error("{0} is not signed with a key of this instance")]
    Unsigned(String),
    #[error("{key}: {why}")]
    Other { key: String, why: String },
}

impl Error {
    /// Whether a retry may succeed without any intervention.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::RateLimited(_) | Self::Unavailable { .. })
    }
}

/// Rejects keys that could escape the store, be hidden in it or be ambiguous, before anything is touched.
pub fn check_key(key: &str) -> Result<()> {
    let sound = key.len() <= 1024
        && !key.chars().any(char::is_control)
        && key.split('/').all(|part| !part.is_empty() && !part.starts_with('.') && part.len() <= 255);
    if sound { Ok(()) } else { Err(Error::Other { key: key.escape_debug().to_string(), why: "not a key".to_owned() }) }
}

/// Rejects an object that exceeds [`MAX_SMALL_OBJECT`].
pub fn check_small(key: &str, size: u64) -> Result<()> {
    if size <= MAX_SMALL_OBJECT { Ok(()) } else { Err(too_large(key, size)) }
}

pub fn too_large(key: &str, size: u64) -> Error {
    Error::Other {
        key: key.to_owned(),
        why: format!("{size} bytes, the most for a small object is {MAX_SMALL_OBJECT}"),
    }
}

pub type Result<T> = std::result::Result<T, Error>;

/// Progress callback: receives the number of bytes transferred so far, from time to time.
pub type ProgressFn<'a> = &'a (dyn Fn(u64) + Send + Sync);

/// An object store. Keys are relative, `/`-separated and built by `layout` alone.
#[async_trait]
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Reads one small object. If it still has the version `known`, the call is cheap.
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> Result<PollResult>;
    /// Over a network, `Conflict` and `Unavailable` are both ambiguous: resolve them by reading.
    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> Result<Written>;
    /// Like `put`, but may be delayed in favour of a more urgent write. The delay counts as part of the call.
    async fn put_as(&self, key: &str, bytes: Bytes, condition: Precondition, _urgency: Priority) -> Result<Written> {
        self.put(key, bytes, condition).await
    }
    /// Over a network, `NotFound` and `Conflict` may also mean that this very call succeeded.
    async fn delete(&self, key: &str, condition: Precondition) -> Result<()>;
    /// Removes an empty directory, named as in [`Page::folders`]. Idempotent. For stores that do not remove empty
    /// directories by themselves.
    async fn remove_folder(&self, _name: &str) -> Result<()> {
        Ok(())
    }
    /// Lists the keys that begin with `prefix` and sort after `after`. The caller sets the timeout; a remote store only
    /// aborts a listing that makes no progress.
    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page>;
    /// Like [`list`](Self::list), for a caller that needs at most `most` entries.
    async fn list_some(&self, prefix: &str, after: Option<&str>, most: usize) -> Result<Page> {
        let mut page = self.list(prefix, after).await?;
        page.more |= page.entries.len() > most;
        page.entries.truncate(most);
        Ok(page)
    }
    /// Rejects a file that does not match `digest`. A cancelled upload leaves nothing under `key`. With
    /// `Precondition::Absent`, an object that already holds this very content is not a conflict, so an upload whose
    /// answer was lost can simply be retried.
    async fn upload(
        &self,
        key: &str,
        file: &Path,
        condition: Precondition,
        digest: &Digest,
        progress: ProgressFn<'_>,
    ) -> Result<Written>;
    /// `file` appears only when it is complete and matches `digest`.
    async fn download(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()>;
    /// Like [`upload`](Self::upload) to a new key, but the store takes ownership of the file, computes the digest
    /// itself and returns it. The caller must not write to the file afterwards. The content is durable when this
    /// returns; the name is durable after the next `put` into the same folder. `None`: the store does not support this,
    /// use `upload`.
    async fn upload_owned(&self, _key: &str, _file: &Path, _progress: ProgressFn<'_>) -> Option<Result<Digest>> {
        None
    }
    /// Like [`download`](Self::download), but `file` must only be read: it may be the object itself.
    async fn download_linked(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()> {
        self.download(key, file, digest, progress).await
    }
    /// Like `download`, for an object whose digest is unknown; returns the digest. Rejects more than `most` bytes.
    async fn download_unverified(&self, key: &str, file: &Path, most: u64, progress: ProgressFn<'_>) -> Result<Digest>;
    /// How long caches may hide a new object from other readers.
    fn visibility_delay(&self) -> Duration {
        Duration::ZERO
    }
    /// Completes when the object may have changed since the call. A store that cannot detect changes never completes:
    /// poll as well.
    async fn changed(&self, _key: &str) {
        std::future::pending().await
    }
}
