//! The timing of the lease and of the calls around it, as one value.
//!
//! The owner may run until *hold* after its last renewal and is certainly stopped *confirm* later;
//! a waiter waits *takeover*. If clock rates differ by less than 1.5 : 1, the two never overlap.

use std::time::Duration;

const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

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
    /// How often to poll the lock: right after a client disconnected or while waiting for the lock (`look_now`), for a
    /// while after that (`look_soon`), and otherwise (`look`).
    pub look_now: Duration,
    pub look_soon: Duration,
    pub look: Duration,
    /// How long "right after" is; "a while" is six times as long.
    pub now: Duration,
    /// How often the owner reads the metadata.
    pub look_at_metadata: Duration,
}

impl Default for LeaseTimes {
    fn default() -> Self {
        Self {
            renew: seconds(5),
            retry: seconds(1),
            call: seconds(2),
            hold: seconds(15),
            confirm: seconds(2),
            takeover: seconds(30),
            waiter: seconds(60),
            beat: seconds(20),
            handoff_wait: seconds(120),
            frozen: seconds(3),
            look_now: Duration::from_millis(60),
            look_soon: Duration::from_millis(250),
            look: seconds(1),
            now: seconds(10),
            look_at_metadata: seconds(5),
        }
    }
}

impl LeaseTimes {
    /// Checks that at most one instance runs a sandbox with these times; the error names the wrong one.
    pub fn check(&self) -> Result<(), String> {
        let show = |span: Duration| humantime::format_duration(span).to_string();
        if self.hold < self.renew * 2 + self.call {
            let least = self.renew * 2 + self.call;
            return Err(format!(
                "BATON_HOLD is {}, but with BATON_RENEW at {} it must be {} or more, or one lost renewal stops the sandbox",
                show(self.hold),
                show(self.renew),
                show(least)
            ));
        }
        let least = (self.hold + self.confirm) * 3 / 2;
        if self.takeover < least {
            return Err(format!(
                "BATON_TAKEOVER is {}, but with BATON_HOLD at {} it must be {} or more, or two copies could run",
                show(self.takeover),
                show(self.hold),
                show(least)
            ));
        }
        Ok(())
    }

    /// Multiplies all of them.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Self {
        let scale = |span: Duration| span.mul_f64(factor);
        Self {
            renew: scale(self.renew),
            retry: scale(self.retry),
            call: scale(self.call),
            hold: scale(self.hold),
            confirm: scale(self.confirm),
            takeover: scale(self.takeover),
            waiter: scale(self.waiter),
            beat: scale(self.beat),
            handoff_wait: scale(self.handoff_wait),
            frozen: scale(self.frozen),
            look_now: scale(self.look_now),
            look_soon: scale(self.look_soon),
            look: scale(self.look),
            now: scale(self.now),
            look_at_metadata: scale(self.look_at_metadata),
        }
    }
}
