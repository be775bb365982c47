//! Watches a directory or a file: one line of JSON for each change, until the process is killed.
//!
//! Memory is bounded by the number of watched directories. A reader that is too slow fills the kernel's queue of
//! events, which then drops some and says so: that becomes an `overflow` line.

use std::{
    collections::BTreeMap,
    ffi::{CStr, OsStr, OsString},
    fs, io,
    io::Write,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use baton_protocol::file_work::{FileChange, FileChangeKind, MAX_DEPTH};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};

use crate::{Fault, TransferTotals};

/// The maximum number of directories that one watch covers.
pub const MAX_WATCHED: usize = 4096;
/// How long the second half of a rename may take to arrive.
const RENAME_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
const BUFFER: usize = 64 << 10;

/// Watches `path`: if it is a directory its entries, with `recursive` everything below; otherwise that file, also when
/// it is replaced. Ends only when the watched directory is gone.
pub fn watch(path: &Path, recursive: bool, to: &mut dyn Write) -> Result<TransferTotals, Fault> {
    let fault = |error: io::Error| Fault::of(&error, path);
    let is_directory = fs::metadata(path).map_err(fault)?.is_dir();
    let (root, only) = match path.file_name() {
        // A file is watched through its directory, so that one that replaces it is watched too.
        Some(name) if !is_directory => (path.parent().unwrap_or(Path::new("")), Some(name.to_owned())),
        Some(_) | None => (path, None),
    };
    let root = if root.as_os_str().is_empty() { Path::new(".") } else { root };
    let inotify = inotify::init(CreateFlags::CLOEXEC).map_err(|error| fault(error.into()))?;
    let mut tree = WatchedTree {
        inotify,
        root: root.to_owned(),
        own_name: path.file_name().unwrap_or(path.as_os_str()).to_owned(),
        only,
        recursive: recursive && is_directory,
        directories: BTreeMap::new(),
    };
    let Covered { is_complete, .. } = tree.cover(Path::new("")).map_err(fault)?;
    if !is_complete {
        return Err(Fault::new("ENOSPC", &format!("More than {MAX_WATCHED} directories to watch"), path));
    }
    let mut lines = Lines { to, last: None, bytes: 0, count: 0 };
    lines.put(&change(FileChangeKind::Ready, "")).and_then(|()| lines.flush()).map_err(fault)?;
    tree.follow(&mut lines).map_err(fault)?;
    Ok(TransferTotals { members: lines.count, bytes: lines.bytes, faults: 0 })
}

struct WatchedTree {
    inotify: OwnedFd,
    root: PathBuf,
    /// How the watched path itself is called.
    own_name: OsString,
    /// The only entry that is reported, if a file is watched.
    only: Option<OsString>,
    recursive: bool,
    /// The path of each watched directory, relative to the root.
    directories: BTreeMap<i32, PathBuf>,
}

/// What covering a directory found.
#[derive(Default)]
struct Covered {
    /// Everything below it. It may have been created before the watch began.
    entries: Vec<PathBuf>,
    /// Whether every directory is watched.
    is_complete: bool,
}

/// The first half of a rename.
struct MovedFrom {
    cookie: u32,
    name: PathBuf,
}

impl WatchedTree {
    /// Watches a directory and, if that was asked for, those below it.
    fn cover(&mut self, name: &Path) -> io::Result<Covered> {
        let mask = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        // The root may be a link to a directory; below it links are entries like any other.
        let below = mask | WatchFlags::DONT_FOLLOW;
        let mut covered = Covered { is_complete: true, ..Covered::default() };
        let mut left = vec![name.to_owned()];
        while let Some(name) = left.pop() {
            let is_root = name.as_os_str().is_empty();
            if self.directories.len() >= MAX_WATCHED || name.components().count() > MAX_DEPTH as usize {
                covered.is_complete = false;
                break;
            }
            let path = self.path_of(&name);
            match inotify::add_watch(&self.inotify, &path, if is_root { mask } else { below }) {
                Ok(descriptor) => drop(self.directories.insert(descriptor, name.clone())),
                Err(error) if is_root => return Err(error.into()),
                // It is gone already, may not be read, or is more than the kernel can watch.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(_) => {
                    covered.is_complete = false;
                    continue;
                }
            }
            if !self.recursive {
                continue;
            }
            for entry in fs::read_dir(&path).into_iter().flatten().flatten() {
                let name = name.join(entry.file_name());
                covered.entries.push(name.clone());
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    left.push(name);
                }
            }
        }
        Ok(covered)
    }

    fn path_of(&self, name: &Path) -> PathBuf {
        if name.as_os_str().is_empty() { self.root.clone() } else { self.root.join(name) }
    }

    /// Reports changes until the root is gone.
    fn follow(&mut self, lines: &mut Lines<'_>) -> io::Result<()> {
        let source = self.inotify.try_clone()?;
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER];
        let mut reader = inotify::Reader::new(&source, &mut buffer);
        let mut moved: Option<MovedFrom> = None;
        loop {
            if reader.is_buffer_empty() {
                if moved.is_some() && !is_readable(&source)? {
                    self.moved_away(moved.take(), lines)?;
                }
                lines.flush()?;
            }
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let (flags, cookie) = (event.events(), event.cookie());
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                lines.put(&change(FileChangeKind::Overflow, ""))?;
                continue;
            }
            let descriptor = event.wd();
            let Some(directory) = self.directories.get(&descriptor).cloned() else { continue };
            let is_root = directory.as_os_str().is_empty();
            let Some(entry) = event.file_name().map(CStr::to_bytes) else {
                if self.changed_itself(flags, descriptor, is_root, lines)? {
                    return lines.flush();
                }
                continue;
            };
            let name = directory.join(OsStr::from_bytes(entry));
            if flags.contains(ReadFlags::MOVED_TO)
                && let Some(from) = moved.take_if(|from| from.cookie == cookie)
            {
                self.renamed(&from.name, &name, lines)?;
                continue;
            }
            self.moved_away(moved.take(), lines)?;
            if flags.contains(ReadFlags::MOVED_FROM) {
                moved = Some(MovedFrom { cookie, name });
            } else {
                self.changed(flags, &name, lines)?;
            }
        }
    }

    /// A change of a watched directory itself. Returns whether the watch is over.
    fn changed_itself(
        &mut self,
        flags: ReadFlags,
        descriptor: i32,
        is_root: bool,
        lines: &mut Lines<'_>,
    ) -> io::Result<bool> {
        if flags.contains(ReadFlags::IGNORED) {
            self.directories.remove(&descriptor);
        }
        // Any other directory is an entry of one that is watched.
        if !is_root || self.only.is_some() {
            return Ok(is_root && flags.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF));
        }
        let own_name = self.own_name.to_string_lossy();
        if flags.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::IGNORED) {
            lines.put(&change(FileChangeKind::Remove, &own_name))?;
            return Ok(true);
        }
        if flags.contains(ReadFlags::ATTRIB) {
            lines.put(&change(FileChangeKind::Chmod, &own_name))?;
        }
        Ok(false)
    }

    fn changed(&mut self, flags: ReadFlags, name: &Path, lines: &mut Lines<'_>) -> io::Result<()> {
        let kind = if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
            FileChangeKind::Create
        } else if flags.contains(ReadFlags::DELETE) {
            FileChangeKind::Remove
        } else if flags.contains(ReadFlags::MODIFY) {
            FileChangeKind::Write
        } else if flags.contains(ReadFlags::ATTRIB) {
            FileChangeKind::Chmod
        } else {
            return Ok(());
        };
        self.put(kind, name, None, lines)?;
        if kind == FileChangeKind::Create && flags.contains(ReadFlags::ISDIR) && self.recursive {
            let covered = self.cover(name)?;
            for entry in covered.entries {
                self.put(FileChangeKind::Create, &entry, None, lines)?;
            }
            if !covered.is_complete {
                lines.put(&change(FileChangeKind::Overflow, ""))?;
            }
        }
        Ok(())
    }

    fn renamed(&mut self, from: &Path, to: &Path, lines: &mut Lines<'_>) -> io::Result<()> {
        for directory in self.directories.values_mut() {
            if let Ok(rest) = directory.strip_prefix(from) {
                *directory = if rest.as_os_str().is_empty() { to.to_owned() } else { to.join(rest) };
            }
        }
        self.put(FileChangeKind::Rename, from, Some(to), lines)
    }

    /// An entry was moved to a place that is not watched.
    fn moved_away(&mut self, moved: Option<MovedFrom>, lines: &mut Lines<'_>) -> io::Result<()> {
        let Some(MovedFrom { name, .. }) = moved else { return Ok(()) };
        let gone = self.directories.iter().filter(|(_, directory)| directory.starts_with(&name));
        for descriptor in gone.map(|(descriptor, _)| *descriptor).collect::<Vec<_>>() {
            self.directories.remove(&descriptor);
            // The kernel may have removed it already.
            let _ = inotify::remove_watch(&self.inotify, descriptor);
        }
        self.put(FileChangeKind::Remove, &name, None, lines)
    }

    fn put(&self, kind: FileChangeKind, name: &Path, to: Option<&Path>, lines: &mut Lines<'_>) -> io::Result<()> {
        let is_watched =
            |name: &Path| self.only.as_ref().is_none_or(|only| name.as_os_str().as_bytes() == only.as_bytes());
        if !is_watched(name) && !to.is_some_and(is_watched) {
            return Ok(());
        }
        let to = to.map(|to| to.to_string_lossy().into_owned());
        lines.put(&FileChange { to, ..change(kind, &name.to_string_lossy()) })
    }
}

fn change(kind: FileChangeKind, name: &str) -> FileChange {
    FileChange { kind, name: name.to_owned(), to: None }
}

/// Whether another event comes soon.
fn is_readable(source: &OwnedFd) -> io::Result<bool> {
    match poll(&mut [PollFd::from_borrowed_fd(source.as_fd(), PollFlags::IN)], Some(&RENAME_WAIT)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Lines that are written together; a repeated one is written once.
struct Lines<'a> {
    to: &'a mut dyn Write,
    last: Option<FileChange>,
    bytes: u64,
    count: u64,
}

impl Lines<'_> {
    fn put(&mut self, change: &FileChange) -> io::Result<()> {
        if self.last.as_ref() == Some(change) {
            return Ok(());
        }
        let mut line = serde_json::to_vec(change)?;
        line.push(b'\n');
        self.to.write_all(&line)?;
        self.bytes += line.len() as u64;
        self.count += 1;
        self.last = Some(change.clone());
        Ok(())
    }

    /// What comes later is a change of its own, although it may look the same.
    fn flush(&mut self) -> io::Result<()> {
        self.last = None;
        self.to.flush()
    }
}
