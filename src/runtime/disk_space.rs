//! Checks for disk space before an image is written, and checks the image afterwards: runsc writes no checksums,
//! and may report success for an image cut short by a full disk.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;

use super::{Error, Result};

/// The files of an image.
pub const FILES: [&str; 3] = ["checkpoint.img", "pages_meta.img", "pages.img"];

/// Added to what the sandbox holds, for the state of its kernel.
const MARGIN: u64 = 32 << 20;

/// Space on the local disk reserved for images being written.
#[derive(Clone, Debug, Default)]
pub struct Reservations(Arc<Mutex<u64>>);

/// A part of the reservations, released on drop.
#[derive(Debug)]
pub struct Room {
    promised: Reservations,
    bytes: u64,
}

impl Reservations {
    /// Returns `None` if `free` bytes are not enough for this and the existing reservations.
    fn reserve(&self, free: u64, bytes: u64) -> Option<Room> {
        let mut promised = self.0.lock();
        *promised = promised.checked_add(bytes).filter(|sum| *sum <= free)?;
        drop(promised);
        Some(Room { promised: self.clone(), bytes })
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        *self.promised.0.lock() -= self.bytes;
    }
}

/// Creates the image directory and refuses if the sandbox's memory and files would not fit. Space reserved for
/// other images counts as used.
pub async fn make_room(image: PathBuf, sentry: i32, promised: &Reservations) -> Result<Room> {
    let checked = tokio::task::spawn_blocking(move || {
        fs::create_dir_all(&image)?;
        if fs::read_dir(&image)?.next().is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        Ok((free(&image)?, sentry_size(sentry)?))
    });
    match checked.await.map_err(io::Error::other).flatten() {
        Ok((free, held)) => promised
            .reserve(free, held.saturating_add(held / 16).saturating_add(MARGIN))
            .ok_or(Error::NoSpace { what: "a checkpoint" }),
        Err(error) => Err(Error::Failed { what: "checkpoint", why: error.kind().to_string() }),
    }
}

/// Refuses if a file with everything the sandbox has written would not fit.
pub async fn check_room(file: PathBuf, sentry: i32) -> Result<()> {
    let checked = tokio::task::spawn_blocking(move || {
        // Includes its memory, which errs on the safe side.
        Ok((free(file.parent().unwrap_or(&file))?, sentry_size(sentry)?))
    });
    match checked.await.map_err(io::Error::other).flatten() {
        Ok((free, held)) if free < held.saturating_add(MARGIN) => Err(Error::NoSpace { what: "a snapshot" }),
        Ok(_) => Ok(()),
        Err(error) => Err(Error::Failed { what: "snapshot", why: error.kind().to_string() }),
    }
}

/// Refuses if the disk on which `file` grows is almost full, so that other sandboxes keep the rest.
pub async fn check_margin(file: PathBuf) -> Result<()> {
    match tokio::task::spawn_blocking(move || free(&file)).await.map_err(io::Error::other).flatten() {
        Ok(free) if free < MARGIN => Err(Error::NoSpace { what: "a snapshot" }),
        Ok(_) => Ok(()),
        Err(error) => Err(Error::Failed { what: "snapshot", why: error.kind().to_string() }),
    }
}

/// The free bytes of the disk that holds `path`.
fn free(path: &Path) -> io::Result<u64> {
    let disk = rustix::fs::statvfs(path)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// The size of the sandbox's memory and changed files, all of which are unlinked files of the sentry.
fn sentry_size(sentry: i32) -> io::Result<u64> {
    let mut files = std::collections::BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{sentry}/fd"))? {
        if let Ok(file) = fs::metadata(entry?.path())
            && file.is_file()
            && file.nlink() == 0
        {
            files.insert((file.dev(), file.ino()), file.blocks().saturating_mul(512));
        }
    }
    Ok(files.values().copied().fold(0, u64::saturating_add))
}

pub async fn verify(image: &Path) -> Result<()> {
    for name in FILES {
        let size = tokio::fs::metadata(image.join(name)).await.map_or(0, |file| file.len());
        if size == 0 {
            return Err(Error::Failed { what: "checkpoint", why: format!("{name} is missing or empty") });
        }
    }
    Ok(())
}

/// Deletes an incomplete image.
pub async fn wipe_image(image: &Path) {
    for name in FILES {
        let _ = tokio::fs::remove_file(image.join(name)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_promised_to_one_image_is_not_promised_to_another() {
        let promised = Reservations::default();
        let first = promised.reserve(100, 60).expect("there is room");
        assert!(promised.reserve(100, 60).is_none());
        let second = promised.reserve(100, 40).expect("there is room for a small one");
        drop(first);
        assert!(promised.reserve(100, 60).is_some());
        drop(second);
        assert_eq!(*promised.0.lock(), 0);
    }
}
