//! A restore: uses only verified checkpoints, and only on a compatible instance.

use std::{future::Future, sync::OnceLock, time::SystemTime};

use baton_protocol::{
    frame::Marker,
    lock::Head,
    manifest::{self, RunscBuild},
    reason::Reason,
};

use super::{ActionResult, Failure, fetch_head::Fetching, refusal, start_failed, take_checkpoint::not_configured};
use crate::{
    bus::StartKind,
    reconciler::{
        desired::Drain,
        start_state::{HeldRootfs, MissingParts},
        worker::Worker,
    },
    runtime::{Layout, StartSpec},
    storage::{
        checkpoints::{Checkpoints, committed},
        store,
    },
    traces::Step,
};

/// How far a restore got before it ended.
#[derive(Debug, Default)]
struct RestoreProgress {
    /// Set before the container starts: even if the restore is interrupted, it may run, and then with this marker.
    started: OnceLock<(Marker, StartKind)>,
    /// When the sandbox was stopped.
    stopped: OnceLock<Option<SystemTime>>,
}

impl Worker {
    /// Starts from the committed head.
    pub(super) async fn restore(&mut self) -> ActionResult {
        let checkpoints = self.context.checkpoints.clone().ok_or_else(not_configured)?;
        let head = self.usable_head(&checkpoints)?;
        if self.start.files_only {
            self.start.abandon_fetch().await;
            let message = "The checkpoint needs another runsc, which is not available here.";
            return self.without_memory(&checkpoints, &head, refusal(Reason::OtherRuntime, message)).await;
        }
        let mut fetching = self.fetching(checkpoints.clone(), &head).await;
        let manifest = match self.while_staying(fetching.manifest()).await.and_then(|read| read) {
            Ok(manifest) => manifest,
            Err(failure) => {
                fetching.abandon().await;
                return self.without_memory(&checkpoints, &head, failure).await;
            }
        };
        self.checkpoints.committed = Some(committed(&head, Some(manifest.created.clone())));
        if let Some(missing) = self.missing_parts(&manifest) {
            // It must be fetched first, while the files keep downloading.
            (self.start.fetching, self.start.missing) = (Some(fetching), Some(missing));
            return Err(Failure::Stale);
        }
        let restored = self.restore_fetched(&head, &manifest, &mut fetching).await;
        fetching.abandon().await;
        restored
    }

    /// The head of the lock, if this instance may and can start from it.
    fn usable_head(&mut self, checkpoints: &Checkpoints) -> Result<Head, Failure> {
        let lock = self.lease.lock().ok_or(Failure::Stale)?;
        let head = lock.head.clone().ok_or(Failure::Stale)?;
        if !lock.may_start_from(&head.checkpoint_id) {
            return Err(refusal(Reason::Damaged, "The lock names a checkpoint of another sandbox."));
        }
        if !checkpoints.may_hold(&head) {
            return Err(refusal(Reason::OtherStore, "The checkpoint is in a bucket that this instance does not use."));
        }
        Ok(head)
    }

    /// What the checkpoint needs and this instance lacks. Holds the root file system and chooses the runsc otherwise.
    fn missing_parts(&mut self, manifest: &manifest::CheckpointManifest) -> Option<MissingParts> {
        let context = &self.context;
        let other = (manifest.runsc.version != context.lifecycle.facts().runsc_version).then(|| manifest.runsc.clone());
        let allowed = |runsc: &RunscBuild| context.runtimes.find(runsc);
        let has_runsc = |runsc: &RunscBuild| allowed(runsc).is_some_and(|name| context.lifecycle.has_runtime(&name));
        let guard =
            context.lifecycle.acquire_rootfs(&manifest.rootfs.digest).filter(|_| other.as_ref().is_none_or(has_runsc));
        let rootfs = manifest.rootfs.clone();
        match guard {
            Some(guard) => {
                (self.start.rootfs, self.start.runsc) = (Some(HeldRootfs { rootfs, guard }), other);
                None
            }
            None => Some(MissingParts { rootfs, runsc: other }),
        }
    }

    /// Waits for the files of the head and starts the container from them.
    async fn restore_fetched(
        &mut self,
        head: &Head,
        manifest: &manifest::CheckpointManifest,
        fetching: &mut Fetching,
    ) -> ActionResult {
        let context = self.context.clone();
        let for_good = start_failed(Reason::RestoreFailed);
        let began = context.clock.now();
        self.while_staying(fetching.done()).await.and_then(|fetched| fetched).map_err(&for_good)?;
        let fetch = context.clock.now() - began;
        self.telemetry.steps.note(Step::Fetch, &context.clock, fetch);
        // A sandbox that ran under this very lease and exited is rolled back to its head, too.
        let rolled_back = self.lease.handle_mut()?.before().behind || self.lease.ran;
        let mut start = self.start_spec()?;
        self.start.layout = Layout::find(&manifest.oci_sha256).unwrap_or_default();
        start.layout = self.start.layout;
        start.runsc = self.start.runsc.as_ref().and_then(|runsc| runsc.sha256.clone());
        if head.checkpoint_id.sandbox() != self.id {
            start.forked_from = Some(head.checkpoint_id.to_string());
        }
        let progress = RestoreProgress::default();
        let restored = self.start_restored(start, head, manifest, fetching, rolled_back, &progress).await;
        if let Some((marker, kind)) = progress.started.into_inner() {
            (self.start.marker, self.start.kind) = (Some(marker), Some(kind));
        }
        restored.map_err(&for_good)?;
        // Another instance stopped it for us, and it runs again.
        if self.contention.has_registered
            && !rolled_back
            && let Some(at) = progress.stopped.into_inner().flatten()
        {
            context.metrics.moved_here(context.clock.wall().duration_since(at).unwrap_or_default());
        }
        self.lease.ran = true;
        self.checkpoints.has_garbage = true;
        if let Some(kind) = self.start.kind.take() {
            self.announce_running(kind).await;
        }
        Ok(())
    }

    async fn start_restored(
        &mut self,
        mut start: StartSpec,
        head: &Head,
        manifest: &manifest::CheckpointManifest,
        fetching: &Fetching,
        rolled_back: bool,
        progress: &RestoreProgress,
    ) -> ActionResult {
        let (context, id) = (self.context.clone(), self.id.clone());
        let deadlines = self.lease.handle_mut()?.deadline();
        let steps = self.telemetry.steps.clone();
        let work = async {
            start.marker = marker(&manifest.agent_marker)
                .ok_or_else(|| refusal(Reason::Damaged, "The manifest of the checkpoint has no agent marker."))?;
            let at = humantime::parse_rfc3339(&manifest.created).ok();
            let _ = progress.stopped.set(at);
            let age = at.and_then(|at| context.clock.wall().duration_since(at).ok());
            let age_ms = age.map_or(0, |age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
            let kind = StartKind::Restored { checkpoint_id: head.checkpoint_id.clone(), age_ms, rolled_back };
            let _ = progress.started.set((start.marker, kind));
            // Fetching may have taken long, and the lease was renewed in the meantime.
            start.deadline = (*deadlines.borrow()).ok_or(Failure::Stale)?;
            let began = context.clock.now();
            context.lifecycle.restore(&id, &start, fetching.image.path()).await?;
            let restore = context.clock.now() - began;
            steps.note(Step::Start, &context.clock, restore);
            tracing::debug!(sandbox = %id, ?restore, "restored an image");
            Ok(())
        };
        self.while_staying(work).await?
    }

    /// As [`under_lease`](Self::under_lease), but cancelled when this instance drains: a sandbox that does not run
    /// yet loses nothing and need not start here.
    async fn while_staying<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        let context = self.context.clone();
        let work = async {
            tokio::select! {
                biased;
                done = work => Ok(done),
                _ = context.drain.until(|drain| *drain != Drain::No) => Err(Failure::Stale),
            }
        };
        self.under_lease(work).await?
    }

    /// The head's memory cannot be used here; falls back to its files if the spec allows that.
    async fn without_memory(&mut self, checkpoints: &Checkpoints, head: &Head, failure: Failure) -> ActionResult {
        let unusable = [Reason::OtherRuntime, Reason::OtherCpu, Reason::OtherSpec];
        match &failure {
            Failure::Refused { reason, .. } if unusable.contains(reason) && self.may_drop_memory() => {}
            Failure::Refused { .. } | Failure::Stale | Failure::Transient(_) | Failure::NoSpace(_) => {
                return Err(start_failed(Reason::RestoreFailed)(failure));
            }
        }
        let verified = self.under_lease(checkpoints.verified(head)).await?;
        let manifest = verified.map_err(not_fetched).map_err(start_failed(Reason::RestoreFailed))?;
        self.start_from_files(&manifest, failure).await
    }
}

/// The first way in which this instance differs from the one that made the checkpoint.
pub(super) fn compatible(manifest: &manifest::CheckpointManifest, here: &crate::runtime::Facts) -> Result<(), Failure> {
    let missing: Vec<_> =
        manifest.cpu_features.iter().filter(|feature| !here.cpu_features.contains(feature)).cloned().collect();
    if manifest.runsc.platform != here.platform {
        let message = format!(
            "The checkpoint needs runsc {} on {}; this instance has {} on {}.",
            manifest.runsc.version, manifest.runsc.platform, here.runsc_version, here.platform
        );
        Err(refusal(Reason::OtherRuntime, &message))
    } else if !missing.is_empty() {
        Err(refusal(
            Reason::OtherCpu,
            &format!("This machine's CPU lacks features that the checkpoint uses: {}.", missing.join(" ")),
        ))
    } else if Layout::find(&manifest.oci_sha256).is_none() {
        Err(refusal(
            Reason::OtherSpec,
            "The checkpoint was made with another container layout than this instance uses.",
        ))
    } else {
        Ok(())
    }
}

fn marker(text: &str) -> Option<[u8; 16]> {
    let mut marker = [0; 16];
    if text.len() != 32 {
        return None;
    }
    for (at, byte) in marker.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(marker)
}

pub(super) fn not_fetched(error: store::Error) -> Failure {
    match error {
        store::Error::Damaged { .. } => refusal(Reason::Damaged, &format!("The checkpoint cannot be used: {error}.")),
        store::Error::Newer { .. } => {
            refusal(Reason::OtherVersion, "The checkpoint was written by a later version of this server.")
        }
        store::Error::Unsigned(_) => refusal(Reason::Unsigned, &format!("The checkpoint cannot be used: {error}.")),
        store::Error::NotFound(_) => {
            refusal(Reason::CheckpointMissing, &format!("The checkpoint is missing: {error}."))
        }
        error @ (store::Error::Conflict(_)
        | store::Error::RateLimited(_)
        | store::Error::Unavailable { .. }
        | store::Error::Denied { .. }
        | store::Error::Other { .. }) => Failure::Transient(format!("The checkpoint could not be fetched: {error}.")),
    }
}

/// As [`not_fetched`], for the manifest. Where only one of lock and instance names its bucket, the two may differ, and an
/// operator should check that first.
pub(super) fn manifest_not_fetched(checkpoints: &Checkpoints, head: &Head, error: store::Error) -> Failure {
    match (&error, &head.bucket, checkpoints.bucket()) {
        (store::Error::NotFound(_), Some(recorded), None) => refusal(
            Reason::OtherStore,
            &format!(
                "The checkpoint is in bucket {recorded}, and was not found in the directory that this instance uses."
            ),
        ),
        (store::Error::NotFound(_), None, Some(own)) => refusal(
            Reason::OtherStore,
            &format!("The checkpoint was stored through a mount and is not in bucket {own}, which this instance uses."),
        ),
        _ => not_fetched(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Facts;
    use baton_protocol::{
        id::{CheckpointId, Nonce, SandboxId, Sha256Name},
        manifest::Rootfs,
        versioned::Versioned as _,
    };

    fn facts() -> Facts {
        Facts {
            runsc_version: "one".to_owned(),
            runsc_sha256: Sha256Name::from_bits([0; 32]),
            platform: "systrap".to_owned(),
            cpu_features: vec!["avx".to_owned(), "sse".to_owned()],
            rootfs_digest: Sha256Name::from_bits([1; 32]),
        }
    }

    fn manifest() -> manifest::CheckpointManifest {
        let sandbox_id = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
        manifest::CheckpointManifest {
            version: manifest::CheckpointManifest::VERSION,
            checkpoint_id: CheckpointId::new(&sandbox_id, 1, 1, &Nonce::from_bits([1; 16])),
            sandbox_id,
            epoch: 1,
            seq: 1,
            parent: None,
            files: Vec::new(),
            runsc: RunscBuild {
                version: "one".to_owned(),
                platform: "systrap".to_owned(),
                flags: Vec::new(),
                sha256: None,
            },
            cpu_features: vec!["sse".to_owned()],
            oci_sha256: Layout::default().sha256(),
            agent_marker: "0f".repeat(16),
            created: String::new(),
            rootfs: Rootfs { digest: facts().rootfs_digest, base_digest: facts().rootfs_digest, archive: None },
            layer: None,
        }
    }

    fn reason(manifest: &manifest::CheckpointManifest) -> Option<Reason> {
        match compatible(manifest, &facts()) {
            Ok(()) => None,
            Err(Failure::Refused { reason, .. }) => Some(reason),
            Err(failure) => panic!("{failure:?}"),
        }
    }

    #[test]
    fn each_difference_has_its_own_reason() {
        assert_eq!(reason(&manifest()), None, "fewer CPU features than here are fine");
        let with = |change: fn(&mut manifest::CheckpointManifest)| {
            let mut other = manifest();
            change(&mut other);
            reason(&other)
        };
        assert_eq!(with(|m| m.runsc.version = "two".to_owned()), None, "what is missing can be fetched");
        assert_eq!(with(|m| m.runsc.platform = "kvm".to_owned()), Some(Reason::OtherRuntime));
        assert_eq!(with(|m| m.cpu_features.push("amx".to_owned())), Some(Reason::OtherCpu));
        assert_eq!(with(|m| m.rootfs.digest = Sha256Name::from_bits([2; 32])), None, "what is missing can be fetched");
        assert_eq!(with(|m| m.oci_sha256 = Layout::Closed.sha256()), None, "older layouts remain");
        assert_eq!(with(|m| m.oci_sha256 = "other".to_owned()), Some(Reason::OtherSpec));
    }

    #[test]
    fn a_manifest_of_a_later_version_has_its_own_reason() {
        let later = store::Error::Newer { key: "manifest.json".to_owned(), why: "it has version 2".to_owned() };
        assert!(matches!(not_fetched(later), Failure::Refused { reason: Reason::OtherVersion, .. }));
    }

    #[test]
    fn a_marker_is_thirty_two_hex_digits() {
        assert_eq!(marker(&"0f".repeat(16)), Some([15; 16]));
        assert_eq!(marker("0f"), None);
        assert_eq!(marker(&"é".repeat(16)), None);
    }
}
