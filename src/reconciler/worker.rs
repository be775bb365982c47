//! The loop of one sandbox on this instance: observe, plan, act, report, until nothing of the sandbox is left here.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use baton_protocol::{
    frame::Marker,
    id::{Nonce, SandboxId},
    metadata::Committed,
    reason::Reason,
};

use super::{
    ReconcilerContext, Wakeup,
    actions::Failure,
    contend::Probe,
    desired::{Drain, desired},
    fetch::Fetching,
    metric_labels,
    plan::{Action, Desired, LockState, Observed, plan},
};
use crate::{
    bus::{AttachGuard, LeaveReason, LifecycleEvent, StartKind},
    clock::Moment,
    metrics::Shown,
    runtime::{Container, Seen},
    storage::{
        lease::{LeaseHandle, rules::LeaseState},
        records::Found,
    },
    traces::{Parts, Traceparent},
};

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) id: SandboxId,
    pub(super) context: Arc<ReconcilerContext>,
    pub(super) wakeup: Arc<Wakeup>,
    /// The last valid metadata.
    pub(super) found: Option<Found>,
    pub(super) spec_sha256: String,
    pub(super) lock: Option<LeaseHandle>,
    pub(super) lock_read: LockRead,
    pub(super) metadata_due: Moment,
    pub(super) lock_due: Moment,
    /// Terminates partial frames sent to the agent; kept across restores.
    pub(super) marker: Option<Marker>,
    /// Its root file system, if that is not the base or was looked up.
    pub(super) root: Option<super::rootfs_source::Root>,
    /// What the head needs and this instance lacks.
    pub(super) missing: Option<super::rootfs_source::Missing>,
    /// The runsc it runs with, if that is not this instance's own.
    pub(super) runsc: Option<baton_protocol::manifest::Runsc>,
    /// The head's memory cannot be used here.
    pub(super) files_only: bool,
    /// What to write to the metadata about the head, if this instance has seen it.
    pub(super) committed: Option<Committed>,
    /// There may be checkpoints that nothing references any more.
    pub(super) untidy: bool,
    /// It ran here under the current lease.
    pub(super) ran: bool,
    /// How it was started, until that is announced.
    pub(super) boot: Option<StartKind>,
    /// The spec and the number of sessions at the time of a permanent failure.
    pub(super) refused: Option<(String, u64)>,
    /// The number of sessions when it began to end because of idleness.
    pub(super) idle_under: Option<u64>,
    /// When a command was last seen running.
    pub(super) busy_at: Moment,
    pub(super) was_busy: bool,
    pub(super) told: Announced,
    pub(super) why: LeaveReason,
    backoff: Option<Backoff>,
    pub(super) beat_due: Moment,
    pub(super) contention: Option<Contention>,
    /// Taken by the sweep; counts as a session until the sandbox runs.
    pub(super) attach_guard: Option<AttachGuard>,
    /// When the next periodic checkpoint is due.
    pub(super) save_due: Option<Moment>,
    /// Answered requests whose client has not collected the answer, and since when.
    pub(super) answered: BTreeMap<Nonce, Moment>,
    /// The metadata is invalid, and its status says so where possible.
    pub(super) amiss: bool,
    /// The metadata could not be read, so it is unknown whether there is any.
    pub(super) unread: bool,
    pub(super) fetching: Option<Fetching>,
    /// We registered as waiter with another instance.
    pub(super) waited: bool,
    /// The number of sessions when we last did.
    pub(super) waited_under: u64,
    /// A liveness probe, sent because another instance wants the sandbox.
    pub(super) probe: Option<Probe>,
    shown: Shown,
    /// The timed steps of the current action.
    pub(super) parts: Parts,
    /// The request that is already fulfilled: later actions are not attributed to it.
    pub(super) fulfilled: Option<Traceparent>,
}

/// What was announced to sessions, so that no event is repeated or out of order.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Announced {
    pub(super) acquiring: bool,
    pub(super) running: bool,
    pub(super) fenced: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockRead {
    Never,
    Good,
    Failed,
    /// There is no lock, or no usable one.
    Unusable(Reason),
}

/// Since when we have wanted a sandbox that another instance holds, and the lease at that time.
#[derive(Clone, Debug)]
pub(super) struct Contention {
    pub(super) since: Moment,
    pub(super) lease: Option<Nonce>,
}

/// An action that failed transiently is not retried before `until`.
#[derive(Clone, Copy, Debug)]
struct Backoff {
    action: Action,
    until: Moment,
    delay: Duration,
}

/// Minimum rest between two passes that no event triggers.
const SHORTEST_REST: Duration = Duration::from_millis(5);
/// Delay before an action that met stale state is retried on what was read since.
const LOOK_DELAY: Duration = Duration::from_millis(5);
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(60);

impl Worker {
    pub(super) fn new(id: SandboxId, context: Arc<ReconcilerContext>, wakeup: Arc<Wakeup>) -> Self {
        let now = context.clock.now();
        let shown = context.metrics.sandbox();
        Self {
            id,
            context,
            wakeup,
            found: None,
            spec_sha256: String::new(),
            lock: None,
            lock_read: LockRead::Never,
            metadata_due: now,
            lock_due: now,
            marker: None,
            root: None,
            missing: None,
            files_only: false,
            committed: None,
            runsc: None,
            untidy: false,
            ran: false,
            boot: None,
            refused: None,
            idle_under: None,
            busy_at: now,
            was_busy: false,
            told: Announced::default(),
            why: LeaveReason::HandedOff,
            backoff: None,
            beat_due: now,
            contention: None,
            attach_guard: None,
            save_due: None,
            answered: BTreeMap::new(),
            amiss: false,
            unread: false,
            fetching: None,
            waited: false,
            waited_under: 0,
            probe: None,
            shown,
            parts: Parts::default(),
            fulfilled: None,
        }
    }

    /// A sandbox taken by the sweep: `lock` has been watched, and `attach_guard` keeps its slot.
    pub(super) fn taken(
        id: SandboxId,
        context: Arc<ReconcilerContext>,
        wakeup: Arc<Wakeup>,
        lock: LeaseHandle,
        attach_guard: AttachGuard,
    ) -> Self {
        Self { lock: Some(lock), attach_guard: Some(attach_guard), ..Self::new(id, context, wakeup) }
    }

    pub(super) async fn run(mut self) {
        loop {
            self.refresh().await;
            let seen = *self.context.lifecycle.watch(&self.id).borrow();
            self.shown.set(&seen.container);
            self.tell_fence(seen.container);
            self.tell_leased();
            let Some((inputs, observed)) = self.observe(seen) else {
                if self.unread && self.is_attended() {
                    self.rest_unread().await;
                    continue;
                }
                self.tell_gone();
                break;
            };
            self.tell_started(&observed).await;
            self.context.bus.hold(&self.id, inputs.held || seen.container != Container::Absent);
            let (desired, why) = desired(&inputs);
            self.why = why;
            if let Some(refusal) = self.refusal_for_waiter(desired, &inputs, &observed) {
                self.handle_outcome(Action::Wait, Err(refusal)).await;
                continue;
            }
            let action = plan(desired, &observed);
            let rests = action == Action::Rest || self.must_wait(action);
            self.tell_tenure(seen, !rests && desired != Desired::Running);
            if rests {
                if self.is_finished(&observed, desired) {
                    break;
                }
                if self.untidy && observed.standing == LockState::Ours && self.is_renewed() {
                    let tidied = self.tidy().await;
                    self.handle_outcome(Action::Rest, tidied).await;
                    continue;
                }
                self.report_at_rest(desired, &observed).await;
                self.rest(seen, inputs.drain).await;
                continue;
            }
            tracing::debug!(sandbox = %self.id, ?desired, ?observed, ?action, "plan");
            // The files of a head keep downloading while its other requirements are fetched.
            if !matches!(action, Action::Restore | Action::Extract) {
                self.abandon_fetch().await;
            }
            let (began, deed) = (self.context.clock.now(), self.begin_to_trace(action));
            let outcome = self.act(action, desired, &observed).await;
            let how = metric_labels::outcome(&outcome);
            self.context.metrics.acted(&action, how, self.context.clock.now() - began);
            self.trace(&deed, how);
            self.handle_outcome(action, outcome).await;
        }
        self.abandon_fetch().await;
        // A purge whose last response was lost ends here.
        if self.told.running {
            self.tell_left(None);
        }
        self.context.bus.hold(&self.id, false);
        self.context.bus.forget(&self.id);
    }

    /// Invalidates everything that was read.
    pub(super) fn look_again(&mut self) {
        let now = self.context.clock.now();
        (self.metadata_due, self.lock_due) = (now, now);
    }

    /// Nothing of it is here, and no session here wants it.
    fn is_finished(&self, observed: &Observed, desired: Desired) -> bool {
        let purged = self.lock.as_ref().and_then(LeaseHandle::stand) == Some(LeaseState::Purged);
        let away = matches!(observed.standing, LockState::Free | LockState::Theirs | LockState::Missing);
        let asked = self.is_attended() && desired == Desired::Running && !observed.refused;
        observed.container == Container::Absent && !observed.registered && (purged || (away && !asked))
    }

    /// Waits until something may have changed since `seen`.
    async fn rest(&mut self, mut seen: Seen, drain: Drain) {
        let context = self.context.clone();
        let mut container = context.lifecycle.watch(&self.id);
        if *container.borrow_and_update() != seen {
            return;
        }
        let (id, place) = (self.id.clone(), self.found.as_ref().map(|found| found.place));
        let stored = async {
            match place {
                Some(place) => context.records.changed(&id, place).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(stored);
        loop {
            let now = context.clock.now();
            let until = self.rests_until(seen);
            tokio::select! {
                biased;
                () = self.wakeup.heard() => return self.look_again(),
                () = &mut stored => return self.look_again(),
                changed = container.changed() => {
                    let then = std::mem::replace(&mut seen, *container.borrow_and_update());
                    // Commands start and end all the time, and only idleness depends on them.
                    if changed.is_err() || seen.container != then.container {
                        return;
                    }
                    self.note_busy(seen);
                    self.tell_tenure(seen, false);
                }
                _ = context.drain.until(|now| *now != drain) => return,
                () = context.clock.sleep_until(until.max(now + SHORTEST_REST)) => return,
            }
        }
    }

    /// A session wants metadata that could not be read: retry soon.
    async fn rest_unread(&mut self) {
        let context = self.context.clone();
        tokio::select! {
            biased;
            () = self.wakeup.heard() => {}
            () = context.clock.sleep(context.clock.jittered(context.times.retry)) => {}
        }
        self.look_again();
    }

    fn rests_until(&self, seen: Seen) -> Moment {
        let now = self.context.clock.now();
        let mut until = self.metadata_due.min(self.lock_due);
        if let Some(lock) = self.lock.as_ref().filter(|_| self.standing() == LockState::Ours) {
            until = until.min(lock.next_renewal());
        }
        if let Some(backoff) = &self.backoff {
            until = until.min(backoff.until.max(now));
        }
        if let Some(left) = self.idle_in(seen).filter(|_| seen.container == Container::Running) {
            until = until.min(now + left);
        }
        if let Some(ends) = self.probe_ends() {
            until = until.min(ends);
        }
        if let Some(due) = self.save_due.filter(|_| seen.container == Container::Running) {
            until = until.min(due);
        }
        until
    }

    pub(super) fn must_wait(&self, action: Action) -> bool {
        self.backoff.is_some_and(|backoff| backoff.action == action && self.context.clock.now() < backoff.until)
    }

    /// Handles the outcome of an action: back off, refuse, or carry on.
    pub(super) async fn handle_outcome(&mut self, action: Action, outcome: Result<(), Failure>) {
        match outcome {
            Ok(()) => {
                self.backoff = None;
                return;
            }
            Err(Failure::Stale) => {
                self.back_off(action, LOOK_DELAY, LONGEST_DELAY);
            }
            Err(Failure::Transient(message) | Failure::NoSpace(message)) => {
                // A container that is stopped until the lease is renewed must not wait longer than the renewal takes.
                let renews = matches!(action, Action::Renew | Action::Resume);
                let longest = if renews { self.context.times.retry } else { LONGEST_DELAY };
                let again_in = self.back_off(action, FIRST_DELAY.min(longest), longest);
                tracing::warn!(sandbox = %self.id, ?action, message, ?again_in, "an action failed");
            }
            Err(Failure::Refused { reason, message }) => {
                tracing::warn!(sandbox = %self.id, ?action, %reason, message, "a wish was refused");
                self.attach_guard = None;
                self.refuse_until_asked();
                self.told.running = false;
                // Only the holder writes the status.
                if self.is_held() || matches!(reason, Reason::LockMissing | Reason::InvalidLock | Reason::Unsigned) {
                    self.report_failed(reason, &message).await;
                }
                self.context.bus.post(&self.id, LifecycleEvent::Failed { reason, message });
            }
        }
        self.lock_due = self.context.clock.now();
    }

    /// Delays the next attempt of the same action, doubling the delay each time.
    fn back_off(&mut self, action: Action, first: Duration, longest: Duration) -> Duration {
        let delay = match self.backoff {
            Some(backoff) if backoff.action == action => (backoff.delay * 2).clamp(first, longest),
            Some(_) | None => first,
        };
        let until = self.context.clock.now() + self.context.clock.jittered(delay);
        self.backoff = Some(Backoff { action, until, delay });
        delay
    }

    /// Does not retry this spec until it changes or a session attaches.
    pub(super) fn refuse_until_asked(&mut self) {
        self.refused = Some((self.spec_sha256.clone(), self.context.bus.asked(&self.id)));
    }

    /// The last attempt failed for good; since then the spec has not changed and no session has attached.
    pub(super) fn is_refused(&self) -> bool {
        let now = (&self.spec_sha256, self.context.bus.asked(&self.id));
        self.refused.as_ref().is_some_and(|(spec, asked)| (spec, *asked) == now)
    }

    pub(super) fn spec_sha256(&self) -> &str {
        &self.spec_sha256
    }
}
