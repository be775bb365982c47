//! Removes and renames files, and creates directories.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::Path,
};

use crate::{Fault, TransferTotals};

const ONE: TransferTotals = TransferTotals { members: 1, bytes: 0, faults: 0 };

/// Removes a file, a link or an empty directory; with `recursive`, a directory and everything in it. Links are never
/// followed.
pub fn remove(path: &Path, recursive: bool) -> Result<TransferTotals, Fault> {
    let fault = |error: io::Error| Fault::of(&error, path);
    // The parent directory, or a directory that is being worked in, is never what the caller means.
    if path.file_name().is_none() {
        return Err(Fault::new("EINVAL", "A path to remove must end with a name", path));
    }
    let found = fs::symlink_metadata(path).map_err(fault)?;
    let removed = match (found.is_dir(), recursive) {
        (false, _) => fs::remove_file(path),
        (true, false) => fs::remove_dir(path),
        (true, true) => fs::remove_dir_all(path),
    };
    removed.map(|()| ONE).map_err(fault)
}

/// Gives a file or directory another name, in the same file system. An existing file at `to` is replaced atomically.
pub fn rename(path: &Path, to: &Path) -> Result<TransferTotals, Fault> {
    fs::symlink_metadata(path).map_err(|error| Fault::of(&error, path))?;
    fs::rename(path, to).map(|()| ONE).map_err(|error| Fault::of(&error, to))
}

/// Creates a directory; with `parents` also the missing ones above it, and one that exists is not a fault.
pub fn make_directory(path: &Path, parents: bool, mode: Option<u32>) -> Result<TransferTotals, Fault> {
    let fault = |error: io::Error| Fault::of(&error, path);
    if parents {
        if fs::metadata(path).is_ok_and(|found| found.is_dir()) {
            return Ok(TransferTotals::default());
        }
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            fs::create_dir_all(parent).map_err(fault)?;
        }
    }
    let mut builder = fs::DirBuilder::new();
    match builder.mode(mode.unwrap_or(0o777)).create(path) {
        Ok(()) => {}
        // Another process has just created it.
        Err(error) if parents && error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
            return Ok(TransferTotals::default());
        }
        Err(error) => return Err(fault(error)),
    }
    if let Some(mode) = mode {
        // Once more, because the umask was applied.
        fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777)).map_err(fault)?;
    }
    Ok(ONE)
}
