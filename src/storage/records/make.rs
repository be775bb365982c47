//! New sandboxes: made from nothing, or as the copy of another.

use std::sync::Arc;

use baton_protocol::{
    id::CheckpointId,
    lock::{Head, Lock},
    metadata::{Committed, Metadata, Phase, Spec, Status},
};

use super::{CHECKPOINT_NOT_ENABLED, Error, Place, Records, Result, lock_key, metadata_key};
use crate::storage::{
    checkpoints::committed,
    store::{self, If, Store, Urgency},
    stores::{Need, Refusal},
};

/// How often a new object is sent again; a client waits for it.
const NEW_TRIES: usize = 3;

impl Records {
    /// Writes a new sandbox's lock, then its metadata: no acquire ever creates a lock.
    pub async fn create(&self, spec: &Spec) -> Result<()> {
        let place = if spec.enable_sandbox_checkpoint { Place::Durable } else { Place::Memory };
        let (locks, metadata) = self.stores(place)?;
        if let Some(stores) = self.stores.as_ref().filter(|_| place == Place::Durable) {
            stores.check(Need::Checkpoint).await.map_err(|refusal| match refusal {
                Refusal::Unreachable(error) => Error::Store(error),
                Refusal::NoCheckpoints | Refusal::NoSnapshots | Refusal::NotLocal => {
                    Error::NotConfigured(refusal.to_string())
                }
            })?;
        }
        let id = &spec.sandbox_id;
        let mut spec = spec.clone();
        spec.lock_bucket = self.lock_bucket(place);
        self.put_new(locks, &lock_key(id), &Lock::new(id.clone())).await?;
        let status = Status::default();
        let record = Metadata { spec, latest_sandbox_checkpoint: None, last_checkpointed: None, status };
        self.put_new(metadata, &metadata_key(id), &record).await
    }

    /// Writes a sandbox that begins as the copy of another one: its pin, its lock with the head, its metadata.
    /// Only a committed checkpoint is copied.
    pub async fn fork(&self, source: &CheckpointId, spec: &Spec) -> Result<()> {
        let (locks, metadata) = self.stores(Place::Durable)?;
        let checkpoints =
            self.checkpoints.as_ref().ok_or_else(|| Error::NotConfigured(CHECKPOINT_NOT_ENABLED.to_owned()))?;
        let id = &spec.sandbox_id;
        // Pinned before it is looked at: what is seen then stays.
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
        spec.lock_bucket = self.lock_bucket(Place::Durable);
        self.put_new(locks, &lock_key(id), &lock).await?;
        let status = Status { phase: Phase::Checkpointed, ..Status::default() };
        let record = Metadata { spec, latest_sandbox_checkpoint: latest, last_checkpointed: at, status };
        self.put_new(metadata, &metadata_key(id), &record).await
    }

    /// The head that names a checkpoint, if it is the last or the last but one of its sandbox.
    async fn committed(&self, id: &CheckpointId) -> Result<Option<Head>> {
        let Some(lock) = self.lock_of(&id.sandbox()).await? else { return Ok(None) };
        Ok([lock.head, lock.prev_head].into_iter().flatten().find(|head| head.checkpoint_id == *id))
    }

    /// A new object under a name that only we know: a conflict is our own lost answer.
    pub(super) async fn put_new(
        &self,
        store: &Arc<dyn Store>,
        key: &str,
        record: &impl serde::Serialize,
    ) -> Result<()> {
        let mut tries = 0;
        loop {
            match self.put(store, key, record, If::Absent, Urgency::Commit).await {
                Ok(_) | Err(store::Error::Conflict(_)) => return Ok(()),
                Err(error) if error.is_passing() && tries < NEW_TRIES => {
                    tries += 1;
                    self.clock.sleep(self.clock.jittered(self.times.retry)).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
