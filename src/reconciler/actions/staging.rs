//! Data on its way to or from the store: its directory on the local disk, and progress events.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use baton_protocol::id::SandboxId;
use parking_lot::Mutex;

use super::Failure;
use crate::{
    bus::{Bus, LifecycleEvent},
    clock::{Moment, SharedClock},
    reconciler::ReconcilerContext,
    storage::{local_files, store},
};

/// Posts progress events of a transfer: often enough for a person, too rarely to crowd out other events.
pub(in crate::reconciler) struct TransferProgress<'a> {
    clock: &'a SharedClock,
    bus: &'a Bus,
    id: &'a SandboxId,
    what: &'static str,
    /// When the last event was posted, and the progress at that time.
    last: Mutex<(Moment, u64)>,
}

/// Minimum time before the first event and between two events.
const EVENT_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of events per transfer.
const MAX_EVENTS: u64 = 100;
/// Bytes between two events if the total is unknown.
const EVENT_BYTES: u64 = 64 << 20;

impl<'a> TransferProgress<'a> {
    pub(super) fn new(context: &'a ReconcilerContext, id: &'a SandboxId, what: &'static str) -> Self {
        let last = Mutex::new((context.clock.now(), 0));
        Self { clock: &context.clock, bus: &context.bus, id, what, last }
    }

    /// `total` is 0 if it is unknown.
    pub(super) fn report(&self, done: u64, total: u64) {
        let now = self.clock.now();
        {
            let mut last = self.last.lock();
            if !is_due(*last, now, done, total) {
                return;
            }
            *last = (now, done);
        }
        tracing::debug!(sandbox = %self.id, what = self.what, done, total, "transferring");
        self.bus.post(self.id, LifecycleEvent::Progress { what: self.what.to_owned(), done, total });
    }

    /// Progress cannot be measured, but the work continues.
    pub(super) fn report_alive(&self) {
        self.bus.post(self.id, LifecycleEvent::Progress { what: self.what.to_owned(), done: 0, total: 0 });
    }
}

/// Whether another event is due, after one that reported `before` at `then`.
fn is_due((then, before): (Moment, u64), now: Moment, done: u64, total: u64) -> bool {
    let step = if total == 0 { EVENT_BYTES } else { total.div_ceil(MAX_EVENTS) };
    now - then >= EVENT_INTERVAL && done >= before.saturating_add(step)
}

/// A temporary directory for one transfer.
#[derive(Clone, Debug)]
pub(in crate::reconciler) struct Staging {
    path: PathBuf,
    clock: SharedClock,
}

/// Space to leave free on the local disk.
const FREE_BYTES: u64 = 32 << 20;
/// Time after which an unresponsive local disk is given up on.
const DISK_TIMEOUT: Duration = Duration::from_secs(30);

impl Staging {
    pub(in crate::reconciler) fn new(context: &ReconcilerContext, name: &str) -> Self {
        Self { path: context.staging.join(name), clock: context.clock.clone() }
    }

    pub(in crate::reconciler) fn path(&self) -> &Path {
        &self.path
    }

    pub(in crate::reconciler) async fn make(&self) -> Result<(), Failure> {
        self.wipe().await;
        let made = self.run_blocking(|path| std::fs::create_dir_all(path)).await;
        made.map_err(|error| Failure::Transient(format!("The staging directory could not be created: {error}.")))
    }

    /// Fails early if `bytes` would fill the disk.
    pub(super) async fn has_room(&self, bytes: u64) -> Result<(), Failure> {
        let path = self.path.clone();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let key = name.clone();
        let disk = local_files::run_blocking(&self.clock, &name, DISK_TIMEOUT, &|_| {}, move |_| {
            rustix::fs::statvfs(&path).map_err(|error| local_files::local_error(&key, &error.into()))
        });
        let disk = disk.await.map_err(|error| Failure::Transient(error.to_string()))?;
        if disk.f_bavail.saturating_mul(disk.f_frsize) < bytes.saturating_add(FREE_BYTES) {
            return Err(Failure::NoSpace(format!("The local disk has no room for the checkpoint's {bytes} bytes.")));
        }
        Ok(())
    }

    pub(in crate::reconciler) async fn wipe(&self) {
        match self.run_blocking(|path| std::fs::remove_dir_all(path)).await {
            Ok(()) | Err(store::Error::NotFound(_)) => {}
            Err(error) => tracing::warn!(%error, "a staging directory could not be removed"),
        }
    }

    async fn run_blocking(&self, work: fn(&Path) -> std::io::Result<()>) -> store::Result<()> {
        let path = self.path.clone();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let key = name.clone();
        local_files::run_blocking(&self.clock, &name, DISK_TIMEOUT, &|_| {}, move |_| {
            work(&path).map_err(|error| local_files::local_error(&key, &error))
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{clock::Clock, testkit::TestClock};

    #[test]
    fn words_are_few_and_none_is_said_of_what_is_quick() {
        let start = TestClock::new(1).now();
        let words = |total, bytes: u64, took: Duration| {
            let (mut told, mut count) = ((start, 0), 0);
            for part in 1..=10_000_u32 {
                let (now, done) = (start + took * part / 10_000, bytes * u64::from(part) / 10_000);
                if is_due(told, now, done, total) {
                    (told, count) = ((now, done), count + 1);
                }
            }
            count
        };
        assert_eq!(words(1 << 30, 1 << 30, Duration::from_millis(499)), 0);
        assert_eq!(words(1 << 30, 1 << 30, Duration::from_secs(3)), 5);
        assert_eq!(words(1 << 40, 1 << 40, Duration::from_secs(36_000)), 99);
        assert_eq!(words(3, 3, Duration::from_secs(60)), 3);
        // The total is unknown.
        assert_eq!(words(0, 1 << 30, Duration::from_secs(60)), 16);
        assert!(!is_due((start, 8), start + Duration::from_secs(9), 3, 10), "it began again");
    }
}
