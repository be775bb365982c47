//! Observation: combines what storage, the container and the bus report into one value for `desired` and `plan`.

use std::time::Duration;

use baton_protocol::{
    id::hex,
    metadata::{DesiredState, Metadata, Phase, Spec, Status},
};
use sha2::{Digest, Sha256};

use super::{
    desired::{Inputs, idle_in},
    plan::{LockState, Observed, Saved},
    precedence::Verdict,
    sweep::{since_1970, sweep_rules::outlived},
    worker::{LockRead, Worker},
};
use crate::{
    clock::Moment,
    runtime::{self, Container, Seen},
    storage::{
        lease::{self, LeaseHandle, rules::LeaseState},
        records::{self, Looked, Place},
    },
};

impl Worker {
    /// Reads what is due (the metadata and the lock) and renews our lease if needed. Both reads may be slow, so they
    /// run concurrently.
    pub(super) async fn refresh(&mut self) {
        let now = self.context.clock.now();
        let (context, id) = (self.context.clone(), self.id.clone());
        if self.lock.is_none() {
            self.lock = context.records.place_of(&id).and_then(|place| self.open_lock(place));
        }
        let known = self.found.as_ref().map(|found| (found.version.clone(), found.place));
        let is_due = now >= self.metadata_due;
        let metadata = async {
            let known = known.as_ref().map(|(version, place)| (version, *place));
            if is_due { Some(context.records.look(&id, known).await) } else { None }
        };
        let reads_lock = now >= self.lock_due || self.lock_read == LockRead::Never;
        let lock = async {
            let lock = self.lock.as_mut()?;
            if matches!(lock.stand(), Some(LeaseState::Ours)) && now >= lock.next_renewal() {
                Some((lock.renew().await, true))
            } else if reads_lock {
                Some((lock.read().await, false))
            } else {
                None
            }
        };
        let (looked, read) = futures::join!(metadata, lock);
        if let Some(looked) = looked {
            self.metadata_due = now + context.rhythm.metadata;
            self.take_in(looked).await;
        }
        self.expire().await;
        self.settle_answers().await;
        let mut has_read = read.is_some();
        if let Some((read, was_renewal)) = read {
            self.note(read);
            if was_renewal {
                self.extend().await;
            }
        } else if self.lock_read == LockRead::Never
            && let Some(lock) = &mut self.lock
        {
            // The metadata has just shown where the lock is stored.
            let read = lock.read().await;
            self.note(read);
            has_read = true;
        }
        let due = self.context.clock.now() + self.lock_rhythm();
        self.lock_due = if has_read { due } else { due.min(self.lock_due) };
        // A waiter that shows no sign of life is skipped, so we refresh our entry. A declined entry already has its
        // answer.
        let entry = self.lock.as_ref().and_then(LeaseHandle::entry).filter(|entry| !entry.declined);
        if let Some(claim) = entry.map(|entry| entry.claim).filter(|_| now >= self.beat_due)
            && let Some(lock) = &mut self.lock
        {
            self.beat_due = now + self.context.times.beat;
            let beaten = lock.wait(claim).await;
            self.note(beaten);
        }
    }

    /// Opens the lock for writing, with the initial lease if the sandbox was created here.
    fn open_lock(&self, place: Place) -> Option<LeaseHandle> {
        let lock = self.context.records.lock_file(&self.id, place, &self.context.who).ok()?;
        Some(match self.context.bus.take_lease(&self.id) {
            Some(lease) => lock.begun_by(lease),
            None => lock,
        })
    }

    async fn take_in(&mut self, looked: records::Result<Option<Looked>>) {
        self.unread = looked.is_err();
        match looked {
            Ok(Some(Looked::Unchanged)) => {}
            Ok(Some(Looked::Found(found))) => {
                self.spec_sha256 = spec_sha256(&found.metadata.spec);
                if self.lock.is_none() {
                    self.lock = self.open_lock(found.place);
                }
                self.found = Some(*found);
                self.amiss = false;
            }
            Ok(None) if !self.is_held() => self.found = None,
            // Deletion requires `deleted` in the spec: metadata that merely disappeared is created again.
            Ok(None) => {
                if let Some((record, place)) = self.remembered()
                    && let Err(error) = self.context.records.recreate(&record, place).await
                {
                    tracing::warn!(sandbox = %self.id, %error, "the metadata is gone and cannot be made anew");
                }
            }
            Err(error) if error.reason().is_some() => self.complain(&error).await,
            Err(error) => tracing::warn!(sandbox = %self.id, %error, "the metadata cannot be read"),
        }
    }

    /// Sets `deleted` in the spec, as an operator would, once the sandbox has outlived its `ttl`.
    async fn expire(&mut self) {
        let now = since_1970(&self.context.clock);
        let over = |spec: &Spec| spec.desired_state != DesiredState::Deleted && outlived(spec, now);
        if !self.is_held() || !self.found.as_ref().is_some_and(|found| over(&found.metadata.spec)) {
            return;
        }
        let change = |spec: &mut Spec| {
            let is_over = over(spec);
            if is_over {
                spec.desired_state = DesiredState::Deleted;
            }
            is_over
        };
        match self.context.records.wish(&self.id, None, &change).await {
            Ok(_) => {
                tracing::info!(sandbox = %self.id, "its ttl is over");
                let known = self.found.as_ref().map(|found| (found.version.clone(), found.place));
                let known = known.as_ref().map(|(version, place)| (version, *place));
                let looked = self.context.records.look(&self.id, known).await;
                self.take_in(looked).await;
            }
            Err(error) => tracing::warn!(sandbox = %self.id, %error, "its ttl is over, and that cannot be written"),
        }
    }

    /// The metadata as we know it, with a status of our own: we must not write an older holder's status.
    fn remembered(&self) -> Option<(Metadata, Place)> {
        let found = self.found.as_ref()?;
        let status = Status {
            phase: if self.told.running { Phase::Running } else { Phase::Pending },
            instance: Some(self.context.who.me.clone()),
            epoch: self.lock.as_ref()?.held()?.epoch,
            observed_spec_sha256: self.spec_sha256.clone(),
            updated: self.context.clock.timestamp(),
            ..Status::default()
        };
        Some((Metadata { status, ..found.metadata.clone() }, found.place))
    }

    pub(super) fn note(&mut self, read: lease::Result<()>) {
        let before = self.lock_read;
        self.lock_read = match &read {
            Ok(()) | Err(lease::Error::Changed) => LockRead::Good,
            Err(error) => error.reason().map_or(LockRead::Failed, LockRead::Unusable),
        };
        // An error that persists until an operator acts is logged once.
        if let Err(error) = &read
            && (self.lock_read == LockRead::Failed || self.lock_read != before)
            && !matches!(error, lease::Error::Changed | lease::Error::Missing)
        {
            tracing::warn!(sandbox = %self.id, %error, "the lock cannot be read or written");
        }
    }

    /// Sends the guard the container's current deadline.
    pub(super) async fn extend(&self) {
        let deadline = self.lock.as_ref().and_then(|lock| *lock.deadline().borrow());
        let Some(deadline) = deadline else { return };
        match self.context.lifecycle.extend(&self.id, deadline).await {
            Ok(()) | Err(runtime::Error::NotIn(_)) => {}
            Err(error) => tracing::error!(sandbox = %self.id, %error, "the guard does not take the deadline"),
        }
    }

    /// Everything that `desired` and `plan` depend on; `None` if the sandbox does not exist.
    pub(super) fn observe(&mut self, seen: Seen) -> Option<(Inputs, Observed)> {
        let standing = self.standing();
        if matches!(standing, LockState::Ours | LockState::Late)
            && matches!(seen.container, Container::Running | Container::Paused | Container::Fenced)
        {
            // Set even if the action that started it was interrupted.
            self.ran = true;
        }
        self.note_busy(seen);
        let now = self.context.clock.now();
        let presence = self.context.bus.presence(&self.id);
        let unattended = !presence.ever_attached && now - presence.known_since >= self.context.rhythm.unattended;
        let idle = self.is_idle(seen, unattended);
        let verdict = self.verdict(seen, &presence);
        let Some(found) = &self.found else {
            // Without a record, only our own container remains to be removed.
            return (seen.container != Container::Absent).then(|| self.nothing_known(seen));
        };
        let spec = &found.metadata.spec;
        let lock = self.lock.as_ref().and_then(LeaseHandle::lock);
        let persistent = spec.enable_sandbox_checkpoint;
        let saved = self.saved();
        let refused = self.is_refused();
        let inputs = Inputs {
            spec: spec.desired_state,
            purging: lock.is_some_and(|lock| lock.purging),
            held: matches!(standing, LockState::Ours | LockState::Late),
            verdict,
            movable: spec.enable_sandbox_handoff,
            persistent,
            drain: self.context.drain.read(),
            yields: self.should_evict(seen),
            idle,
            checkpoint_when_idle: spec.enable_idle_timeout_auto_checkpoint && persistent,
            placed_here: spec.placement.as_ref() == Some(&self.context.who.me),
            asked_here: presence.attached,
            saved,
            refused,
        };
        let observed = Observed {
            standing,
            container: seen.container,
            saved,
            checkpointable: persistent,
            may_wait: self.may_move(spec) && lock.is_some_and(|lock| lock.lease.is_some()),
            owed_checkpoint: self.owes_checkpoint(),
            owed_snapshot: self.owes_snapshot(),
            owed_rootfs: self.owes_rootfs(),
            registered: self.lock.as_ref().is_some_and(|lock| lock.entry().is_some()),
            waiting: self.is_waiting(spec),
            declines: verdict == Verdict::Decline && spec.enable_sandbox_handoff,
            refused,
        };
        Some((inputs, observed))
    }

    /// Records that a command is running, or was at the last observation.
    pub(super) fn note_busy(&mut self, seen: Seen) {
        let busy = seen.running_execs > 0 || seen.container == Container::Fenced;
        if busy || self.was_busy {
            self.busy_at = self.context.clock.now();
        }
        self.was_busy = busy;
    }

    pub(super) fn nothing_known(&self, seen: Seen) -> (Inputs, Observed) {
        let inputs = Inputs {
            spec: DesiredState::HandedOff,
            purging: false,
            held: false,
            verdict: Verdict::Keep,
            movable: false,
            persistent: true,
            drain: self.context.drain.read(),
            yields: false,
            idle: false,
            checkpoint_when_idle: false,
            placed_here: false,
            asked_here: false,
            saved: Saved::Nothing,
            refused: true,
        };
        let observed = Observed {
            standing: LockState::Free,
            container: seen.container,
            saved: Saved::Nothing,
            checkpointable: false,
            may_wait: false,
            owed_checkpoint: false,
            owed_snapshot: false,
            owed_rootfs: false,
            registered: false,
            waiting: false,
            declines: false,
            refused: true,
        };
        (inputs, observed)
    }

    pub(super) fn standing(&self) -> LockState {
        let stand = self.lock.as_ref().and_then(LeaseHandle::stand);
        match (self.lock_read, stand) {
            (_, Some(LeaseState::Ours)) => LockState::Ours,
            // [14]
            (LockRead::Unusable(_), _) => LockState::Missing,
            (_, Some(LeaseState::Late)) => LockState::Late,
            (LockRead::Never | LockRead::Failed, _) | (LockRead::Good, None) => LockState::Unknown,
            (LockRead::Good, Some(LeaseState::Free)) => LockState::Free,
            // [9] No instance may acquire a tombstone.
            (LockRead::Good, Some(LeaseState::Theirs | LeaseState::Purged)) => LockState::Theirs,
        }
    }

    /// What the sandbox can start from. Our own acquisition has set `ran` in the lock; what matters is whether it
    /// really ran.
    pub(super) fn saved(&self) -> Saved {
        let Some(file) = &self.lock else { return Saved::Nothing };
        let Some(lock) = file.lock() else { return Saved::Nothing };
        let ran = if self.is_held() { self.ran || file.before().ran } else { lock.ran };
        match (&lock.head, ran) {
            (Some(_), _) => Saved::Checkpoint,
            (None, true) => Saved::Lost,
            (None, false) => Saved::Nothing,
        }
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(self.standing(), LockState::Ours | LockState::Late)
    }

    pub(super) fn idle_in(&self, seen: Seen) -> Option<Duration> {
        let spec = &self.found.as_ref()?.metadata.spec;
        let timeout = spec.idle_timeout.map(Duration::from_secs);
        idle_in(timeout, self.context.clock.now() - self.used_at(), seen.running_execs)
    }

    /// When a client was last active or a command last ran.
    pub(super) fn used_at(&self) -> Moment {
        self.context.bus.presence(&self.id).active_at.max(self.busy_at)
    }

    /// The idle timeout has passed. Once the sandbox begins to end, it continues unless a session attaches.
    pub(super) fn is_idle(&mut self, seen: Seen, unattended: bool) -> bool {
        let asked = self.context.bus.asked(&self.id);
        if seen.container == Container::Running {
            let idle = unattended || self.idle_in(seen).is_some_and(|left| left.is_zero());
            self.idle_under = idle.then_some(asked);
        }
        self.idle_under == Some(asked)
    }

    pub(super) fn lock_rhythm(&self) -> Duration {
        let presence = self.context.bus.presence(&self.id);
        let now = self.context.clock.now();
        let movable = self.found.as_ref().is_some_and(|found| found.metadata.spec.enable_sandbox_handoff);
        let left = (!presence.attached && presence.ever_attached).then(|| now - presence.active_at);
        let waits = self.lock.as_ref().is_some_and(|lock| lock.entry().is_some());
        let waited = self.contention.as_ref().filter(|_| waits).map(|contention| now - contention.since);
        self.context.rhythm.lock_in(self.is_held(), movable, left, waited)
    }
}

fn spec_sha256(spec: &Spec) -> String {
    let bytes = serde_json::to_vec(spec).unwrap_or_default();
    hex(&Sha256::digest(&bytes))
}
