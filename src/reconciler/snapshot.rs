//! A snapshot on request: claimed by name, taken in a pause, stored while the sandbox runs on.
//!
//! ```text
//!   claim ──▶ pause, write, go on ──▶ hash, upload, manifest ──▶ answer
//!     └─ taken by another: a no        └─ failed: the name is free again, a no
//! ```

use std::time::Duration;

use baton_protocol::{
    id::{Nonce, SnapshotName},
    manifest::{self, SnapshotKind},
    metadata::{Answer, Done as Fulfilled, Request},
    reason::Reason,
};

use super::{
    act::{Done, Failure},
    checkpoint::refusal,
    requests::NOT_ENABLED,
    sandbox::Sandbox,
    staging::{Staging, Steps},
};
use crate::{
    runtime::Shape,
    storage::{
        board::SNAPSHOT,
        snapshots::{Claim, Snapshots},
    },
};

impl Sandbox {
    pub(super) async fn snapshot(&mut self) -> Done {
        let Some((nonce, name, shape)) = self.wanted_snapshot() else { return Err(Failure::Look) };
        let (reason, message) = match self.take_snapshot(&nonce, &name, shape).await {
            Ok(paused) => {
                let done = Fulfilled {
                    snapshot: Some(name),
                    paused_ms: paused.and_then(|paused| u64::try_from(paused.as_millis()).ok()),
                    ..Fulfilled::default()
                };
                return self.answer(vec![nonce], &Answer::Ok(done), None).await;
            }
            Err(Failure::Look) => return Err(Failure::Look),
            Err(Failure::NoSpace(message)) => (Reason::NoSpace, message),
            Err(Failure::Passing(message)) => (Reason::SnapshotFailed, message),
            Err(Failure::Refused { reason, message }) => (reason, message),
        };
        self.answer_no(vec![nonce], reason, &message).await
    }

    fn wanted_snapshot(&self) -> Option<(Nonce, SnapshotName, Shape)> {
        let nonce = self.unanswered(|request| matches!(request, Request::Snapshot { .. })).next()?;
        match self.found.as_ref()?.metadata.spec.requests.get(&nonce)? {
            Request::Snapshot { name, full } => {
                let shape = if *full { Shape::Complete } else { Shape::Layer };
                Some((nonce, name.clone(), shape))
            }
            Request::Checkpoint {} => None,
        }
    }

    /// How long the sandbox stood still; `None` if an earlier holder has made it.
    async fn take_snapshot(
        &mut self,
        nonce: &Nonce,
        name: &SnapshotName,
        shape: Shape,
    ) -> Result<Option<Duration>, Failure> {
        let tools = self.tools.clone();
        let snapshots = tools.snapshots.clone().ok_or_else(|| refusal(Reason::NotSupported, NOT_ENABLED))?;
        let stored = |error| Failure::Passing(format!("The snapshot could not be stored: {error}."));
        match self.under_lease(snapshots.claim(name, nonce)).await?.map_err(stored)? {
            Claim::Taken => {
                let message = format!("A filesystem snapshot named `{name}` exists already.");
                return Err(refusal(Reason::SnapshotExists, &message));
            }
            Claim::Finished(_) => return Ok(None),
            Claim::Ours => {}
        }
        let staging = Staging::new(&tools, nonce.as_str());
        let id = self.id.clone();
        let work = async {
            staging.make().await?;
            let archive = staging.path().join("snapshot.tar");
            let began = tools.clock.now();
            let taken = tools.lifecycle.snapshot(&id, &archive, shape).await?;
            let written = tools.clock.now();
            let steps = Steps::new(&tools, &id, SNAPSHOT);
            let tell = |done, total| steps.tell(done, total);
            // Each reads it once.
            let (entries, archive) =
                futures::join!(tools.lifecycle.tally(&archive), snapshots.store(name, &archive, &tell));
            let archive = archive.map_err(stored)?;
            let manifest = manifest::Snapshot {
                version: manifest::VERSION,
                kind: if taken.base_digest.is_some() { SnapshotKind::Layer } else { SnapshotKind::Rootfs },
                base_digest: taken.base_digest,
                size: archive.size,
                sha256: archive.sha256,
                entries: entries?,
                nonce: nonce.clone(),
                created: tools.clock.timestamp(),
            };
            snapshots.finish(name, &manifest).await.map_err(stored)?;
            let (write, store) = (written - began, tools.clock.now() - written);
            tracing::debug!(sandbox = %id, %name, ?write, paused = ?taken.paused, ?store, "a snapshot is stored");
            Ok(taken.paused)
        };
        let cancelled = self.cancelled();
        let work = async {
            tokio::select! {
                biased;
                done = work => done,
                () = cancelled => Err(Failure::Look),
            }
        };
        let done = self.under_lease(work).await;
        staging.wipe().await;
        self.look_again();
        let done = done?;
        if matches!(done, Err(Failure::Passing(_) | Failure::NoSpace(_) | Failure::Refused { .. })) {
            give_back(&snapshots, name).await;
        }
        done.map(Some)
    }
}

/// Nobody will go on with it.
async fn give_back(snapshots: &Snapshots, name: &SnapshotName) {
    if let Err(error) = snapshots.erase(name).await {
        tracing::warn!(%name, %error, "a snapshot that failed is left unfinished");
    }
}
