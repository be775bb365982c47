//! What failed, and when it is tried again.

use std::{collections::HashMap, time::Duration};

use super::plan::Action;
use crate::clock::{Moment, SharedClock};

/// Delay before an action that met stale state is retried on what was read since.
pub(super) const STALE_DELAY: Duration = Duration::from_millis(5);
pub(super) const FIRST_DELAY: Duration = Duration::from_secs(1);
pub(super) const LONGEST_DELAY: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Retry {
    /// The step that failed last. A success of any step clears it.
    step: Option<(Action, Backoff)>,
    /// Upkeep that failed. It delays only itself.
    upkeep: HashMap<Action, Backoff>,
    refused: Option<Refused>,
}

/// An action that failed transiently is not retried before `until`.
#[derive(Clone, Copy, Debug)]
struct Backoff {
    until: Moment,
    delay: Duration,
}

/// A permanent failure: the spec at that time, and how many sessions had attached until then.
#[derive(Debug, PartialEq, Eq)]
struct Refused {
    spec_sha256: String,
    sessions: u64,
}

impl Retry {
    pub(super) fn succeeded(&mut self, action: Action) {
        self.upkeep.remove(&action);
        if !action.is_upkeep() || self.step.is_some_and(|(failed, _)| failed == action) {
            self.step = None;
        }
    }

    /// Delays the next attempt of the same action, doubling the delay each time.
    pub(super) fn back_off(
        &mut self,
        action: Action,
        clock: &SharedClock,
        first: Duration,
        longest: Duration,
    ) -> Duration {
        let delay = self.backoff(action).map_or(first, |backoff| (backoff.delay * 2).clamp(first, longest));
        let backoff = Backoff { until: clock.now() + clock.jittered(delay), delay };
        // A renewal that backs off is one of a late lease, and nothing else is done about that.
        if action.is_upkeep() && action != Action::Renew {
            self.upkeep.insert(action, backoff);
        } else {
            self.step = Some((action, backoff));
        }
        delay
    }

    fn backoff(&self, action: Action) -> Option<Backoff> {
        match self.step {
            Some((failed, backoff)) if failed == action => Some(backoff),
            Some(_) | None => self.upkeep.get(&action).copied(),
        }
    }

    /// Whether the next attempt of this action is not due yet.
    pub(super) fn defers(&self, action: Action, now: Moment) -> bool {
        self.backoff(action).is_some_and(|backoff| now < backoff.until)
    }

    /// The step whose next attempt is not due yet.
    pub(super) fn deferred(&self, now: Moment) -> Option<Action> {
        self.step.filter(|(_, backoff)| now < backoff.until).map(|(action, _)| action)
    }

    /// When the next attempt of anything is due.
    pub(super) fn next(&self, now: Moment) -> Option<Moment> {
        let step = self.step.iter().map(|(_, backoff)| backoff.until);
        step.chain(self.upkeep.values().map(|backoff| backoff.until)).filter(|until| *until > now).min()
    }

    /// Gives up on this spec until it changes or another session attaches.
    pub(super) fn refuse(&mut self, spec_sha256: &str, sessions: u64) {
        self.refused = Some(Refused { spec_sha256: spec_sha256.to_owned(), sessions });
    }

    /// Whether this spec failed for good, and no session has attached since.
    pub(super) fn is_refused(&self, spec_sha256: &str, sessions: u64) -> bool {
        self.refused.as_ref().is_some_and(|refused| refused.spec_sha256 == spec_sha256 && refused.sessions == sessions)
    }
}
