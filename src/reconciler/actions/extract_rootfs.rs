//! Root file systems: fetches the one a sandbox needs before it starts.
//!
//! ```text
//!   snapshot ─▶ fetch, verify ─▶ (its base, if it is a layer) ─▶ extract ─▶ create
//!   manifest of the head ─▶ the same, from where it says ─▶ extract ─▶ restore
//! ```

use baton_protocol::{
    manifest::{self, Rootfs},
    metadata::OnIncompatible,
    reason::Reason,
    snapshot_key::SnapshotKey,
};

use super::{
    ActionResult, Failure,
    rootfs_fetcher::{RootfsFetcher, not_fetched},
    staging::TransferProgress,
    start_failed,
};
use crate::{
    bus::{EXTRACT, StartKind},
    reconciler::{
        start_state::{HeldRootfs, MissingParts},
        worker::Worker,
    },
    runtime::rootfs_digest::derived,
};

impl Worker {
    /// As recorded in the manifest of a checkpoint.
    pub(super) fn rootfs(&self) -> Rootfs {
        let digest = self.context.lifecycle.facts().rootfs_digest;
        let base = Rootfs { digest: digest.clone(), base_digest: digest, archive: None };
        self.start.rootfs.as_ref().map_or(base, |held| held.rootfs.clone())
    }

    pub(super) async fn extract(&mut self) -> ActionResult {
        let context = self.context.clone();
        let id = self.id.clone();
        let named = self.record.spec().and_then(|spec| {
            let name = spec.filesystem_snapshot_name.as_ref()?;
            Some(SnapshotKey::candidates(spec.tenant.as_ref(), name))
        });
        let missing = self.start.missing.clone();
        let work = async {
            let progress = TransferProgress::new(&context, &id, EXTRACT);
            let fetcher = RootfsFetcher { context: &context, progress: &progress };
            let found = async {
                match (missing, named) {
                    (Some(missing), _) => {
                        if let Some(runsc) = &missing.runsc {
                            fetcher.runtime(runsc).await?;
                        }
                        fetcher.rootfs(missing.rootfs).await
                    }
                    (None, Some(candidates)) => fetcher.snapshot(candidates).await,
                    (None, None) => Err(Failure::Stale),
                }
            };
            tokio::pin!(found);
            loop {
                tokio::select! {
                    biased;
                    found = &mut found => break found,
                    // Tells waiting sessions that the work continues.
                    () = context.clock.sleep(context.times.poll.metadata) => progress.report_alive(),
                }
            }
        };
        let fetched = self.under_lease(work).await?;
        let reason = match &fetched {
            Err(Failure::Refused { reason, .. }) => Some(*reason),
            Ok(_) | Err(_) => None,
        };
        if reason == Some(Reason::OtherRuntime) && self.may_drop_memory() && !self.start.files_only {
            // Its files may be usable without that runsc.
            (self.start.files_only, self.start.missing) = (true, None);
            return Err(Failure::Stale);
        }
        let rootfs = fetched.map_err(start_failed(Reason::RestoreFailed))?;
        tracing::info!(sandbox = %self.id, digest = %rootfs.rootfs.digest, "the root file system is ready");
        (self.start.rootfs, self.start.missing) = (Some(rootfs), None);
        Ok(())
    }

    /// The spec accepts the files without the memory.
    pub(super) fn may_drop_memory(&self) -> bool {
        self.record.spec().is_some_and(|spec| spec.on_incompatible == OnIncompatible::Files)
    }

    /// Starts from the files of the head, whose memory cannot be used here because of `refusal`.
    pub(super) async fn start_from_files(
        &mut self,
        manifest: &manifest::CheckpointManifest,
        refusal: Failure,
    ) -> ActionResult {
        let context = self.context.clone();
        let checkpoints = context.checkpoints.clone().ok_or(Failure::Stale)?;
        let archive = checkpoints.files_of(manifest).filter(|_| self.may_drop_memory());
        let (Some(archive), Some(layer)) = (archive, &manifest.layer) else { return Err(refusal) };
        let digest = derived(layer.base_digest.as_ref(), &archive.sha256);
        let base_digest = layer.base_digest.clone().unwrap_or_else(|| digest.clone());
        let rootfs = Rootfs { digest, base_digest, archive: Some(archive) };
        let Some(guard) = context.lifecycle.acquire_rootfs(&rootfs.digest) else {
            self.start.missing = Some(MissingParts { rootfs, runsc: None });
            return Err(Failure::Stale);
        };
        // The source of its new root file system must outlive the next checkpoints.
        let (id, source) = (self.id.clone(), manifest.checkpoint_id.clone());
        let for_good = start_failed(Reason::RestoreFailed);
        self.under_lease(checkpoints.pin(&source, &id)).await?.map_err(not_fetched).map_err(&for_good)?;
        (self.start.rootfs, self.start.runsc, self.start.marker) = (Some(HeldRootfs { rootfs, guard }), None, None);
        let kind = StartKind::Files { checkpoint_id: source };
        self.start.kind = Some(kind.clone());
        let start = self.start_spec()?;
        let created = self.under_lease(async { context.lifecycle.create(&id, &start).await }).await?;
        created.map_err(Failure::from).map_err(&for_good)?;
        self.lease.ran = true;
        self.start.files_only = false;
        tracing::warn!(sandbox = %self.id, ?refusal, "started from the files of the checkpoint, without its memory");
        self.announce_running(kind).await;
        Ok(())
    }
}
