//! The loop of one sandbox on this instance: observe, desired, plan, act, report, until nothing of the sandbox is left
//! here. What the worker knows is divided among small owners, each in its own file.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use baton_protocol::{id::SandboxId, reason::Reason};

use super::{
    ReconcilerContext,
    actions::{ActionResult, Failure},
    activity::Activity,
    announced::Announced,
    checkpoint_state::CheckpointState,
    contention::Contention,
    desired::desired,
    lease_view::LeaseView,
    observe::Observation,
    plan::{Action, LockState, plan},
    record_view::RecordView,
    retry::{FIRST_DELAY, LONGEST_DELAY, Retry, STALE_DELAY},
    start_state::StartState,
    worker_telemetry::Telemetry,
    workers::Wakeup,
};
use crate::{
    bus::{AttachGuard, LifecycleEvent},
    clock::Moment,
    runtime::{Container, ContainerView},
    storage::lease::LeaseHandle,
};

/// Minimum rest between two passes that no event triggers.
const SHORTEST_REST: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) id: SandboxId,
    pub(super) context: Arc<ReconcilerContext>,
    pub(super) wakeup: Arc<Wakeup>,
    pub(super) record: RecordView,
    pub(super) lease: LeaseView,
    pub(super) contention: Contention,
    pub(super) start: StartState,
    pub(super) checkpoints: CheckpointState,
    pub(super) activity: Activity,
    pub(super) announced: Announced,
    pub(super) retry: Retry,
    pub(super) telemetry: Telemetry,
}

impl Worker {
    pub(super) fn new(id: SandboxId, context: Arc<ReconcilerContext>, wakeup: Arc<Wakeup>) -> Self {
        Self::with(id, context, wakeup, None, None)
    }

    /// For a sandbox that the sweep has taken, with the lock it has watched.
    pub(super) fn taken(
        id: SandboxId,
        context: Arc<ReconcilerContext>,
        wakeup: Arc<Wakeup>,
        handle: LeaseHandle,
        attach_guard: AttachGuard,
    ) -> Self {
        Self::with(id, context, wakeup, Some(handle), Some(attach_guard))
    }

    fn with(
        id: SandboxId,
        context: Arc<ReconcilerContext>,
        wakeup: Arc<Wakeup>,
        handle: Option<LeaseHandle>,
        attach_guard: Option<AttachGuard>,
    ) -> Self {
        let now = context.clock.now();
        Self {
            id,
            record: RecordView::new(now),
            lease: LeaseView::new(now, handle),
            contention: Contention::default(),
            start: StartState::default(),
            checkpoints: CheckpointState::default(),
            activity: Activity::new(now, attach_guard),
            announced: Announced::new(),
            retry: Retry::default(),
            telemetry: Telemetry::new(&context.metrics),
            context,
            wakeup,
        }
    }

    pub(super) async fn run(mut self) {
        while self.pass().await.is_continue() {}
        self.start.abandon_fetch().await;
        // A purge whose last response was lost ends here.
        if self.announced.running {
            self.announce_left(None);
        }
        self.context.bus.set_held(&self.id, false);
        self.context.bus.forget(&self.id);
    }

    async fn pass(&mut self) -> ControlFlow<()> {
        let observation = self.observe().await;
        self.announce(&observation).await;
        let (desired, leave_reason) = desired(&observation.inputs);
        self.announced.leave_reason = leave_reason;
        let action = plan(desired, &observation.observed);
        self.publish_evictability(observation.seen, action, desired);
        if action == Action::Finish {
            return ControlFlow::Break(());
        }
        if action == Action::Rest {
            self.report_at_rest(desired, &observation.observed).await;
            self.wait_for_change(&observation).await;
        } else {
            tracing::debug!(sandbox = %self.id, ?desired, observed = ?observation.observed, ?action, "plan");
            let outcome = self.act(action, desired, &observation.observed).await;
            self.handle_outcome(action, outcome).await;
        }
        ControlFlow::Continue(())
    }

    /// Invalidates everything that was read.
    pub(super) fn read_again(&mut self) {
        let now = self.context.clock.now();
        (self.record.due, self.lease.due) = (now, now);
    }

    /// Waits until something may have changed since the observation.
    async fn wait_for_change(&mut self, observation: &Observation) {
        let context = self.context.clone();
        let mut container = context.lifecycle.watch(&self.id);
        let mut seen = observation.seen;
        if *container.borrow_and_update() != seen {
            return;
        }
        let (id, place) = (self.id.clone(), self.record.store_kind());
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
                () = self.wakeup.woken() => return self.read_again(),
                () = &mut stored => return self.read_again(),
                changed = container.changed() => {
                    let then = std::mem::replace(&mut seen, *container.borrow_and_update());
                    // Commands start and end all the time, and only idleness depends on them.
                    if changed.is_err() || seen.container != then.container {
                        return;
                    }
                    self.activity.note(seen, context.clock.now());
                    self.publish_evictability_at_rest(seen);
                }
                _ = context.drain.until(|now| *now != observation.inputs.drain) => return,
                () = context.clock.sleep_until(until.max(now + SHORTEST_REST)) => return,
            }
        }
    }

    fn rests_until(&self, seen: ContainerView) -> Moment {
        let now = self.context.clock.now();
        let runs = seen.container == Container::Running;
        let times = [
            Some(self.record.due),
            Some(self.lease.due),
            self.lease.next_renewal(),
            self.retry.next(now),
            self.idle_in(seen).filter(|_| runs).map(|left| now + left),
            self.contention.probe_ends(),
            self.checkpoints.due.filter(|_| runs),
        ];
        // What is due already was part of the plan to rest.
        times.into_iter().flatten().filter(|time| *time > now).min().unwrap_or(now)
    }

    /// Handles the outcome of an action: back off, refuse, or carry on.
    pub(super) async fn handle_outcome(&mut self, action: Action, outcome: ActionResult) {
        match outcome {
            Ok(()) => return self.retry.succeeded(action),
            Err(Failure::Stale) => {
                self.back_off(action, STALE_DELAY, LONGEST_DELAY);
            }
            Err(Failure::Transient(message) | Failure::NoSpace(message)) => {
                // A container that is stopped until the lease is renewed must not wait longer than the renewal takes.
                let renews = matches!(action, Action::Renew | Action::Resume);
                let longest = if renews { self.context.times.retry } else { LONGEST_DELAY };
                let again_in = self.back_off(action, FIRST_DELAY.min(longest), longest);
                tracing::warn!(sandbox = %self.id, ?action, message, ?again_in, "an action failed");
            }
            Err(Failure::Refused { reason, message }) => {
                tracing::warn!(sandbox = %self.id, ?action, %reason, message, "the spec was refused");
                self.activity.attach_guard = None;
                self.refuse_until_asked();
                self.announced.running = false;
                // Only the holder writes the status.
                let is_about_lock = matches!(reason, Reason::LockMissing | Reason::InvalidLock | Reason::Unsigned);
                if self.lease.is_held() || is_about_lock {
                    self.report_failed(reason, &message).await;
                }
                self.post(LifecycleEvent::Failed { reason, message });
            }
        }
        self.lease.due = self.context.clock.now();
    }

    /// A lease that is not late yet has its own interval for the next attempt to renew it.
    fn back_off(&mut self, action: Action, first: Duration, longest: Duration) -> Duration {
        if action == Action::Renew && self.lease.state() == LockState::Ours {
            return self.context.times.retry;
        }
        self.retry.back_off(action, &self.context.clock, first, longest)
    }

    /// Does not retry this spec until it changes or a session attaches.
    pub(super) fn refuse_until_asked(&mut self) {
        self.retry.refuse(self.record.spec_sha256(), self.context.bus.asked(&self.id));
    }

    /// The last attempt failed for good; since then the spec has not changed and no session has attached.
    pub(super) fn is_refused(&self) -> bool {
        self.retry.is_refused(self.record.spec_sha256(), self.sessions())
    }
}
