//! The typed records of a sandbox, wherever they are stored: those of a persistent sandbox in the configured store, all
//! others in this instance's memory. Code and keys are the same.

mod create_records;
mod read_records;
mod scan;
mod update;

use std::{collections::BTreeMap, sync::Arc};

use baton_protocol::{
    id::SandboxId,
    lock::Lock,
    metadata::{Metadata, Spec},
    reason::Reason,
    trace::Traceparent,
};
use bytes::Bytes;

use super::{
    checkpoints::Checkpoints,
    layout::{self, Object},
    lease::{LeaseHandle, lease_rules::Identity},
    lock_object::{self, Unusable},
    metadata_cache::Recent,
    signature::Seals,
    store::{self, ObjectEntry, PollResult, Precondition, Priority, Store, Version},
    stores::Stores,
    unresponsive::LastWrite,
};
use crate::config::LeaseTimes;
use crate::{clock::SharedClock, metrics::Metrics};

pub use self::read_records::{Draft, parse};
pub use self::scan::SandboxObjects;

/// Errors of the records, grouped by what the caller can do about them.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The object has to be repaired; nothing was changed.
    #[error("{reason}: {0}", reason = Reason::InvalidSpec)]
    InvalidSpec(String),
    /// The sandbox was created in a store that this instance does not use.
    #[error("{reason}: {0}", reason = Reason::OtherStore)]
    OtherStore(String),
    /// No client can attach until an operator has set a token.
    #[error("{reason}: metadata.json has no `token_sha256`", reason = Reason::TokenMissing)]
    TokenMissing,
    /// The request needs something that is not configured.
    #[error("{0}")]
    NotConfigured(String),
    /// The checkpoint to fork from does not exist.
    #[error("the checkpoint is not one of the last two of its sandbox")]
    NoCheckpoint,
    #[error(transparent)]
    Store(#[from] store::Error),
}

pub type Result<T> = std::result::Result<T, Error>;

/// The stores of persistent sandboxes.
#[derive(Clone, Debug)]
pub struct Durable {
    pub locks: Arc<dyn Store>,
    pub metadata: Arc<dyn Store>,
    /// Recorded in the metadata, so that an instance with another lock bucket notices.
    pub lock_bucket: Option<String>,
}

#[derive(Clone, Debug)]
pub struct Records {
    clock: SharedClock,
    memory: Arc<dyn Store>,
    durable: Option<Durable>,
    can_snapshot: bool,
    times: LeaseTimes,
    /// Checked before a durable sandbox is created.
    stores: Option<Stores>,
    recent: Arc<Recent>,
    /// The source of forks.
    checkpoints: Option<Checkpoints>,
    /// The keys that sign durable locks.
    seals: Seals,
    metrics: Metrics,
}

/// Which store holds a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    Memory,
    Durable,
}

/// Metadata as it was read.
#[derive(Clone, Debug)]
pub struct FoundMetadata {
    pub metadata: Metadata,
    pub version: Version,
    pub place: StoreKind,
}

type StoreRef<'a> = &'a Arc<dyn Store>;

/// How often a write is retried on top of concurrent writes before it fails.
const WRITE_ATTEMPTS: usize = 20;
/// Objects listed per sandbox: lock and metadata.
const NAMES: usize = 2;
/// A listing may take this many times as long as a call on a small object.
const LISTING_PATIENCE: u32 = 10;
pub const CHECKPOINT_NOT_ENABLED: &str = "Checkpointing is not enabled on the server.";

impl Records {
    pub fn new(
        clock: SharedClock,
        memory: Arc<dyn Store>,
        durable: Option<Durable>,
        can_snapshot: bool,
        times: LeaseTimes,
    ) -> Self {
        Self {
            clock,
            memory,
            durable,
            can_snapshot,
            times,
            stores: None,
            recent: Arc::default(),
            checkpoints: None,
            seals: Seals::default(),
            metrics: Metrics::default(),
        }
    }

    /// Rejects durable sandboxes that these stores cannot hold, for example on a mount that cannot lock.
    pub fn checked_by(mut self, stores: Stores) -> Self {
        self.stores = Some(stores);
        self
    }

    /// Sets the checkpoints from which a sandbox can be forked.
    pub fn forking_from(mut self, checkpoints: Checkpoints) -> Self {
        self.checkpoints = Some(checkpoints);
        self
    }

    /// With keys, durable locks are signed, and unsigned ones are rejected.
    pub fn sealed_by(mut self, seals: Seals) -> Self {
        self.seals = seals;
        self
    }

    /// Reports how late leases are renewed.
    pub fn measured_by(mut self, metrics: Metrics) -> Self {
        self.metrics = metrics;
        self
    }

    pub fn can_checkpoint(&self) -> bool {
        self.durable.is_some()
    }

    /// Whether there is a key to sign locks with.
    pub fn signs(&self) -> bool {
        self.seals.are_asked_for()
    }

    pub fn can_snapshot(&self) -> bool {
        self.can_snapshot
    }

    /// Reads the lock of a durable sandbox once. `None`: it does not exist.
    pub async fn lock_of(&self, id: &SandboxId) -> Result<Option<Lock>> {
        let (locks, _) = self.stores(StoreKind::Durable)?;
        let key = lock_key(id);
        match self.poll(locks, &key, None).await? {
            PollResult::Changed(bytes, _) => match lock_object::parse(&self.seals, &key, &bytes) {
                Ok(stored) => Ok(Some(stored.lock)),
                Err(Unusable::Unsigned) => Err(store::Error::Unsigned(key).into()),
                Err(unusable @ (Unusable::Garbled(_) | Unusable::Older)) => {
                    Err(store::Error::Damaged { key, why: unusable.to_string() }.into())
                }
            },
            PollResult::Unchanged | PollResult::Missing => Ok(None),
        }
    }

    /// `None`: no such sandbox.
    pub async fn find(&self, id: &SandboxId) -> Result<Option<Metadata>> {
        Ok(self.read_if_changed(id, None).await?.and_then(MetadataPoll::found).map(|found| found.metadata))
    }

    /// What changed since `known`. `None`: no such sandbox.
    pub async fn read_if_changed(
        &self,
        id: &SandboxId,
        known: Option<(&Version, StoreKind)>,
    ) -> Result<Option<MetadataPoll>> {
        for place in [StoreKind::Memory, StoreKind::Durable] {
            let Ok((_, metadata)) = self.stores(place) else { continue };
            let version = known.filter(|(_, at)| *at == place).map(|(version, _)| version);
            match self.poll(metadata, &metadata_key(id), version).await? {
                PollResult::Unchanged => return Ok(Some(MetadataPoll::Unchanged)),
                PollResult::Missing => {}
                PollResult::Changed(bytes, version) => {
                    let draft = read_records::draft(id, &bytes, self.lock_bucket(place).as_deref())?;
                    self.check_place(&draft.metadata.spec, place)?;
                    let metadata = draft.finished()?;
                    let found = FoundMetadata { metadata, version, place };
                    self.recent.note(id, &found);
                    return Ok(Some(MetadataPoll::Found(Box::new(found))));
                }
            }
        }
        Ok(None)
    }

    /// Writes metadata that was deleted while the sandbox runs. Existing metadata is not overwritten.
    pub async fn recreate(&self, record: &Metadata, place: StoreKind) -> Result<()> {
        let (_, metadata) = self.stores(place)?;
        let key = metadata_key(&record.spec.sandbox_id);
        match self.put(metadata, &key, record, Precondition::Absent, Priority::Commit).await {
            Ok(_) | Err(store::Error::Conflict(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Erases the metadata; in memory also the lock, since no other instance can have seen it.
    pub async fn erase(&self, id: &SandboxId, place: StoreKind) -> Result<()> {
        let (locks, metadata) = self.stores(place)?;
        self.recent.forget(id);
        self.delete(metadata, &metadata_key(id)).await?;
        if place == StoreKind::Memory {
            self.delete(locks, &lock_key(id)).await?;
        }
        Ok(())
    }

    /// The first `most` sandboxes after `after`, from this instance's memory and the store, in order; and whether there
    /// are more.
    pub async fn list(&self, after: Option<&SandboxId>, most: usize) -> Result<(Vec<SandboxId>, bool)> {
        let (listed, more) = self.page(after, most).await?;
        Ok((listed.into_iter().map(|(id, _)| id).collect(), more))
    }

    /// Like [`list`](Self::list), with the time each lock was written, if the same page of the store contains it.
    pub async fn page(
        &self,
        after: Option<&SandboxId>,
        most: usize,
    ) -> Result<(Vec<(SandboxId, Option<LastWrite>)>, bool)> {
        // Ordered by key, as pages are requested: where one id is a prefix of another, the order of ids differs.
        let mut found = BTreeMap::new();
        // The listing is cut where the shorter page ends, so that nothing in between is skipped.
        let mut end: Option<String> = None;
        for place in [StoreKind::Memory, StoreKind::Durable] {
            let Ok((_, metadata)) = self.stores(place) else { continue };
            let listing = list_in(metadata, after, most);
            let (entries, more) = match self.clock.timeout(self.times.call * LISTING_PATIENCE, listing).await {
                Ok(listed) => listed?,
                Err(elapsed) => return Err(unanswered(PREFIX, elapsed).into()),
            };
            if let Some(last) = entries.last().filter(|_| more) {
                end = Some(end.map_or_else(|| last.key.clone(), |end| end.min(last.key.clone())));
            }
            let written: BTreeMap<_, _> =
                entries.iter().map(|entry| (entry.key.as_str(), self.last_write(entry))).collect();
            for entry in &entries {
                let Some(id) = id_of(&entry.key) else { continue };
                let lock = written.get(lock_key(&id).as_str()).copied().flatten();
                found.insert(entry.key.clone(), (id, lock));
            }
        }
        let more = end.is_some() || found.len() > most;
        let within = |key: &String| end.as_ref().is_none_or(|end| key <= end);
        let listed = found.into_iter().filter(|(key, _)| within(key)).map(|(_, listed)| listed);
        Ok((listed.take(most).collect(), more))
    }

    /// The writer of a sandbox's lock.
    pub fn lock_file(&self, id: &SandboxId, place: StoreKind, who: &Identity) -> Result<LeaseHandle> {
        let (locks, _) = self.stores(place)?;
        let file = LeaseHandle::new(locks.clone(), lock_key(id), who.clone(), self.clock.clone(), self.times);
        Ok(file.measured_by(self.metrics.clone()).sealed_by(self.seals_of(place)))
    }

    /// Completes when lock or metadata may have changed; never if the store cannot detect changes.
    pub async fn changed(&self, id: &SandboxId, place: StoreKind) {
        let Ok((locks, metadata)) = self.stores(place) else { return std::future::pending().await };
        let (lock_key, metadata_key) = (lock_key(id), metadata_key(id));
        tokio::select! {
            biased;
            () = locks.changed(&lock_key) => {}
            () = metadata.changed(&metadata_key) => {}
        }
    }

    /// Where a sandbox is stored, if this instance has read it recently. A sandbox never changes its place.
    pub fn place_of(&self, id: &SandboxId) -> Option<StoreKind> {
        self.recent.get(id).map(|found| found.place)
    }

    /// The request behind the last spec edit that this instance has seen, if it is traced.
    pub fn cause_of(&self, id: &SandboxId) -> Option<Traceparent> {
        self.recent.get(id).and_then(|found| found.metadata.spec.traceparent)
    }

    /// The stores of locks and of metadata.
    fn stores(&self, place: StoreKind) -> Result<(StoreRef<'_>, StoreRef<'_>)> {
        match (place, &self.durable) {
            (StoreKind::Memory, _) => Ok((&self.memory, &self.memory)),
            (StoreKind::Durable, Some(durable)) => Ok((&durable.locks, &durable.metadata)),
            (StoreKind::Durable, None) => Err(Error::NotConfigured(CHECKPOINT_NOT_ENABLED.to_owned())),
        }
    }

    /// Ephemeral sandboxes are in this instance's own memory, where nothing else can write: their locks are not signed.
    fn seals_of(&self, place: StoreKind) -> Seals {
        match place {
            StoreKind::Memory => Seals::default(),
            StoreKind::Durable => self.seals.clone(),
        }
    }

    /// The lock bucket that the metadata record.
    pub fn lock_bucket(&self, place: StoreKind) -> Option<String> {
        match place {
            StoreKind::Memory => None,
            StoreKind::Durable => self.durable.as_ref().and_then(|durable| durable.lock_bucket.clone()),
        }
    }

    fn check_place(&self, spec: &Spec, place: StoreKind) -> Result<()> {
        let here = self.lock_bucket(place);
        if spec.lock_bucket == here {
            return Ok(());
        }
        let name = |bucket: &Option<String>| bucket.clone().unwrap_or_else(|| "a directory".to_owned());
        Err(Error::OtherStore(format!(
            "its lock lies in {}, this instance looks in {}",
            name(&spec.lock_bucket),
            name(&here)
        )))
    }

    async fn put(
        &self,
        store: &Arc<dyn Store>,
        key: &str,
        record: &impl serde::Serialize,
        condition: Precondition,
        urgency: Priority,
    ) -> store::Result<Version> {
        let put = store.put_as(key, encoded(key, record)?, condition, urgency);
        match self.clock.timeout(self.times.call, put).await {
            Ok(written) => written.map(|written| written.version),
            Err(elapsed) => Err(unanswered(key, elapsed)),
        }
    }

    async fn poll(&self, store: &Arc<dyn Store>, key: &str, known: Option<&Version>) -> store::Result<PollResult> {
        match self.clock.timeout(self.times.call, store.get_if_changed(key, known)).await {
            Ok(polled) => polled,
            Err(elapsed) => Err(unanswered(key, elapsed)),
        }
    }

    async fn delete(&self, store: &Arc<dyn Store>, key: &str) -> Result<()> {
        match self.clock.timeout(self.times.call, store.delete(key, Precondition::Any)).await {
            Ok(Ok(()) | Err(store::Error::NotFound(_))) => Ok(()),
            Ok(Err(error)) => Err(error.into()),
            Err(elapsed) => Err(unanswered(key, elapsed).into()),
        }
    }
}

#[derive(Clone, Debug)]
pub enum MetadataPoll {
    Unchanged,
    Found(Box<FoundMetadata>),
}

impl MetadataPoll {
    fn found(self) -> Option<FoundMetadata> {
        match self {
            Self::Found(found) => Some(*found),
            Self::Unchanged => None,
        }
    }
}

/// Lists one store after `after`, up to `most` sandboxes with metadata; and whether there may be more.
async fn list_in(
    store: StoreRef<'_>,
    after: Option<&SandboxId>,
    most: usize,
) -> store::Result<(Vec<ObjectEntry>, bool)> {
    let (mut entries, mut count, mut after) = (Vec::new(), 0, after.map(metadata_key));
    loop {
        let page = store.list_some(PREFIX, after.as_deref(), NAMES * (most - count)).await?;
        count += page.entries.iter().filter(|entry| id_of(&entry.key).is_some()).count();
        after = page.entries.last().map(|entry| entry.key.clone());
        entries.extend(page.entries);
        // A tombstone has no metadata: there may be fewer sandboxes than names.
        if count >= most || !page.more || after.is_none() {
            return Ok((entries, page.more));
        }
    }
}

/// The common prefix of all sandbox keys.
const PREFIX: &str = "sandboxes/";

fn lock_key(id: &SandboxId) -> String {
    Object::Lock(id).key()
}

fn metadata_key(id: &SandboxId) -> String {
    Object::Metadata(id).key()
}

/// Encodes a record as it is stored.
fn encoded(key: &str, record: &impl serde::Serialize) -> store::Result<Bytes> {
    let encoded = serde_json::to_vec_pretty(record);
    encoded.map(Bytes::from).map_err(|error| store::Error::Other { key: key.to_owned(), why: error.to_string() })
}

fn id_of(key: &str) -> Option<SandboxId> {
    layout::sandbox_of(key).filter(|id| metadata_key(id) == key)
}

fn unanswered(key: &str, elapsed: crate::clock::Elapsed) -> store::Error {
    store::Error::Unavailable { key: key.to_owned(), why: elapsed.to_string() }
}
