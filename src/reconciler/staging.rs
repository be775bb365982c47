//! What is on its way to or from the store: its place on the local disk, and word of how far it has come.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use baton_protocol::id::SandboxId;

use super::{Tools, act::Failure};
use crate::{
    clock::SharedClock,
    storage::{
        board::{Board, Passing},
        files, store,
    },
};

/// Tells of a transfer now and then: often enough for a person, too rarely to crowd out phases.
pub(super) struct Steps<'a> {
    board: &'a Board,
    id: &'a SandboxId,
    what: &'static str,
    told: AtomicU64,
}

const STEP: u64 = 64 << 20;

impl<'a> Steps<'a> {
    pub(super) fn new(board: &'a Board, id: &'a SandboxId, what: &'static str) -> Self {
        Self { board, id, what, told: AtomicU64::new(0) }
    }

    pub(super) fn tell(&self, done: u64, total: u64) {
        if done / STEP > self.told.fetch_max(done / STEP, Ordering::Relaxed) {
            tracing::debug!(sandbox = %self.id, what = self.what, done, total, "bytes of an image moved");
            self.board.post(self.id, Passing::Progress { what: self.what.to_owned(), done, total });
        }
    }

    /// Nothing can be counted, but it goes on.
    pub(super) fn alive(&self) {
        self.board.post(self.id, Passing::Progress { what: self.what.to_owned(), done: 0, total: 0 });
    }
}

/// A directory for what is on its way; gone when the way is done.
#[derive(Clone, Debug)]
pub(super) struct Staging {
    path: PathBuf,
    clock: SharedClock,
}

/// What is left free on the local disk.
const MARGIN: u64 = 32 << 20;
/// A local disk that does not answer for so long is given up.
const STALL: Duration = Duration::from_secs(30);

impl Staging {
    pub(super) fn new(tools: &Tools, name: &str) -> Self {
        Self { path: tools.staging.join(name), clock: tools.clock.clone() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) async fn make(&self) -> Result<(), Failure> {
        self.wipe().await;
        let made = self.beside(|path| std::fs::create_dir_all(path)).await;
        made.map_err(|error| Failure::Passing(format!("There is no place for its files: {error}.")))
    }

    /// Refuses early what would fill the disk.
    pub(super) async fn has_room(&self, bytes: u64) -> Result<(), Failure> {
        let path = self.path.clone();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let key = name.clone();
        let disk = files::beside(&self.clock, &name, STALL, &|_| {}, move |_| {
            rustix::fs::statvfs(&path).map_err(|error| files::local_error(&key, &error.into()))
        });
        let disk = disk.await.map_err(|error| Failure::Passing(error.to_string()))?;
        if disk.f_bavail.saturating_mul(disk.f_frsize) < bytes.saturating_add(MARGIN) {
            return Err(Failure::NoSpace(format!("The local disk has no room for the checkpoint's {bytes} bytes.")));
        }
        Ok(())
    }

    pub(super) async fn wipe(&self) {
        match self.beside(|path| std::fs::remove_dir_all(path)).await {
            Ok(()) | Err(store::Error::NotFound(_)) => {}
            Err(error) => tracing::warn!(%error, "something staged is left over"),
        }
    }

    async fn beside(&self, work: fn(&Path) -> std::io::Result<()>) -> store::Result<()> {
        let path = self.path.clone();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let key = name.clone();
        files::beside(&self.clock, &name, STALL, &|_| {}, move |_| {
            work(&path).map_err(|error| files::local_error(&key, &error))
        })
        .await
    }
}
