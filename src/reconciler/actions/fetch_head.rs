//! Fetches the head of a sandbox: starts while the lease is still being acquired, and finishes under it.
//!
//! Rule 10: The acquiring write contains the head it was made from, so no other head is ever fetched. If the lease is
//! not acquired, the fetched files are discarded.

use std::sync::Arc;

use baton_protocol::{id::SandboxId, lock::Head, manifest::CheckpointManifest};
use tokio::{sync::watch, task::JoinSet};

use super::{
    ActionResult, Failure,
    restore::{compatible, manifest_not_fetched, not_fetched},
    staging::{Staging, TransferProgress},
};
use crate::{
    bus::DOWNLOAD,
    reconciler::{ReconcilerContext, worker::Worker},
    storage::checkpoints::Checkpoints,
};

#[derive(Debug)]
pub(in crate::reconciler) struct Fetching {
    head: Head,
    pub(super) image: Staging,
    /// Arrives first: it says what else is needed.
    manifest: watch::Receiver<Option<CheckpointManifest>>,
    /// Dropping this aborts the fetch.
    task: JoinSet<Result<(), Failure>>,
    /// Every file is in the image directory.
    is_here: bool,
}

impl Fetching {
    pub(super) fn begin(
        context: &Arc<ReconcilerContext>,
        id: &SandboxId,
        checkpoints: Checkpoints,
        head: Head,
    ) -> Self {
        // The name includes the sandbox: several sandboxes may fetch the same checkpoint concurrently.
        let image = Staging::new(context, &format!("{id}-{}", head.checkpoint_id));
        let (read, manifest) = watch::channel(None);
        let mut task = JoinSet::new();
        task.spawn(fetch(context.clone(), id.clone(), checkpoints, head.clone(), image.clone(), read));
        Self { head, image, manifest, task, is_here: false }
    }

    /// The verified manifest, while the files it describes are still being fetched.
    pub(super) async fn manifest(&mut self) -> Result<CheckpointManifest, Failure> {
        let read = self.manifest.wait_for(Option::is_some).await.ok().and_then(|manifest| manifest.clone());
        match read {
            Some(manifest) => Ok(manifest),
            // The fetch ended without a manifest; its result says why.
            None => self.done().await.and(Err(Failure::Stale)),
        }
    }

    /// Completes when every file that the manifest describes is in the image directory.
    pub(super) async fn done(&mut self) -> ActionResult {
        if !self.is_here {
            match self.task.join_next().await {
                Some(Ok(fetched)) => fetched?,
                Some(Err(error)) => {
                    return Err(Failure::Transient(format!("The checkpoint could not be fetched: {error}.")));
                }
                None => return Err(Failure::Stale),
            }
            self.is_here = true;
        }
        Ok(())
    }

    pub(in crate::reconciler) async fn abandon(mut self) {
        self.task.shutdown().await;
        self.image.wipe().await;
    }
}

/// Fetches and verifies the manifest, checks that this instance is compatible, then fetches and verifies the files.
async fn fetch(
    context: Arc<ReconcilerContext>,
    id: SandboxId,
    checkpoints: Checkpoints,
    head: Head,
    image: Staging,
    read: watch::Sender<Option<CheckpointManifest>>,
) -> ActionResult {
    let (manifest, made) = futures::join!(checkpoints.verified(&head), image.make());
    let manifest = manifest.map_err(|error| manifest_not_fetched(&checkpoints, &head, error))?;
    made?;
    compatible(&manifest, &context.lifecycle.facts())?;
    read.send_replace(Some(manifest.clone()));
    image.has_room(manifest.size()).await?;
    let progress = TransferProgress::new(&context, &id, DOWNLOAD);
    let report = |done, total| progress.report(done, total);
    checkpoints.fetch(&manifest, image.path(), &report).await.map_err(not_fetched)
}

impl Worker {
    /// Starts fetching the head of the lock as last read, if it can be fetched here.
    pub(super) fn fetch_ahead(&mut self) {
        let lock = self.lease.lock();
        let head = lock.and_then(|lock| lock.head.clone().filter(|head| lock.may_start_from(&head.checkpoint_id)));
        let checkpoints = self.context.checkpoints.clone();
        if let (Some(head), Some(checkpoints), None) = (head, checkpoints, &self.start.fetching)
            && checkpoints.may_hold(&head)
        {
            self.start.fetching = Some(Fetching::begin(&self.context, &self.id, checkpoints, head));
        }
    }

    /// The fetch of this head: the current one, or a new one.
    pub(super) async fn fetching(&mut self, checkpoints: Checkpoints, head: &Head) -> Fetching {
        match self.start.fetching.take() {
            Some(fetching) if fetching.head == *head => return fetching,
            Some(fetching) => fetching.abandon().await,
            None => {}
        }
        Fetching::begin(&self.context, &self.id, checkpoints, head.clone())
    }
}
