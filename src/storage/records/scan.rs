//! Scans the store: which objects of which sandboxes exist, and operations on objects that no worker owns.

use std::{collections::BTreeMap, sync::Arc};

use baton_protocol::{
    id::SandboxId,
    lock::Lock,
    metadata::{MAX_BYTES, Metadata, Phase, SandboxStatus},
    reason::Reason,
};
use bytes::Bytes;
use serde_json::{Map, Value};

use super::{
    Draft, Error, LISTING_PATIENCE, PREFIX, Records, Result, StoreKind, lock_key, metadata_key, read_records,
    unanswered,
};
use crate::storage::{
    layout,
    lock_object::{self, Unusable},
    store::{self, ObjectEntry, PollResult, Precondition, Priority, Store, Version},
    unresponsive::{self, LastWrite, Unresponsive},
};

/// Which objects of a sandbox exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxObjects {
    pub lock: Option<Version>,
    pub metadata: Option<Version>,
    /// When the lock was written; for display only.
    pub lock_written: Option<LastWrite>,
}

/// A lock that was parsed and not verified.
pub type Unverified = std::result::Result<Lock, Unusable>;

impl Records {
    /// Every sandbox in the store, in order. Listed in pages; concurrent changes may be missed.
    pub async fn survey(&self) -> Result<BTreeMap<SandboxId, SandboxObjects>> {
        self.listed(PREFIX).await
    }

    /// Which objects of one sandbox exist.
    pub async fn objects(&self, id: &SandboxId) -> Result<SandboxObjects> {
        Ok(self.listed(&layout::sandbox_prefix(id)).await?.remove(id).unwrap_or_default())
    }

    /// The sandboxes whose ids begin with `text`.
    pub async fn beginning_with(&self, text: &str) -> Result<Vec<SandboxId>> {
        Ok(self.listed(&format!("{PREFIX}{text}")).await?.into_keys().collect())
    }

    /// The objects under `prefix`, grouped by sandbox.
    async fn listed(&self, prefix: &str) -> Result<BTreeMap<SandboxId, SandboxObjects>> {
        let (locks, metadata) = self.stores(StoreKind::Durable)?;
        let mut found: BTreeMap<SandboxId, SandboxObjects> = BTreeMap::new();
        let shared = Arc::ptr_eq(locks, metadata);
        for store in std::iter::once(metadata).chain((!shared).then_some(locks)) {
            let mut after: Option<String> = None;
            loop {
                let listing = store.list(prefix, after.as_deref());
                let page = match self.clock.timeout(self.times.call * LISTING_PATIENCE, listing).await {
                    Ok(page) => page?,
                    Err(elapsed) => return Err(unanswered(prefix, elapsed).into()),
                };
                for entry in &page.entries {
                    let Some(id) = layout::sandbox_of(&entry.key) else { continue };
                    let version = Some(entry.version.clone());
                    if entry.key == lock_key(&id) && (shared || Arc::ptr_eq(store, locks)) {
                        let objects = found.entry(id).or_default();
                        (objects.lock, objects.lock_written) = (version, self.last_write(entry));
                    } else if entry.key == metadata_key(&id) && (shared || Arc::ptr_eq(store, metadata)) {
                        found.entry(id).or_default().metadata = version;
                    }
                }
                after = page.entries.last().map(|entry| entry.key.clone());
                if !page.more || after.is_none() {
                    break;
                }
            }
        }
        Ok(found)
    }

    /// The last write of an object that was just listed.
    pub(super) fn last_write(&self, entry: &ObjectEntry) -> Option<LastWrite> {
        let at = entry.updated?;
        Some(LastWrite { at, age: self.clock.wall().duration_since(at).unwrap_or_default() })
    }

    /// Whether the holder of a sandbox is unresponsive, and what follows. For display only: decisions watch the lock
    /// instead. `None` if the store does not answer. `lock` is when the lock was written, if known.
    pub async fn unresponsive(&self, found: &Metadata, lock: Option<LastWrite>) -> Option<Unresponsive> {
        // Most sandboxes are at rest, and those have no holder. A sandbox without checkpoints ends with its instance.
        let (spec, status) = (&found.spec, &found.status);
        if !matches!(status.phase, Phase::Running | Phase::Pending) || !spec.enable_sandbox_checkpoint {
            return None;
        }
        let id = &spec.sandbox_id;
        let written = match lock {
            Some(written) => written,
            None => self.objects(id).await.ok()?.lock_written?,
        };
        if written.age < self.times.takeover {
            return None;
        }
        let lock = self.lock_of(id).await.ok()??;
        unresponsive::assess(&lock, found, written, self.times.takeover)
    }

    /// The metadata as stored, valid or not. `None`: it does not exist.
    pub async fn raw(&self, id: &SandboxId) -> Result<Option<(Bytes, Version)>> {
        let (_, metadata) = self.stores(StoreKind::Durable)?;
        match self.poll(metadata, &metadata_key(id), None).await? {
            PollResult::Changed(bytes, version) => Ok(Some((bytes, version))),
            PollResult::Unchanged | PollResult::Missing => Ok(None),
        }
    }

    /// The metadata if it is valid, with or without a token. `None`: it does not exist.
    pub async fn draft(&self, id: &SandboxId) -> Result<Option<(Draft, Version)>> {
        let Some((bytes, version)) = self.raw(id).await? else { return Ok(None) };
        let draft = read_records::draft(id, &bytes, self.lock_bucket(StoreKind::Durable).as_deref())?;
        self.check_place(&draft.metadata.spec, StoreKind::Durable)?;
        Ok(Some((draft, version)))
    }

    /// Replaces the metadata with an operator's text if `seen` still holds. Returns whether it was replaced.
    pub async fn put_raw(&self, id: &SandboxId, text: Bytes, seen: Precondition) -> Result<bool> {
        let (_, metadata) = self.stores(StoreKind::Durable)?;
        let key = metadata_key(id);
        match self.clock.timeout(self.times.call, metadata.put(&key, text.clone(), seen)).await {
            Ok(Ok(_)) => Ok(true),
            // Success may be reported as a conflict, or not at all: only a read decides.
            Ok(Err(store::Error::Conflict(_) | store::Error::Unavailable { .. })) | Err(_) => {
                Ok(self.raw(id).await?.is_some_and(|(there, _)| there == text))
            }
            Ok(Err(error)) => Err(error.into()),
        }
    }

    /// Records in the status of invalid metadata what is wrong with it. Everything but `status` stays as it is;
    /// metadata that is not a JSON object is not touched.
    pub async fn complain(&self, id: &SandboxId, epoch: u64, reason: Reason, message: &str) -> Result<()> {
        let Some((bytes, version)) = self.raw(id).await? else { return Ok(()) };
        let Ok(mut record) = serde_json::from_slice::<Map<String, Value>>(&bytes) else { return Ok(()) };
        let status = record.get("status").cloned();
        let mut status: SandboxStatus =
            status.and_then(|status| serde_json::from_value(status).ok()).unwrap_or_default();
        if bytes.len() > MAX_BYTES
            || status.epoch > epoch
            || (status.reason == reason.name() && status.message == message)
        {
            return Ok(());
        }
        (status.reason, status.message, status.epoch) = (reason.into(), message.to_owned(), epoch);
        status.updated = self.clock.timestamp();
        let encode = |error: serde_json::Error| store::Error::Other { key: metadata_key(id), why: error.to_string() };
        record.insert("status".to_owned(), serde_json::to_value(&status).map_err(encode)?);
        let text = serde_json::to_vec_pretty(&record).map_err(encode)?;
        // If the metadata changed meanwhile, the next observation evaluates the new content.
        self.put_raw(id, text.into(), Precondition::Is(version)).await.map(drop)
    }

    /// Creates a missing lock, for an operator who made sure that the sandbox is not running.
    pub async fn new_lock(&self, lock: &Lock) -> Result<()> {
        let (locks, _) = self.stores(StoreKind::Durable)?;
        let sealed = self.sealed(lock, StoreKind::Durable)?;
        self.put_new(locks, &lock_key(&lock.sandbox_id), &sealed).await.map(drop)
    }

    /// Replaces an unusable lock, for an operator as above, if it still has the version `seen`.
    pub async fn replace_lock(&self, lock: &Lock, seen: &Version) -> Result<()> {
        let (locks, _) = self.stores(StoreKind::Durable)?;
        let sealed = self.sealed(lock, StoreKind::Durable)?;
        let key = lock_key(&lock.sandbox_id);
        Ok(self.put(locks, &key, &sealed, Precondition::Is(seen.clone()), Priority::Commit).await.map(drop)?)
    }

    /// The lock as stored, without verification, for an operator who vouches for it. `None`: it does not exist.
    pub async fn unverified_lock(&self, id: &SandboxId) -> Result<Option<(Unverified, Version)>> {
        let (locks, _) = self.stores(StoreKind::Durable)?;
        let key = lock_key(id);
        let PollResult::Changed(bytes, version) = self.poll(locks, &key, None).await? else { return Ok(None) };
        Ok(Some((lock_object::parse_unverified(&key, &bytes), version)))
    }

    /// Erases metadata that was restored over a tombstone, if it still has the version `seen`.
    pub async fn erase_metadata(&self, id: &SandboxId, seen: &Version) -> Result<()> {
        let (_, metadata) = self.stores(StoreKind::Durable)?;
        self.delete_seen(metadata, &metadata_key(id), seen).await.map(drop)
    }

    /// Erases a tombstone, the last object of a sandbox, if it still has the version `seen`.
    pub async fn forget(&self, id: &SandboxId, seen: &Version) -> Result<()> {
        let (locks, _) = self.stores(StoreKind::Durable)?;
        self.delete_seen(locks, &lock_key(id), seen).await.map(drop)
    }

    /// Deletes an object that still has the version `seen`. Returns whether it is gone: one that was written since stays.
    pub(super) async fn delete_seen(&self, store: &Arc<dyn Store>, key: &str, seen: &Version) -> Result<bool> {
        match self.clock.timeout(self.times.call, store.delete(key, Precondition::Is(seen.clone()))).await {
            Ok(Ok(()) | Err(store::Error::NotFound(_))) => Ok(true),
            Ok(Err(store::Error::Conflict(_))) => Ok(false),
            Ok(Err(error)) => Err(error.into()),
            Err(elapsed) => Err(unanswered(key, elapsed).into()),
        }
    }
}

impl Error {
    /// The status reason for metadata that cannot be used.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::InvalidSpec(_) => Some(Reason::InvalidSpec),
            Self::OtherStore(_) => Some(Reason::OtherStore),
            Self::TokenMissing => Some(Reason::TokenMissing),
            Self::NotConfigured(_) | Self::NoCheckpoint | Self::Store(_) => None,
        }
    }
}
