//! The timing of the lease and of the calls around it. Configuration, server and tests share this one type and its
//! defaults.
//!
//! The owner may run until *hold* after its last renewal and is certainly stopped *confirm* later;
//! a waiter waits *takeover*. If clock rates differ by less than 1.5 : 1, the two never overlap.

use std::time::Duration;

use super::{
    Error, Reader, parse,
    variables::{HANDOFF_WAIT, HOLD, RENEW, TAKEOVER, TIME_SCALE},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTimes {
    pub renew: Duration,
    /// The interval between retries of a failed renewal.
    pub retry: Duration,
    /// The timeout of one storage call on a small object.
    pub call: Duration,
    pub hold: Duration,
    pub confirm: Duration,
    pub takeover: Duration,
    /// A waiter without a beat for this long is stale.
    pub waiter: Duration,
    pub beat: Duration,
    pub handoff_wait: Duration,
    /// If the store's clock advanced by this much more than ours between two renewals, this machine was frozen.
    pub frozen: Duration,
    pub poll: PollIntervals,
}

/// How often to poll when nothing wakes the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollIntervals {
    /// The lock, while a release is imminent; docs/adr/0009 works out the cost.
    pub lock_now: Duration,
    /// The lock, for a while after a client left, or while this instance wants it.
    pub lock_soon: Duration,
    pub lock: Duration,
    /// `lock_now` applies for this long after a client left or this instance began to wait; `lock_soon` for six times
    /// as long.
    pub now: Duration,
    pub metadata: Duration,
}

impl LeaseTimes {
    pub const DEFAULT: Self = Self {
        renew: Duration::from_secs(5),
        retry: Duration::from_secs(1),
        call: Duration::from_secs(2),
        hold: Duration::from_secs(15),
        confirm: Duration::from_secs(2),
        takeover: Duration::from_secs(30),
        waiter: Duration::from_secs(60),
        beat: Duration::from_secs(20),
        handoff_wait: Duration::from_secs(120),
        frozen: Duration::from_secs(3),
        poll: PollIntervals {
            lock_now: Duration::from_millis(60),
            lock_soon: Duration::from_millis(250),
            lock: Duration::from_secs(1),
            now: Duration::from_secs(10),
            metadata: Duration::from_secs(5),
        },
    };

    pub(super) fn read(from: &mut Reader<'_>, on_cloud_run: bool) -> Result<Self, Error> {
        let renew = from.required(RENEW, parse::span)?;
        let hold = from.required(HOLD, parse::span)?;
        let takeover = from.required(TAKEOVER, parse::span)?;
        let handoff_wait = from.required(HANDOFF_WAIT, parse::span)?;
        let scale = from.required(TIME_SCALE, parse::factor)?;
        if on_cloud_run && scale != 1.0 {
            return Err(Error::Conflict(format!("{TIME_SCALE} is for tests and is refused on Cloud Run: unset it")));
        }
        let times = Self { renew, hold, takeover, handoff_wait, ..Self::DEFAULT };
        times.check().map_err(Error::Conflict)?;
        Ok(times.scaled(scale))
    }

    /// Checks that at most one instance runs a sandbox with these times; the error names the wrong one.
    pub fn check(&self) -> Result<(), String> {
        let show = humantime::format_duration;
        let (renew, hold, takeover) = (show(self.renew), show(self.hold), show(self.takeover));
        let least = self.renew * 2 + self.call;
        if self.hold < least {
            return Err(format!(
                "{HOLD} is {hold}, but with {RENEW} at {renew} it must be {} or more, or one lost renewal stops the sandbox",
                show(least)
            ));
        }
        let least = (self.hold + self.confirm) * 3 / 2;
        if self.takeover < least {
            return Err(format!(
                "{TAKEOVER} is {takeover}, but with {HOLD} at {hold} it must be {} or more, or two copies could run",
                show(least)
            ));
        }
        Ok(())
    }

    /// Multiplies all of them.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        let Self { renew, retry, call, hold, confirm, takeover, waiter, beat, handoff_wait, frozen, poll } = self;
        let scale = |span: Duration| span.mul_f64(factor);
        Self {
            renew: scale(renew),
            retry: scale(retry),
            call: scale(call),
            hold: scale(hold),
            confirm: scale(confirm),
            takeover: scale(takeover),
            waiter: scale(waiter),
            beat: scale(beat),
            handoff_wait: scale(handoff_wait),
            frozen: scale(frozen),
            poll: PollIntervals {
                lock_now: scale(poll.lock_now),
                lock_soon: scale(poll.lock_soon),
                lock: scale(poll.lock),
                now: scale(poll.now),
                metadata: scale(poll.metadata),
            },
        }
    }
}

impl PollIntervals {
    /// Time until the next read of the lock. `left`: time since the last client left; `waited`: how long this
    /// instance has been registered as waiter.
    pub fn lock_in(&self, held: bool, movable: bool, left: Option<Duration>, waited: Option<Duration>) -> Duration {
        let is_now = |since: Option<Duration>| since.is_some_and(|since| since < self.now);
        let is_soon = left.is_some_and(|left| left < self.now * 6);
        if is_now(waited) || (held && movable && is_now(left)) {
            self.lock_now
        } else if is_soon || !held {
            self.lock_soon
        } else {
            self.lock
        }
    }
}
