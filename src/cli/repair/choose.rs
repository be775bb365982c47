//! Which checkpoint a sandbox without a lock starts from.

use std::collections::BTreeMap;

use anyhow::Result;
use baton_protocol::{
    id::{CheckpointId, SandboxId, Sha256Name},
    lock::Head,
    manifest::CheckpointManifest,
    metadata::{Latest, Metadata},
    reason::Reason,
};

use crate::{
    config::variables::SANDBOX_CHECKPOINT_BUCKET,
    storage::{checkpoints::Checkpoints, foreign::Folder, store::Error as StoreError},
};

/// The result of the search for a checkpoint.
#[derive(Debug)]
pub enum Choice {
    /// Nothing is stored of the sandbox.
    Nothing,
    Start(Box<RestorePoint>),
    /// Why not, in one sentence that begins with the reason.
    Refused(String),
}

#[derive(Debug)]
pub struct RestorePoint {
    pub head: Head,
    /// When it was taken.
    pub taken: String,
}

/// Everything stored of a sandbox under its own name.
#[derive(Debug, Default)]
pub struct StoredSandbox {
    manifests: BTreeMap<CheckpointId, (CheckpointManifest, Sha256Name)>,
    /// The highest epoch of any of them.
    pub epoch: u64,
}

impl StoredSandbox {
    pub async fn of(store: &Checkpoints, id: &SandboxId) -> Result<Self> {
        let mut stored = Self::default();
        for checkpoint in store.list(id).await? {
            stored.epoch = stored.epoch.max(checkpoint.epoch());
            match store.manifest_of(&checkpoint).await {
                Ok(Some(manifest)) => drop(stored.manifests.insert(checkpoint, manifest)),
                // It cannot be restored, and it does not prevent restoring another one.
                Ok(None) | Err(StoreError::Damaged { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(stored)
    }

    /// The newest complete checkpoint that descends from `from`; `from` itself if there is none.
    fn newest_from(&self, from: &CheckpointId) -> Option<CheckpointId> {
        let descends = |id: &CheckpointId| {
            let mut at = id;
            for _ in 0..=self.manifests.len() {
                if at == from {
                    return true;
                }
                match self.manifests.get(at).and_then(|(manifest, _)| manifest.parent.as_ref()) {
                    Some(parent) => at = parent,
                    None => return false,
                }
            }
            false
        };
        let found = self.manifests.keys().filter(|id| descends(id));
        found.max_by_key(|id| (id.seq(), id.epoch())).cloned()
    }
}

/// The requested checkpoint, or else the newest descendant of the one that the metadata names.
pub async fn choose(
    store: &Checkpoints,
    stored: &StoredSandbox,
    asked: Option<&CheckpointId>,
    found: &Metadata,
) -> Result<Choice> {
    let id = &found.spec.sandbox_id;
    let folder = match (asked, &found.latest_sandbox_checkpoint) {
        (Some(asked), _) => Folder::from(asked),
        (None, Some(latest)) => match folder_of(store, latest) {
            Ok(folder) => folder,
            Err(refusal) => return Ok(Choice::Refused(refusal)),
        },
        (None, None) if stored.manifests.is_empty() => return Ok(Choice::Nothing),
        (None, None) => {
            return Ok(Choice::Refused(format!(
                "{}: nothing says which checkpoint to start from: choose one with --head; `baton checkpoints {id}` lists them",
                Reason::CheckpointMissing
            )));
        }
    };
    let newest = folder.checkpoint().and_then(|from| stored.newest_from(&from));
    start(store, &newest.as_ref().map_or(folder, Folder::from)).await
}

fn folder_of(store: &Checkpoints, latest: &Latest) -> Result<Folder, String> {
    // Under a mount the bucket is unknown.
    if let (Some(named), Some(here)) = (&latest.bucket, store.bucket())
        && named != here
    {
        return Err(format!(
            "{}: the checkpoint is in bucket {named}, but {SANDBOX_CHECKPOINT_BUCKET} is {here}: copy it there and change latest_sandbox_checkpoint, or set the variable",
            Reason::OtherStore
        ));
    }
    Folder::parse(&latest.path).map_err(|error| format!("{}: latest_sandbox_checkpoint: {error}", Reason::InvalidSpec))
}

/// The checkpoint in a folder, if it is complete and ours. One stored under another name is copied to its own.
async fn start(store: &Checkpoints, folder: &Folder) -> Result<Choice> {
    let damaged =
        |why: String| Choice::Refused(format!("{}: {} cannot be used: {why}", Reason::Damaged, folder.path()));
    let manifest = match store.manifest_in(folder).await {
        Ok(manifest) => manifest,
        Err(StoreError::Damaged { why, .. }) => return Ok(damaged(why)),
        Err(error) => return Err(error.into()),
    };
    let missing = store.missing_in(folder, manifest.as_ref().map(|(manifest, _)| manifest)).await?;
    if !missing.is_empty() {
        return Ok(Choice::Refused(format!(
            "{}: {} lacks {}: a checkpoint needs every file that baton has written; choose another with --head",
            Reason::CheckpointMissing,
            folder.path(),
            missing.join(", ")
        )));
    }
    let Some((manifest, mut sha256)) = manifest else { return Ok(damaged("there is no manifest".to_owned())) };
    match folder.checkpoint() {
        Some(id) if id != manifest.checkpoint_id => return Ok(damaged("it describes another checkpoint".to_owned())),
        Some(_) => {}
        None => {
            let through = tempfile::tempdir()?;
            sha256 = match store.adopt(folder, &manifest, through.path()).await {
                Ok(sha256) => sha256,
                Err(StoreError::Damaged { why, .. }) => return Ok(damaged(why)),
                Err(error) => return Err(error.into()),
            };
        }
    }
    let head = Head {
        seq: manifest.seq,
        epoch: manifest.epoch,
        checkpoint_id: manifest.checkpoint_id,
        bucket: store.bucket().cloned(),
        manifest_sha256: sha256,
    };
    match store.manifest(&head).await {
        Ok(manifest) => Ok(Choice::Start(Box::new(RestorePoint { head, taken: manifest.created }))),
        Err(StoreError::Damaged { why, .. }) => Ok(damaged(why)),
        Err(error) => Err(error.into()),
    }
}
