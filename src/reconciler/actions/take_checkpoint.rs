//! A checkpoint, as one transaction: until the one write that commits it, the sandbox can always be resumed, and any
//! failure resumes it.
//!
//! ```text
//!   pause ──▶ image ──▶ hash, upload, manifest ──▶ commit (and release) ─┬▶ metadata ──▶ post
//!     └──────────┴───────────────┴── any failure: resume, post, keep       └▶ remove
//! ```

use std::{future::pending, pin::pin, sync::Arc, time::Duration};

use baton_protocol::{
    id::{CheckpointId, SandboxId, hex},
    lock::Head,
    manifest::{self, RunscBuild},
    reason::Reason,
    versioned::Versioned as _,
};
use futures::{FutureExt, future::maybe_done};

use super::{
    ActionResult, Failure, no_lock, refusal,
    staging::{Staging, TransferProgress},
};
use crate::{
    bus::{LeaveReason, LifecycleEvent, UPLOAD},
    clock::SharedClock,
    reconciler::{
        ReconcilerContext,
        plan::{Action, Rejection},
        worker::Worker,
    },
    runtime::{self, Shape},
    storage::{
        checkpoints::{Checkpoints, committed},
        layout::Image,
        lease::{LeaseHandle, Released},
        store,
    },
    traces::{Parts, Step},
};

/// A commit is announced without its metadata after this many call timeouts.
const CALLS_BEFORE_TELLING: u32 = 2;

/// The state of the sandbox once its image is on the local disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Paused,
    Running,
}

/// An image that is stored but not committed yet.
#[derive(Debug)]
pub(super) struct StoredImage {
    pub(super) head: Head,
    /// When it was taken.
    pub(super) taken: String,
    /// How long the sandbox was paused, if it keeps running.
    pub(super) paused: Duration,
    /// To be deleted when there is time.
    pub(super) image: Staging,
}

impl Worker {
    /// Commits a checkpoint and releases the lease in one write.
    pub(super) async fn checkpoint(&mut self) -> ActionResult {
        let why = self.announced.leave_reason;
        if let Some(waiter) =
            self.lease.handle.as_ref().and_then(LeaseHandle::waiter).filter(|_| why == LeaveReason::Waiter)
        {
            let (by, claim) = (waiter.instance.clone(), waiter.claim);
            self.post(LifecycleEvent::ReleaseRequested { by, claim });
        }
        self.post(LifecycleEvent::Checkpointing { why });
        let StoredImage { head, taken, image, .. } = match self.save_image(After::Paused).await {
            Ok(stored) => stored,
            Err(failure) => return self.resume_after_failure(why, failure).await,
        };
        // A session that attached at the last moment should not have to wait for a restore.
        if why == LeaveReason::Room && self.is_attended() {
            image.wipe().await;
            return Err(Failure::Stale);
        }
        let (checkpoint_id, shown) = (head.checkpoint_id.clone(), committed(&head, Some(taken)));
        let removed = match self.release_until_settled(Some(head)).await {
            Ok(Released::Freed) => {
                self.checkpoints.committed = Some(shown);
                self.leave_stored(checkpoint_id).await
            }
            Ok(Released::Lost) => {
                let removed = self.context.lifecycle.remove(&self.id).await;
                removed.map(|()| self.announce_lost()).map_err(Failure::from)
            }
            Err(failure) => Err(failure),
        };
        // Nothing waits for this any more.
        image.wipe().await;
        removed
    }

    /// Removes a sandbox whose checkpoint was committed and whose lease was released, and announces that. The
    /// metadata is written first, so that clients that receive the event find the checkpoint there. The commit
    /// already counts, so a slow metadata write delays the event only briefly and then completes after it.
    async fn leave_stored(&mut self, checkpoint_id: CheckpointId) -> ActionResult {
        let (context, id) = (self.context.clone(), self.id.clone());
        let report = self.report_checkpointed();
        let mut writing = pin!(maybe_done(async {
            if let Some(report) = report {
                report.write().await;
            }
        }));
        let mut removing = pin!(maybe_done(context.lifecycle.remove(&id)));
        tokio::select! {
            biased;
            () = writing.as_mut() => {}
            () = context.clock.sleep(context.times.call * CALLS_BEFORE_TELLING) => {
                tracing::warn!(sandbox = %id, %checkpoint_id, "the metadata does not name the checkpoint yet");
            }
            () = removing.as_mut().then(|()| pending()) => {}
        }
        self.announce_left(Some(checkpoint_id));
        removing.as_mut().await;
        writing.await;
        removing.as_mut().take_output().unwrap_or(Ok(())).map_err(Failure::from)
    }

    /// Releases the lease, retrying until the outcome is known: after the first attempt nothing may run under this
    /// epoch, and uploaded objects stay.
    pub(super) async fn release_until_settled(&mut self, head: Option<Head>) -> Result<Released, Failure> {
        let context = self.context.clone();
        let ran = self.lease.ran;
        loop {
            match self.lease.handle_mut()?.release(head.clone(), ran).await {
                Ok(released) => {
                    self.lease.ran = false;
                    return Ok(released);
                }
                Err(error) => match error.reason() {
                    // Rule 14: There is no lease to release, and no state here to keep.
                    Some(_) if head.is_none() => return Err(Failure::Stale),
                    Some(reason) => self.miss_lock(reason).await?,
                    None => {
                        tracing::warn!(sandbox = %self.id, %error, "the outcome of the release is unknown; retrying");
                        context.clock.sleep(context.clock.jittered(context.times.retry)).await;
                    }
                },
            }
        }
    }

    /// Rule 14: The checkpoint cannot be committed because the lock is missing or unusable: the sandbox stays paused
    /// and is kept until the lock is back. Sessions that attach in the meantime are told so.
    async fn miss_lock(&mut self, reason: Reason) -> ActionResult {
        let context = self.context.clone();
        if self.is_attended() && !self.is_refused() {
            self.handle_outcome(Action::Refuse(Rejection::NoLock), Err(no_lock(reason))).await;
        }
        context.clock.sleep(context.clock.jittered(context.times.retry)).await;
        let read = self.lease.handle_mut()?.read().await;
        self.lease.note_read(&self.id, read);
        Ok(())
    }

    /// Writes the tombstone, retrying until the outcome is known: no other instance would finish the purge.
    pub(super) async fn write_tombstone(&mut self) -> ActionResult {
        let context = self.context.clone();
        loop {
            match self.lease.handle_mut()?.write_tombstone().await {
                Ok(Released::Freed | Released::Lost) => return Ok(()),
                Err(error) if error.reason().is_some() => return Err(Failure::Stale),
                Err(error) => {
                    tracing::warn!(sandbox = %self.id, %error, "the outcome of the purge is unknown; retrying");
                    context.clock.sleep(context.clock.jittered(context.times.retry)).await;
                }
            }
        }
    }

    /// The sandbox is unchanged; reports to the requesters why the checkpoint failed.
    async fn resume_after_failure(&mut self, why: LeaveReason, failure: Failure) -> ActionResult {
        let (reason, message) = match &failure {
            Failure::Stale => return Err(failure),
            Failure::Transient(message) => (Reason::CheckpointFailed, message.clone()),
            Failure::NoSpace(message) => (Reason::NoSpace, message.clone()),
            Failure::Refused { reason, message } => (*reason, message.clone()),
        };
        if let Err(error) = self.context.lifecycle.resume(&self.id).await {
            tracing::error!(sandbox = %self.id, %error, "the sandbox could not be resumed; retrying");
        }
        self.report_trouble(reason, &message).await;
        self.post(LifecycleEvent::CheckpointFailed { why, reason, message });
        Err(failure)
    }

    /// Everything before the commit: takes the image and stores it.
    pub(super) async fn save_image(&mut self, after: After) -> Result<StoredImage, Failure> {
        let context = self.context.clone();
        let checkpoints = context.checkpoints.clone().ok_or_else(not_configured)?;
        // The new checkpoint follows the head, so the head must be certain.
        if self.lease.handle_mut()?.is_in_doubt() {
            self.lease.handle_mut()?.renew().await?;
            self.extend_deadline().await;
        }
        let draft = self.draft()?;
        let taken = draft.created.clone();
        let image = Staging::new(&context, draft.checkpoint_id.as_str());
        let job = ImageJob {
            context: context.clone(),
            image: &image,
            after,
            has_files: self.may_drop_memory(),
            steps: self.telemetry.steps.clone(),
        };
        // The work is cancelled when it is no longer wanted, as long as the commit was not sent.
        let cancelled = self.cancelled();
        let work = async {
            tokio::select! {
                biased;
                stored = job.run(&checkpoints, draft) => stored,
                () = cancelled => Err(Failure::Stale),
            }
        };
        let stored = self.under_lease(work).await;
        self.read_again();
        match stored.and_then(|stored| stored) {
            Ok((head, paused)) => Ok(StoredImage { head, taken, paused, image }),
            Err(failure) => {
                image.wipe().await;
                Err(failure)
            }
        }
    }

    /// The manifest of the next checkpoint, without its files.
    fn draft(&mut self) -> Result<manifest::CheckpointManifest, Failure> {
        let context = &self.context;
        let lock = self.lease.lock().ok_or(Failure::Stale)?;
        let marker = self.start.marker.ok_or(Failure::Stale)?;
        let seq = lock.head.as_ref().map_or(0, |head| head.seq).saturating_add(1);
        let facts = context.lifecycle.facts();
        Ok(manifest::CheckpointManifest {
            version: manifest::CheckpointManifest::VERSION,
            checkpoint_id: CheckpointId::new(&self.id, lock.epoch, seq, &context.clock.nonce()),
            sandbox_id: self.id.clone(),
            epoch: lock.epoch,
            seq,
            parent: lock.head.as_ref().map(|head| head.checkpoint_id.clone()),
            files: Vec::new(),
            runsc: self.start.runsc.clone().unwrap_or(RunscBuild {
                version: facts.runsc_version,
                platform: facts.platform,
                flags: self.start.layout.flags(),
                sha256: Some(facts.runsc_sha256),
            }),
            cpu_features: facts.cpu_features,
            oci_sha256: self.start.layout.sha256(),
            agent_marker: hex(&marker),
            created: timestamp_in_millis(&context.clock),
            rootfs: self.rootfs(),
            layer: None,
        })
    }
}

/// Takes the image of a running container and stores it.
struct ImageJob<'a> {
    context: Arc<ReconcilerContext>,
    image: &'a Staging,
    after: After,
    /// Whether the checkpoint also gets an archive of its files alone.
    has_files: bool,
    steps: Parts,
}

impl ImageJob<'_> {
    /// Returns the head to commit, and how long the sandbox was paused.
    async fn run(
        self,
        checkpoints: &Checkpoints,
        mut draft: manifest::CheckpointManifest,
    ) -> Result<(Head, Duration), Failure> {
        let (clock, lifecycle, id) = (&self.context.clock, &self.context.lifecycle, draft.sandbox_id.clone());
        let began = clock.now();
        if self.after == After::Paused {
            lifecycle.reset_connections(&id).await;
        }
        let (made, paused) = futures::join!(self.image.make(), lifecycle.pause(&id));
        made?;
        paused?;
        let stopped = clock.now();
        self.steps.note(Step::Pause, clock, stopped - began);
        lifecycle.checkpoint(&id, self.image.path()).await?;
        let written = clock.now();
        self.steps.note(Step::Image, clock, written - stopped);
        if self.has_files {
            draft.layer = self.archive_files(&id).await?;
        }
        if self.after == After::Running {
            lifecycle.resume(&id).await?;
        }
        let paused = clock.now() - began;
        let progress = TransferProgress::new(&self.context, &id, UPLOAD);
        let report = |done, total| progress.report(done, total);
        let head = checkpoints.store(self.image.path(), draft, &report).await.map_err(not_stored)?;
        let store = clock.now() - written;
        self.steps.note(Step::Store, clock, store);
        let (pause, image) = (stopped - began, written - stopped);
        tracing::debug!(sandbox = %id, ?pause, ?image, ?store, "stored an image");
        Ok((head, paused))
    }

    /// Adds an archive of the files alone, for instances that cannot use the memory.
    async fn archive_files(&self, id: &SandboxId) -> Result<Option<manifest::Layer>, Failure> {
        let file = self.image.path().join(Image::Files.file_name());
        match self.context.lifecycle.snapshot(id, &file, Shape::Layer).await {
            Ok(taken) => Ok(Some(manifest::Layer { base_digest: taken.base_digest })),
            // The image still contains its memory and files.
            Err(runtime::Error::Refused { reason: Reason::TooLarge, message }) => {
                tracing::warn!(sandbox = %id, message, "the checkpoint has no separate archive of its files");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// In milliseconds: the pause of a sandbox is measured from it.
fn timestamp_in_millis(clock: &SharedClock) -> String {
    humantime::format_rfc3339_millis(clock.wall()).to_string()
}

pub(super) fn not_configured() -> Failure {
    refusal(Reason::NotCheckpointable, crate::storage::records::CHECKPOINT_NOT_ENABLED)
}

fn not_stored(error: store::Error) -> Failure {
    Failure::Transient(format!("The checkpoint could not be stored: {error}."))
}
