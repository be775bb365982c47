//! Limits how often an object is written: the service allows about one write per second.
//!
//! One token bucket per object: one token per second, at most four, since a handoff writes the lock three times in a
//! row. A renewal leaves one token for a commit, a waiter leaves two.
//!
//! The burst that the service tolerates is not known beforehand. After it rejects one, the limit is strict for a while:
//! writes are one second apart, and a write of another instance, detected by a read, counts like our own. Waiting for
//! the right moment costs less than a rejection and a longer wait.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;

use crate::{
    clock::{Moment, SharedClock},
    storage::store::{Error, Priority, Result},
};

/// How long an object is not written after the service has rate-limited it.
pub const PENALTY: Duration = Duration::from_secs(1);
/// How long the limit stays strict after a rejection.
const STRICT_FOR: Duration = Duration::from_secs(600);
/// The maximum number of tracked objects; beyond it, idle ones are dropped.
const MAX_TRACKED: usize = 1024;

#[derive(Debug)]
pub struct WriteRate {
    per_second: f64,
    burst: f64,
    objects: Mutex<HashMap<String, Tokens>>,
    /// Until when no bursts are attempted.
    strict_until: Mutex<Option<Moment>>,
}

#[derive(Clone, Copy, Debug)]
struct Tokens {
    left: f64,
    counted: Moment,
    barred_until: Moment,
}

impl Default for WriteRate {
    fn default() -> Self {
        Self::new(1.0, 4.0)
    }
}

impl WriteRate {
    pub fn new(per_second: f64, burst: f64) -> Self {
        Self { per_second, burst, objects: Mutex::default(), strict_until: Mutex::default() }
    }

    fn count(&self, tokens: &mut Tokens, now: Moment) {
        let grown = (now - tokens.counted).as_secs_f64() * self.per_second;
        tokens.left = (tokens.left + grown).min(self.burst);
        tokens.counted = now;
    }

    /// How long until a write of this priority may be sent; zero takes a token.
    fn spend(&self, tokens: &mut Tokens, urgency: Priority, now: Moment) -> Duration {
        self.count(tokens, now);
        let needed = match urgency {
            Priority::Commit | Priority::View => 1.0,
            Priority::Renewal => 2.0,
            Priority::Waiter => 3.0,
        };
        let barred = tokens.barred_until - now;
        if tokens.left >= needed && barred.is_zero() {
            tokens.left -= 1.0;
            if self.is_strict(now) {
                tokens.barred_until = now + self.apart();
            }
            return Duration::ZERO;
        }
        barred.max(Duration::from_secs_f64(((needed - tokens.left) / self.per_second).max(0.001)))
    }

    /// Waits until a write may be sent; `RateLimited` if that is not before the deadline.
    pub async fn turn(&self, clock: &SharedClock, key: &str, urgency: Priority, deadline: Moment) -> Result<()> {
        loop {
            let now = clock.now();
            let wait = self.reserve(key, urgency, now);
            if wait.is_zero() {
                return Ok(());
            }
            if now + wait >= deadline {
                return Err(Error::RateLimited(key.to_owned()));
            }
            clock.sleep(wait).await;
        }
    }

    fn reserve(&self, key: &str, urgency: Priority, now: Moment) -> Duration {
        let mut objects = self.objects.lock();
        if objects.len() > MAX_TRACKED {
            objects.retain(|_, tokens| {
                self.count(tokens, now);
                tokens.left < self.burst || tokens.barred_until > now
            });
        }
        let full = Tokens { left: self.burst, counted: now, barred_until: now };
        self.spend(objects.entry(key.to_owned()).or_insert(full), urgency, now)
    }

    /// Records that the service rate-limited this object at `now`: it is not written before `moment`, and no bursts are
    /// attempted for a while.
    pub fn bar(&self, key: &str, now: Moment, moment: Moment) {
        if let Some(tokens) = self.objects.lock().get_mut(key) {
            tokens.barred_until = tokens.barred_until.max(moment);
        }
        *self.strict_until.lock() = Some(now + STRICT_FOR);
    }

    /// Records that a read at `now` found a new version of this object.
    pub fn noticed(&self, key: &str, now: Moment) {
        if self.is_strict(now) {
            let full = Tokens { left: self.burst, counted: now, barred_until: now };
            let mut objects = self.objects.lock();
            let tokens = objects.entry(key.to_owned()).or_insert(full);
            tokens.barred_until = tokens.barred_until.max(now + self.apart());
        }
    }

    fn is_strict(&self, now: Moment) -> bool {
        self.strict_until.lock().is_some_and(|until| now < until)
    }

    fn apart(&self) -> Duration {
        Duration::from_secs_f64(1.0 / self.per_second)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::testkit::TestClock;

    const FAR: Moment = Moment(Duration::from_secs(1 << 30));

    #[tokio::test(start_paused = true)]
    async fn four_writes_go_at_once_and_then_one_a_second() {
        let clock: SharedClock = Arc::new(TestClock::new(1));
        let (pace, start) = (WriteRate::default(), clock.now());
        for _ in 0..4 {
            pace.turn(&clock, "k", Priority::Commit, FAR).await.unwrap();
        }
        assert_eq!(clock.now(), start);
        for second in 1..5 {
            pace.turn(&clock, "k", Priority::Commit, FAR).await.unwrap();
            let passed = (clock.now() - start).as_secs_f64();
            assert!((passed - f64::from(second)).abs() < 0.05, "{second}: {passed}");
        }
        pace.turn(&clock, "other", Priority::Waiter, clock.now()).await.expect("each object has its own");
    }

    #[tokio::test(start_paused = true)]
    async fn a_commit_goes_before_a_renewal_and_that_before_a_waiter() {
        let clock: SharedClock = Arc::new(TestClock::new(1));
        let pace = WriteRate::default();
        let now = clock.now();
        for _ in 0..2 {
            pace.turn(&clock, "k", Priority::Waiter, now).await.unwrap();
        }
        assert!(pace.turn(&clock, "k", Priority::Waiter, now).await.is_err(), "two are left for others");
        pace.turn(&clock, "k", Priority::Renewal, now).await.unwrap();
        assert!(pace.turn(&clock, "k", Priority::Renewal, now).await.is_err(), "one is left for a commit");
        pace.turn(&clock, "k", Priority::Commit, now).await.unwrap();
        assert!(pace.turn(&clock, "k", Priority::Commit, now).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_that_was_written_too_often_rests() {
        let clock: SharedClock = Arc::new(TestClock::new(1));
        let pace = WriteRate::default();
        pace.turn(&clock, "k", Priority::Commit, FAR).await.unwrap();
        let until = clock.now() + PENALTY;
        pace.bar("k", clock.now(), until);
        assert!(pace.turn(&clock, "k", Priority::Commit, clock.now()).await.is_err());
        pace.turn(&clock, "k", Priority::Commit, FAR).await.unwrap();
        assert!(clock.now() >= until);
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_that_refused_a_burst_gets_none_for_a_while_whoever_wrote_last() {
        let clock: SharedClock = Arc::new(TestClock::new(1));
        let pace = WriteRate::default();
        pace.noticed("k", clock.now());
        for _ in 0..3 {
            pace.turn(&clock, "k", Priority::Commit, clock.now()).await.expect("a burst is tried at first");
        }
        pace.bar("other", clock.now(), clock.now());
        clock.sleep(Duration::from_secs(5)).await;
        let began = clock.now();
        for second in 0..3 {
            pace.turn(&clock, "k", Priority::Commit, FAR).await.unwrap();
            let passed = (clock.now() - began).as_secs_f64();
            assert!((passed - f64::from(second)).abs() < 0.05, "{second}: {passed}");
        }
        clock.sleep(Duration::from_millis(1500)).await;
        let seen = clock.now();
        pace.noticed("k", seen);
        pace.turn(&clock, "k", Priority::Commit, FAR).await.unwrap();
        assert_eq!(clock.now() - seen, Duration::from_secs(1), "a second after another's write");
        clock.sleep(STRICT_FOR).await;
        for _ in 0..4 {
            pace.turn(&clock, "k", Priority::Commit, clock.now()).await.expect("then a burst is tried again");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn objects_at_rest_are_forgotten() {
        let clock: SharedClock = Arc::new(TestClock::new(1));
        let pace = WriteRate::default();
        for number in 0..3000 {
            pace.turn(&clock, &number.to_string(), Priority::Commit, FAR).await.unwrap();
            clock.sleep(Duration::from_millis(10)).await;
        }
        assert!(pace.objects.lock().len() <= MAX_TRACKED + 1, "{}", pace.objects.lock().len());
    }
}
