//! Filesystem snapshots by name: written once, manifest last.
//!
//! ```text
//!   making.json {nonce}, only if absent ─▶ NAME.tar ─▶ manifest.json {nonce}
//! ```
//! With the first file and without the last, a snapshot is unfinished, and only the request with that nonce may
//! continue it. With neither, a complete archive was put there by hand.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
    time::Duration,
};

use baton_protocol::{
    id::{Nonce, Sha256Name, Tenant, hex},
    manifest::{self, Archive, ArchiveEnd, ArchivePath},
    snapshot_key::SnapshotKey,
    versioned,
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{
    bucket_name,
    checkpoint_io::{self, erase, give, put_once, retry, unreadable},
    layout::{Object, SNAPSHOTS, snapshot_of, snapshot_prefix, snapshots_of},
    local_files,
    signature::{self, Seals},
    store::{Digest, Error, PollResult, Precondition, ProgressFn, Result, Store},
};
use crate::clock::SharedClock;

/// Stall timeout for reading a local file.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub struct Snapshots {
    store: Arc<dyn Store>,
    /// `None` for a mount whose bucket is not configured.
    bucket: Option<String>,
    clock: SharedClock,
    seals: Seals,
}

#[derive(Debug, Serialize, Deserialize)]
struct Making {
    nonce: Nonce,
}

/// Who owns a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameClaim {
    /// The caller may create the snapshot or continue it.
    Ours,
    /// The caller has already finished the snapshot.
    Finished(manifest::SnapshotManifest),
    /// The snapshot exists, or another request is creating it.
    Taken,
}

/// What is stored under a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamedSnapshot {
    Nothing,
    Unfinished,
    Ours(manifest::SnapshotManifest),
    /// A complete archive that was put there by hand.
    Foreign {
        path: ArchivePath,
    },
}

/// One entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedSnapshot {
    pub snapshot: SnapshotKey,
    pub size: u64,
    /// Created by an instance, and complete.
    pub has_manifest: bool,
    /// Started, and not complete.
    pub is_unfinished: bool,
}

impl Snapshots {
    pub fn new(store: Arc<dyn Store>, bucket: Option<String>, clock: SharedClock) -> Self {
        Self { store, bucket, clock, seals: Seals::default() }
    }

    /// With keys, stored snapshots are signed, and no sandbox starts from an unsigned one.
    #[must_use]
    pub fn sealed_by(self, seals: Seals) -> Self {
        Self { seals, ..self }
    }

    /// Claims the name for the request with this nonce. Idempotent.
    pub async fn claim(&self, snapshot: &SnapshotKey, nonce: &Nonce) -> Result<NameClaim> {
        let making = Object::SnapshotMaking(snapshot).key();
        if let Some(begun) = self.making(snapshot).await? {
            return self.claimed(snapshot, nonce, &begun).await;
        }
        let prefix = snapshot_prefix(snapshot);
        if !retry(&self.clock, || self.store.list(&prefix, None)).await?.entries.is_empty() {
            return Ok(NameClaim::Taken);
        }
        let bytes = serde_json::to_vec(&Making { nonce: nonce.clone() })
            .map_err(|error| Error::Other { key: making.clone(), why: error.to_string() })?;
        match put_once(&*self.store, &self.clock, &making, &Bytes::from(bytes)).await {
            Ok(()) => Ok(NameClaim::Ours),
            Err(Error::Conflict(_)) => Ok(NameClaim::Taken),
            Err(error) => Err(error),
        }
    }

    async fn claimed(&self, snapshot: &SnapshotKey, nonce: &Nonce, begun: &Making) -> Result<NameClaim> {
        if begun.nonce != *nonce {
            return Ok(NameClaim::Taken);
        }
        Ok(match self.manifest(snapshot).await? {
            Some(manifest) if manifest.nonce == *nonce => NameClaim::Finished(manifest),
            Some(_) => NameClaim::Taken,
            None => NameClaim::Ours,
        })
    }

    /// Stores the archive of a claimed name, taking ownership of the file, and returns its digest. Idempotent.
    pub async fn store(
        &self,
        snapshot: &SnapshotKey,
        archive: &Path,
        progress: checkpoint_io::Total<'_>,
    ) -> Result<Digest> {
        let key = Object::SnapshotArchive(snapshot).key();
        let (path, named) = (archive.to_owned(), key.clone());
        let size = local_files::run_blocking(&self.clock, &key, STALL_TIMEOUT, &|_| {}, move |_| {
            path.metadata().map(|about| about.len()).map_err(|error| local_files::local_error(&named, &error))
        });
        let size = size.await?;
        let tell = |done| progress(done, size);
        match give(&*self.store, &self.clock, &key, archive, &tell).await {
            // From an earlier attempt of ours, and never visible: without a manifest there is no snapshot.
            Err(Error::Conflict(_)) => {
                erase(&*self.store, &self.clock, &key).await?;
                give(&*self.store, &self.clock, &key, archive, &tell).await
            }
            given => given,
        }
    }

    /// Writes the manifest, which completes the snapshot. Idempotent.
    pub async fn finish(&self, snapshot: &SnapshotKey, manifest: &manifest::SnapshotManifest) -> Result<()> {
        let key = Object::SnapshotManifest(snapshot).key();
        let bytes = serde_json::to_vec_pretty(manifest)
            .map_err(|error| Error::Other { key: key.clone(), why: error.to_string() })?;
        // Signature first, since the manifest completes the snapshot. No other request writes this name.
        self.seal(snapshot, &key, &hex(&Sha256::digest(&bytes))).await?;
        put_once(&*self.store, &self.clock, &key, &Bytes::from(bytes)).await
    }

    async fn seal(&self, snapshot: &SnapshotKey, about: &str, sha256: &str) -> Result<()> {
        let seal = Object::SnapshotSeal(snapshot).key();
        signature::put(&*self.store, &self.clock, &self.seals, about, &seal, sha256).await
    }

    async fn check(&self, snapshot: &SnapshotKey, about: &str, sha256: &str) -> Result<()> {
        let seal = Object::SnapshotSeal(snapshot).key();
        signature::check(&*self.store, &self.clock, &self.seals, about, &seal, sha256).await
    }

    /// Like [`find`](Self::find), before a start: rejects a snapshot of ours whose manifest is not signed.
    pub async fn find_genuine(&self, snapshot: &SnapshotKey) -> Result<NamedSnapshot> {
        let found = self.find(snapshot).await?;
        if !matches!(found, NamedSnapshot::Ours(_)) || !self.seals.are_asked_for() {
            return Ok(found);
        }
        let key = Object::SnapshotManifest(snapshot).key();
        let bytes = self.small(&key).await?.ok_or_else(|| Error::NotFound(key.clone()))?;
        self.check(snapshot, &key, &hex(&Sha256::digest(&bytes))).await?;
        let damaged = |error: serde_json::Error| Error::Damaged { key, why: error.to_string() };
        serde_json::from_slice(&bytes).map(NamedSnapshot::Ours).map_err(damaged)
    }

    /// Verifies the signature of a downloaded archive that has no manifest.
    pub async fn check_archive(&self, snapshot: &SnapshotKey, archive: &Archive) -> Result<()> {
        self.check(snapshot, &archive.path.to_string(), archive.sha256.as_str()).await
    }

    pub async fn find(&self, snapshot: &SnapshotKey) -> Result<NamedSnapshot> {
        if let Some(manifest) = self.manifest(snapshot).await? {
            return Ok(NamedSnapshot::Ours(manifest));
        }
        let prefix = snapshot_prefix(snapshot);
        let page = retry(&self.clock, || self.store.list(&prefix, None)).await?;
        if page.entries.iter().any(|entry| entry.key == Object::SnapshotMaking(snapshot).key()) {
            return Ok(NamedSnapshot::Unfinished);
        }
        let paths = ArchiveEnd::ALL.map(|end| ArchivePath::Snapshot(snapshot.clone(), end));
        let is_there = |path: &ArchivePath| page.entries.iter().any(|entry| entry.key == path.to_string());
        Ok(paths.into_iter().find(is_there).map_or(NamedSnapshot::Nothing, |path| NamedSnapshot::Foreign { path }))
    }

    /// Downloads an archive into `file`, rejecting more than `most` bytes. Returns its location and digest.
    pub async fn fetch(&self, path: &ArchivePath, file: &Path, most: u64, progress: ProgressFn<'_>) -> Result<Archive> {
        let key = path.to_string();
        let digest = retry(&self.clock, || self.store.download_unverified(&key, file, most, progress)).await?;
        let sha256 =
            Sha256Name::parse(&digest.sha256).map_err(|invalid| Error::Other { key, why: invalid.to_string() })?;
        Ok(Archive { bucket: self.bucket.clone(), path: path.clone(), sha256 })
    }

    /// The location of an archive of ours, without accessing the store.
    pub fn archive(&self, snapshot: &SnapshotKey, manifest: &manifest::SnapshotManifest) -> Archive {
        let path = ArchivePath::Snapshot(snapshot.clone(), ArchiveEnd::Tar);
        Archive { bucket: self.bucket.clone(), path, sha256: manifest.sha256.clone() }
    }

    /// Whether this instance's snapshot store may hold an archive.
    pub fn may_hold(&self, archive: &Archive) -> bool {
        matches!(archive.path, ArchivePath::Snapshot(..))
            && bucket_name::may_be_one(archive.bucket.as_ref(), self.bucket.as_ref())
    }

    /// All snapshots, or those of one tenant.
    pub async fn list(&self, tenant: Option<&Tenant>) -> Result<Vec<ListedSnapshot>> {
        let prefix = tenant.map_or_else(|| SNAPSHOTS.to_owned(), snapshots_of);
        let mut found: BTreeMap<SnapshotKey, ListedSnapshot> = BTreeMap::new();
        let (mut making, mut after) = (BTreeSet::new(), None::<String>);
        loop {
            let page = retry(&self.clock, || self.store.list(&prefix, after.as_deref())).await?;
            for entry in &page.entries {
                let Some(snapshot) = snapshot_of(&entry.key) else { continue };
                let unknown =
                    ListedSnapshot { snapshot: snapshot.clone(), size: 0, has_manifest: false, is_unfinished: false };
                let listed = found.entry(snapshot.clone()).or_insert(unknown);
                if entry.key == Object::SnapshotManifest(&snapshot).key() {
                    listed.has_manifest = true;
                } else if entry.key == Object::SnapshotMaking(&snapshot).key() {
                    making.insert(snapshot);
                } else {
                    listed.size = listed.size.max(entry.size);
                }
            }
            after = page.entries.last().map(|entry| entry.key.clone());
            if !page.more {
                break;
            }
        }
        for listed in found.values_mut() {
            listed.is_unfinished = !listed.has_manifest && making.contains(&listed.snapshot);
        }
        Ok(found.into_values().collect())
    }

    /// Erases a snapshot in an order in which the remains never look like a foreign archive. Idempotent.
    pub async fn erase(&self, snapshot: &SnapshotKey) -> Result<()> {
        erase(&*self.store, &self.clock, &Object::SnapshotManifest(snapshot).key()).await?;
        let (prefix, last) = (snapshot_prefix(snapshot), Object::SnapshotMaking(snapshot).key());
        let page = retry(&self.clock, || self.store.list(&prefix, None)).await?;
        for entry in page.entries.iter().filter(|entry| entry.key != last) {
            erase(&*self.store, &self.clock, &entry.key).await?;
        }
        erase(&*self.store, &self.clock, &last).await?;
        checkpoint_io::remove_folders(&*self.store, &self.clock, &page).await
    }

    /// Stores a complete archive under a name as it is; `end` is its file name extension.
    pub async fn import(&self, snapshot: &SnapshotKey, file: &Path, end: &str) -> Result<Digest> {
        let prefix = snapshot_prefix(snapshot);
        if !retry(&self.clock, || self.store.list(&prefix, None)).await?.entries.is_empty() {
            return Err(Error::Conflict(prefix));
        }
        let digest = local_files::digest(&self.clock, file, STALL_TIMEOUT, &|_| {}).await?;
        let key = format!("{prefix}{snapshot}{end}");
        self.store.upload(&key, file, Precondition::Absent, &digest, &|_| {}).await?;
        self.seal(snapshot, &key, &digest.sha256).await?;
        Ok(digest)
    }

    async fn manifest(&self, snapshot: &SnapshotKey) -> Result<Option<manifest::SnapshotManifest>> {
        let key = Object::SnapshotManifest(snapshot).key();
        let Some(bytes) = self.small(&key).await? else { return Ok(None) };
        versioned::parse(&bytes).map(Some).map_err(|error| unreadable(&key, error))
    }

    async fn making(&self, snapshot: &SnapshotKey) -> Result<Option<Making>> {
        let key = Object::SnapshotMaking(snapshot).key();
        let Some(bytes) = self.small(&key).await? else { return Ok(None) };
        let damaged = |error: serde_json::Error| Error::Damaged { key: key.clone(), why: error.to_string() };
        serde_json::from_slice(&bytes).map(Some).map_err(damaged)
    }

    async fn small(&self, key: &str) -> Result<Option<Bytes>> {
        match retry(&self.clock, || self.store.get_if_changed(key, None)).await? {
            PollResult::Changed(bytes, _) => Ok(Some(bytes)),
            PollResult::Unchanged | PollResult::Missing => Ok(None),
        }
    }
}
