//! Metrics and traces of one worker. Actions are traced as part of the request that caused them.

use std::time::{Duration, SystemTime};

use super::{
    actions::{ActionResult, Failure},
    plan::Action,
    worker::Worker,
};
use crate::{
    bus::LeaveReason,
    clock::Moment,
    metrics::{ActionOutcome, Metrics, Shown},
    traces::{Cause, Parts, Traceparent},
};

#[derive(Debug)]
pub(super) struct Telemetry {
    /// Counts the container of this sandbox among those of the instance.
    pub(super) container: Shown,
    /// The timed steps of the current action.
    pub(super) steps: Parts,
    /// The request that is already fulfilled: later actions are not attributed to it.
    fulfilled: Option<Traceparent>,
}

impl Telemetry {
    pub(super) fn new(metrics: &Metrics) -> Self {
        Self { container: metrics.sandbox(), steps: Parts::default(), fulfilled: None }
    }
}

/// An action that is recorded when it is over.
#[derive(Debug)]
pub(super) struct TracedAction {
    action: Action,
    began: (Moment, SystemTime),
    /// The request behind the spec that the action was planned from.
    request: Option<Traceparent>,
    /// Another instance requested it through the lock; its trace context is in metadata that is not read yet.
    is_for_a_waiter: bool,
}

/// How significant an action is for a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weight {
    /// What a request is about.
    Whole,
    /// An intermediate step, recorded only in the trace of a request.
    Part,
    /// Too frequent, or too short.
    None,
}

fn weight(action: Action) -> Weight {
    match action {
        Action::Create
        | Action::Restore
        | Action::Checkpoint
        | Action::Save
        | Action::Snapshot
        | Action::Release
        | Action::Purge => Weight::Whole,
        Action::Acquire | Action::Extract | Action::Remove | Action::Withdraw => Weight::Part,
        Action::Wait
        | Action::Decline
        | Action::Renew
        | Action::Refuse(_)
        | Action::Fence
        | Action::Resume
        | Action::Probe
        | Action::Expire
        | Action::SetEgress
        | Action::RecreateMetadata
        | Action::ReportInvalid
        | Action::ForgetAnswers
        | Action::CollectGarbage
        | Action::Rest
        | Action::Finish => Weight::None,
    }
}

/// The cause to record; `None` if the action is not recorded.
fn cause(
    action: Action,
    outcome: ActionOutcome,
    asked: Option<Traceparent>,
    fulfilled: Option<Traceparent>,
) -> Option<Cause> {
    // Nothing was done: the state had changed.
    if outcome == ActionOutcome::Again {
        return None;
    }
    match (weight(action), asked) {
        (Weight::None, _) => None,
        (_, Some(asked)) if fulfilled != Some(asked) => Some(Cause::Request(asked)),
        (Weight::Part, _) => None,
        (Weight::Whole, Some(before)) => Some(Cause::After(before)),
        (Weight::Whole, None) => Some(Cause::Unrequested),
    }
}

impl Worker {
    pub(super) fn begin_action(&self, action: Action) -> TracedAction {
        TracedAction {
            action,
            began: (self.context.clock.now(), self.context.clock.wall()),
            request: self.record.spec().and_then(|spec| spec.traceparent),
            is_for_a_waiter: action == Action::Checkpoint && self.announced.leave_reason == LeaveReason::Waiter,
        }
    }

    /// Counts the action and adds it to the trace of its request.
    pub(super) fn end_action(&mut self, traced: &TracedAction, done: &ActionResult) {
        let (action, (began, began_wall)) = (traced.action, traced.began);
        let outcome = outcome(done);
        let took: Duration = self.context.clock.now() - began;
        self.context.metrics.acted(&action, outcome, took);
        let steps = self.telemetry.steps.drain();
        // The report that follows a checkpoint has read what the waiter's client wrote.
        let request = if traced.is_for_a_waiter { self.context.records.cause_of(&self.id) } else { traced.request };
        if let Some(cause) = cause(action, outcome, request, self.telemetry.fulfilled) {
            self.context.traces.acted(&action, cause, outcome, began_wall, steps);
        }
        if weight(action) == Weight::Whole && outcome == ActionOutcome::Done {
            self.telemetry.fulfilled = request;
        }
    }
}

fn outcome(done: &ActionResult) -> ActionOutcome {
    match done {
        Ok(()) => ActionOutcome::Done,
        Err(Failure::Stale) => ActionOutcome::Again,
        Err(Failure::Transient(_) | Failure::NoSpace(_)) => ActionOutcome::Failed,
        Err(Failure::Refused { .. }) => ActionOutcome::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(span: u8) -> Traceparent {
        Traceparent { trace: [1; 16], span: [span; 8], sampled: true }
    }

    #[test]
    fn what_a_request_asked_for_is_its_own_and_what_comes_later_is_not() {
        let cause_of = |action, asked, fulfilled| cause(action, ActionOutcome::Done, asked, fulfilled);
        let (one, two) = (Some(context(1)), Some(context(2)));
        assert_eq!(cause_of(Action::Restore, two, one), Some(Cause::Request(context(2))));
        assert_eq!(cause_of(Action::Acquire, two, one), Some(Cause::Request(context(2))));
        assert_eq!(cause_of(Action::Checkpoint, one, one), Some(Cause::After(context(1))));
        assert_eq!(cause_of(Action::Remove, one, one), None);
        assert_eq!(cause_of(Action::Checkpoint, None, one), Some(Cause::Unrequested));
        assert_eq!(cause_of(Action::Acquire, None, None), None);
        assert_eq!(cause_of(Action::Renew, two, one), None);
        assert_eq!(cause(Action::Restore, ActionOutcome::Again, two, one), None);
        assert_eq!(cause(Action::Restore, ActionOutcome::Failed, two, one), Some(Cause::Request(context(2))));
    }
}
