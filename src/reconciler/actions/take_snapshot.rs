//! A snapshot on request: claimed by name, taken during a pause, stored while the sandbox keeps running.
//!
//! ```text
//!   claim ──▶ pause, write, resume ─▶ hash, upload, manifest ──▶ answer
//!     └─ taken, or over quota: refused    └─ failed: the name is free again, refused
//! ```

use std::time::Duration;

use baton_protocol::{
    id::{Nonce, SandboxId},
    manifest::{self, SnapshotKind},
    metadata::{Answer, CompletedRequest as Fulfilled, SpecRequest},
    reason::Reason,
    snapshot_key::SnapshotKey,
    versioned::Versioned as _,
};

use super::{
    ActionResult, Failure,
    answer_requests::NOT_ENABLED,
    refusal,
    staging::{Staging, TransferProgress},
};
use crate::{
    bus::SNAPSHOT,
    reconciler::{ReconcilerContext, worker::Worker},
    runtime::Shape,
    storage::{
        checkpoint_io,
        snapshots::{NameClaim, Snapshots},
        store,
    },
};

impl Worker {
    pub(super) async fn snapshot(&mut self) -> ActionResult {
        let Some((nonce, snapshot, shape)) = self.wanted_snapshot() else { return Err(Failure::Stale) };
        match self.take_snapshot(&nonce, &snapshot, shape).await {
            Ok(paused) => {
                let done = Fulfilled {
                    snapshot: Some(snapshot.name),
                    paused_ms: paused.and_then(|paused| u64::try_from(paused.as_millis()).ok()),
                    ..Fulfilled::default()
                };
                self.answer(vec![nonce], &Answer::Ok(done), None).await
            }
            Err(failure) => self.answer_failure(vec![nonce], Reason::SnapshotFailed, failure).await,
        }
    }

    fn wanted_snapshot(&self) -> Option<(Nonce, SnapshotKey, Shape)> {
        let nonce = self.record.unanswered(|request| matches!(request, SpecRequest::Snapshot { .. })).next()?;
        let spec = self.record.spec()?;
        match spec.requests.get(&nonce)? {
            SpecRequest::Snapshot { name, full } => {
                let shape = if *full { Shape::Complete } else { Shape::Layer };
                Some((nonce, SnapshotKey::new(spec.tenant.as_ref(), name), shape))
            }
            SpecRequest::Checkpoint {} => None,
        }
    }

    /// Returns how long the sandbox was paused; `None` if an earlier holder already made the snapshot.
    async fn take_snapshot(
        &mut self,
        nonce: &Nonce,
        snapshot: &SnapshotKey,
        shape: Shape,
    ) -> Result<Option<Duration>, Failure> {
        let context = self.context.clone();
        let snapshots = context.snapshots.clone().ok_or_else(|| refusal(Reason::NotSupported, NOT_ENABLED))?;
        // Checked before anything is written.
        self.check_quota(&snapshots, snapshot).await?;
        match self.under_lease(snapshots.claim(snapshot, nonce)).await?.map_err(not_stored)? {
            NameClaim::Taken => {
                let message = format!("A filesystem snapshot named `{}` exists already.", snapshot.name);
                return Err(refusal(Reason::SnapshotExists, &message));
            }
            NameClaim::Finished(_) => return Ok(None),
            NameClaim::Ours => {}
        }
        // Checked again: concurrent claims, on any instance, see each other now.
        if let Err(above) = self.check_quota(&snapshots, snapshot).await {
            if !matches!(above, Failure::Stale) {
                give_back(&snapshots, snapshot).await;
            }
            return Err(above);
        }
        let staging = Staging::new(&context, nonce.as_str());
        let job = SnapshotJob { context: &context, snapshots: &snapshots, snapshot, staging: &staging };
        let id = self.id.clone();
        let cancelled = self.cancelled();
        let work = async {
            tokio::select! {
                biased;
                done = job.run(&id, nonce, shape) => done,
                () = cancelled => Err(Failure::Stale),
            }
        };
        let done = self.under_lease(work).await;
        staging.wipe().await;
        self.read_again();
        let done = done?;
        if matches!(done, Err(Failure::Transient(_) | Failure::NoSpace(_) | Failure::Refused { .. })) {
            give_back(&snapshots, snapshot).await;
        }
        done.map(Some)
    }

    /// Whether the quota allows the tenant one more snapshot.
    async fn check_quota(&mut self, snapshots: &Snapshots, snapshot: &SnapshotKey) -> Result<(), Failure> {
        let Some(tenant) = &snapshot.tenant else { return Ok(()) };
        let quota = self.context.quotas.of(Some(tenant));
        if quota.snapshots.is_none() {
            return Ok(());
        }
        let counted = |error| Failure::Transient(format!("The snapshots of the tenant could not be counted: {error}."));
        let stored = self.under_lease(snapshots.list(Some(tenant))).await?.map_err(counted)?;
        let others = stored.iter().filter(|listed| listed.snapshot != *snapshot).count();
        quota.allow_snapshot(others).map_err(|sentence| refusal(Reason::QuotaExceeded, &sentence))
    }
}

/// Takes a snapshot whose name is claimed, and stores it.
struct SnapshotJob<'a> {
    context: &'a ReconcilerContext,
    snapshots: &'a Snapshots,
    snapshot: &'a SnapshotKey,
    staging: &'a Staging,
}

impl SnapshotJob<'_> {
    /// Returns how long the sandbox was paused.
    async fn run(self, id: &SandboxId, nonce: &Nonce, shape: Shape) -> Result<Duration, Failure> {
        let Self { context, snapshots, snapshot, staging } = self;
        staging.make().await?;
        let archive = staging.path().join("snapshot.tar");
        let began = context.clock.now();
        let taken = context.lifecycle.snapshot(id, &archive, shape).await?;
        let written = context.clock.now();
        let progress = TransferProgress::new(context, id, SNAPSHOT);
        let report = |done, total| progress.report(done, total);
        // Both read the archive once.
        let (entries, archive) =
            futures::join!(context.lifecycle.count_entries(&archive), snapshots.store(snapshot, &archive, &report));
        let archive = archive.map_err(not_stored)?;
        let manifest = manifest::SnapshotManifest {
            version: manifest::SnapshotManifest::VERSION,
            kind: if taken.base_digest.is_some() { SnapshotKind::Layer } else { SnapshotKind::Rootfs },
            base_digest: taken.base_digest,
            size: archive.size,
            sha256: checkpoint_io::named(&snapshot.to_string(), &archive.sha256).map_err(not_stored)?,
            entries: entries?,
            nonce: nonce.clone(),
            created: context.clock.timestamp(),
        };
        snapshots.finish(snapshot, &manifest).await.map_err(not_stored)?;
        let (write, store) = (written - began, context.clock.now() - written);
        tracing::debug!(sandbox = %id, %snapshot, ?write, paused = ?taken.paused, ?store, "stored a snapshot");
        Ok(taken.paused)
    }
}

fn not_stored(error: store::Error) -> Failure {
    Failure::Transient(format!("The snapshot could not be stored: {error}."))
}

/// Frees the name of a snapshot that will not be finished.
async fn give_back(snapshots: &Snapshots, snapshot: &SnapshotKey) {
    if let Err(error) = snapshots.erase(snapshot).await {
        tracing::warn!(%snapshot, %error, "the name of a failed snapshot could not be freed");
    }
}
