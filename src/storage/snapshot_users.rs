//! Finds the sandboxes that use a snapshot.

use baton_protocol::{
    id::{SandboxId, SnapshotName},
    manifest::{Archive, ArchivePath},
    metadata::{DesiredState, Spec},
    snapshot_key::SnapshotKey,
};
use serde_json::Value;

use super::{
    checkpoints::Checkpoints,
    records::{Error, Records, Result},
    store,
};

/// How many sandboxes are listed at once.
const AT_ONCE: usize = 500;

/// The sandboxes that use a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotUsers {
    pub first: Option<SandboxId>,
    /// Sandboxes whose objects are broken, and how. They cannot be started either, and do not name the snapshot as far
    /// as can be seen.
    pub unreadable: Vec<(SandboxId, String)>,
}

/// A sandbox that was created from a snapshot, or whose checkpoints depend on it. Reads every sandbox in the store.
pub async fn users_of(records: &Records, checkpoints: &Checkpoints, snapshot: &SnapshotKey) -> Result<SnapshotUsers> {
    let mut users = SnapshotUsers::default();
    let mut after = None;
    loop {
        let (ids, more) = records.list(after.as_ref(), AT_ONCE).await?;
        for id in &ids {
            match is_user(records, checkpoints, snapshot, id).await {
                Ok(true) => return Ok(SnapshotUsers { first: Some(id.clone()), ..users }),
                Ok(false) => {}
                Err(error) if is_broken(&error) => users.unreadable.push((id.clone(), error.to_string())),
                Err(error) => return Err(error),
            }
        }
        after = ids.last().cloned();
        if !more || after.is_none() {
            return Ok(users);
        }
    }
}

async fn is_user(records: &Records, checkpoints: &Checkpoints, snapshot: &SnapshotKey, id: &SandboxId) -> Result<bool> {
    // The checkpoints count whatever the metadata are.
    let spec = match records.find(id).await {
        Ok(found) => Ok(found.map(|found| found.spec)),
        Err(error) if is_broken(&error) => {
            let raw = records.raw(id).await?;
            if raw.is_some_and(|(bytes, _)| names(&bytes, &snapshot.name)) {
                return Ok(true);
            }
            Err(error)
        }
        Err(error) => return Err(error),
    };
    if matches!(&spec, Ok(Some(spec)) if may_mean(spec, snapshot)) {
        return Ok(true);
    }
    // A lock without a good signature counts: an operator may sign it yet.
    let lock = records.unverified_lock(id).await?.map(|(lock, _)| lock).transpose();
    let lock = lock.map_err(|unusable| Error::InvalidSpec(unusable.to_string()))?;
    for head in lock.into_iter().flat_map(|lock| [lock.head, lock.prev_head]).flatten() {
        // A checkpoint whose manifest cannot be read cannot be restored either.
        let Ok(Some((manifest, _))) = checkpoints.manifest_of(&head.checkpoint_id).await else { continue };
        let is_of = |archive: Archive| matches!(archive.path, ArchivePath::Snapshot(of, _) if of == *snapshot);
        if manifest.rootfs.archive.is_some_and(is_of) {
            return Ok(true);
        }
    }
    spec.map(|_| false)
}

/// Whether the object itself is at fault, and not the store.
fn is_broken(error: &Error) -> bool {
    matches!(error, Error::InvalidSpec(_) | Error::TokenMissing | Error::Store(store::Error::Damaged { .. }))
}

/// Whether metadata that are not valid name the snapshot.
fn names(bytes: &[u8], name: &SnapshotName) -> bool {
    let record = serde_json::from_slice::<Value>(bytes).ok();
    let named = record.as_ref().and_then(|record| record.get("filesystem_snapshot_name")).and_then(Value::as_str);
    named == Some(name.as_str())
}

/// Whether the sandbox names the snapshot. If its tenant has a snapshot of that name too, it may mean either.
fn may_mean(spec: &Spec, snapshot: &SnapshotKey) -> bool {
    let named = spec.filesystem_snapshot_name.as_ref();
    let meant = named.map(|name| SnapshotKey::candidates(spec.tenant.as_ref(), name));
    spec.desired_state != DesiredState::Deleted && meant.is_some_and(|meant| meant.contains(snapshot))
}
