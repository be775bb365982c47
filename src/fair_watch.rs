//! A watched value that wakes its waiters in the order in which they began to wait. Tokio's `watch` wakes them in no
//! fixed order, which a simulation could not replay.

use parking_lot::Mutex;
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub struct FairWatch<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T: Clone> FairWatch<T> {
    pub fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Notify::new() }
    }

    pub fn read(&self) -> T {
        self.value.lock().clone()
    }

    /// Sets the value and wakes all waiters.
    pub fn post(&self, value: T) {
        *self.value.lock() = value;
        self.changed.notify_waiters();
    }

    /// Waits until the value satisfies `wanted`; returns at once if it already does. Cancel safe.
    pub async fn until(&self, wanted: impl Fn(&T) -> bool) -> T {
        loop {
            // Registered before the read, so that no later `post` is missed.
            let changed = self.changed.notified();
            let value = self.read();
            if wanted(&value) {
                return value;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_waits_first_is_woken_first() {
        let (notice, woken) = (Arc::new(FairWatch::new(0)), Arc::new(Mutex::new(Vec::new())));
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..40 {
            let (notice, woken) = (notice.clone(), woken.clone());
            tasks.spawn(async move {
                notice.until(|value| *value == 2).await;
                woken.lock().push(number);
            });
        }
        tokio::task::yield_now().await;
        notice.post(1);
        tokio::task::yield_now().await;
        notice.post(2);
        tasks.join_all().await;
        assert_eq!(*woken.lock(), (0..40).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_so_already_is_not_waited_for() {
        let notice = FairWatch::new(3);
        assert_eq!(notice.until(|value| *value > 2).await, 3);
    }
}
