//! The checkpoints of one instance's store, by the head that names them.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use baton_protocol::{
    id::{CheckpointId, SandboxId, hex},
    lock::Head,
    manifest::Checkpoint,
};

use sha2::{Digest, Sha256};

use super::{
    artifacts::{self, Total},
    layout,
    store::{Poll, Result, Store},
};
use crate::clock::SharedClock;

#[derive(Clone, Debug)]
pub struct Checkpoints {
    store: Arc<dyn Store>,
    /// Recorded in the head; `None` under a mount.
    bucket: Option<String>,
    clock: SharedClock,
}

impl Checkpoints {
    pub fn new(store: Arc<dyn Store>, bucket: Option<String>, clock: SharedClock) -> Self {
        Self { store, bucket, clock }
    }

    /// Stores every file of `image`, then `manifest` with their digests; the head that names it.
    /// The files are given away. Nothing counts before that head is committed.
    pub async fn store(&self, image: &Path, mut manifest: Checkpoint, progress: Total<'_>) -> Result<Head> {
        let sha256 = artifacts::store(&*self.store, &self.clock, image, &mut manifest, progress).await?;
        Ok(Head {
            seq: manifest.seq,
            epoch: manifest.epoch,
            checkpoint_id: manifest.checkpoint_id,
            bucket: self.bucket.clone(),
            manifest_sha256: sha256,
        })
    }

    /// The manifest that a head names, verified against it.
    pub async fn manifest(&self, head: &Head) -> Result<Checkpoint> {
        artifacts::manifest(&*self.store, &self.clock, &head.checkpoint_id, &head.manifest_sha256).await
    }

    /// Whether a head was stored where this instance looks.
    pub fn holds(&self, head: &Head) -> bool {
        head.bucket == self.bucket
    }

    /// Brings every file of a verified manifest into the fresh directory `image`, each verified, to be read only.
    pub async fn fetch(&self, manifest: &Checkpoint, image: &Path, progress: Total<'_>) -> Result<()> {
        artifacts::download(&*self.store, &self.clock, manifest, image, progress).await
    }

    /// Every checkpoint of a sandbox of which anything is stored.
    pub async fn list(&self, sandbox: &SandboxId) -> Result<BTreeSet<CheckpointId>> {
        let (prefix, mut found, mut after) = (layout::checkpoints_of(sandbox), BTreeSet::new(), None);
        loop {
            let page = self.store.list(&prefix, after.as_deref()).await?;
            after = page.entries.last().map(|entry| entry.key.clone());
            found.extend(page.entries.iter().filter_map(|entry| layout::checkpoint_of(&entry.key)));
            if !page.more {
                return Ok(found);
            }
        }
    }

    /// The manifest of a checkpoint as it lies there, and its digest. `None`: there is none, so the upload
    /// was never finished. Only the lock says whether it was committed.
    pub async fn manifest_of(&self, id: &CheckpointId) -> Result<Option<(Checkpoint, String)>> {
        let key = layout::Object::CheckpointManifest(id).key();
        let Poll::Changed(bytes, _) = self.store.poll(&key, None).await? else { return Ok(None) };
        let manifest = serde_json::from_slice(&bytes)
            .map_err(|error| super::store::Error::Damaged { key, why: error.to_string() })?;
        Ok(Some((manifest, hex(&Sha256::digest(&bytes)))))
    }

    pub fn bucket(&self) -> Option<&String> {
        self.bucket.as_ref()
    }

    /// A fork needs it.
    pub async fn is_pinned(&self, id: &CheckpointId) -> Result<bool> {
        Ok(!self.store.list(&layout::pins_prefix(id), None).await?.entries.is_empty())
    }

    /// Erases a checkpoint that nothing names any more.
    pub async fn erase(&self, id: &CheckpointId) -> Result<()> {
        artifacts::purge(&*self.store, &self.clock, id).await
    }
}
