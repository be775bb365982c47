//! Fetches what a sandbox needs and this instance lacks: a snapshot, a root file system, a runsc.

use baton_protocol::{
    manifest::{Archive, ArchivePath, Rootfs, RunscBuild, SnapshotKind},
    reason::Reason,
    snapshot_key::SnapshotKey,
};

use super::{
    Failure, answer_requests, refusal,
    staging::{Staging, TransferProgress},
};
use crate::{
    config::variables::RUNTIMES,
    reconciler::{ReconcilerContext, start_state::HeldRootfs},
    runtime::{ArchiveSource, Extract, RootfsGuard, rootfs_digest::derived},
    storage::{
        layout::Sha256Name,
        snapshots::{NamedSnapshot, Snapshots},
        store,
    },
};

pub(super) struct RootfsFetcher<'a> {
    pub(super) context: &'a ReconcilerContext,
    pub(super) progress: &'a TransferProgress<'a>,
}

impl RootfsFetcher<'_> {
    /// Fetches the first of these snapshots that exists.
    pub(super) async fn snapshot(&self, candidates: Vec<SnapshotKey>) -> Result<HeldRootfs, Failure> {
        let Some(snapshots) = &self.context.snapshots else {
            return Err(refusal(Reason::NotSupported, answer_requests::NOT_ENABLED));
        };
        let mut sought = None;
        for snapshot in candidates {
            let found = snapshots.find_genuine(&snapshot).await.map_err(not_fetched)?;
            let is_found = found != NamedSnapshot::Nothing;
            sought = Some((snapshot, found));
            if is_found {
                break;
            }
        }
        let Some((snapshot, found)) = sought else { return Err(Failure::Stale) };
        // By the name the client used: clients know nothing of tenants.
        let name = &snapshot.name;
        let missing = |why: &str| refusal(Reason::SnapshotMissing, &format!("The filesystem snapshot `{name}` {why}."));
        match found {
            // Existing clients match on the first words.
            NamedSnapshot::Nothing => {
                let message = format!("Filesystem snapshot not found: `{name}` does not exist.");
                Err(refusal(Reason::SnapshotMissing, &message))
            }
            NamedSnapshot::Unfinished => Err(missing("is not finished")),
            NamedSnapshot::Ours(manifest) => {
                let base = match (manifest.kind, manifest.base_digest.clone()) {
                    (SnapshotKind::Rootfs, _) => None,
                    (SnapshotKind::Layer, Some(base)) => Some(base),
                    (SnapshotKind::Layer, None) => return Err(missing("does not say what it lies on")),
                };
                let digest = derived(base.as_ref(), &manifest.sha256);
                let base_digest = base.unwrap_or_else(|| digest.clone());
                let archive = Some(snapshots.archive(&snapshot, &manifest));
                self.rootfs(Rootfs { digest, base_digest, archive }).await
            }
            NamedSnapshot::Foreign { path } => self.foreign(snapshots, &snapshot, &path).await,
        }
    }

    /// Fetches a complete archive that was not stored by an instance and has no manifest.
    async fn foreign(
        &self,
        snapshots: &Snapshots,
        snapshot: &SnapshotKey,
        path: &ArchivePath,
    ) -> Result<HeldRootfs, Failure> {
        let staging = self.staged().await?;
        let file = staging.path().join("archive");
        let report = |done| self.progress.report(done, 0);
        let extracted = async {
            let fetched = snapshots.fetch(path, &file, self.context.archive_size, &report).await;
            let archive = fetched.map_err(not_fetched)?;
            snapshots.check_archive(snapshot, &archive).await.map_err(not_fetched)?;
            let digest = derived(None, &archive.sha256);
            let wanted = Extract { digest: digest.clone(), from: ArchiveSource::Complete };
            let guard = self.context.lifecycle.extract(&file, &wanted).await?;
            let rootfs = Rootfs { base_digest: digest.clone(), digest, archive: Some(archive) };
            Ok(HeldRootfs { rootfs, guard })
        };
        let extracted = extracted.await;
        staging.wipe().await;
        extracted
    }

    /// Fetches the runsc that made a checkpoint, if the operator allows it here.
    pub(super) async fn runtime(&self, runsc: &RunscBuild) -> Result<(), Failure> {
        let version = &runsc.version;
        let facts = self.context.lifecycle.facts();
        let refuse = |why: &str| {
            let message =
                format!("The checkpoint needs runsc {version}, this instance has {}, {why}.", facts.runsc_version);
            refusal(Reason::OtherRuntime, &message)
        };
        // Also checked if the binary is already here: the operator's list applies at every start.
        let Some(name) = self.context.runtimes.find(runsc) else {
            return Err(refuse(&format!("and {RUNTIMES} does not allow the other one")));
        };
        if self.context.lifecycle.has_runtime(&name) {
            return Ok(());
        }
        let Some(checkpoints) = &self.context.checkpoints else { return Err(refuse("and there is no storage")) };
        let staging = self.staged().await?;
        let file = staging.path().join("runsc");
        let added = async {
            match checkpoints.fetch_runtime(&name, &file, self.context.archive_size).await {
                Err(store::Error::NotFound(_)) => return Err(refuse("and the other one is not stored")),
                done => done.map_err(not_fetched)?,
            }
            Ok(self.context.lifecycle.add_runtime(&file, &name).await?)
        };
        let added = added.await;
        staging.wipe().await;
        added
    }

    /// Fetches the root file system that a manifest describes.
    pub(super) async fn rootfs(&self, rootfs: Rootfs) -> Result<HeldRootfs, Failure> {
        if let Some(guard) = self.context.lifecycle.acquire_rootfs(&rootfs.digest) {
            return Ok(HeldRootfs { rootfs, guard });
        }
        let is_layer = rootfs.base_digest != rootfs.digest;
        let Some(archive) = rootfs.archive.clone() else {
            let guard = self.base(&rootfs.digest).await?;
            return Ok(HeldRootfs { rootfs, guard });
        };
        let base = is_layer.then(|| rootfs.base_digest.clone());
        if derived(base.as_ref(), &archive.sha256) != rootfs.digest {
            return Err(refusal(Reason::Damaged, "The manifest names an archive that does not belong to it."));
        }
        let from = match base {
            None => ArchiveSource::Complete,
            Some(base_digest) => {
                // Kept until the layer is extracted on top of it.
                let _base = self.base(&base_digest).await?;
                return self.extracted(rootfs, &archive, ArchiveSource::Layer { base_digest }).await;
            }
        };
        self.extracted(rootfs, &archive, from).await
    }

    async fn extracted(&self, rootfs: Rootfs, archive: &Archive, from: ArchiveSource) -> Result<HeldRootfs, Failure> {
        let staging = self.staged().await?;
        let file = staging.path().join("archive");
        let extracted = async {
            self.fetch(archive, &file).await?;
            let wanted = Extract { digest: rootfs.digest.clone(), from };
            Ok(self.context.lifecycle.extract(&file, &wanted).await?)
        };
        let extracted = extracted.await;
        staging.wipe().await;
        extracted.map(|guard| HeldRootfs { rootfs, guard })
    }

    /// Fetches a base root file system, which instances store by its digest.
    async fn base(&self, digest: &Sha256Name) -> Result<RootfsGuard, Failure> {
        if let Some(guard) = self.context.lifecycle.acquire_rootfs(digest) {
            return Ok(guard);
        }
        let unknown =
            || refusal(Reason::OtherRootfs, "The sandbox runs on a root file system that this instance does not have.");
        let checkpoints = self.context.checkpoints.as_ref().ok_or_else(unknown)?;
        let staging = self.staged().await?;
        let file = staging.path().join("archive");
        let report = |done| self.progress.report(done, 0);
        let extracted = async {
            match checkpoints.fetch_rootfs(digest, &file, self.context.archive_size, &report).await {
                Err(store::Error::NotFound(_)) => return Err(unknown()),
                done => done.map_err(not_fetched)?,
            }
            let wanted = Extract { digest: digest.clone(), from: ArchiveSource::Base };
            Ok(self.context.lifecycle.extract(&file, &wanted).await?)
        };
        let extracted = extracted.await;
        staging.wipe().await;
        extracted
    }

    async fn fetch(&self, archive: &Archive, file: &std::path::Path) -> Result<(), Failure> {
        let elsewhere = || {
            refusal(
                Reason::OtherStore,
                "The sandbox's root file system is in a bucket that this instance does not use.",
            )
        };
        let report = |done| self.progress.report(done, 0);
        let max_bytes = self.context.archive_size;
        let found = if let Some(snapshots) = self.context.snapshots.as_ref().filter(|at| at.may_hold(archive)) {
            snapshots.fetch(&archive.path, file, max_bytes, &report).await.map_err(not_fetched)?.sha256
        } else if let Some(checkpoints) = self.context.checkpoints.as_ref().filter(|at| at.may_hold_archive(archive)) {
            let digest = checkpoints.fetch_archive(archive, file, max_bytes, &report).await.map_err(not_fetched)?;
            Sha256Name::parse(&digest.sha256).map_err(|_| elsewhere())?
        } else {
            return Err(elsewhere());
        };
        if found == archive.sha256 {
            Ok(())
        } else {
            Err(refusal(
                Reason::Damaged,
                "The archive of the sandbox's root file system is not the one it was made from.",
            ))
        }
    }

    async fn staged(&self) -> Result<Staging, Failure> {
        let staging = Staging::new(self.context, self.context.clock.nonce().as_str());
        staging.make().await?;
        Ok(staging)
    }
}

pub(super) fn not_fetched(error: store::Error) -> Failure {
    match error {
        store::Error::Damaged { .. } => refusal(Reason::Damaged, &format!("The snapshot cannot be used: {error}.")),
        store::Error::Newer { .. } => {
            refusal(Reason::OtherVersion, "The snapshot was written by a later version of this server.")
        }
        store::Error::Unsigned(_) => refusal(Reason::Unsigned, &format!("The snapshot cannot be used: {error}.")),
        store::Error::NotFound(_) => refusal(Reason::SnapshotMissing, &format!("The snapshot is missing: {error}.")),
        error @ (store::Error::Conflict(_)
        | store::Error::RateLimited(_)
        | store::Error::Unavailable { .. }
        | store::Error::Denied { .. }
        | store::Error::Other { .. }) => Failure::Transient(format!("The snapshot could not be fetched: {error}.")),
    }
}
