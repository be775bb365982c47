//! The checkpoints in an instance's store, addressed by their heads.

use std::{collections::BTreeSet, path::Path, sync::Arc, time::Duration};

use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::Head,
    manifest::{Archive, ArchivePath, CheckpointManifest},
    metadata::{Committed, Latest},
    versioned,
};

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::{
    bucket_name,
    checkpoint_io::{self, Total, erase, put_once, retry},
    layout::{self, Image, Object, Sha256Name},
    local_files,
    signature::{self, Seals},
    store::{Digest, Error, PollResult, ProgressFn, Result, Store},
};
use crate::clock::SharedClock;

/// Stall timeout for reading a local file.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// How the metadata shows a head that was taken at this time.
pub fn committed(head: &Head, taken: Option<String>) -> Committed {
    let latest = Latest { bucket: head.bucket.clone(), path: layout::checkpoint_prefix(&head.checkpoint_id) };
    Committed { latest: Some(latest), at: taken }
}

#[derive(Clone, Debug)]
pub struct Checkpoints {
    pub(super) store: Arc<dyn Store>,
    /// Recorded in the head; `None` for a mount whose bucket is not configured.
    bucket: Option<String>,
    pub(super) clock: SharedClock,
    seals: Seals,
}

impl Checkpoints {
    pub fn new(store: Arc<dyn Store>, bucket: Option<String>, clock: SharedClock) -> Self {
        Self { store, bucket, clock, seals: Seals::default() }
    }

    /// With keys, stored checkpoints are signed, and unsigned ones are not restored.
    #[must_use]
    pub fn sealed_by(self, seals: Seals) -> Self {
        Self { seals, ..self }
    }

    /// Stores every file of `image`, then `manifest` with their digests, and returns the head that names it. The store
    /// takes ownership of the files. The checkpoint has no effect until that head is committed.
    pub async fn store(&self, image: &Path, mut manifest: CheckpointManifest, progress: Total<'_>) -> Result<Head> {
        let sha256 = checkpoint_io::store(&*self.store, &self.clock, image, &mut manifest, progress).await?;
        let id = &manifest.checkpoint_id;
        let (about, seal) = (Object::CheckpointManifest(id).key(), Object::CheckpointSeal(id).key());
        signature::put(&*self.store, &self.clock, &self.seals, &about, &seal, sha256.as_str()).await?;
        Ok(Head {
            seq: manifest.seq,
            epoch: manifest.epoch,
            checkpoint_id: manifest.checkpoint_id,
            bucket: self.bucket.clone(),
            manifest_sha256: sha256,
        })
    }

    /// Reads the manifest that a head names and verifies it against the head.
    pub async fn manifest(&self, head: &Head) -> Result<CheckpointManifest> {
        let id = &head.checkpoint_id;
        // A rollback commits an older checkpoint again: a head may be newer than its checkpoint, but never older.
        if head.seq < id.seq() || head.epoch < id.epoch() {
            let why = "the head in the lock is older than the checkpoint that it names".to_owned();
            return Err(Error::Damaged { key: Object::CheckpointManifest(id).key(), why });
        }
        checkpoint_io::manifest(&*self.store, &self.clock, id, &head.manifest_sha256).await
    }

    /// Like [`manifest`](Self::manifest), before a restore: rejects a manifest that is not signed.
    pub async fn verified(&self, head: &Head) -> Result<CheckpointManifest> {
        let id = &head.checkpoint_id;
        let (about, seal) = (Object::CheckpointManifest(id).key(), Object::CheckpointSeal(id).key());
        let (manifest, sealed) = futures::join!(
            self.manifest(head),
            signature::check(&*self.store, &self.clock, &self.seals, &about, &seal, head.manifest_sha256.as_str()),
        );
        let manifest = manifest?;
        sealed.map(|()| manifest)
    }

    /// Signs the stored checkpoint that a head names, if there is a key.
    pub async fn sign(&self, head: &Head) -> Result<()> {
        let (id, sha256) = (&head.checkpoint_id, &head.manifest_sha256);
        self.manifest(head).await?;
        let (about, seal) = (Object::CheckpointManifest(id).key(), Object::CheckpointSeal(id).key());
        signature::put(&*self.store, &self.clock, &self.seals, &about, &seal, sha256.as_str()).await
    }

    /// Whether this instance's store may hold the checkpoint of a head. Only differing bucket names rule it out.
    pub fn may_hold(&self, head: &Head) -> bool {
        bucket_name::may_be_one(head.bucket.as_ref(), self.bucket.as_ref())
    }

    /// Downloads every file of a verified manifest into the fresh directory `image`, verifying each. The files must
    /// only be read.
    pub async fn fetch(&self, manifest: &CheckpointManifest, image: &Path, progress: Total<'_>) -> Result<()> {
        checkpoint_io::download(&*self.store, &self.clock, manifest, image, progress).await
    }

    /// The archive of the file system alone, if the checkpoint has one.
    pub fn files_of(&self, manifest: &CheckpointManifest) -> Option<Archive> {
        let name = Image::Files.file_name();
        let sha256 = manifest.files.iter().find(|file| file.name == name)?.sha256.clone();
        let path = ArchivePath::Checkpoint(manifest.checkpoint_id.clone());
        Some(Archive { bucket: self.bucket.clone(), path, sha256 })
    }

    /// Whether this instance's checkpoint store may hold an archive.
    pub fn may_hold_archive(&self, archive: &Archive) -> bool {
        matches!(archive.path, ArchivePath::Checkpoint(_))
            && bucket_name::may_be_one(archive.bucket.as_ref(), self.bucket.as_ref())
    }

    /// Downloads an archive that a manifest names into `file` and returns its digest.
    pub async fn fetch_archive(
        &self,
        archive: &Archive,
        file: &Path,
        most: u64,
        progress: ProgressFn<'_>,
    ) -> Result<Digest> {
        let key = archive.path.to_string();
        retry(&self.clock, || self.store.download_unverified(&key, file, most, progress)).await
    }

    /// Stores a content-addressed file unless it exists. Returns whether it was missing.
    async fn store_once(&self, key: &str, file: &Path) -> Result<bool> {
        if !retry(&self.clock, || self.store.list(key, None)).await?.entries.is_empty() {
            return Ok(false);
        }
        let digest = local_files::digest(&self.clock, file, STALL_TIMEOUT, &|_| {}).await?;
        match checkpoint_io::send(&*self.store, &self.clock, key, file, &digest, &|_| {}).await {
            // Another instance was faster. The content is verified when it is used.
            Ok(()) | Err(Error::Conflict(_)) => Ok(true),
            Err(error) => Err(error),
        }
    }

    pub async fn has_rootfs(&self, digest: &Sha256Name) -> Result<bool> {
        let key = Object::Rootfs(digest).key();
        Ok(!retry(&self.clock, || self.store.list(&key, None)).await?.entries.is_empty())
    }

    /// Stores a base root file system for later restores. Returns whether it was missing.
    pub async fn store_rootfs(&self, digest: &Sha256Name, file: &Path) -> Result<bool> {
        self.store_once(&Object::Rootfs(digest).key(), file).await
    }

    /// Stores a runsc binary for later restores. Returns whether it was missing.
    pub async fn store_runtime(&self, sha256: &Sha256Name, file: &Path) -> Result<bool> {
        self.store_once(&Object::Runtime(sha256).key(), file).await
    }

    /// Downloads a runsc binary into `file` and verifies its SHA-256.
    pub async fn fetch_runtime(&self, sha256: &Sha256Name, file: &Path, most: u64) -> Result<()> {
        let key = Object::Runtime(sha256).key();
        let found = retry(&self.clock, || self.store.download_unverified(&key, file, most, &|_| {})).await?;
        if found.sha256 == sha256.as_str() {
            return Ok(());
        }
        Err(Error::Damaged { key, why: "it is not what its name says".to_owned() })
    }

    /// Downloads the archive of a base root file system into `file`. Its digest is verified on extraction.
    pub async fn fetch_rootfs(
        &self,
        digest: &Sha256Name,
        file: &Path,
        most: u64,
        progress: ProgressFn<'_>,
    ) -> Result<()> {
        let key = Object::Rootfs(digest).key();
        retry(&self.clock, || self.store.download_unverified(&key, file, most, progress)).await.map(drop)
    }

    /// Every checkpoint of a sandbox of which at least one object is stored.
    pub async fn list(&self, sandbox: &SandboxId) -> Result<BTreeSet<CheckpointId>> {
        let (prefix, mut found, mut after) = (layout::checkpoints_of(sandbox), BTreeSet::new(), None);
        loop {
            let page = self.store.list(&prefix, after.as_deref()).await?;
            after = page.entries.last().map(|entry| entry.key.clone());
            let listed = page.entries.iter().filter_map(|entry| layout::checkpoint_of(&entry.key));
            // One sandbox id may be a prefix of another.
            found.extend(listed.filter(|id| id.sandbox() == *sandbox));
            if !page.more {
                return Ok(found);
            }
        }
    }

    /// The manifest of a checkpoint as stored, and its digest. `None`: it does not exist, so the upload never finished.
    /// Only the lock tells whether the checkpoint was committed.
    pub async fn manifest_of(&self, id: &CheckpointId) -> Result<Option<(CheckpointManifest, Sha256Name)>> {
        self.manifest_at(Object::CheckpointManifest(id).key()).await
    }

    pub(super) async fn manifest_at(&self, key: String) -> Result<Option<(CheckpointManifest, Sha256Name)>> {
        let PollResult::Changed(bytes, _) = self.store.get_if_changed(&key, None).await? else { return Ok(None) };
        let manifest = versioned::parse(&bytes).map_err(|error| checkpoint_io::unreadable(&key, error))?;
        Ok(Some((manifest, Sha256Name::from_bits(Sha256::digest(&bytes).into()))))
    }

    pub fn bucket(&self) -> Option<&String> {
        self.bucket.as_ref()
    }

    /// Whether any sandbox pins the checkpoint.
    pub async fn is_pinned(&self, id: &CheckpointId) -> Result<bool> {
        Ok(!self.store.list(&layout::pins_prefix(id), None).await?.entries.is_empty())
    }

    /// Whether a sandbox other than `but` pins the checkpoint.
    pub async fn is_pinned_by_another(&self, id: &CheckpointId, but: &SandboxId) -> Result<bool> {
        let own = Object::Pin(id, but).key();
        Ok(self.store.list(&layout::pins_prefix(id), None).await?.entries.iter().any(|entry| entry.key != own))
    }

    /// Keeps a checkpoint for a sandbox until it is unpinned. Idempotent.
    pub async fn pin(&self, id: &CheckpointId, sandbox: &SandboxId) -> Result<()> {
        put_once(&*self.store, &self.clock, &Object::Pin(id, sandbox).key(), &Bytes::from_static(b"{}")).await
    }

    /// Removes a pin. Idempotent.
    pub async fn unpin(&self, id: &CheckpointId, sandbox: &SandboxId) -> Result<()> {
        erase(&*self.store, &self.clock, &Object::Pin(id, sandbox).key()).await
    }

    /// Erases an unreferenced checkpoint.
    pub async fn erase(&self, id: &CheckpointId) -> Result<()> {
        checkpoint_io::purge(&*self.store, &self.clock, id).await
    }
}
