//! Writes one file atomically: into a temporary file that is renamed at the end.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid},
    io::Errno,
};

use crate::{CHUNK, Fault, TransferTotals};

/// How many links are followed before a path counts as a loop; the usual limit.
const MOST_LINKS: usize = 40;

/// The attributes of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct How {
    /// Permission bits; by default those of the replaced file, or those of new files.
    pub mode: Option<u32>,
    /// Seconds and nanoseconds since 1970.
    pub mtime: Option<(i64, u32)>,
    /// The expected number of bytes; if it differs, nothing is written.
    pub size: Option<u64>,
}

/// Writes everything read from `from` to the file at `path`. Creates missing directories and follows
/// links. On a fault the previous content remains.
pub fn write(path: &Path, from: &mut dyn Read, how: &How) -> Result<TransferTotals, Fault> {
    let fault = |error: io::Error| Fault::of(&error, path);
    let place = follow(path);
    let Some(name) = place.file_name() else { return Err(Fault::new("EISDIR", "Is a directory", path)) };
    let parent = match place.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) | None => Path::new("."),
    };
    let mut how = *how;
    let mut owner = None;
    match fs::metadata(&place) {
        Ok(found) if found.is_dir() => return Err(Fault::new("EISDIR", "Is a directory", path)),
        // A file must not replace a device or a pipe.
        Ok(found) if !found.is_file() => return Err(Fault::new("EINVAL", "Not a regular file", path)),
        Ok(found) => {
            how.mode = how.mode.or(Some(found.permissions().mode() & 0o7777));
            owner = Some((found.uid(), found.gid()));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir_all(parent).map_err(fault)?,
        // A loop of links leads nowhere, so there is no attribute to keep.
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {}
        Err(error) => return Err(fault(error)),
    }
    // A name that ends with a slash can only be a directory.
    if path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(Fault::new("EISDIR", "Is a directory", path));
    }
    let parent = File::open(parent).map_err(fault)?;
    let bytes = write_at(parent.as_fd(), name, from, &how, owner).map_err(fault)?;
    Ok(TransferTotals { members: 1, bytes, faults: 0 })
}

/// The path that a write to `path` modifies.
fn follow(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("")).join(target),
            Err(_) => break,
        }
    }
    path
}

/// Like [`write`], for a name in an open directory; an existing entry is replaced, and a link never followed.
pub(crate) fn write_at(
    directory: BorrowedFd<'_>,
    name: &OsStr,
    from: &mut dyn Read,
    how: &How,
    owner: Option<(u32, u32)>,
) -> io::Result<u64> {
    let (file, mut unnamed) = Unnamed::create(directory, how.mode)?;
    let mut file = File::from(file);
    let mut buffer = vec![0; how.size.map_or(CHUNK, |size| size.clamp(1, CHUNK as u64) as usize)];
    let mut bytes = 0;
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        bytes += count as u64;
        if how.size.is_some_and(|size| bytes > size) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "More bytes came than were announced"));
        }
        file.write_all(&buffer[..count])?;
    }
    if how.size.is_some_and(|size| bytes < size) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "Fewer bytes came than were announced"));
    }
    if let Some((uid, gid)) = owner {
        // Only root may change the owner; otherwise the writer owns the file.
        let _ = rustix::fs::fchown(&file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    }
    if let Some(mode) = how.mode {
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & 0o7777))?;
    }
    if let Some(mtime) = how.mtime {
        rustix::fs::futimens(&file, &times(mtime))?;
    }
    drop(file);
    rustix::fs::renameat(directory, &unnamed.name, directory, name)?;
    unnamed.is_named = true;
    Ok(bytes)
}

/// The timestamps for an mtime; the access time is the same.
pub(crate) fn times((seconds, nanoseconds): (i64, u32)) -> Timestamps {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds.into() };
    Timestamps { last_access: time, last_modification: time }
}

/// A temporary file that is removed unless it is renamed.
struct Unnamed<'a> {
    directory: BorrowedFd<'a>,
    name: String,
    is_named: bool,
}

impl<'a> Unnamed<'a> {
    fn create(directory: BorrowedFd<'a>, mode: Option<u32>) -> io::Result<(OwnedFd, Self)> {
        let name = unused_name()?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // Without a requested mode, the umask decides.
        let mode = if mode.is_some() { 0o600 } else { 0o666 };
        let file = rustix::fs::openat(directory, &name, flags, Mode::from_raw_mode(mode))?;
        Ok((file, Self { directory, name, is_named: false }))
    }
}

impl Drop for Unnamed<'_> {
    fn drop(&mut self) {
        if !self.is_named {
            // A failure cannot be handled here.
            let _ = rustix::fs::unlinkat(self.directory, &self.name, AtFlags::empty());
        }
    }
}

/// A random temporary name.
pub(crate) fn unused_name() -> io::Result<String> {
    let mut dice = [0; 8];
    rustix::rand::getrandom(&mut dice, rustix::rand::GetRandomFlags::empty())?;
    Ok(format!(".baton-{:016x}", u64::from_le_bytes(dice)))
}
