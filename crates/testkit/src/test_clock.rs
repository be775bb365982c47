//! Simulated time. In a test with `start_paused`, Tokio advances it as soon as every task waits.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use baton::clock::{Clock, Moment};

/// Tokio's clock, which tests can pause, and a deterministic random number generator.
#[derive(Debug)]
pub struct TestClock {
    start: tokio::time::Instant,
    rng_state: Mutex<u64>,
}

/// What `now` returns at the start: not zero, so that a test can subtract from it.
const FIRST_MOMENT: Moment = Moment(Duration::from_secs(1_000));
/// What `wall` returns at the start, in seconds since 1970.
const FIRST_TIMESTAMP: Duration = Duration::from_secs(1_800_000_000);

impl TestClock {
    #[expect(clippy::disallowed_methods, reason = "a clock reads the time")]
    pub fn new(seed: u64) -> Self {
        Self { start: tokio::time::Instant::now(), rng_state: Mutex::new(seed) }
    }
}

#[async_trait]
impl Clock for TestClock {
    fn now(&self) -> Moment {
        FIRST_MOMENT + self.start.elapsed()
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + FIRST_TIMESTAMP + self.start.elapsed()
    }

    async fn sleep_until(&self, moment: Moment) {
        tokio::time::sleep_until(self.start + (moment - FIRST_MOMENT)).await;
    }

    fn fill(&self, bytes: &mut [u8]) {
        // SplitMix64: small, and good enough for the ids of a test.
        let mut state = self.rng_state.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in bytes.chunks_mut(8) {
            *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut word = *state;
            word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            word ^= word >> 31;
            chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        }
    }
}
