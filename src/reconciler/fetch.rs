//! What a head names, on its way here: begun while the lease is still being acquired, finished under it.
//!
//! [10] The head that the acquiring write will contain is the one it was made from, so nothing is
//! fetched for any other. Whoever does not get the lease throws it away.

use std::sync::Arc;

use baton_protocol::{id::SandboxId, lock::Head, manifest::Checkpoint};
use tokio::task::JoinSet;

use super::{
    Tools,
    act::{Done, Failure},
    checkpoint::{compatible, fetched},
    sandbox::Sandbox,
    staging::{Staging, Steps},
};
use crate::storage::checkpoints::Checkpoints;

#[derive(Debug)]
pub(super) struct Fetching {
    head: Head,
    pub(super) image: Staging,
    /// Ends with this value.
    task: JoinSet<Result<Checkpoint, Failure>>,
}

impl Fetching {
    pub(super) fn begin(tools: &Arc<Tools>, id: &SandboxId, checkpoints: Checkpoints, head: Head) -> Self {
        // By the sandbox too: copies of one checkpoint may be fetched here side by side.
        let image = Staging::new(tools, &format!("{id}-{}", head.checkpoint_id));
        let mut task = JoinSet::new();
        task.spawn(fetch(tools.clone(), id.clone(), checkpoints, head.clone(), image.clone()));
        Self { head, image, task }
    }

    /// The verified manifest, once every file it describes lies in the image.
    pub(super) async fn done(&mut self) -> Result<Checkpoint, Failure> {
        match self.task.join_next().await {
            Some(Ok(fetched)) => fetched,
            Some(Err(error)) => Err(Failure::Passing(format!("The checkpoint could not be fetched: {error}."))),
            None => Err(Failure::Look),
        }
    }

    pub(super) async fn abandon(mut self) {
        self.task.shutdown().await;
        self.image.wipe().await;
    }
}

/// The manifest by its hash, then what this instance must be like, then the files by theirs.
async fn fetch(
    tools: Arc<Tools>,
    id: SandboxId,
    checkpoints: Checkpoints,
    head: Head,
    image: Staging,
) -> Result<Checkpoint, Failure> {
    let (manifest, made) = futures::join!(checkpoints.manifest(&head), image.make());
    let manifest = manifest.map_err(fetched)?;
    made?;
    compatible(&manifest, &tools.lifecycle.facts())?;
    image.has_room(manifest.files.iter().map(|file| file.size).sum()).await?;
    let progress = Steps::new(&tools.board, &id, "download");
    let tell = |done, total| progress.tell(done, total);
    checkpoints.fetch(&manifest, image.path(), &tell).await.map_err(fetched)?;
    Ok(manifest)
}

impl Sandbox {
    /// Begins to fetch the head of the lock as it was read, if it can be had here.
    pub(super) fn fetch_ahead(&mut self) {
        let head = self.lock.as_ref().and_then(|lock| lock.lock()?.head.clone());
        let checkpoints = self.tools.checkpoints.clone();
        if let (Some(head), Some(checkpoints), None) = (head, checkpoints, &self.fetching)
            && checkpoints.holds(&head)
        {
            self.fetching = Some(Fetching::begin(&self.tools, &self.id, checkpoints, head));
        }
    }

    /// What was fetched for another head, or for a start that is not wanted any more.
    pub(super) async fn abandon_fetch(&mut self) {
        if let Some(fetching) = self.fetching.take() {
            fetching.abandon().await;
        }
    }

    /// The fetch of this very head: one that is under way, or a new one.
    pub(super) async fn fetching(&mut self, checkpoints: Checkpoints, head: &Head) -> Fetching {
        match self.fetching.take() {
            Some(fetching) if fetching.head == *head => return fetching,
            Some(fetching) => fetching.abandon().await,
            None => {}
        }
        Fetching::begin(&self.tools, &self.id, checkpoints, head.clone())
    }

    /// Takes the lease, while what it will be needed for is already on its way.
    pub(super) async fn acquire_to_run(&mut self) -> Done {
        self.fetch_ahead();
        let acquired = self.lock_file()?.acquire(true).await;
        if acquired.is_err() {
            self.abandon_fetch().await;
        }
        Ok(acquired?)
    }
}
