//! Time and randomness of one instance. Nothing else asks the system for either, so that a simulation can give each
//! instance its own clock, run it faster, freeze it, or replay its random numbers.

use std::{
    fmt,
    future::Future,
    ops::{Add, Sub},
    sync::Arc,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use baton_protocol::id::{InstanceId, Nonce, SandboxId};
use serde::{Deserialize, Serialize};

/// A moment on one instance's own clock: time since boot, including suspended time. Moments of two machines must
/// never be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Moment(pub Duration);

impl Add<Duration> for Moment {
    type Output = Moment;
    fn add(self, span: Duration) -> Moment {
        Moment(self.0.saturating_add(span))
    }
}

impl Sub<Moment> for Moment {
    type Output = Duration;
    /// Zero if `earlier` is actually later.
    fn sub(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

#[async_trait]
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    fn now(&self) -> Moment;
    /// For people and for records; no decision compares it with another machine's wall clock.
    fn wall(&self) -> SystemTime;
    async fn sleep_until(&self, moment: Moment);
    fn fill(&self, bytes: &mut [u8]);
    /// Whether blocking work gets a thread of its own. Not in a simulation, because threads end in no fixed order.
    fn has_threads(&self) -> bool {
        true
    }
}

pub type SharedClock = Arc<dyn Clock>;

/// A timeout passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no answer within {}", humantime::format_duration(*.0))]
pub struct Elapsed(pub Duration);

impl dyn Clock {
    pub async fn sleep(&self, span: Duration) {
        self.sleep_until(self.now() + span).await;
    }

    /// Returns the result of `work`, or [`Elapsed`] after `span`; the work is then dropped.
    pub async fn timeout<T>(&self, span: Duration, work: impl Future<Output = T>) -> Result<T, Elapsed> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = self.sleep(span) => Err(Elapsed(span)),
        }
    }

    pub fn bits(&self) -> [u8; 16] {
        let mut bits = [0; 16];
        self.fill(&mut bits);
        bits
    }

    pub fn nonce(&self) -> Nonce {
        Nonce::from_bits(self.bits())
    }

    pub fn instance_id(&self) -> InstanceId {
        InstanceId::from_bits(self.bits())
    }

    pub fn sandbox_id(&self) -> SandboxId {
        let uuid = uuid::Builder::from_random_bytes(self.bits()).into_uuid();
        SandboxId::from_uuid(&uuid.to_string()).expect("a UUID is short enough for an id")
    }

    /// `span` plus up to a fifth, so that instances do not run in lockstep.
    pub fn jittered(&self, span: Duration) -> Duration {
        let mut dice = [0; 4];
        self.fill(&mut dice);
        span + span.mul_f64(f64::from(u32::from_le_bytes(dice)) / f64::from(u32::MAX) / 5.0)
    }

    /// The wall clock in RFC 3339, as used in records.
    pub fn timestamp(&self) -> String {
        humantime::format_rfc3339_seconds(self.wall()).to_string()
    }
}

/// The machine's own clock and entropy.
#[derive(Debug, Default)]
pub struct SystemClock;

#[async_trait]
impl Clock for SystemClock {
    fn now(&self) -> Moment {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Moment(Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32))
    }

    #[expect(clippy::disallowed_methods, reason = "a clock reads the time")]
    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }

    #[expect(clippy::disallowed_methods, reason = "a clock reads the time")]
    async fn sleep_until(&self, moment: Moment) {
        // Tokio's timer does not count suspended time: check again after each sleep.
        loop {
            let left = moment - self.now();
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }

    fn fill(&self, bytes: &mut [u8]) {
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
                Ok(count) => filled += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => panic!("the kernel has no randomness: {error}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::TestClock;

    #[test]
    fn the_system_clock_counts_and_its_dice_differ() {
        let clock: SharedClock = Arc::new(SystemClock);
        let before = clock.now();
        assert_ne!(clock.nonce(), clock.nonce());
        assert!(clock.now() >= before);
        let id = clock.sandbox_id();
        let uuid = id.as_str().strip_prefix("sandbox-").and_then(|text| uuid::Uuid::parse_str(text).ok());
        assert_eq!(uuid.map(|uuid| uuid.get_version_num()), Some(4), "{id}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_timeout_drops_the_work_and_says_how_long_it_waited() {
        let clock: SharedClock = Arc::new(TestClock::new(1));
        let waited = clock.timeout(Duration::from_secs(2), std::future::pending::<()>()).await;
        assert_eq!(waited.unwrap_err().to_string(), "no answer within 2s");
        assert_eq!(clock.timeout(Duration::from_secs(2), async { 7 }).await, Ok(7));
    }
}
