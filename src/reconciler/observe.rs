//! Observation: combines what storage, the container and the bus say into one value for `desired` and `plan`. Only
//! reads; what has to be written is planned.

use std::time::Duration;

use baton_protocol::metadata::{DesiredState, Spec, SpecRequest};

use super::{
    desired::Inputs,
    plan::{AttachState, LockState, Observed, Saved, Upkeep},
    precedence::Verdict,
    record_view::MetadataFault,
    sweep::since_1970,
    worker::Worker,
};
use crate::{
    runtime::{Container, ContainerView},
    storage::{lease::LeaseHandle, records::StoreKind},
};

/// A sandbox that no session ever attached to ends after this time.
const UNATTENDED: Duration = Duration::from_secs(60);

/// One observation of the sandbox.
#[derive(Clone, Copy, Debug)]
pub(super) struct Observation {
    /// The container.
    pub(super) seen: ContainerView,
    /// What the desired state depends on.
    pub(super) inputs: Inputs,
    /// What the plan depends on besides.
    pub(super) observed: Observed,
}

impl Worker {
    /// Reads what is due, and puts together everything that `desired` and `plan` depend on.
    pub(super) async fn observe(&mut self) -> Observation {
        self.read_due().await;
        let seen = *self.context.lifecycle.watch(&self.id).borrow();
        let now = self.context.clock.now();
        self.activity.note(seen, now);
        let is_live = matches!(seen.container, Container::Running | Container::Paused | Container::Fenced);
        if self.lease.is_held() && is_live {
            // Set even if the action that started it was interrupted.
            self.lease.ran = true;
        }
        match self.record.spec().cloned() {
            Some(spec) => self.observe_known(seen, &spec),
            None => self.observe_unknown(seen),
        }
    }

    /// Reads metadata and lock if they are due. Both reads may be slow, so they run concurrently. A renewal that is
    /// due goes first: nothing is read before it.
    async fn read_due(&mut self) {
        let now = self.context.clock.now();
        if self.lease.handle.is_none() {
            self.lease.handle = self.context.records.place_of(&self.id).and_then(|place| self.open_lock(place));
        }
        if self.lease.is_renewal_due(now) {
            return;
        }
        let (context, id) = (self.context.clone(), self.id.clone());
        let (reads_metadata, known) = (now >= self.record.due, self.record.known());
        let metadata = async {
            let known = known.as_ref().map(|(version, place)| (version, *place));
            if reads_metadata { Some(context.records.read_if_changed(&id, known).await) } else { None }
        };
        let placed = context.bus.presence(&id).placed;
        let reads_lock = now >= self.lease.due || !self.lease.was_read();
        let lock = async {
            let handle = self.lease.handle.as_mut().filter(|_| reads_lock)?;
            Some(handle.read().await)
        };
        let (looked, read) = futures::join!(metadata, lock);
        if let Some(looked) = looked {
            self.record.note_read(&id, looked, self.lease.is_held(), placed);
            let is_unknown = self.record.is_unreadable() && self.record.spec().is_none();
            let again_in =
                if is_unknown { context.clock.jittered(context.times.retry) } else { context.times.poll.metadata };
            self.record.due = now + again_in;
        }
        if self.lease.is_held() {
            self.record.note_answers(now);
        }
        let mut has_read = read.is_some();
        if let Some(read) = read {
            self.lease.note_read(&id, read);
        } else if !self.lease.was_read() || self.context.clock.now() >= self.lease.due {
            // The metadata may just have shown where the lock is stored, or the read of it took until the lock is due.
            // A worker does not wake for what was due before it rested.
            has_read = self.read_lock().await;
        }
        let due = self.context.clock.now() + self.lock_interval();
        self.lease.due = if has_read { due } else { due.min(self.lease.due) };
    }

    async fn read_lock(&mut self) -> bool {
        if self.lease.handle.is_none() {
            self.lease.handle = self.record.store_kind().and_then(|place| self.open_lock(place));
        }
        let Some(handle) = &mut self.lease.handle else { return false };
        let read = handle.read().await;
        self.lease.note_read(&self.id, read);
        true
    }

    /// Opens the lock for writing, with the initial lease if the sandbox was created here.
    fn open_lock(&self, place: StoreKind) -> Option<LeaseHandle> {
        let lock = self.context.records.lock_file(&self.id, place, &self.context.who).ok()?;
        Some(match self.context.bus.take_lease(&self.id) {
            Some(lease) => lock.begun_by(lease),
            None => lock,
        })
    }

    fn observe_known(&mut self, seen: ContainerView, spec: &Spec) -> Observation {
        let (context, now) = (self.context.clone(), self.context.clock.now());
        let (lock, saved, is_refused) = (self.lease.state(), self.lease.saved(), self.is_refused());
        let presence = context.bus.presence(&self.id);
        let is_unattended = !presence.ever_attached && now - presence.known_since >= UNATTENDED;
        let is_idle = self.is_idle(seen, is_unattended);
        let (verdict, unprobed) = self.verdict(seen, &presence);
        let persistent = spec.enable_sandbox_checkpoint;
        let inputs = Inputs {
            spec: spec.desired_state,
            purging: self.lease.lock().is_some_and(|lock| lock.purging),
            held: self.lease.is_held(),
            verdict,
            movable: spec.enable_sandbox_handoff,
            persistent,
            drain: context.drain.read(),
            yields: self.should_evict(seen),
            idle: is_idle,
            checkpoint_when_idle: spec.enable_idle_timeout_auto_checkpoint && persistent,
            placed_here: spec.placement.as_ref() == Some(&context.who.me),
            asked_here: presence.attached,
            saved,
            refused: is_refused,
        };
        let observed = Observed {
            lock,
            container: seen.container,
            saved,
            checkpointable: persistent,
            may_wait: self.may_move(spec) && self.lease.lock().is_some_and(|lock| lock.lease.is_some()),
            checkpoint_requested: self.is_checkpoint_requested(),
            snapshot_requested: self.is_snapshot_requested(),
            rootfs_missing: self.is_rootfs_missing(),
            registered: self.lease.is_registered(),
            waiting: self.is_waiting(spec),
            declines: verdict == Verdict::Decline && spec.enable_sandbox_handoff,
            refused: is_refused,
            attachment: self.attachment(&inputs, &presence, lock, seen.container),
            due: self.due(unprobed.is_some(), seen),
            deferred: self.retry.deferred(now),
        };
        Observation { seen, inputs, observed }
    }

    /// Without metadata, only our own container and our entry as waiter remain to be removed: a holder that has
    /// recreated the metadata would yield to an entry that nobody stands behind. If it is unknown whether there is
    /// metadata, the container and the sessions wait.
    fn observe_unknown(&self, seen: ContainerView) -> Observation {
        let is_attended = self.is_attended();
        let may_exist = self.record.is_unreadable() && (is_attended || seen.container != Container::Absent);
        let is_refused = self.is_refused();
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
            refused: is_refused,
        };
        let observed = Observed {
            lock: if may_exist { LockState::Unknown } else { LockState::Free },
            container: seen.container,
            saved: Saved::Nothing,
            checkpointable: false,
            may_wait: false,
            checkpoint_requested: false,
            snapshot_requested: false,
            rootfs_missing: false,
            registered: self.lease.is_registered(),
            waiting: false,
            declines: false,
            refused: is_refused,
            attachment: if is_attended && !self.announced.running { AttachState::Deleted } else { AttachState::None },
            due: None,
            deferred: self.retry.deferred(self.context.clock.now()),
        };
        Observation { seen, inputs, observed }
    }

    /// The most urgent upkeep that is due and does not back off.
    fn due(&self, is_unprobed: bool, seen: ContainerView) -> Option<Upkeep> {
        let (now, wall) = (self.context.clock.now(), since_1970(&self.context.clock));
        let is_due = |upkeep: &Upkeep| match upkeep {
            Upkeep::Renewal => self.lease.is_renewal_due(now),
            Upkeep::Probe => is_unprobed,
            Upkeep::Expiry => self.record.is_expired(wall),
            Upkeep::Egress => seen.container == Container::Running && self.is_egress_outdated(),
            Upkeep::MetadataMissing => self.record.fault() == Some(&MetadataFault::Missing),
            Upkeep::MetadataInvalid => {
                matches!(self.record.fault(), Some(MetadataFault::Invalid { .. })) && !self.record.is_fault_reported()
            }
            Upkeep::StaleAnswers => !self.record.stale_answers(now).is_empty(),
            Upkeep::Garbage => self.checkpoints.has_garbage && self.lease.is_renewed(),
        };
        let backs_off = |upkeep: &Upkeep| *upkeep != Upkeep::Renewal && self.retry.defers(upkeep.action(), now);
        Upkeep::ALL.into_iter().find(|upkeep| is_due(upkeep) && !backs_off(upkeep))
    }

    /// The container has another network policy than the spec. One without a network has none.
    fn is_egress_outdated(&self) -> bool {
        self.start.layout.has_network() && self.egress().is_some_and(|egress| self.start.egress != Some(egress))
    }

    /// A snapshot was requested and not answered yet.
    fn is_snapshot_requested(&self) -> bool {
        self.record.unanswered(|request| matches!(request, SpecRequest::Snapshot { .. })).next().is_some()
    }

    /// The root file system it needs is not known to be here.
    fn is_rootfs_missing(&self) -> bool {
        let is_new = self.lease.head().is_none();
        let names_snapshot = self.record.spec().is_some_and(|spec| spec.filesystem_snapshot_name.is_some());
        self.start.missing.is_some() || (is_new && self.start.rootfs.is_none() && names_snapshot)
    }

    /// How long to wait before the lock is read again.
    pub(super) fn lock_interval(&self) -> Duration {
        let presence = self.context.bus.presence(&self.id);
        let now = self.context.clock.now();
        let left = (!presence.attached && presence.ever_attached).then(|| now - presence.active_at);
        let waited = self.contention.waited(now).filter(|_| self.lease.is_registered());
        self.context.times.poll.lock_in(self.lease.is_held(), self.record.is_movable(), left, waited)
    }
}
