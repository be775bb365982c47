//! The store: four verbs on small objects, two on files. GCS, a directory and memory
//! implement it and pass one suite (`tests/storage`).

use std::{
    fmt,
    path::Path,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use bytes::Bytes;

/// `poll` and `put` are for objects up to this many bytes.
pub const SMALL: u64 = 1 << 20;

/// Opaque: which content of an object somebody has seen. Equal or not, never earlier or later.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Version(pub String);

/// When a write or a deletion may happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Precondition {
    Any,
    Absent,
    Is(Version),
}

impl Precondition {
    /// Whether it may happen to an object whose version is `current`; `None` is an absent one.
    pub fn holds(&self, current: Option<&Version>) -> bool {
        match self {
            Self::Any => true,
            Self::Absent => current.is_none(),
            Self::Is(version) => current == Some(version),
        }
    }
}

/// Who goes first when one object may not be written as often as one would like, and what must have
/// outlasted a crash of the whole machine when the write returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    Waiter,
    Renewal,
    /// What is wanted, and the view of what is so: both can be said again.
    View,
    /// Commits, acquisitions and releases, and all that is new.
    Commit,
}

impl Priority {
    /// Where store and instances are one machine, a crash ends those who wrote the others: then the
    /// object before the write will do. It is whole in any case.
    pub fn lasts(self) -> bool {
        self == Self::Commit
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Poll {
    /// Still the version that was named.
    Unchanged,
    Changed(Bytes, Version),
    Missing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub version: Version,
    /// The store's own time of the write, where it has one.
    pub updated: Option<SystemTime>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: String,
    pub version: Version,
    pub size: u64,
    /// When it was last written, by the store's own clock, where it has one. For views: no decision compares it.
    pub updated: Option<SystemTime>,
}

/// One page of a listing, in the order of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    pub entries: Vec<Entry>,
    /// Directories under the prefix, with a slash at the end. In a bucket they are empty objects that a mount has
    /// left; they are no keys.
    pub folders: Vec<String>,
    /// Ask again `after` the last key.
    pub more: bool,
}

/// What a file is known to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digest {
    pub size: u64,
    /// In hex.
    pub sha256: String,
    pub crc32c: u32,
}

/// By what the caller can do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The condition did not hold, as far as can be known: read, and decide anew.
    #[error("{0} was changed by somebody else")]
    Conflict(String),
    #[error("{0} does not exist")]
    NotFound(String),
    /// Wait at least a second.
    #[error("too many writes to {0}")]
    RateLimited(String),
    /// Nobody knows whether a write was applied: read back. Reads may simply be tried again.
    #[error("storage does not answer for {key}: {why}")]
    Unavailable { key: String, why: String },
    /// An operator has to act.
    #[error("storage refuses access to {key}: {why}")]
    Denied { key: String, why: String },
    /// What was read is not what was written.
    #[error("{key} is damaged: {why}")]
    Damaged { key: String, why: String },
    /// Nobody with a key of ours says that he wrote it.
    #[error("{0} is not signed with a key of this instance")]
    Unsigned(String),
    #[error("{key}: {why}")]
    Other { key: String, why: String },
}

impl Error {
    /// It may succeed later without anybody's doing.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::RateLimited(_) | Self::Unavailable { .. })
    }
}

/// Keys that could leave the store, hide in it or mean two things are refused before anything is touched.
pub fn check_key(key: &str) -> Result<()> {
    let sound = key.len() <= 1024
        && !key.chars().any(char::is_control)
        && key.split('/').all(|part| !part.is_empty() && !part.starts_with('.') && part.len() <= 255);
    if sound { Ok(()) } else { Err(Error::Other { key: key.escape_debug().to_string(), why: "not a key".to_owned() }) }
}

/// The refusal of a small object that is not small.
pub fn check_small(key: &str, size: u64) -> Result<()> {
    if size <= SMALL { Ok(()) } else { Err(too_large(key, size)) }
}

pub fn too_large(key: &str, size: u64) -> Error {
    Error::Other { key: key.to_owned(), why: format!("{size} bytes, the most for a small object is {SMALL}") }
}

pub type Result<T> = std::result::Result<T, Error>;

/// How far a transfer has come: bytes done so far, told from time to time.
pub type Progress<'a> = &'a (dyn Fn(u64) + Send + Sync);

/// Keys are relative, `/`-separated and built by `layout` alone.
#[async_trait]
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// One small object. With `known` an unchanged one costs next to nothing.
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> Result<Poll>;
    /// `Conflict` and `Unavailable` are both ambiguous over a network: settle them by reading.
    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> Result<Written>;
    /// A `put` that may be told to wait for a more urgent one. Waiting counts as part of the call.
    async fn put_as(&self, key: &str, bytes: Bytes, condition: Precondition, _urgency: Priority) -> Result<Written> {
        self.put(key, bytes, condition).await
    }
    /// Over a network `NotFound` and `Conflict` may also mean that this very call succeeded.
    async fn delete(&self, key: &str, condition: Precondition) -> Result<()>;
    /// Removes a directory, by its name from [`Page::folders`], if nothing is in it. Safe to repeat. For stores that do
    /// not do so by themselves.
    async fn remove_folder(&self, _name: &str) -> Result<()> {
        Ok(())
    }
    /// What begins with `prefix` and comes after the key `after`. How long it may take is the caller's to say; a store
    /// that is far away only ends a listing that makes no progress.
    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page>;
    /// As [`list`](Self::list), for a caller that needs at most `most` entries.
    async fn list_some(&self, prefix: &str, after: Option<&str>, most: usize) -> Result<Page> {
        let mut page = self.list(prefix, after).await?;
        page.more |= page.entries.len() > most;
        page.entries.truncate(most);
        Ok(page)
    }
    /// Refuses a file that is not what `digest` says. Cancelled, it leaves nothing behind under `key`.
    /// With `Precondition::Absent` an object that already holds this very content is no conflict, so that an
    /// upload whose answer was lost can simply be repeated.
    async fn upload(
        &self,
        key: &str,
        file: &Path,
        condition: Precondition,
        digest: &Digest,
        progress: Progress<'_>,
    ) -> Result<Written>;
    /// `file` appears only whole and only if it is what `digest` says.
    async fn download(&self, key: &str, file: &Path, digest: &Digest, progress: Progress<'_>) -> Result<()>;
    /// As [`upload`](Self::upload) under a new name, by a store that need not know beforehand what it
    /// gets: it says what it was. The file is given away; nobody writes to it afterwards. Its content
    /// lasts when this returns, its name with the next object that is `put` into the same folder.
    /// `None`: this store wants an `upload`.
    async fn upload_owned(&self, _key: &str, _file: &Path, _progress: Progress<'_>) -> Option<Result<Digest>> {
        None
    }
    /// As [`download`](Self::download), but `file` is only to be read: it may be the object itself.
    async fn download_linked(&self, key: &str, file: &Path, digest: &Digest, progress: Progress<'_>) -> Result<()> {
        self.download(key, file, digest, progress).await
    }
    /// As `download`, of an object of which nothing is known: what it was. More than `most` bytes are refused.
    async fn download_unverified(&self, key: &str, file: &Path, most: u64, progress: Progress<'_>) -> Result<Digest>;
    /// How long a new object may stay invisible to others: caches lie in between.
    fn visibility_delay(&self) -> Duration {
        Duration::ZERO
    }
    /// Ends when the object may have changed since the call. A store that cannot tell waits
    /// for ever: poll beside it.
    async fn changed(&self, _key: &str) {
        std::future::pending().await
    }
}
