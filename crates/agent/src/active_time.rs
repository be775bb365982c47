//! The time the sandbox has actually run. Unlike the kernel's clock, it does not jump over a stop or a restore.

use std::time::Duration;

/// Upper bound for one step: anything longer was a jump.
const LONGEST_STEP: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Ran {
    last: Duration,
    total: Duration,
}

impl Ran {
    pub fn new(now: Duration) -> Self {
        Self { last: now, total: Duration::ZERO }
    }

    pub fn step(&mut self, now: Duration) {
        self.total += now.saturating_sub(self.last).min(LONGEST_STEP);
        self.last = now;
    }

    pub fn total(&self) -> Duration {
        self.total
    }
}

/// The kernel's clock.
pub fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// Milliseconds since 1970, for people.
pub fn wall_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32).as_millis() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_counts_as_one_second_at_most_and_a_step_back_not_at_all() {
        let mut ran = Ran::new(Duration::from_secs(100));
        ran.step(Duration::from_millis(100_250));
        ran.step(Duration::from_secs(5_000));
        ran.step(Duration::from_secs(4_000));
        ran.step(Duration::from_millis(4_000_500));
        assert_eq!(ran.total(), Duration::from_millis(250 + 1000 + 500));
    }
}
