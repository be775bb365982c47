//! Uploads and downloads of checkpoints: hashed, in parallel, manifest last, verified.
//!
//! ```text
//!  hash ─▶ files, each only if absent ─▶ manifest, only if absent ─▶ (the lock names it: committed)
//!  (the lock names it) ─▶ manifest, by its hash ─▶ files, by the hashes in it ─▶ runsc
//! ```

use std::{
    collections::BTreeSet,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use baton_protocol::{
    id::{CheckpointId, Sha256Name},
    manifest,
    versioned::{self, Unreadable},
};
use bytes::Bytes;
use futures::future::{BoxFuture, try_join_all};
use sha2::{Digest as _, Sha256};

use super::{
    layout::{Image, Object, checkpoint_prefix},
    local_files,
    store::{Digest, Error, Page, PollResult, Precondition, ProgressFn, Result, Store},
};
use crate::clock::SharedClock;

/// Stall timeout for reading a local file.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How often an operation is attempted if it fails with a transient error, and the initial back-off.
const ATTEMPTS: u32 = 5;
const INITIAL_BACKOFF: Duration = Duration::from_millis(200);
/// The minimum back-off after the service has rate-limited a call.
const LONG_PAUSE: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Progress callback: receives the bytes transferred so far and the total.
pub type Total<'a> = &'a (dyn Fn(u64, u64) + Send + Sync);

/// Hashes the files of a checkpoint in `folder`, reading each once.
pub async fn hash(clock: &SharedClock, folder: &Path) -> Result<Vec<manifest::File>> {
    let mut files: Vec<BoxFuture<'_, Result<manifest::File>>> = Vec::new();
    let has_files = folder.join(Image::Files.file_name()).exists();
    for image in Image::ALL.into_iter().chain(has_files.then_some(Image::Files)) {
        files.push(Box::pin(async move {
            let name = image.file_name();
            let Digest { size, sha256, crc32c } =
                local_files::digest(clock, &folder.join(name), STALL_TIMEOUT, &|_| {}).await?;
            Ok(manifest::File { name: name.to_owned(), size, sha256: named(name, &sha256)?, crc32c })
        }));
    }
    try_join_all(files).await
}

/// Uploads the files in `folder` as the manifest describes them, then the manifest. Idempotent. Returns the manifest's
/// SHA-256, by which the lock will name it.
pub async fn upload(
    store: &dyn Store,
    clock: &SharedClock,
    folder: &Path,
    manifest: &manifest::CheckpointManifest,
    progress: Total<'_>,
) -> Result<Sha256Name> {
    let id = &manifest.checkpoint_id;
    let tally = FileProgress::of(manifest.files.iter().map(|file| file.size), progress);
    let mut files: Vec<BoxFuture<'_, Result<()>>> = Vec::new();
    for (at, (image, digest)) in images(manifest)?.into_iter().enumerate() {
        let (tally, key) = (&tally, Object::Image(id, image).key());
        files.push(Box::pin(async move {
            let file = folder.join(image.file_name());
            send(store, clock, &key, &file, &digest, &|done| tally.report(at, done)).await
        }));
    }
    try_join_all(files).await?;
    describe(store, clock, manifest).await
}

/// Converts a locally computed digest to the type used in manifests.
pub fn named(key: &str, sha256: &str) -> Result<Sha256Name> {
    Sha256Name::parse(sha256).map_err(|invalid| Error::Other { key: key.to_owned(), why: invalid.to_string() })
}

/// Uploads the manifest, after the files it describes.
async fn describe(
    store: &dyn Store,
    clock: &SharedClock,
    manifest: &manifest::CheckpointManifest,
) -> Result<Sha256Name> {
    let key = Object::CheckpointManifest(&manifest.checkpoint_id).key();
    let wrong = |error: serde_json::Error| Error::Other { key: key.clone(), why: error.to_string() };
    let bytes = Bytes::from(serde_json::to_vec_pretty(manifest).map_err(wrong)?);
    put_once(store, clock, &key, &bytes).await?;
    Ok(Sha256Name::from_bits(Sha256::digest(&bytes).into()))
}

/// The sizes of the checkpoint files in `folder`.
async fn sizes(clock: &SharedClock, folder: &Path) -> Result<Vec<(Image, u64)>> {
    let folder = folder.to_owned();
    local_files::run_blocking(clock, "a checkpoint", STALL_TIMEOUT, &|_| {}, move |_| {
        let size = |image: Image| {
            let about = folder.join(image.file_name()).metadata();
            about.map(|about| (image, about.len())).map_err(|error| local_files::local_error(image.file_name(), &error))
        };
        let has_files = folder.join(Image::Files.file_name()).exists();
        Image::ALL.into_iter().chain(has_files.then_some(Image::Files)).map(size).collect()
    })
    .await
}

/// Uploads the files in `folder`, passing ownership to the store, then the manifest with their digests. If the store
/// computes digests itself, each file is read once. Idempotent.
pub async fn store(
    store: &dyn Store,
    clock: &SharedClock,
    folder: &Path,
    manifest: &mut manifest::CheckpointManifest,
    progress: Total<'_>,
) -> Result<Sha256Name> {
    let sizes = sizes(clock, folder).await?;
    let tally = FileProgress::of(sizes.iter().map(|(_, size)| *size), progress);
    let id = &manifest.checkpoint_id;
    let mut files: Vec<BoxFuture<'_, Result<Option<manifest::File>>>> = Vec::new();
    for (at, (image, _)) in sizes.into_iter().enumerate() {
        let (tally, key) = (&tally, Object::Image(id, image).key());
        files.push(Box::pin(async move {
            let file = folder.join(image.file_name());
            let told = |done| tally.report(at, done);
            let taken = retry(clock, || {
                let taking = store.upload_owned(&key, &file, &told);
                Box::pin(async { taking.await.transpose() })
            });
            let name = image.file_name().to_owned();
            let taken = taken.await?;
            let Some(Digest { size, sha256, crc32c }) = taken else { return Ok(None) };
            Ok(Some(manifest::File { sha256: named(&name, &sha256)?, name, size, crc32c }))
        }));
    }
    let taken: Option<Vec<_>> = try_join_all(files).await?.into_iter().collect();
    let Some(taken) = taken else {
        manifest.files = hash(clock, folder).await?;
        return upload(store, clock, folder, manifest, progress).await;
    };
    manifest.files = taken;
    describe(store, clock, manifest).await
}

/// Reads the manifest that the lock names and verifies its SHA-256.
pub async fn manifest(
    store: &dyn Store,
    clock: &SharedClock,
    id: &CheckpointId,
    sha256: &Sha256Name,
) -> Result<manifest::CheckpointManifest> {
    let key = Object::CheckpointManifest(id).key();
    let bytes = wait_for(store, clock, &key).await?;
    let damaged = |why: String| Error::Damaged { key: key.clone(), why };
    if Sha256Name::from_bits(Sha256::digest(&bytes).into()) != *sha256 {
        return Err(damaged("it is not the one the lock names".to_owned()));
    }
    let manifest: manifest::CheckpointManifest = versioned::parse(&bytes).map_err(|error| unreadable(&key, error))?;
    if manifest.checkpoint_id != *id {
        return Err(damaged("it describes another checkpoint".to_owned()));
    }
    // Lock and signature refer to the checkpoint id, so the other fields must agree with it.
    if (&manifest.sandbox_id, manifest.epoch, manifest.seq) != (&id.sandbox(), id.epoch(), id.seq()) {
        return Err(damaged("its sandbox, epoch or sequence is not that of its name".to_owned()));
    }
    images(&manifest)?;
    Ok(manifest)
}

/// A manifest that cannot be read: damaged, or of a later version.
pub(super) fn unreadable(key: &str, error: Unreadable) -> Error {
    let (key, why) = (key.to_owned(), error.to_string());
    match error {
        Unreadable::Newer { .. } => Error::Newer { key, why },
        Unreadable::Malformed(_) => Error::Damaged { key, why },
    }
}

/// Downloads the files that runsc needs into `folder`, for reading only. Each appears only if it matches the manifest.
pub async fn download(
    store: &dyn Store,
    clock: &SharedClock,
    manifest: &manifest::CheckpointManifest,
    folder: &Path,
    progress: Total<'_>,
) -> Result<()> {
    let id = &manifest.checkpoint_id;
    let tally = FileProgress::of(manifest.files.iter().map(|file| file.size), progress);
    let mut files: Vec<BoxFuture<'_, Result<()>>> = Vec::new();
    for (at, (image, digest)) in
        images(manifest)?.into_iter().enumerate().filter(|(_, (image, _))| *image != Image::Files)
    {
        let (tally, key) = (&tally, Object::Image(id, image).key());
        files.push(Box::pin(async move {
            let file = folder.join(image.file_name());
            let told = |done| tally.report(at, done);
            retry(clock, || store.download_linked(&key, &file, &digest, &told)).await
        }));
    }
    try_join_all(files).await.map(|_| ())
}

/// Erases an unreferenced checkpoint, manifest first: without it, the remaining files are not a checkpoint. Idempotent.
pub async fn purge(store: &dyn Store, clock: &SharedClock, id: &CheckpointId) -> Result<()> {
    let manifest = Object::CheckpointManifest(id).key();
    erase(store, clock, &manifest).await?;
    let prefix = checkpoint_prefix(id);
    loop {
        let page = retry(clock, || store.list(&prefix, None)).await?;
        for entry in &page.entries {
            erase(store, clock, &entry.key).await?;
        }
        remove_folders(store, clock, &page).await?;
        if !page.more {
            return Ok(());
        }
    }
}

/// Removes the empty directories that a mounted bucket keeps.
pub(super) async fn remove_folders(store: &dyn Store, clock: &SharedClock, page: &Page) -> Result<()> {
    let mut folders: Vec<_> = page.folders.iter().collect();
    // A nested directory has a longer name than its parent, so it is removed first.
    folders.sort_by_key(|name| std::cmp::Reverse(name.len()));
    for folder in folders {
        retry(clock, || store.remove_folder(folder)).await?;
    }
    Ok(())
}

pub(super) async fn erase(store: &dyn Store, clock: &SharedClock, key: &str) -> Result<()> {
    match retry(clock, || store.delete(key, Precondition::Any)).await {
        // Already gone, perhaps through an attempt whose answer was lost.
        Err(Error::NotFound(_)) => Ok(()),
        erased => erased,
    }
}

/// Uploads one file if it is absent; retries transient errors.
pub async fn send(
    store: &dyn Store,
    clock: &SharedClock,
    key: &str,
    file: &Path,
    digest: &Digest,
    progress: ProgressFn<'_>,
) -> Result<()> {
    retry(clock, || store.upload(key, file, Precondition::Absent, digest, progress)).await.map(drop)
}

/// Like [`send`], but passes ownership of the file to the store and returns its digest. If the store computes the
/// digest itself, the file is read once.
pub async fn give(
    store: &dyn Store,
    clock: &SharedClock,
    key: &str,
    file: &Path,
    progress: ProgressFn<'_>,
) -> Result<Digest> {
    let taken = retry(clock, || {
        let taking = store.upload_owned(key, file, progress);
        Box::pin(async { taking.await.transpose() })
    });
    if let Some(digest) = taken.await? {
        return Ok(digest);
    }
    let digest = local_files::digest(clock, file, STALL_TIMEOUT, &|_| {}).await?;
    send(store, clock, key, file, &digest, progress).await?;
    Ok(digest)
}

/// Downloads one file; retries transient errors.
pub async fn fetch(
    store: &dyn Store,
    clock: &SharedClock,
    key: &str,
    file: &Path,
    digest: &Digest,
    progress: ProgressFn<'_>,
) -> Result<()> {
    retry(clock, || store.download(key, file, digest, progress)).await
}

/// Writes a small object once. An existing object with the same content counts as success: it is our own, from an
/// attempt whose answer was lost.
pub async fn put_once(store: &dyn Store, clock: &SharedClock, key: &str, bytes: &Bytes) -> Result<()> {
    retry(clock, || Box::pin(put_or_find(store, key, bytes))).await
}

async fn put_or_find(store: &dyn Store, key: &str, bytes: &Bytes) -> Result<()> {
    let error = match store.put(key, bytes.clone(), Precondition::Absent).await {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    if !matches!(error, Error::Conflict(_) | Error::Unavailable { .. }) {
        return Err(error);
    }
    match store.get_if_changed(key, None).await? {
        PollResult::Changed(there, _) if there == *bytes => Ok(()),
        PollResult::Changed(..) => Err(Error::Conflict(key.to_owned())),
        PollResult::Unchanged | PollResult::Missing => Err(error),
    }
}

/// Reads a small object that is known to exist: caches may delay its visibility.
pub(super) async fn wait_for(store: &dyn Store, clock: &SharedClock, key: &str) -> Result<Bytes> {
    let start = clock.now();
    loop {
        let found = retry(clock, || store.get_if_changed(key, None)).await?;
        if let PollResult::Changed(bytes, _) = found {
            return Ok(bytes);
        }
        if clock.now() - start >= store.visibility_delay() {
            return Err(Error::NotFound(key.to_owned()));
        }
        clock.sleep(LOOK_AGAIN).await;
    }
}

/// Retries transient errors a few times, with exponential back-off.
pub(super) async fn retry<'a, T>(clock: &SharedClock, work: impl Fn() -> BoxFuture<'a, Result<T>>) -> Result<T> {
    let mut pause = INITIAL_BACKOFF;
    for _ in 1..ATTEMPTS {
        match work().await {
            Err(error) if error.is_passing() => {
                let least = if matches!(error, Error::RateLimited(_)) { LONG_PAUSE } else { INITIAL_BACKOFF };
                clock.sleep(clock.jittered(pause.max(least))).await;
                pause *= 2;
            }
            done => return done,
        }
    }
    work().await
}

/// The files of a checkpoint with their digests from the manifest: every required file, each once, and no other name.
pub(super) fn images(manifest: &manifest::CheckpointManifest) -> Result<Vec<(Image, Digest)>> {
    let mut seen = BTreeSet::new();
    let found = manifest.files.iter().map(|file| {
        let every = Image::ALL.into_iter().chain([Image::Files]);
        let image = every.into_iter().find(|image| image.file_name() == file.name)?;
        let digest = Digest { size: file.size, sha256: file.sha256.to_string(), crc32c: file.crc32c };
        seen.insert(file.name.clone()).then_some((image, digest))
    });
    let found: Option<Vec<_>> = found.collect();
    let whole = |files: &Vec<(Image, Digest)>| {
        Image::ALL.into_iter().all(|image| files.iter().any(|(found, _)| *found == image))
    };
    found.filter(whole).ok_or_else(|| Error::Damaged {
        key: Object::CheckpointManifest(&manifest.checkpoint_id).key(),
        why: "its files are not those of a checkpoint".to_owned(),
    })
}

/// Adds up the progress of parallel transfers.
struct FileProgress<'a> {
    done: Vec<AtomicU64>,
    total: u64,
    progress: Total<'a>,
}

impl<'a> FileProgress<'a> {
    fn of(sizes: impl Iterator<Item = u64> + Clone, progress: Total<'a>) -> Self {
        let total = sizes.clone().fold(0, u64::saturating_add);
        Self { done: sizes.map(|_| AtomicU64::new(0)).collect(), total, progress }
    }

    fn report(&self, file: usize, done: u64) {
        self.done[file].store(done, Ordering::Relaxed);
        let sum = self.done.iter().map(|done| done.load(Ordering::Relaxed)).sum();
        (self.progress)(sum, self.total);
    }
}
