//! One sandbox on this instance: look, plan, act, report, look again, until nothing of it is here.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use baton_protocol::{
    frame::Marker,
    id::{Nonce, SandboxId},
    metadata::Committed,
    reason::Reason,
};

use super::{
    Bell, Tools,
    act::Failure,
    contend::Probe,
    desired::{Drain, desired},
    fetch::Fetching,
    measure,
    plan::{Action, Desired, Observed, Standing, plan},
};
use crate::{
    clock::Moment,
    metrics::Shown,
    runtime::{Container, Seen},
    storage::{
        board::{Attached, Boot, Passing, Why},
        lease::LockFile,
        records::Found,
        rules::Stand,
    },
    traces::{Parts, Traceparent},
};

#[derive(Debug)]
pub(super) struct Sandbox {
    pub(super) id: SandboxId,
    pub(super) tools: Arc<Tools>,
    pub(super) bell: Arc<Bell>,
    /// The last good metadata.
    pub(super) found: Option<Found>,
    pub(super) spec_sha256: String,
    pub(super) lock: Option<LockFile>,
    pub(super) lock_read: LockRead,
    pub(super) metadata_due: Moment,
    pub(super) lock_due: Moment,
    /// What ends partial frames on the way to the agent; for the sandbox's whole life.
    pub(super) marker: Option<Marker>,
    /// What it stands on, if that is not the base or was looked up.
    pub(super) root: Option<super::roots::Root>,
    /// What the head needs and this instance does not have.
    pub(super) missing: Option<super::roots::Missing>,
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
    pub(super) boot: Option<Boot>,
    /// The spec and the number of sessions under which a wish failed for good.
    pub(super) refused: Option<(String, u64)>,
    /// How many sessions had come when it began to end for being idle.
    pub(super) idle_under: Option<u64>,
    /// When a command was last seen to run.
    pub(super) busy_at: Moment,
    pub(super) was_busy: bool,
    pub(super) told: Told,
    pub(super) why: Why,
    backoff: Option<Backoff>,
    pub(super) beat_due: Moment,
    pub(super) contention: Option<Contention>,
    /// The sweep asked for it; until it runs this counts as a session.
    pub(super) seat: Option<Attached>,
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
pub(super) struct Told {
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

impl Sandbox {
    pub(super) fn new(id: SandboxId, tools: Arc<Tools>, bell: Arc<Bell>) -> Self {
        let now = tools.clock.now();
        let shown = tools.metrics.sandbox();
        Self {
            id,
            tools,
            bell,
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
            told: Told::default(),
            why: Why::HandedOff,
            backoff: None,
            beat_due: now,
            contention: None,
            seat: None,
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
    pub(super) fn taken(id: SandboxId, tools: Arc<Tools>, bell: Arc<Bell>, lock: LockFile, seat: Attached) -> Self {
        Self { lock: Some(lock), seat: Some(seat), ..Self::new(id, tools, bell) }
    }

    pub(super) async fn run(mut self) {
        loop {
            self.look().await;
            let seen = *self.tools.lifecycle.watch(&self.id).borrow();
            self.shown.set(&seen.container);
            self.tell_fence(seen.container);
            self.tell_leased();
            let Some((wish, observed)) = self.observe(seen) else {
                if self.unread && self.is_attended() {
                    self.rest_unread().await;
                    continue;
                }
                self.tell_gone();
                break;
            };
            self.tell_started(&observed).await;
            self.tools.board.hold(&self.id, wish.held || seen.container != Container::Absent);
            let (desired, why) = desired(&wish);
            self.why = why;
            if let Some(refusal) = self.turned_away(desired, &wish, &observed) {
                self.settle(Action::Wait, Err(refusal)).await;
                continue;
            }
            let action = plan(desired, &observed);
            let rests = action == Action::Rest || self.must_wait(action);
            self.tell_tenure(seen, !rests && desired != Desired::Running);
            if rests {
                if self.is_finished(&observed, desired) {
                    break;
                }
                if self.untidy && observed.standing == Standing::Ours && self.is_renewed() {
                    let tidied = self.tidy().await;
                    self.settle(Action::Rest, tidied).await;
                    continue;
                }
                self.report_at_rest(desired, &observed).await;
                self.rest(seen, wish.drain).await;
                continue;
            }
            tracing::debug!(sandbox = %self.id, ?desired, ?observed, ?action, "plan");
            // What a head needs besides may be brought while its files come.
            if !matches!(action, Action::Restore | Action::Extract) {
                self.abandon_fetch().await;
            }
            let (began, deed) = (self.tools.clock.now(), self.begin_to_trace(action));
            let outcome = self.act(action, desired, &observed).await;
            let how = measure::outcome(&outcome);
            self.tools.metrics.acted(&action, how, self.tools.clock.now() - began);
            self.trace(&deed, how);
            self.settle(action, outcome).await;
        }
        self.abandon_fetch().await;
        // A purge whose last answer was lost ends here.
        if self.told.running {
            self.tell_left(None);
        }
        self.tools.board.hold(&self.id, false);
        self.tools.board.forget(&self.id);
    }

    /// Nothing that was read counts any more.
    pub(super) fn look_again(&mut self) {
        let now = self.tools.clock.now();
        (self.metadata_due, self.lock_due) = (now, now);
    }

    /// Nothing of it is here and nobody here wants it.
    fn is_finished(&self, observed: &Observed, desired: Desired) -> bool {
        let purged = self.lock.as_ref().and_then(LockFile::stand) == Some(Stand::Purged);
        let away = matches!(observed.standing, Standing::Free | Standing::Theirs | Standing::Missing);
        let asked = self.is_attended() && desired == Desired::Running && !observed.refused;
        observed.container == Container::Absent && !observed.registered && (purged || (away && !asked))
    }

    /// Waits until something may have changed since this was seen.
    async fn rest(&mut self, mut seen: Seen, drain: Drain) {
        let tools = self.tools.clone();
        let mut container = tools.lifecycle.watch(&self.id);
        if *container.borrow_and_update() != seen {
            return;
        }
        let (id, place) = (self.id.clone(), self.found.as_ref().map(|found| found.place));
        let stored = async {
            match place {
                Some(place) => tools.records.changed(&id, place).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(stored);
        loop {
            let now = tools.clock.now();
            let until = self.rests_until(seen);
            tokio::select! {
                biased;
                () = self.bell.heard() => return self.look_again(),
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
                _ = tools.drain.until(|now| *now != drain) => return,
                () = tools.clock.sleep_until(until.max(now + SHORTEST_REST)) => return,
            }
        }
    }

    /// Somebody wants what could not be read: it is tried again soon.
    async fn rest_unread(&mut self) {
        let tools = self.tools.clone();
        tokio::select! {
            biased;
            () = self.bell.heard() => {}
            () = tools.clock.sleep(tools.clock.jittered(tools.times.retry)) => {}
        }
        self.look_again();
    }

    fn rests_until(&self, seen: Seen) -> Moment {
        let now = self.tools.clock.now();
        let mut until = self.metadata_due.min(self.lock_due);
        if let Some(lock) = self.lock.as_ref().filter(|_| self.standing() == Standing::Ours) {
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
        self.backoff.is_some_and(|backoff| backoff.action == action && self.tools.clock.now() < backoff.until)
    }

    /// What follows from how an action went.
    pub(super) async fn settle(&mut self, action: Action, outcome: Result<(), Failure>) {
        match outcome {
            Ok(()) => {
                self.backoff = None;
                return;
            }
            Err(Failure::Look) => {
                self.back_off(action, LOOK_DELAY, LONGEST_DELAY);
            }
            Err(Failure::Passing(message) | Failure::NoSpace(message)) => {
                // What stands still for want of a renewal is not made to wait longer than that takes.
                let renews = matches!(action, Action::Renew | Action::Resume);
                let longest = if renews { self.tools.times.retry } else { LONGEST_DELAY };
                let again_in = self.back_off(action, FIRST_DELAY.min(longest), longest);
                tracing::warn!(sandbox = %self.id, ?action, message, ?again_in, "an action failed");
            }
            Err(Failure::Refused { reason, message }) => {
                tracing::warn!(sandbox = %self.id, ?action, %reason, message, "a wish was refused");
                self.seat = None;
                self.refuse_until_asked();
                self.told.running = false;
                // The status is the holder's to write.
                if self.is_held() || matches!(reason, Reason::LockMissing | Reason::InvalidLock | Reason::Unsigned) {
                    self.report_failed(reason, &message).await;
                }
                self.tools.board.post(&self.id, Passing::Failed { reason, message });
            }
        }
        self.lock_due = self.tools.clock.now();
    }

    /// The same action waits from now on, twice as long each time.
    fn back_off(&mut self, action: Action, first: Duration, longest: Duration) -> Duration {
        let delay = match self.backoff {
            Some(backoff) if backoff.action == action => (backoff.delay * 2).clamp(first, longest),
            Some(_) | None => first,
        };
        let until = self.tools.clock.now() + self.tools.clock.jittered(delay);
        self.backoff = Some(Backoff { action, until, delay });
        delay
    }

    /// This spec is not tried again until it changes or a session comes.
    pub(super) fn refuse_until_asked(&mut self) {
        self.refused = Some((self.spec_sha256.clone(), self.tools.board.asked(&self.id)));
    }

    /// The last try failed for good, and neither has the spec changed nor has anybody asked since.
    pub(super) fn is_refused(&self) -> bool {
        let now = (&self.spec_sha256, self.tools.board.asked(&self.id));
        self.refused.as_ref().is_some_and(|(spec, asked)| (spec, *asked) == now)
    }

    pub(super) fn spec_sha256(&self) -> &str {
        &self.spec_sha256
    }
}
