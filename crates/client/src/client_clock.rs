//! Time and randomness of a client: no other module asks the system for either.

use std::{
    future::Future,
    hash::{BuildHasher, RandomState},
    time::Duration,
};

pub(crate) use tokio::time::Instant;

/// The shortest and the longest back-off before a retry.
const MIN_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

#[expect(clippy::disallowed_methods, reason = "this is the seam")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Time since 1970. For comparison with timestamps of others, not for measuring.
#[cfg(feature = "google")]
#[expect(clippy::disallowed_methods, reason = "this is the seam")]
pub(crate) fn wall() -> Duration {
    let now = std::time::SystemTime::now();
    now.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap_or_default()
}

pub(crate) async fn sleep_until(moment: Instant) {
    tokio::time::sleep_until(moment).await;
}

/// Returns the work's result, or `None` at the timeout, which drops the work.
#[expect(clippy::disallowed_methods, reason = "this is the seam")]
pub(crate) async fn timeout<T>(span: Duration, work: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(span, work).await.ok()
}

/// A random number; not suitable for secrets.
pub(crate) fn dice() -> u64 {
    // The standard library seeds its hashers from the system, on every platform.
    RandomState::new().hash_one(0_u8)
}

/// The back-off before retry number `attempt`, counted from 0.
pub(crate) fn pause(attempt: u32, dice: u64) -> Duration {
    let ceiling = MAX_BACKOFF.min(MIN_BACKOFF.saturating_mul(2_u32.saturating_pow(attempt.saturating_add(1))));
    let share = (dice >> 32) as f64 / f64::from(u32::MAX);
    MIN_BACKOFF + (ceiling - MIN_BACKOFF).mul_f64(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_stay_within_their_bounds() {
        assert_eq!(pause(0, 0), MIN_BACKOFF);
        assert_eq!(pause(0, u64::MAX), 2 * MIN_BACKOFF);
        assert_eq!(pause(3, u64::MAX), 16 * MIN_BACKOFF);
        for attempt in [6, 31, 32, u32::MAX] {
            assert_eq!(pause(attempt, u64::MAX), MAX_BACKOFF);
            assert_eq!(pause(attempt, 0), MIN_BACKOFF);
        }
    }

    #[test]
    fn dice_differ() {
        assert_ne!(dice(), dice());
    }
}
