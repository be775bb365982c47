//! One file, written whole: into a file without its name, which takes the name at the end.

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

use crate::{CHUNK, Done, Fault};

/// Links followed before a path counts as a circle, as everywhere.
const MOST_LINKS: usize = 40;

/// What the file is to be like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct How {
    /// Permission bits; without them those it had, or those that new files have.
    pub mode: Option<u32>,
    /// Seconds and nanoseconds since 1970.
    pub mtime: Option<(i64, u32)>,
    /// If another number of bytes comes, nothing is written.
    pub size: Option<u64>,
}

/// Everything that `from` gives becomes the file at `path`. Missing directories are made, a link is
/// followed. On a fault there is what there was before.
pub fn write(path: &Path, from: &mut dyn Read, how: &How) -> Result<Done, Fault> {
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
        // A device or a pipe must not be replaced by a file.
        Ok(found) if !found.is_file() => return Err(Fault::new("EINVAL", "Not a regular file", path)),
        Ok(found) => {
            how.mode = how.mode.or(Some(found.permissions().mode() & 0o7777));
            owner = Some((found.uid(), found.gid()));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir_all(parent).map_err(fault)?,
        // A circle of links leads nowhere, so there is nothing to keep.
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {}
        Err(error) => return Err(fault(error)),
    }
    // A name that ends with a slash can only be a directory's.
    if path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(Fault::new("EISDIR", "Is a directory", path));
    }
    let parent = File::open(parent).map_err(fault)?;
    let bytes = write_at(parent.as_fd(), name, from, &how, owner).map_err(fault)?;
    Ok(Done { members: 1, bytes, faults: 0 })
}

/// Where a write to `path` ends up.
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

/// The same for a name in an open directory; whatever has that name is replaced, and never followed.
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
        // Only root may give files away; others keep what they write.
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

/// An mtime to set; the access time becomes the same.
pub(crate) fn times((seconds, nanoseconds): (i64, u32)) -> Timestamps {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds.into() };
    Timestamps { last_access: time, last_modification: time }
}

/// A file that is removed again unless it gets its name.
struct Unnamed<'a> {
    directory: BorrowedFd<'a>,
    name: String,
    is_named: bool,
}

impl<'a> Unnamed<'a> {
    fn create(directory: BorrowedFd<'a>, mode: Option<u32>) -> io::Result<(OwnedFd, Self)> {
        let name = unused_name()?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // Without a wish for its mode it is what the umask makes of it.
        let mode = if mode.is_some() { 0o600 } else { 0o666 };
        let file = rustix::fs::openat(directory, &name, flags, Mode::from_raw_mode(mode))?;
        Ok((file, Self { directory, name, is_named: false }))
    }
}

impl Drop for Unnamed<'_> {
    fn drop(&mut self) {
        if !self.is_named {
            // Nothing more can be done about it.
            let _ = rustix::fs::unlinkat(self.directory, &self.name, AtFlags::empty());
        }
    }
}

/// A name for a moment.
pub(crate) fn unused_name() -> io::Result<String> {
    let mut dice = [0; 8];
    rustix::rand::getrandom(&mut dice, rustix::rand::GetRandomFlags::empty())?;
    Ok(format!(".baton-{:016x}", u64::from_le_bytes(dice)))
}
