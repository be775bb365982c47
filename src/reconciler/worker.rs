//! One sandbox on this instance: look, plan, act, report, look again, until nothing of it is here.

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
    /// The last good metadata.
    pub(super) found: Option<Found>,
    pub(super) spec_sha256: String,
    pub(super) lock: Option<LeaseHandle>,
    pub(super) lock_read: LockRead,
    pub(super) metadata_due: Moment,
    pub(super) lock_due: Moment,
    /// What ends partial frames on the way to the agent; for the sandbox's whole life.
    pub(super) marker: Option<Marker>,
    /// What it stands on, if that is not the base or was looked up.
    pub(super) root: Option<super::rootfs_source::Root>,
    /// What the head needs and this instance does not have.
    pub(super) missing: Option<super::rootfs_source::Missing>,
    /// Another runsc than this instance's own, with which it runs.
    pub(super) runsc: Option<baton_protocol::manifest::Runsc>,
    /// The memory of the head cannot be used here.
    pub(super) files_only: bool,
    /// What the metadata are to say of the head, as far as it was seen here.
    pub(super) committed: Option<Committed>,
    /// There may be checkpoints that nothing names any more.
    pub(super) untidy: bool,
    /// It ran here under the lease we hold.
    pub(super) ran: bool,
    /// How a start that nobody has been told of came about.
    pub(super) boot: Option<StartKind>,
    /// The spec and the number of sessions under which a wish failed for good.
    pub(super) refused: Option<(String, u64)>,
    /// How many sessions had come when it began to end for being idle.
    pub(super) idle_under: Option<u64>,
    /// When a command was last seen to run.
    pub(super) busy_at: Moment,
    pub(super) was_busy: bool,
    pub(super) told: Announced,
    pub(super) why: LeaveReason,
    backoff: Option<Backoff>,
    pub(super) beat_due: Moment,
    pub(super) contention: Option<Contention>,
    /// The sweep asked for it; until it runs this counts as a session.
    pub(super) attach_guard: Option<AttachGuard>,
    /// When it is next checkpointed without anybody's asking.
    pub(super) save_due: Option<Moment>,
    /// Since when requests are answered whose asker has not taken the answer.
    pub(super) answered: BTreeMap<Nonce, Moment>,
    /// The metadata cannot be used, and says so as far as it can.
    pub(super) amiss: bool,
    /// The metadata could not be read: whether there is any is not known.
    pub(super) unread: bool,
    pub(super) fetching: Option<Fetching>,
    /// We asked another instance for it.
    pub(super) waited: bool,
    /// How many sessions had come when we last did.
    pub(super) waited_under: u64,
    /// A sign of life that was asked for because another instance wants it.
    pub(super) probe: Option<Probe>,
    shown: Shown,
    /// Of the action under way.
    pub(super) parts: Parts,
    /// The request whose wish is fulfilled: what comes now is not its doing.
    pub(super) fulfilled: Option<Traceparent>,
}

/// What sessions have been told, so that nothing is told twice or out of order.
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
    /// There is none, or none that can be used.
    Unusable(Reason),
}

/// Since when we want what another has, and the lease as it was then.
#[derive(Clone, Debug)]
pub(super) struct Contention {
    pub(super) since: Moment,
    pub(super) lease: Option<Nonce>,
}

/// An action that failed in passing is not tried again before its time.
#[derive(Clone, Copy, Debug)]
struct Backoff {
    action: Action,
    until: Moment,
    delay: Duration,
}

/// No loop turns faster without an event.
const SHORTEST_REST: Duration = Duration::from_millis(5);
/// Before an action that met a changed world is tried on what was read since.
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

    /// One that the sweep took: `lock` has been watched, and `seat` keeps its place.
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
            // What a head needs besides may be brought while its files come.
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
        // A purge whose last answer was lost ends here.
        if self.told.running {
            self.tell_left(None);
        }
        self.context.bus.hold(&self.id, false);
        self.context.bus.forget(&self.id);
    }

    /// Nothing that was read counts any more.
    pub(super) fn look_again(&mut self) {
        let now = self.context.clock.now();
        (self.metadata_due, self.lock_due) = (now, now);
    }

    /// Nothing of it is here and nobody here wants it.
    fn is_finished(&self, observed: &Observed, desired: Desired) -> bool {
        let purged = self.lock.as_ref().and_then(LeaseHandle::stand) == Some(LeaseState::Purged);
        let away = matches!(observed.standing, LockState::Free | LockState::Theirs | LockState::Missing);
        let asked = self.is_attended() && desired == Desired::Running && !observed.refused;
        observed.container == Container::Absent && !observed.registered && (purged || (away && !asked))
    }

    /// Waits until something may have changed since this was seen.
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
                    // Commands begin and end all the time, and only idleness depends on that.
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

    /// Somebody wants what could not be read: it is tried again soon.
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

    /// What follows from how an action went.
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
                // What stands still for want of a renewal is not made to wait longer than that takes.
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
                // The status is the holder's to write.
                if self.is_held() || matches!(reason, Reason::LockMissing | Reason::InvalidLock | Reason::Unsigned) {
                    self.report_failed(reason, &message).await;
                }
                self.context.bus.post(&self.id, LifecycleEvent::Failed { reason, message });
            }
        }
        self.lock_due = self.context.clock.now();
    }

    /// The same action waits from now on, twice as long each time.
    fn back_off(&mut self, action: Action, first: Duration, longest: Duration) -> Duration {
        let delay = match self.backoff {
            Some(backoff) if backoff.action == action => (backoff.delay * 2).clamp(first, longest),
            Some(_) | None => first,
        };
        let until = self.context.clock.now() + self.context.clock.jittered(delay);
        self.backoff = Some(Backoff { action, until, delay });
        delay
    }

    /// This spec is not tried again until it changes or a session comes.
    pub(super) fn refuse_until_asked(&mut self) {
        self.refused = Some((self.spec_sha256.clone(), self.context.bus.asked(&self.id)));
    }

    /// The last try failed for good, and neither has the spec changed nor has anybody asked since.
    pub(super) fn is_refused(&self) -> bool {
        let now = (&self.spec_sha256, self.context.bus.asked(&self.id));
        self.refused.as_ref().is_some_and(|(spec, asked)| (spec, *asked) == now)
    }

    pub(super) fn spec_sha256(&self) -> &str {
        &self.spec_sha256
    }
}
