//! Traces actions as part of the request that caused them.

use std::time::SystemTime;

use super::{plan::Action, worker::Worker};
use crate::{
    bus::LeaveReason,
    metrics::Outcome,
    traces::{Cause, Traceparent},
};

/// An action that is recorded when it is over.
#[derive(Debug)]
pub(super) struct TracedAction {
    action: Action,
    began: SystemTime,
    /// The request behind the spec that the action was planned from.
    behind: Option<Traceparent>,
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
        | Action::Refuse
        | Action::Fence
        | Action::Resume
        | Action::Rest => Weight::None,
    }
}

/// The cause to record; `None` if the action is not recorded.
fn cause(
    action: Action,
    outcome: Outcome,
    asked: Option<Traceparent>,
    fulfilled: Option<Traceparent>,
) -> Option<Cause> {
    // Nothing was done: the state had changed.
    if outcome == Outcome::Again {
        return None;
    }
    match (weight(action), asked) {
        (Weight::None, _) => None,
        (_, Some(asked)) if fulfilled != Some(asked) => Some(Cause::Request(asked)),
        (Weight::Part, _) => None,
        (Weight::Whole, Some(before)) => Some(Cause::After(before)),
        (Weight::Whole, None) => Some(Cause::Nobody),
    }
}

impl Worker {
    pub(super) fn begin_to_trace(&self, action: Action) -> TracedAction {
        TracedAction {
            action,
            began: self.context.clock.wall(),
            behind: self.found.as_ref().and_then(|found| found.metadata.spec.traceparent),
            is_for_a_waiter: action == Action::Checkpoint && self.why == LeaveReason::Waiter,
        }
    }

    pub(super) fn trace(&mut self, deed: &TracedAction, outcome: Outcome) {
        let parts = self.parts.take();
        // The report that follows a checkpoint has read what the waiter's client wrote.
        let asked = if deed.is_for_a_waiter { self.context.records.cause_of(&self.id) } else { deed.behind };
        if let Some(cause) = cause(deed.action, outcome, asked, self.fulfilled) {
            self.context.traces.acted(&deed.action, cause, outcome, deed.began, parts);
        }
        if weight(deed.action) == Weight::Whole && outcome == Outcome::Done {
            self.fulfilled = asked;
        }
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
        let told = |action, asked, fulfilled| cause(action, Outcome::Done, asked, fulfilled);
        let (one, two) = (Some(context(1)), Some(context(2)));
        assert_eq!(told(Action::Restore, two, one), Some(Cause::Request(context(2))));
        assert_eq!(told(Action::Acquire, two, one), Some(Cause::Request(context(2))));
        assert_eq!(told(Action::Checkpoint, one, one), Some(Cause::After(context(1))));
        assert_eq!(told(Action::Remove, one, one), None);
        assert_eq!(told(Action::Checkpoint, None, one), Some(Cause::Nobody));
        assert_eq!(told(Action::Acquire, None, None), None);
        assert_eq!(told(Action::Renew, two, one), None);
        assert_eq!(cause(Action::Restore, Outcome::Again, two, one), None);
        assert_eq!(cause(Action::Restore, Outcome::Failed, two, one), Some(Cause::Request(context(2))));
    }
}
