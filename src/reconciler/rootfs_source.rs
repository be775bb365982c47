//! Root file systems: fetches the one a sandbox needs before it starts.
//!
//! ```text
//!   snapshot ─▶ fetch, verify ─▶ (its base, if it is a layer) ─▶ extract ─▶ create
//!   manifest of the head ─▶ the same, from where it says ─▶ extract ─▶ restore
//! ```

use baton_protocol::{
    manifest::{self, Archive, Rootfs, Runsc, SnapshotKind},
    metadata::OnIncompatible,
    reason::Reason,
    snapshot_key::SnapshotKey,
};

use super::{
    ReconcilerContext,
    actions::{Done, Failure},
    checkpoint::refusal,
    restore::for_good,
    staging::{Staging, Steps},
    worker::Worker,
};
use crate::{
    bus::{EXTRACT, StartKind},
    runtime::{Extract, RootfsGuard, Source, rootfs_digest::derived},
    storage::{layout::Sha256Name, snapshots::Found, store},
};

/// What the head of a sandbox needs and this instance lacks.
#[derive(Clone, Debug)]
pub(super) struct Missing {
    pub(super) rootfs: Rootfs,
    /// `None`: this instance's own runsc is sufficient.
    pub(super) runsc: Option<Runsc>,
}

/// The root file system of a sandbox.
#[derive(Clone, Debug)]
pub(super) struct Root {
    pub(super) rootfs: Rootfs,
    #[expect(dead_code, reason = "held, not read")]
    pub(super) hold: RootfsGuard,
}

impl Worker {
    /// The root file system it needs is not known to be here.
    pub(super) fn owes_rootfs(&self) -> bool {
        let named = || Some(self.found.as_ref()?.metadata.spec.filesystem_snapshot_name.is_some());
        let has_head = || Some(self.lock.as_ref()?.lock()?.head.is_some());
        let is_new = !has_head().unwrap_or(false);
        self.missing.is_some() || (is_new && self.root.is_none() && named().unwrap_or(false))
    }

    /// As recorded in the manifest of a checkpoint.
    pub(super) fn rootfs(&self) -> Rootfs {
        let digest = self.context.lifecycle.facts().rootfs_digest;
        let base = Rootfs { digest: digest.clone(), base_digest: digest, archive: None };
        self.root.as_ref().map_or(base, |root| root.rootfs.clone())
    }

    pub(super) async fn extract(&mut self) -> Done {
        let context = self.context.clone();
        let id = self.id.clone();
        let named = self.found.as_ref().and_then(|found| {
            let spec = &found.metadata.spec;
            let name = spec.filesystem_snapshot_name.as_ref()?;
            Some(SnapshotKey::candidates(spec.tenant.as_ref(), name))
        });
        let missing = self.missing.clone();
        let work = async {
            let bring = RootfsFetcher { context: &context, steps: &Steps::new(&context, &id, EXTRACT) };
            let found = async {
                match (missing, named) {
                    (Some(missing), _) => {
                        if let Some(runsc) = &missing.runsc {
                            bring.runtime(runsc).await?;
                        }
                        bring.rootfs(missing.rootfs).await
                    }
                    (None, Some(candidates)) => bring.snapshot(candidates).await,
                    (None, None) => Err(Failure::Stale),
                }
            };
            tokio::pin!(found);
            loop {
                tokio::select! {
                    biased;
                    found = &mut found => break found,
                    // Tells waiting sessions that the work continues.
                    () = context.clock.sleep(context.rhythm.metadata) => bring.steps.alive(),
                }
            }
        };
        let brought = self.under_lease(work).await?;
        let reason = match &brought {
            Err(Failure::Refused { reason, .. }) => Some(*reason),
            Ok(_) | Err(_) => None,
        };
        if reason == Some(Reason::OtherRuntime) && self.may_drop_memory() && !self.files_only {
            // Its files may be usable without that runsc.
            (self.files_only, self.missing) = (true, None);
            return Err(Failure::Stale);
        }
        let root = brought.map_err(for_good)?;
        tracing::info!(sandbox = %self.id, digest = %root.rootfs.digest, "its root file system is here");
        (self.root, self.missing) = (Some(root), None);
        Ok(())
    }
}

impl Worker {
    /// The spec accepts the files without the memory.
    pub(super) fn may_drop_memory(&self) -> bool {
        let spec = self.found.as_ref().map(|found| &found.metadata.spec);
        spec.is_some_and(|spec| spec.on_incompatible == OnIncompatible::Files)
    }

    /// Starts from the files of the head, whose memory cannot be used here because of `refusal`.
    pub(super) async fn start_from_files(&mut self, manifest: &manifest::Checkpoint, refusal: Failure) -> Done {
        let context = self.context.clone();
        let checkpoints = context.checkpoints.clone().ok_or(Failure::Stale)?;
        let archive = checkpoints.files_of(manifest).filter(|_| self.may_drop_memory());
        let (Some(archive), Some(layer)) = (archive, &manifest.layer) else { return Err(refusal) };
        let digest = derived(layer.base_digest.as_ref(), &archive.sha256);
        let base_digest = layer.base_digest.clone().unwrap_or_else(|| digest.clone());
        let rootfs = Rootfs { digest, base_digest, archive: Some(archive) };
        let Some(hold) = context.lifecycle.hold(&rootfs.digest) else {
            self.missing = Some(Missing { rootfs, runsc: None });
            return Err(Failure::Stale);
        };
        // The source of its new root file system must outlive the next checkpoints.
        let (id, source) = (self.id.clone(), manifest.checkpoint_id.clone());
        self.under_lease(checkpoints.pin(&source, &id)).await?.map_err(fetched).map_err(for_good)?;
        (self.root, self.runsc, self.marker) = (Some(Root { rootfs, hold }), None, None);
        let boot = StartKind::Files { checkpoint_id: source };
        self.boot = Some(boot.clone());
        let start = self.start()?;
        self.under_lease(async { context.lifecycle.create(&id, &start).await })
            .await?
            .map_err(Failure::from)
            .map_err(for_good)?;
        self.ran = true;
        self.files_only = false;
        tracing::warn!(sandbox = %self.id, ?refusal, "started anew on its files");
        self.tell_running(boot).await;
        Ok(())
    }
}

struct RootfsFetcher<'a> {
    context: &'a ReconcilerContext,
    steps: &'a Steps<'a>,
}

impl RootfsFetcher<'_> {
    /// Fetches the first of these snapshots that exists.
    async fn snapshot(&self, candidates: Vec<SnapshotKey>) -> Result<Root, Failure> {
        let Some(snapshots) = &self.context.snapshots else {
            return Err(refusal(Reason::NotSupported, super::requests::NOT_ENABLED));
        };
        let mut sought = None;
        for snapshot in candidates {
            let found = snapshots.find_genuine(&snapshot).await.map_err(fetched)?;
            let is_found = found != Found::Nothing;
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
            Found::Nothing => {
                let message = format!("Filesystem snapshot not found: `{name}` does not exist.");
                Err(refusal(Reason::SnapshotMissing, &message))
            }
            Found::Unfinished => Err(missing("is not finished")),
            Found::Ours(manifest) => {
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
            Found::Foreign { path } => {
                let staging = self.staged().await?;
                let file = staging.path().join("archive");
                let tell = |done| self.steps.tell(done, 0);
                let brought = snapshots.fetch(&path, &file, self.context.archive_size, &tell).await.map_err(fetched);
                let extracted = async {
                    let archive = brought?;
                    snapshots.check_archive(&snapshot, &archive).await.map_err(fetched)?;
                    let digest = derived(None, &archive.sha256);
                    let wanted = Extract { digest: digest.clone(), from: Source::Complete };
                    let hold = self.context.lifecycle.extract(&file, &wanted).await?;
                    Ok(Root { rootfs: Rootfs { base_digest: digest.clone(), digest, archive: Some(archive) }, hold })
                };
                let extracted = extracted.await;
                staging.wipe().await;
                extracted
            }
        }
    }

    /// Fetches the runsc that made a checkpoint, if the operator allows it here.
    async fn runtime(&self, runsc: &Runsc) -> Result<(), Failure> {
        let version = &runsc.version;
        let facts = self.context.lifecycle.facts();
        let refuse = |why: &str| {
            let message =
                format!("The checkpoint needs runsc {version}, this instance has {}, {why}.", facts.runsc_version);
            refusal(Reason::OtherRuntime, &message)
        };
        // Also checked if the binary is already here: the operator's list applies at every start.
        let Some(name) = self.context.runtimes.find(runsc) else {
            return Err(refuse("and BATON_RUNTIMES does not allow the other one"));
        };
        if self.context.lifecycle.has_runtime(&name) {
            return Ok(());
        }
        let Some(checkpoints) = &self.context.checkpoints else { return Err(refuse("and there is no storage")) };
        let staging = self.staged().await?;
        let file = staging.path().join("runsc");
        let brought = async {
            match checkpoints.fetch_runtime(&name, &file, self.context.archive_size).await {
                Err(store::Error::NotFound(_)) => return Err(refuse("and the other one is not stored")),
                done => done.map_err(fetched)?,
            }
            Ok(self.context.lifecycle.add_runtime(&file, &name).await?)
        };
        let brought = brought.await;
        staging.wipe().await;
        brought
    }

    /// Fetches the root file system that a manifest describes.
    async fn rootfs(&self, rootfs: Rootfs) -> Result<Root, Failure> {
        if let Some(hold) = self.context.lifecycle.hold(&rootfs.digest) {
            return Ok(Root { rootfs, hold });
        }
        let is_layer = rootfs.base_digest != rootfs.digest;
        let Some(archive) = rootfs.archive.clone() else {
            let hold = self.base(&rootfs.digest).await?;
            return Ok(Root { rootfs, hold });
        };
        let base = is_layer.then(|| rootfs.base_digest.clone());
        if derived(base.as_ref(), &archive.sha256) != rootfs.digest {
            return Err(refusal(Reason::Damaged, "The manifest names an archive that does not belong to it."));
        }
        let from = match base {
            None => Source::Complete,
            Some(base_digest) => {
                // Kept until the layer is extracted on top of it.
                let _base = self.base(&base_digest).await?;
                return self.extracted(rootfs, &archive, Source::Layer { base_digest }).await;
            }
        };
        self.extracted(rootfs, &archive, from).await
    }

    async fn extracted(&self, rootfs: Rootfs, archive: &Archive, from: Source) -> Result<Root, Failure> {
        let staging = self.staged().await?;
        let file = staging.path().join("archive");
        let extracted = async {
            self.fetch(archive, &file).await?;
            let wanted = Extract { digest: rootfs.digest.clone(), from };
            Ok(self.context.lifecycle.extract(&file, &wanted).await?)
        };
        let extracted = extracted.await;
        staging.wipe().await;
        extracted.map(|hold| Root { rootfs, hold })
    }

    /// Fetches a base root file system, which instances store by its digest.
    async fn base(&self, digest: &Sha256Name) -> Result<RootfsGuard, Failure> {
        if let Some(hold) = self.context.lifecycle.hold(digest) {
            return Ok(hold);
        }
        let unknown =
            || refusal(Reason::OtherRootfs, "The sandbox stands on another root file system than this instance has.");
        let checkpoints = self.context.checkpoints.as_ref().ok_or_else(unknown)?;
        let staging = self.staged().await?;
        let file = staging.path().join("archive");
        let tell = |done| self.steps.tell(done, 0);
        let extracted = async {
            match checkpoints.fetch_rootfs(digest, &file, self.context.archive_size, &tell).await {
                Err(store::Error::NotFound(_)) => return Err(unknown()),
                done => done.map_err(fetched)?,
            }
            let wanted = Extract { digest: digest.clone(), from: Source::Base };
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
                "The sandbox's root file system lies in another bucket than this instance uses.",
            )
        };
        let tell = |done| self.steps.tell(done, 0);
        let most = self.context.archive_size;
        let found = if let Some(snapshots) = self.context.snapshots.as_ref().filter(|at| at.may_hold(archive)) {
            snapshots.fetch(&archive.path, file, most, &tell).await.map_err(fetched)?.sha256
        } else if let Some(checkpoints) = self.context.checkpoints.as_ref().filter(|at| at.may_hold_archive(archive)) {
            let digest = checkpoints.fetch_archive(archive, file, most, &tell).await.map_err(fetched)?;
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

fn fetched(error: store::Error) -> Failure {
    match error {
        store::Error::Damaged { .. } => refusal(Reason::Damaged, &format!("The snapshot cannot be used: {error}.")),
        store::Error::Unsigned(_) => refusal(Reason::Unsigned, &format!("The snapshot cannot be used: {error}.")),
        store::Error::NotFound(_) => refusal(Reason::SnapshotMissing, &format!("The snapshot is not there: {error}.")),
        error @ (store::Error::Conflict(_)
        | store::Error::RateLimited(_)
        | store::Error::Unavailable { .. }
        | store::Error::Denied { .. }
        | store::Error::Other { .. }) => Failure::Transient(format!("The snapshot could not be fetched: {error}.")),
    }
}
