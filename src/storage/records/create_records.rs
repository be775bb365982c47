//! Creates sandboxes, from scratch or as forks of others.

use baton_protocol::{
    id::{CheckpointId, InstanceId},
    lock::{Head, Lock},
    metadata::{Committed, Metadata, Phase, SandboxStatus, Spec},
};

use super::{
    CHECKPOINT_NOT_ENABLED, Error, FoundMetadata, Records, Result, StoreKind, StoreRef, encoded, lock_key, metadata_key,
};
use crate::storage::{
    checkpoints::committed,
    lease::lease_rules::{self, InitialLease},
    lock_object::{self, Sealed},
    store::{self, PollResult, Precondition, Priority, Version},
    stores::{Need, StorageRefusal},
};

/// How often the write of a new object is retried while a client waits.
const NEW_TRIES: usize = 3;

impl Records {
    /// Writes a new sandbox's lock, held by the instance `me`, and then its metadata: an acquisition never creates a
    /// lock. The caller has already recorded `lease` for the reconciler of that instance.
    pub async fn create(&self, spec: &Spec, me: &InstanceId, lease: &InitialLease) -> Result<()> {
        let place = if spec.enable_sandbox_checkpoint { StoreKind::Durable } else { StoreKind::Memory };
        let (locks, metadata) = self.stores(place)?;
        if let Some(stores) = self.stores.as_ref().filter(|_| place == StoreKind::Durable) {
            stores.check(Need::Checkpoint).await.map_err(|refusal| match refusal {
                StorageRefusal::Unreachable(error) => Error::Store(error),
                StorageRefusal::NoCheckpoints | StorageRefusal::NoSnapshots | StorageRefusal::NotLocal => {
                    Error::NotConfigured(refusal.to_string())
                }
            })?;
        }
        let mut spec = spec.clone();
        spec.lock_bucket = self.lock_bucket(place);
        let lock = lease_rules::initial(spec.sandbox_id.clone(), me, lease, &self.times);
        let status = SandboxStatus::default();
        let record = Metadata { spec, latest_sandbox_checkpoint: None, last_checkpointed: None, status };
        let sealed = self.sealed(&lock, place)?;
        let written = self.write_new((locks, &sealed), (metadata, &record)).await;
        let version = written.map_err(|unwritten| unwritten.error)?;
        self.recent.note(&lock.sandbox_id, &FoundMetadata { metadata: record, version, place });
        Ok(())
    }

    /// Writes a sandbox that starts as a fork of another: its pin, its lock with the head, its metadata. Only a
    /// committed checkpoint can be forked.
    pub async fn fork(&self, source: &CheckpointId, spec: &Spec) -> Result<()> {
        let (locks, metadata) = self.stores(StoreKind::Durable)?;
        let checkpoints =
            self.checkpoints.as_ref().ok_or_else(|| Error::NotConfigured(CHECKPOINT_NOT_ENABLED.to_owned()))?;
        let id = &spec.sandbox_id;
        // Pin before checking: what the check finds then cannot be erased.
        checkpoints.pin(source, id).await?;
        let head = self.committed(source).await;
        let head = match head {
            Ok(Some(head)) => head,
            gone => {
                checkpoints.unpin(source, id).await?;
                gone?;
                return Err(Error::NoCheckpoint);
            }
        };
        let manifest = match checkpoints.manifest(&head).await {
            Ok(manifest) => manifest,
            Err(error) => {
                checkpoints.unpin(source, id).await?;
                return Err(error.into());
            }
        };
        let Committed { latest, at } = committed(&head, Some(manifest.created));
        let lock = Lock { head: Some(head), forked_from: Some(source.clone()), ran: true, ..Lock::new(id.clone()) };
        let mut spec = spec.clone();
        spec.lock_bucket = self.lock_bucket(StoreKind::Durable);
        let status = SandboxStatus { phase: Phase::Checkpointed, ..SandboxStatus::default() };
        let record = Metadata { spec, latest_sandbox_checkpoint: latest, last_checkpointed: at, status };
        let sealed = self.sealed(&lock, StoreKind::Durable)?;
        let Err(unwritten) = self.write_new((locks, &sealed), (metadata, &record)).await else { return Ok(()) };
        if unwritten.is_erased {
            checkpoints.unpin(source, id).await?;
        }
        Err(unwritten.error)
    }

    /// The head that names a checkpoint, if it is the latest or the previous one of its sandbox.
    async fn committed(&self, id: &CheckpointId) -> Result<Option<Head>> {
        let Some(lock) = self.lock_of(&id.sandbox()).await? else { return Ok(None) };
        Ok([lock.head, lock.prev_head].into_iter().flatten().find(|head| head.checkpoint_id == *id))
    }

    /// Encodes a lock for this place, signed if it is durable and there is a key.
    pub(super) fn sealed<'a>(&self, lock: &'a Lock, place: StoreKind) -> Result<Sealed<'a>> {
        let key = lock_key(&lock.sandbox_id);
        let sealed = lock_object::sealed(&self.seals_of(place), &key, lock);
        Ok(sealed.map_err(|error| store::Error::Other { key, why: error.to_string() })?)
    }

    /// Writes both objects of a new sandbox. On failure, erases what was written, as far as the store answers: at worst
    /// a lock without metadata remains, which the sweep purges.
    async fn write_new(
        &self,
        (locks, lock): (StoreRef<'_>, &Sealed<'_>),
        (metadata, record): (StoreRef<'_>, &Metadata),
    ) -> std::result::Result<Version, Unwritten> {
        let id = &record.spec.sandbox_id;
        let (lock_key, metadata_key) = (lock_key(id), metadata_key(id));
        if let Err(error) = self.put_new(locks, &lock_key, lock).await {
            let is_erased = self.erase_own(locks, &lock_key, lock).await;
            return Err(Unwritten { error, is_erased });
        }
        match self.put_new(metadata, &metadata_key, record).await {
            Ok(version) => Ok(version),
            Err(error) => {
                // The lock is erased last: metadata without a lock would need an operator.
                let is_erased = self.erase_own(metadata, &metadata_key, record).await
                    && self.erase_own(locks, &lock_key, lock).await;
                Err(Unwritten { error, is_erased })
            }
        }
    }

    /// Writes an object that must not exist yet. A conflict or a lost answer is resolved by reading: the object found
    /// is either this very record, from an attempt that was applied after all, or a conflicting one.
    pub(super) async fn put_new(
        &self,
        store: StoreRef<'_>,
        key: &str,
        record: &impl serde::Serialize,
    ) -> Result<Version> {
        let mut tries = 0;
        loop {
            let error = match self.put(store, key, record, Precondition::Absent, Priority::Commit).await {
                Ok(version) => return Ok(version),
                Err(error) => error,
            };
            if matches!(error, store::Error::Conflict(_) | store::Error::Unavailable { .. }) {
                match self.own(store, key, record).await {
                    Ok(Some(Own::Ours(version))) => return Ok(version),
                    Ok(Some(Own::Theirs)) => return Err(store::Error::Conflict(key.to_owned()).into()),
                    // The write was not applied, or the object is already gone again.
                    Ok(None) => {}
                    Err(unread) if unread.is_passing() => {}
                    Err(unread) => return Err(unread.into()),
                }
            } else if !error.is_passing() {
                return Err(error.into());
            }
            if tries == NEW_TRIES {
                return Err(error.into());
            }
            tries += 1;
            self.clock.sleep(self.clock.jittered(self.times.retry)).await;
        }
    }

    /// Whether an existing object has our content.
    async fn own(&self, store: StoreRef<'_>, key: &str, record: &impl serde::Serialize) -> store::Result<Option<Own>> {
        let ours = encoded(key, record)?;
        Ok(match self.poll(store, key, None).await? {
            PollResult::Changed(there, version) if there == ours => Some(Own::Ours(version)),
            PollResult::Changed(..) | PollResult::Unchanged => Some(Own::Theirs),
            PollResult::Missing => None,
        })
    }

    /// Erases an object that still has our content. Returns whether the object is gone.
    async fn erase_own(&self, store: StoreRef<'_>, key: &str, record: &impl serde::Serialize) -> bool {
        let erased = match self.own(store, key, record).await {
            Ok(None) => return true,
            Ok(Some(Own::Theirs)) => return false,
            Ok(Some(Own::Ours(version))) => self.delete_seen(store, key, &version).await,
            Err(error) => Err(error.into()),
        };
        erased
            .inspect_err(
                |error| tracing::warn!(key, %error, "a failed create could not be cleaned up; the sweep will do it"),
            )
            .unwrap_or(false)
    }
}

/// Whose content was found in an object that should be new.
enum Own {
    Ours(Version),
    Theirs,
}

/// Why a new sandbox could not be written.
struct Unwritten {
    error: Error,
    /// Nothing of the sandbox remains in the store.
    is_erased: bool,
}
