//! A value that many wait on: they are woken in the order in which they began to wait. Tokio's `watch` wakes them
//! in no fixed order, and what cannot be told twice in the same order cannot be replayed by a simulation.

use std::sync::{Mutex, MutexGuard, PoisonError};

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
        self.value().clone()
    }

    /// Everybody who waits looks again.
    pub fn post(&self, value: T) {
        *self.value() = value;
        self.changed.notify_waiters();
    }

    /// Ends when the value is one of the wanted; at once, if it is. May be cancelled.
    pub async fn until(&self, wanted: impl Fn(&T) -> bool) -> T {
        loop {
            // Before the look, so that nothing that is posted after it is missed.
            let changed = self.changed.notified();
            let value = self.read();
            if wanted(&value) {
                return value;
            }
            changed.await;
        }
    }

    fn value(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
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
                woken.lock().unwrap().push(number);
            });
        }
        tokio::task::yield_now().await;
        notice.post(1);
        tokio::task::yield_now().await;
        notice.post(2);
        tasks.join_all().await;
        assert_eq!(*woken.lock().unwrap(), (0..40).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_so_already_is_not_waited_for() {
        let notice = FairWatch::new(3);
        assert_eq!(notice.until(|value| *value > 2).await, 3);
    }
}
