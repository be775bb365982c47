//! Stores once what later restores will need: the base root file system and the runsc of this instance.
//!
//! The upload starts with the first sandbox that can outlive this instance, and blocks nothing.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;

use super::{
    ReconcilerContext,
    actions::{Failure, staging::Staging},
};
use crate::storage::{checkpoints::Checkpoints, store};

/// Delay after a failed attempt.
const LATER: Duration = Duration::from_secs(60);

/// Whether to upload them, and whether the upload has begun.
#[derive(Debug, Default)]
pub struct BaseUpload {
    is_wanted: bool,
    has_begun: AtomicBool,
    begin: Notify,
}

impl BaseUpload {
    pub fn new(is_wanted: bool) -> Self {
        Self { is_wanted, ..Self::default() }
    }

    /// Starts the upload: there is a sandbox that will need it.
    pub(super) fn begin(&self) {
        if self.is_wanted && !self.has_begun.swap(true, Ordering::SeqCst) {
            self.begin.notify_one();
        }
    }

    pub(super) fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::SeqCst)
    }
}

/// Completes when everything is stored.
pub(super) async fn run(context: Arc<ReconcilerContext>) {
    let Some(checkpoints) = context.checkpoints.clone() else { return std::future::pending().await };
    context.base_upload.begin.notified().await;
    while let Err(error) = store(&context, &checkpoints).await {
        tracing::warn!(error = ?error, "the runtime or base root file system could not be stored; retrying");
        context.clock.sleep(LATER).await;
    }
}

async fn store(context: &ReconcilerContext, checkpoints: &Checkpoints) -> Result<(), Failure> {
    let failed = |error: store::Error| Failure::Transient(error.to_string());
    let facts = context.lifecycle.facts();
    let (sha256, digest) = (&facts.runsc_sha256, &facts.rootfs_digest);
    if checkpoints.store_runtime(sha256, &context.lifecycle.runtime_file()).await.map_err(failed)? {
        tracing::info!(sha256 = sha256.as_str(), version = facts.runsc_version, "stored the runsc of this instance");
    }
    if checkpoints.has_rootfs(digest).await.map_err(failed)? {
        return Ok(());
    }
    let staging = Staging::new(context, "rootfs");
    staging.make().await?;
    let file = staging.path().join("rootfs.tar.zst");
    let stored = async {
        context.lifecycle.pack(&file).await?;
        checkpoints.store_rootfs(digest, &file).await.map_err(failed)?;
        tracing::info!(digest = digest.as_str(), "stored the base root file system of this instance");
        Ok(())
    };
    let stored = stored.await;
    staging.wipe().await;
    stored
}
