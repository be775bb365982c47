//! Garbage collection of one sandbox's objects: what may be erased, in which order, and what is kept. For the lease
//! holder: the sandbox's worker, the sweep, or an operator's command.

use std::collections::BTreeSet;

use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::{Head, Lock},
    manifest::ArchivePath,
    metadata::{Committed, Phase, SandboxStatus},
    reason::Reason,
};

use super::{
    checkpoints::{Checkpoints, committed},
    lease::{self, Lapse, LeaseHandle, Released, lease_rules::LeaseState},
    records::{self, Records, StoreKind},
    store,
};
use crate::clock::SharedClock;

/// Errors of garbage collection, grouped by what the caller can do about them.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another instance holds the lease or is about to.
    #[error("another instance holds the lease")]
    Taken,
    #[error(transparent)]
    Lease(#[from] lease::Error),
    #[error(transparent)]
    Lapse(#[from] Lapse),
    #[error(transparent)]
    Records(#[from] records::Error),
    #[error(transparent)]
    Store(#[from] store::Error),
}

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Clone, Debug)]
pub struct GarbageCollector {
    pub records: Records,
    /// `None` if checkpoints are not configured.
    pub checkpoints: Option<Checkpoints>,
    pub clock: SharedClock,
    /// The number of committed checkpoints to keep, including the head.
    pub keep: usize,
}

/// How often the last write of a task is attempted before it is left to the next task.
const LAST_WRITE_ATTEMPTS: u32 = 5;

impl GarbageCollector {
    /// Acquires a free or abandoned lease, or fails with [`Error::Taken`].
    pub async fn acquire(&self, lock: &mut LeaseHandle) -> Result<()> {
        lock.read().await?;
        if lock.state() != Some(LeaseState::Free) {
            return Err(Error::Taken);
        }
        Ok(lock.acquire(false).await?)
    }

    /// Erases a sandbox without a holder: checkpoints, metadata, and last the lock, which becomes a tombstone. If it is
    /// interrupted, the next purge continues.
    pub async fn purge(&self, id: &SandboxId, lock: &mut LeaseHandle) -> Result<()> {
        self.acquire(lock).await?;
        lock.purging().await?;
        let held = lock.lock().cloned().ok_or(lease::Error::Missing)?;
        let erase = async {
            self.erase_checkpoints(id).await?;
            self.unpin_source(&held).await?;
            Ok::<_, Error>(self.records.erase(id, StoreKind::Durable).await?)
        };
        lock.renew_while(erase).await??;
        let mut tries = 1;
        loop {
            match lock.write_tombstone().await {
                Ok(Released::Freed) => return Ok(()),
                Ok(Released::Lost) => return Err(Error::Taken),
                Err(error) if tries == LAST_WRITE_ATTEMPTS || matches!(error, lease::Error::Missing) => {
                    return Err(error.into());
                }
                Err(_) => self.pause(&mut tries).await,
            }
        }
    }

    /// Erases every checkpoint of a sandbox except those that a fork needs.
    pub async fn erase_checkpoints(&self, id: &SandboxId) -> store::Result<()> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(()) };
        for old in checkpoints.list(id).await? {
            if !checkpoints.is_pinned_by_another(&old, id).await? {
                checkpoints.erase(&old).await?;
            }
        }
        Ok(())
    }

    /// Unpins the checkpoint a sandbox was forked from once none of its own checkpoints need it. If the source sandbox
    /// is gone and no other fork needs the checkpoint, erases it. Only for the lease holder. Idempotent.
    pub async fn unpin_source(&self, lock: &Lock) -> Result<()> {
        let (Some(checkpoints), Some(source)) = (&self.checkpoints, &lock.forked_from) else { return Ok(()) };
        if !lock.purging && self.needs(checkpoints, lock, source).await? {
            return Ok(());
        }
        checkpoints.unpin(source, &lock.sandbox_id).await?;
        if self.is_erased(&source.sandbox()).await? && !checkpoints.is_pinned(source).await? {
            checkpoints.erase(source).await?;
        }
        Ok(())
    }

    /// Whether a sandbox was purged. If the lock is missing but metadata exists, the lock was deleted by hand, and the
    /// sandbox's objects are still needed to repair it.
    async fn is_erased(&self, id: &SandboxId) -> records::Result<bool> {
        if let Some(lock) = self.records.lock_of(id).await? {
            return Ok(lock.purged);
        }
        match self.records.find(id).await {
            Ok(found) => Ok(found.is_none()),
            Err(error) if error.reason().is_some() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether the lock names a checkpoint, or the head depends on its files.
    async fn needs(&self, checkpoints: &Checkpoints, lock: &Lock, id: &CheckpointId) -> store::Result<bool> {
        if [&lock.head, &lock.prev_head].into_iter().flatten().any(|head| head.checkpoint_id == *id) {
            return Ok(true);
        }
        let Some(head) = &lock.head else { return Ok(false) };
        let archive = checkpoints.manifest(head).await?.rootfs.archive;
        Ok(archive.is_some_and(|archive| archive.path == ArchivePath::Checkpoint(id.clone())))
    }

    /// Checkpoints that nothing needs: beyond the number to keep or never committed, and not pinned. `lock` must be as
    /// its holder has just read or written it; for a free lock the result is a guess until the lock is held.
    pub async fn unreferenced(&self, lock: &Lock) -> store::Result<Vec<CheckpointId>> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(Vec::new()) };
        let stored = checkpoints.list(&lock.sandbox_id).await?;
        let unnamed: Vec<_> = stored.iter().filter(|id| !is_needed(id, lock)).cloned().collect();
        if unnamed.is_empty() {
            return Ok(Vec::new());
        }
        let kept = self.chain(checkpoints, lock, &stored).await?;
        let mut found = Vec::new();
        for id in unnamed {
            if !kept.contains(&id) && !checkpoints.is_pinned(&id).await? {
                found.push(id);
            }
        }
        Ok(found)
    }

    /// Erases unreferenced checkpoints. Only for a lease holder that has just renewed the lease.
    pub async fn collect_garbage(&self, lock: &Lock) -> store::Result<usize> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(0) };
        let old = self.unreferenced(lock).await?;
        for id in &old {
            checkpoints.erase(id).await?;
        }
        Ok(old.len())
    }

    /// Erases unreferenced checkpoints of a sandbox without a holder.
    pub async fn tidy_free(&self, lock: &mut LeaseHandle) -> Result<usize> {
        self.acquire(lock).await?;
        let held = lock.lock().cloned().ok_or(lease::Error::Missing)?;
        let tidied = lock.renew_while(self.collect_garbage(&held)).await?;
        self.release(lock, None).await?;
        Ok(tidied?)
    }

    /// Updates the status of a sandbox that is not running to what the lock shows, and releases the lease.
    pub async fn correct(&self, id: &SandboxId, lock: &mut LeaseHandle) -> Result<Phase> {
        self.acquire(lock).await?;
        let held = lock.lock().cloned().ok_or(lease::Error::Missing)?;
        let reported = lock.renew_while(self.report_resting(id, &held)).await?;
        self.release(lock, None).await?;
        Ok(reported?)
    }

    /// Writes the status of a sandbox that is not running. We hold `lock`.
    pub async fn report_resting(&self, id: &SandboxId, lock: &Lock) -> records::Result<Phase> {
        let rest = Resting::of(lock, self.taken(lock).await);
        self.records
            .report(id, lock.epoch, &|status: &mut SandboxStatus, committed| {
                status.phase = rest.phase;
                status.reason = rest.reason.map(String::from).unwrap_or_default();
                status.message = rest.message.to_owned();
                status.instance = None;
                committed.clone_from(&rest.committed);
            })
            .await?;
        Ok(rest.phase)
    }

    /// When the head of a lock was taken, if its manifest can be read. For display only.
    pub async fn taken(&self, lock: &Lock) -> Option<String> {
        let (checkpoints, head) = (self.checkpoints.as_ref()?, lock.head.as_ref()?);
        checkpoints.manifest(head).await.ok().map(|manifest| manifest.created)
    }

    /// Releases a lease under which nothing ran, with `head` as the last commit in the same write.
    pub async fn release(&self, lock: &mut LeaseHandle, head: Option<Head>) -> Result<()> {
        let mut tries = 1;
        loop {
            match lock.release(head.clone(), false).await {
                Ok(Released::Freed) => return Ok(()),
                Ok(Released::Lost) => return Err(Error::Taken),
                Err(error) if tries == LAST_WRITE_ATTEMPTS || matches!(error, lease::Error::Missing) => {
                    return Err(error.into());
                }
                Err(_) => self.pause(&mut tries).await,
            }
        }
    }

    async fn pause(&self, tries: &mut u32) {
        *tries += 1;
        self.clock.sleep(self.clock.jittered(std::time::Duration::from_secs(1))).await;
    }

    /// The newest committed checkpoints, up to the number to keep: the head, the previous head, and their parents.
    async fn chain(
        &self,
        checkpoints: &Checkpoints,
        lock: &Lock,
        stored: &BTreeSet<CheckpointId>,
    ) -> store::Result<BTreeSet<CheckpointId>> {
        let mut kept: BTreeSet<_> = [&lock.head, &lock.prev_head]
            .into_iter()
            .flatten()
            .take(self.keep.max(1))
            .map(|head| head.checkpoint_id.clone())
            .collect();
        let mut last = lock.prev_head.as_ref().or(lock.head.as_ref()).map(|head| head.checkpoint_id.clone());
        while kept.len() < self.keep
            && let Some(id) = last.take().filter(|id| stored.contains(id))
            && let Some(manifest) = checkpoints.manifest_of(&id).await?
            && let Some(parent) = manifest.0.parent
            && kept.insert(parent.clone())
        {
            last = Some(parent);
        }
        Ok(kept)
    }
}

/// Whether the lock names a checkpoint as its head, or it may be an upload in progress: one of the current epoch that
/// comes after the head.
fn is_needed(id: &CheckpointId, lock: &Lock) -> bool {
    let head = lock.head.as_ref();
    let on_its_way = id.epoch() >= lock.epoch && id.seq() > head.map_or(0, |head| head.seq);
    on_its_way || head.is_some_and(|head| head.checkpoint_id == *id)
}

/// The status of a sandbox that is not running.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resting {
    pub phase: Phase,
    pub reason: Option<Reason>,
    pub message: &'static str,
    pub committed: Committed,
}

impl Resting {
    /// `taken` is when the head was taken.
    pub fn of(lock: &Lock, taken: Option<String>) -> Self {
        let committed = lock.head.as_ref().map(|head| committed(head, taken)).unwrap_or_default();
        let (phase, reason, message) = match (&committed.latest, lock.ran) {
            (Some(_), _) if lock.behind => {
                (Phase::Checkpointed, None, "It kept running after its last checkpoint; later work is lost.")
            }
            (Some(_), _) => (Phase::Checkpointed, None, ""),
            (None, true) => {
                (Phase::Failed, Some(Reason::Lost), "The sandbox ended without a checkpoint; its state is lost.")
            }
            (None, false) => (Phase::Pending, None, ""),
        };
        Self { phase, reason, message, committed }
    }
}

#[cfg(test)]
mod tests {
    use baton_protocol::id::{Nonce, Sha256Name};

    use super::*;

    fn id() -> SandboxId {
        SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap()
    }

    fn head(epoch: u64, seq: u64) -> Head {
        let checkpoint_id = CheckpointId::new(&id(), epoch, seq, &Nonce::from_bits([seq as u8; 16]));
        Head { seq, epoch, checkpoint_id, bucket: None, manifest_sha256: Sha256Name::from_bits([0; 32]) }
    }

    #[test]
    fn what_may_be_on_its_way_is_needed_and_what_the_head_has_passed_is_not() {
        let lock = Lock { epoch: 5, head: Some(head(5, 7)), ..Lock::new(id()) };
        for (epoch, seq, needed) in [(5, 8, true), (5, 7, false), (5, 6, false), (4, 8, false), (6, 8, true)] {
            let other = CheckpointId::new(&id(), epoch, seq, &Nonce::from_bits([0xee; 16]));
            assert_eq!(is_needed(&other, &lock), needed, "{epoch} {seq}");
        }
        assert!(is_needed(&head(5, 7).checkpoint_id, &lock));
        let fresh = Lock { epoch: 1, ..Lock::new(id()) };
        assert!(is_needed(&head(1, 1).checkpoint_id, &fresh), "the first one is on its way");
    }

    #[test]
    fn the_status_of_what_runs_nowhere_follows_from_the_lock() {
        let phase = |lock: &Lock| Resting::of(lock, None).phase;
        assert_eq!(phase(&Lock::new(id())), Phase::Pending);
        assert_eq!(phase(&Lock { ran: true, ..Lock::new(id()) }), Phase::Failed);
        let stored = Lock { ran: true, head: Some(head(1, 1)), ..Lock::new(id()) };
        assert_eq!((phase(&stored), Resting::of(&stored, None).message), (Phase::Checkpointed, ""));
        assert!(!Resting::of(&Lock { behind: true, ..stored }, None).message.is_empty());
    }
}
