//! A directory whose kind is detected on first use: a local file system, or a mounted bucket.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::OnceCell;

use super::{
    directory::Directory,
    gcsfuse::Mounted,
    local_files::local_error,
    store::{Digest, Error, Page, PollResult, Precondition, Priority, ProgressFn, Result, Store, Version, Written},
};
use crate::clock::SharedClock;

const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// File systems that support the locks and renames we need, by the magic number from `statfs`.
const LOCAL: [i64; 5] = [
    0xEF53,      // ext4
    0x5846_5342, // xfs
    0x9123_683E, // btrfs
    0x0102_1994, // tmpfs
    0x794C_7630, // overlay
];

/// Whether a directory, or its closest existing ancestor, is on a local file system. Times out, since a mount may hang.
pub async fn is_local(clock: &SharedClock, path: &Path) -> Result<bool> {
    let name = "the mounted directory";
    let path = path.to_owned();
    let asked = tokio::task::spawn_blocking(move || {
        for folder in path.ancestors() {
            match rustix::fs::statfs(folder) {
                Ok(about) => return Ok(LOCAL.contains(&about.f_type)),
                Err(rustix::io::Errno::NOENT) => {}
                Err(error) => return Err(io::Error::from(error)),
            }
        }
        Err(io::ErrorKind::NotFound.into())
    });
    let unavailable = |why: String| Error::Unavailable { key: name.to_owned(), why };
    let asked = clock.timeout(PROBE_TIMEOUT, asked).await.map_err(|late| unavailable(late.to_string()))?;
    asked.map_err(|error| unavailable(error.to_string()))?.map_err(|error| local_error(name, &error))
}

#[derive(Debug)]
pub struct Mount {
    clock: SharedClock,
    root: PathBuf,
    store: OnceCell<Box<dyn Store>>,
}

impl Mount {
    pub fn new(root: impl Into<PathBuf>, clock: SharedClock) -> Self {
        Self { clock, root: root.into(), store: OnceCell::new() }
    }

    async fn store(&self) -> Result<&dyn Store> {
        let open = || async {
            let (root, clock) = (self.root.clone(), self.clock.clone());
            let store: Box<dyn Store> = if is_local(&clock, &root).await? {
                Box::new(Directory::new(root, clock))
            } else {
                Box::new(Mounted::new(root, clock))
            };
            Ok(store)
        };
        self.store.get_or_try_init(open).await.map(|store| &**store)
    }
}

#[async_trait]
impl Store for Mount {
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> Result<PollResult> {
        self.store().await?.get_if_changed(key, known).await
    }

    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> Result<Written> {
        self.store().await?.put(key, bytes, condition).await
    }

    async fn put_as(&self, key: &str, bytes: Bytes, condition: Precondition, urgency: Priority) -> Result<Written> {
        self.store().await?.put_as(key, bytes, condition, urgency).await
    }

    async fn delete(&self, key: &str, condition: Precondition) -> Result<()> {
        self.store().await?.delete(key, condition).await
    }

    async fn remove_folder(&self, name: &str) -> Result<()> {
        self.store().await?.remove_folder(name).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        self.store().await?.list(prefix, after).await
    }

    async fn upload(
        &self,
        key: &str,
        file: &Path,
        condition: Precondition,
        digest: &Digest,
        progress: ProgressFn<'_>,
    ) -> Result<Written> {
        self.store().await?.upload(key, file, condition, digest, progress).await
    }

    async fn download(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()> {
        self.store().await?.download(key, file, digest, progress).await
    }

    async fn upload_owned(&self, key: &str, file: &Path, progress: ProgressFn<'_>) -> Option<Result<Digest>> {
        match self.store().await {
            Ok(store) => store.upload_owned(key, file, progress).await,
            Err(error) => Some(Err(error)),
        }
    }

    async fn download_linked(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()> {
        self.store().await?.download_linked(key, file, digest, progress).await
    }

    async fn download_unverified(&self, key: &str, file: &Path, most: u64, progress: ProgressFn<'_>) -> Result<Digest> {
        self.store().await?.download_unverified(key, file, most, progress).await
    }

    fn visibility_delay(&self) -> Duration {
        self.store.get().map_or(Duration::ZERO, |store| store.visibility_delay())
    }

    async fn changed(&self, key: &str) {
        match self.store().await {
            Ok(store) => store.changed(key).await,
            Err(_) => std::future::pending().await,
        }
    }
}
