//! Bounds what a sandbox's connections may send before it was passed on.
//!
//! Every connection has a small window of its own. A connection that is passed on quickly borrows more from a pool that
//! all connections of the sandbox share, so that a thousand of them need no more memory than a few fast ones.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// The window that every connection has.
pub const LEAST_WINDOW: u64 = 8 << 10;
/// The window of a fast connection.
const LARGEST_WINDOW: u64 = 1 << 20;
/// What the windows of a sandbox's connections share, beyond what each has anyway.
const POOL: u64 = 4 << 20;

/// Shared by the connections of one container.
#[derive(Clone, Debug)]
pub struct CreditPool {
    left: Arc<AtomicU64>,
}

impl Default for CreditPool {
    fn default() -> Self {
        Self { left: Arc::new(AtomicU64::new(POOL)) }
    }
}

impl CreditPool {
    fn borrow(&self, wanted: u64) -> u64 {
        let take = |left: u64| Some(left - left.min(wanted));
        let before = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        before.map_or(0, |before| before.min(wanted))
    }
}

/// The credit of one direction of one connection. Returns what it borrowed when dropped.
#[derive(Debug)]
pub struct CreditWindow {
    pool: CreditPool,
    borrowed: u64,
    /// The offset up to which the peer may send; shared with whoever checks that it keeps to it.
    granted: Arc<AtomicU64>,
    /// The offset up to which bytes were passed on.
    passed: u64,
}

impl CreditWindow {
    pub fn new(pool: &CreditPool) -> Self {
        Self { pool: pool.clone(), borrowed: 0, granted: Arc::new(AtomicU64::new(LEAST_WINDOW)), passed: 0 }
    }

    /// The offset up to which the peer may send.
    pub fn granted(&self) -> u64 {
        self.granted.load(Ordering::Relaxed)
    }

    /// The same, as it changes.
    pub fn watch(&self) -> Arc<AtomicU64> {
        self.granted.clone()
    }

    /// Records that `count` bytes were passed on. Returns the new credit if it is time to grant some.
    pub fn pass(&mut self, count: usize) -> Option<u64> {
        self.passed += count as u64;
        let left = self.granted().saturating_sub(self.passed);
        let size = LEAST_WINDOW + self.borrowed;
        if left > size / 2 {
            return None;
        }
        // It used up half of its window: twice the window lets it go faster.
        let more = size.min(LARGEST_WINDOW.saturating_sub(size));
        self.borrowed += self.pool.borrow(more);
        // Before the peer learns of it.
        let granted = self.passed + LEAST_WINDOW + self.borrowed;
        self.granted.store(granted, Ordering::Relaxed);
        Some(granted)
    }
}

impl Drop for CreditWindow {
    fn drop(&mut self) {
        self.pool.left.fetch_add(self.borrowed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends all that it may, `rounds` times.
    fn run(window: &mut CreditWindow, rounds: usize) {
        for _ in 0..rounds {
            let all = window.granted() - window.passed;
            window.pass(all as usize);
        }
    }

    #[test]
    fn a_fast_connection_gets_a_large_window_and_returns_it() {
        let pool = CreditPool::default();
        let mut window = CreditWindow::new(&pool);
        run(&mut window, 20);
        assert_eq!(window.granted() - window.passed, LARGEST_WINDOW);
        drop(window);
        assert_eq!(pool.left.load(Ordering::Relaxed), POOL);
    }

    #[test]
    fn a_thousand_fast_connections_share_the_pool_and_none_is_left_without() {
        let pool = CreditPool::default();
        let mut windows: Vec<_> = (0..1000).map(|_| CreditWindow::new(&pool)).collect();
        windows.iter_mut().for_each(|window| run(window, 20));
        let outstanding: u64 = windows.iter().map(|window| window.granted() - window.passed).sum();
        assert!(outstanding <= POOL + 1000 * LEAST_WINDOW, "{outstanding}");
        assert!(windows.iter().all(|window| window.granted() - window.passed >= LEAST_WINDOW));
    }

    #[test]
    fn credit_is_granted_in_pieces_that_are_worth_a_frame() {
        let mut window = CreditWindow::new(&CreditPool::default());
        assert_eq!(window.pass(1), None);
        assert_eq!(window.pass(LEAST_WINDOW as usize / 2), Some(LEAST_WINDOW / 2 + 1 + 2 * LEAST_WINDOW));
    }
}
