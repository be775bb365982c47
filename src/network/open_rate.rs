//! Limits how many connections a sandbox opens per time.

use crate::{clock::Moment, config::Rate};

/// A token bucket: as many at once as the rate has per period, then as fast as the rate.
#[derive(Debug)]
pub struct OpenRate {
    /// `None` means no limit.
    rate: Option<Rate>,
    tokens: f64,
    refilled_at: Moment,
}

impl OpenRate {
    pub fn new(rate: Option<Rate>, now: Moment) -> Self {
        Self { rate, tokens: rate.map_or(0.0, |rate| f64::from(rate.count)), refilled_at: now }
    }

    /// Takes one, if there is one.
    pub fn take(&mut self, now: Moment) -> bool {
        let Some(Rate { count, per }) = self.rate else { return true };
        let burst = f64::from(count);
        let refilled = (now - self.refilled_at).as_secs_f64() * burst / per.as_secs_f64();
        self.tokens = burst.min(self.tokens + refilled);
        self.refilled_at = now;
        let has_one = self.tokens >= 1.0;
        if has_one {
            self.tokens -= 1.0;
        }
        has_one
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_burst_passes_and_the_rest_comes_with_time() {
        let at = |millis: u64| Moment(Duration::from_millis(millis));
        let mut rate = OpenRate::new(Some(Rate { count: 5, per: Duration::from_secs(1) }), at(0));
        let passed = |rate: &mut OpenRate, now: Moment| (0..100).filter(|_| rate.take(now)).count();
        assert_eq!(passed(&mut rate, at(0)), 5);
        assert_eq!(passed(&mut rate, at(100)), 0);
        assert_eq!(passed(&mut rate, at(400)), 2);
        assert_eq!(passed(&mut rate, at(60_000)), 5, "what was not used is not saved up");
        assert!(OpenRate::new(None, at(0)).take(at(0)));
    }
}
