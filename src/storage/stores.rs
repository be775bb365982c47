//! The stores of one instance as configured, and whether they support a request.
//!
//! Opening them touches nothing, so the server always starts; a misconfiguration is reported by the first request that
//! needs the store.

use std::{path::PathBuf, sync::Arc};

use super::{
    auto_directory::{Mount, is_local},
    bucket_name,
    checkpoint_io::wait_for,
    checkpoints::Checkpoints,
    directory::Directory,
    gcs::{Gcs, GcsConnection},
    layout::{Artifact, ArtifactRoot, root_for},
    metered::Counted,
    signature::Seals,
    snapshots::Snapshots,
    store::{self, PollResult, Precondition, Store},
};
use crate::{
    clock::SharedClock,
    config::{StorageSettings, variables::SANDBOX_METADATA_BUCKET},
    metrics::Metrics,
};

/// A store and the name records use for it.
#[derive(Clone, Debug)]
pub struct Opened {
    pub store: Arc<dyn Store>,
    /// `None` if only a mount is configured.
    pub bucket: Option<String>,
    /// Direct access to the bucket if `store` is a mount of it. Used by the probe only.
    pub behind_mount: Option<Arc<dyn Store>>,
}

/// All stores of an instance; `None` where nothing is configured.
#[derive(Clone, Debug)]
pub struct Stores {
    pub lock: Option<Opened>,
    pub metadata: Option<Opened>,
    pub checkpoints: Option<Opened>,
    pub snapshots: Option<Opened>,
    clock: SharedClock,
    /// Directories that hold objects written by compare-and-set.
    mounts: Vec<PathBuf>,
    seals: Seals,
}

/// The result of probing one store.
#[derive(Debug)]
pub struct StoreProbe {
    pub artifact: Artifact,
    pub bucket: Option<String>,
    /// The bucket is reached through a mount.
    pub is_mounted: bool,
    pub result: store::Result<()>,
}

/// What a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Includes handoff and everything else that outlives an instance.
    Checkpoint,
    Snapshot,
}

/// Why a request is refused, worded for a client.
#[derive(Debug, thiserror::Error)]
pub enum StorageRefusal {
    #[error("Checkpointing is not enabled on the server.")]
    NoCheckpoints,
    #[error("Filesystem snapshot is not enabled on the server.")]
    NoSnapshots,
    #[error(
        "Checkpointing is not enabled on the server: locks and metadata need a local file system \
         or a bucket, a mounted bucket or network file system cannot lock. Set {}.",
        SANDBOX_METADATA_BUCKET
    )]
    NotLocal,
    /// A retry may succeed.
    #[error("Storage cannot be reached: {0}")]
    Unreachable(#[source] store::Error),
}

impl Stores {
    pub fn open(settings: &StorageSettings, clock: &SharedClock) -> Self {
        let connection = Arc::new(GcsConnection::new(settings.gcs_endpoint.clone()));
        let bucket = |bucket: String| {
            let store = Gcs::new(connection.clone(), &bucket, clock.clone())
                .with_timeouts(settings.call_timeout, settings.stall_timeout);
            let store: Arc<dyn Store> = Arc::new(store);
            Opened { store, bucket: Some(bucket), behind_mount: None }
        };
        let mut mounts = Vec::new();
        let mut open = |artifact| {
            root_for(artifact, settings).map(|place| match (place, artifact) {
                (ArtifactRoot::Bucket(name), _) => bucket(name),
                (ArtifactRoot::Mounted(path), Artifact::Lock | Artifact::Metadata) => {
                    mounts.push(path.clone());
                    let store = Arc::new(Directory::new(path, clock.clone()));
                    Opened { store, bucket: None, behind_mount: None }
                }
                (ArtifactRoot::Mounted(path), Artifact::Checkpoints | Artifact::Snapshots) => {
                    let named = bucket_name::of(artifact, settings).map(bucket);
                    let (bucket, behind_mount) = named.map(|named| (named.bucket, named.store)).unzip();
                    let store = Arc::new(Mount::new(path, clock.clone()));
                    Opened { store, bucket: bucket.flatten(), behind_mount }
                }
            })
        };
        // In the same place they are the same store, so a listing of both reads it once.
        let metadata = open(Artifact::Metadata);
        let is_one = root_for(Artifact::Lock, settings) == root_for(Artifact::Metadata, settings);
        let lock = if is_one { metadata.clone() } else { open(Artifact::Lock) };
        let (checkpoints, snapshots) = (open(Artifact::Checkpoints), open(Artifact::Snapshots));
        Self { lock, metadata, checkpoints, snapshots, clock: clock.clone(), mounts, seals: Seals::default() }
    }

    pub fn of_checkpoints(&self) -> Option<Checkpoints> {
        let at = self.checkpoints.clone()?;
        Some(Checkpoints::new(at.store, at.bucket, self.clock.clone()).sealed_by(self.seals.clone()))
    }

    pub fn of_snapshots(&self) -> Option<Snapshots> {
        let at = self.snapshots.clone()?;
        Some(Snapshots::new(at.store, at.bucket, self.clock.clone()).sealed_by(self.seals.clone()))
    }

    pub fn seals(&self) -> &Seals {
        &self.seals
    }

    /// Adds the keys that sign locks, checkpoints and snapshots.
    #[must_use]
    pub fn sealed_by(self, seals: Seals) -> Self {
        Self { seals, ..self }
    }

    /// Wraps the stores so that every call is counted.
    pub fn counted(mut self, metrics: &Metrics) -> Self {
        let stores = [&mut self.lock, &mut self.metadata, &mut self.checkpoints, &mut self.snapshots];
        let mut known: Vec<(Arc<dyn Store>, Arc<dyn Store>)> = Vec::new();
        for opened in stores.into_iter().flatten() {
            let bare = opened.store.clone();
            // Shared stores stay shared.
            let counted = match known.iter().find(|(other, _)| Arc::ptr_eq(other, &bare)) {
                Some((_, counted)) => counted.clone(),
                None => Arc::new(Counted::new(bare.clone(), self.clock.clone(), metrics.clone())),
            };
            opened.store = counted.clone();
            known.push((bare, counted));
        }
        self
    }

    /// Uses one store for everything, as ephemeral sandboxes and tests do.
    pub fn of(store: &Arc<dyn Store>, clock: &SharedClock) -> Self {
        let opened = || Some(Opened { store: store.clone(), bucket: None, behind_mount: None });
        Self {
            lock: opened(),
            metadata: opened(),
            checkpoints: opened(),
            snapshots: opened(),
            clock: clock.clone(),
            mounts: Vec::new(),
            seals: Seals::default(),
        }
    }

    /// Tries each configured store the way it will be used, and cleans up afterwards if it can.
    pub async fn probe(&self) -> Vec<StoreProbe> {
        let opened = [&self.lock, &self.metadata, &self.checkpoints, &self.snapshots];
        let mut probes = Vec::new();
        for (artifact, opened) in Artifact::ALL.into_iter().zip(opened) {
            let Some(Opened { store, bucket, behind_mount }) = opened else { continue };
            let key = format!("probes/{}", self.clock.nonce());
            let result = match artifact {
                Artifact::Lock | Artifact::Metadata => try_register(&**store, &key).await,
                Artifact::Checkpoints | Artifact::Snapshots => {
                    try_shelf(&**store, behind_mount.as_deref(), &key, &self.clock).await
                }
            };
            let is_mounted = behind_mount.is_some();
            probes.push(StoreProbe { artifact, bucket: bucket.clone(), is_mounted, result });
        }
        probes
    }

    /// Whether the stores support a request; no bucket is contacted.
    pub async fn check(&self, need: Need) -> Result<(), StorageRefusal> {
        match need {
            Need::Snapshot => self.snapshots.as_ref().map(|_| ()).ok_or(StorageRefusal::NoSnapshots),
            Need::Checkpoint => {
                if self.lock.is_none() || self.metadata.is_none() || self.checkpoints.is_none() {
                    return Err(StorageRefusal::NoCheckpoints);
                }
                for mount in &self.mounts {
                    if !is_local(&self.clock, mount).await.map_err(StorageRefusal::Unreachable)? {
                        return Err(StorageRefusal::NotLocal);
                    }
                }
                Ok(())
            }
        }
    }
}

/// Create, compare-and-set, delete: what lock and metadata need.
async fn try_register(store: &dyn Store, key: &str) -> store::Result<()> {
    let first = store.put(key, "1".into(), Precondition::Absent).await?.version;
    let second = store.put(key, "2".into(), Precondition::Is(first)).await?.version;
    match store.get_if_changed(key, Some(&second)).await? {
        PollResult::Unchanged => store.delete(key, Precondition::Is(second)).await,
        PollResult::Changed(..) | PollResult::Missing => Err(store::Error::Conflict(key.to_owned())),
    }
}

/// Write once, list, delete: what checkpoints and snapshots need. An object written through a mount must appear in the
/// bucket that the mount is configured to show.
async fn try_shelf(
    store: &dyn Store,
    behind_mount: Option<&dyn Store>,
    key: &str,
    clock: &SharedClock,
) -> store::Result<()> {
    store.put(key, "1".into(), Precondition::Absent).await?;
    store.list(key, None).await?;
    let shows = match behind_mount {
        Some(bucket) => match wait_for(bucket, clock, key).await {
            Err(store::Error::NotFound(_)) => Err(store::Error::Other {
                key: key.to_owned(),
                why: "written through the mount, it is not in the bucket: the mount shows another one".to_owned(),
            }),
            found => found.map(drop),
        },
        None => Ok(()),
    };
    store.delete(key, Precondition::Any).await.and(shows)
}
