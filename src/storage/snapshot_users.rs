//! Finds the sandboxes that use a snapshot.

use baton_protocol::{
    id::SandboxId,
    manifest::{Archive, ArchivePath},
    metadata::{DesiredState, Spec},
    snapshot_key::SnapshotKey,
};

use super::{
    checkpoints::Checkpoints,
    records::{Records, Result},
};

/// How many sandboxes are listed at once.
const AT_ONCE: usize = 500;

/// A sandbox that was created from a snapshot, or whose checkpoints depend on it. Reads every sandbox in the store.
pub async fn user_of(
    records: &Records,
    checkpoints: &Checkpoints,
    snapshot: &SnapshotKey,
) -> Result<Option<SandboxId>> {
    let mut after = None;
    loop {
        let (ids, more) = records.list(after.as_ref(), AT_ONCE).await?;
        for id in &ids {
            let spec = records.find(id).await?.map(|found| found.spec);
            if spec.is_some_and(|spec| may_mean(&spec, snapshot)) {
                return Ok(Some(id.clone()));
            }
            let lock = records.lock_of(id).await?;
            for head in lock.into_iter().flat_map(|lock| [lock.head, lock.prev_head]).flatten() {
                // A checkpoint whose manifest cannot be read cannot be restored either.
                let Ok(manifest) = checkpoints.manifest(&head).await else { continue };
                let is_of = |archive: Archive| matches!(archive.path, ArchivePath::Snapshot(of, _) if of == *snapshot);
                if manifest.rootfs.archive.is_some_and(is_of) {
                    return Ok(Some(id.clone()));
                }
            }
        }
        after = ids.last().cloned();
        if !more || after.is_none() {
            return Ok(None);
        }
    }
}

/// Whether the sandbox names the snapshot. If its tenant has a snapshot of that name too, it may mean either.
fn may_mean(spec: &Spec, snapshot: &SnapshotKey) -> bool {
    let named = spec.filesystem_snapshot_name.as_ref();
    let meant = named.map(|name| SnapshotKey::candidates(spec.tenant.as_ref(), name));
    spec.desired_state != DesiredState::Deleted && meant.is_some_and(|meant| meant.contains(snapshot))
}
