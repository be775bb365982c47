//! The child that extracts an archive: it confines itself to the new tree before it reads any of the archive,
//! and keeps only the capabilities for owners and modes. Links cannot lead outside, and devices cannot be
//! created.
//!
//! ```text
//!   baton extract-archive TREE SIZE ENTRIES DEPTH layer|complete|base [BASE] < ARCHIVE
//!   links to BASE ─▶ chroot, drop capabilities ─▶ entries ─▶ owners and times of directories ─▶ one line
//! ```

use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::{
        fd::AsFd,
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, fchown, lchown, symlink},
        },
    },
    path::Path,
    process::ExitCode,
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, UTIME_OMIT, XattrFlags},
    process::{Resource, Rlimit},
    thread::{CapabilitySet, CapabilitySets},
};

use super::{
    entries::{ArchiveEntry, ArchiveLimits, ArchiveReader, EntryKind, open, shown_path, wrong},
    hardlink_tree::hardlink_tree,
    is_kept,
};

pub const VERB: &str = "extract-archive";

const USAGE: &str = "usage: baton extract-archive TREE SIZE ENTRIES DEPTH layer|complete|base [BASE] < ARCHIVE";
const CHUNK: usize = 64 << 10;
/// Maximum size in bytes of the names remembered until the end, each with `NAME` bytes of overhead.
const MAX_NAME_BYTES: usize = 256 << 20;
const NAME: usize = 128;

/// Exit code of the child if the disk is full, rather than the archive invalid.
pub const NO_SPACE: u8 = 28;

/// The verb. Writes the number of entries and bytes to stdout, or the error to stderr.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let words: Vec<_> = arguments.collect();
    let text = |at: usize| words.get(at).and_then(|word| word.to_str());
    let number = |at: usize| text(at).and_then(|word| word.parse::<u64>().ok());
    let asked = (
        words.first(),
        number(1),
        number(2),
        number(3).and_then(|depth| depth.try_into().ok()),
        text(4).and_then(Form::parse),
    );
    let (Some(tree), Some(size), Some(entries), Some(depth), Some(form)) = asked else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let base = words.get(5).map(Path::new);
    match run(Path::new(tree), base, form, ArchiveLimits { size, entries, depth }) {
        Ok((entries, bytes)) => {
            println!("{entries} {bytes}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            let is_full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
            if is_full { ExitCode::from(NO_SPACE) } else { ExitCode::FAILURE }
        }
    }
}

fn run(tree: &Path, base: Option<&Path>, form: Form, limits: ArchiveLimits) -> io::Result<(u64, u64)> {
    let archive = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    if let Some(base) = base {
        hardlink_tree(base, tree)?;
    }
    // The kernel enforces the limit even if our own count is wrong.
    let most = Rlimit { current: Some(limits.size), maximum: Some(limits.size) };
    rustix::process::setrlimit(Resource::Fsize, most)?;
    extract_into(archive, tree, form, limits)
}

/// The form of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Changes to the tree's existing content.
    Layer,
    /// Everything; what a container needs besides is added.
    Complete,
    /// Everything, unmodified.
    Base,
}

impl Form {
    fn parse(word: &str) -> Option<Self> {
        match word {
            "layer" => Some(Self::Layer),
            "complete" => Some(Self::Complete),
            "base" => Some(Self::Base),
            _ => None,
        }
    }
}

/// Confines the caller permanently to `tree`, drops its capabilities and extracts `archive` there. Returns the
/// number of entries and bytes. Only for a process that exits afterwards, or a thread that shares no root with
/// others.
pub fn extract_into(archive: File, tree: &Path, form: Form, limits: ArchiveLimits) -> io::Result<(u64, u64)> {
    confine(tree)?;
    rustix::process::umask(Mode::empty());
    let tally = extract(open(archive)?, form == Form::Layer, limits)?;
    if form != Form::Base {
        furnish()?;
    }
    Ok(tally)
}

/// Confines the process to the tree.
fn confine(tree: &Path) -> io::Result<()> {
    rustix::process::chroot(tree)?;
    rustix::process::chdir("/")?;
    rustix::thread::set_no_new_privs(true)?;
    let needed = CapabilitySet::CHOWN
        | CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::FOWNER
        | CapabilitySet::FSETID
        | CapabilitySet::SETFCAP;
    let have = rustix::thread::capabilities(None)?.permitted;
    let kept =
        CapabilitySets { effective: have & needed, permitted: have & needed, inheritable: CapabilitySet::empty() };
    Ok(rustix::thread::set_capabilities(None, kept)?)
}

/// Extracts into the root of this process.
fn extract(source: impl Read, is_layer: bool, limits: ArchiveLimits) -> io::Result<(u64, u64)> {
    let mut reader = ArchiveReader::new(source, limits);
    let mut gone = BTreeSet::new();
    let mut directories = Vec::new();
    let mut remembered = 0;
    while let Some(mut entry) = reader.next()? {
        let place = Path::new("/").join(&entry.path);
        let named = |error: io::Error| {
            if error.kind() == io::ErrorKind::InvalidData {
                return error;
            }
            io::Error::new(error.kind(), format!("{}: {error}", shown_path(&entry.path)))
        };
        if matches!(entry.kind, EntryKind::Whiteout | EntryKind::Link(_) | EntryKind::Directory) {
            remembered += NAME + entry.path.as_os_str().len();
        }
        if remembered > MAX_NAME_BYTES {
            return Err(wrong("it has too many long names"));
        }
        match &entry.kind {
            EntryKind::Whiteout if is_layer => {
                gone.insert(entry.path.clone());
                remove(&place).map_err(named)?;
            }
            EntryKind::Link(target) if is_layer && gone.contains(target) => {
                gone.insert(entry.path.clone());
                remove(&place).map_err(named)?;
            }
            EntryKind::Directory => {
                directory(&place, &entry, is_layer, limits.depth).map_err(named)?;
                // They may be large, and need not be set again.
                entry.attributes = Vec::new();
                directories.push(entry);
            }
            // The sandbox has its own devices.
            EntryKind::Whiteout | EntryKind::Device => {}
            EntryKind::File | EntryKind::Sparse(_) | EntryKind::Link(_) | EntryKind::Symlink(_) | EntryKind::Fifo => {
                if entry.path.as_os_str().is_empty() {
                    return Err(wrong("its root is not a directory"));
                }
                other(&place, &entry, &mut reader, limits.depth).map_err(named)?;
            }
        }
    }
    // Deepest first: a write below a directory changes its time.
    directories.sort_by(|one, other| other.path.cmp(&one.path));
    for entry in &directories {
        let place = Path::new("/").join(&entry.path);
        // A later entry may have replaced it.
        if fs::symlink_metadata(&place).is_ok_and(|about| about.is_dir()) {
            dress(&place, entry)?;
        }
    }
    Ok(reader.count_entries())
}

/// Mount points of a container. runsc would create missing ones in a tree that is already shared.
const MOUNTS: [&str; 6] = ["/.baton", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm"];
/// An empty `/tmp` would get its own file system, which snapshots do not include.
const KEEP: &str = "/tmp/.keep";
const KEEP_TEXT: &str = "This file keeps /tmp on the root file system.\n";

fn furnish() -> io::Result<()> {
    for place in MOUNTS.map(Path::new) {
        if !fs::symlink_metadata(place).is_ok_and(|about| about.is_dir()) {
            remove(place)?;
            fs::DirBuilder::new().mode(0o755).create(place)?;
        }
    }
    if fs::symlink_metadata("/tmp").is_err() {
        fs::DirBuilder::new().mode(0o1777).create("/tmp")?;
    }
    let is_empty = fs::read_dir("/tmp").is_ok_and(|mut entries| entries.next().is_none());
    if is_empty { fs::write(KEEP, KEEP_TEXT) } else { Ok(()) }
}

fn directory(place: &Path, entry: &ArchiveEntry, is_layer: bool, depth: u32) -> io::Result<()> {
    let is_root = entry.path.as_os_str().is_empty();
    let found = fs::symlink_metadata(place).is_ok_and(|about| about.is_dir());
    if !is_root && (!found || (is_layer && entry.is_opaque())) {
        put(place, depth, || fs::DirBuilder::new().mode(0o700).create(place))?;
        check_depth(place, depth)?;
    }
    set_attributes(place, entry)
}

fn other(place: &Path, entry: &ArchiveEntry, content: &mut impl Read, depth: u32) -> io::Result<()> {
    match &entry.kind {
        EntryKind::File | EntryKind::Sparse(_) => return file(place, entry, content, depth),
        // A hard link shares its metadata with its target, which may belong to the base, so none is set.
        EntryKind::Link(target) => return put(place, depth, || fs::hard_link(Path::new("/").join(target), place)),
        EntryKind::Symlink(target) => put(place, depth, || symlink(target, place))?,
        EntryKind::Fifo => {
            put(place, depth, || Ok(rustix::fs::mknodat(CWD, place, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?))?
        }
        EntryKind::Directory | EntryKind::Whiteout | EntryKind::Device => {}
    }
    dress(place, entry)
}

fn file(place: &Path, entry: &ArchiveEntry, content: &mut impl Read, depth: u32) -> io::Result<()> {
    let mut file = put(place, depth, || File::options().write(true).create_new(true).mode(0o600).open(place))?;
    if let EntryKind::Sparse(pieces) = &entry.kind {
        for (offset, length) in pieces {
            file.seek(SeekFrom::Start(*offset))?;
            io::copy(&mut content.take(*length), &mut file)?;
        }
        file.set_len(entry.size)?;
    } else {
        write_with_holes(content, &mut file, entry.size)?;
    }
    // Like `dress`, but on the open file, which avoids path lookups.
    fchown(&file, Some(entry.uid), Some(entry.gid))?;
    file.set_permissions(fs::Permissions::from_mode(entry.mode))?;
    set_attributes(place, entry)?;
    Ok(rustix::fs::futimens(&file, &times(entry.mtime))?)
}

/// Makes an entry. Tries without preparation first, which nearly always succeeds.
fn put<T>(place: &Path, depth: u32, make: impl Fn() -> io::Result<T>) -> io::Result<T> {
    use io::ErrorKind::{AlreadyExists, NotADirectory, NotFound};
    match make() {
        Err(error) if matches!(error.kind(), AlreadyExists | NotADirectory | NotFound) => {
            make_way(place, depth)?;
            make()
        }
        made => made,
    }
}

/// Writes runs of zeros as holes.
fn write_with_holes(content: &mut impl Read, file: &mut File, size: u64) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK.min(usize::try_from(size).unwrap_or(CHUNK).max(1))];
    let (mut left, mut is_hole) = (size, false);
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
        content.read_exact(&mut chunk[..most])?;
        is_hole = chunk[..most].iter().all(|byte| *byte == 0);
        if is_hole {
            file.seek(SeekFrom::Current(i64::try_from(most).map_err(io::Error::other)?))?;
        } else {
            file.write_all(&chunk[..most])?;
        }
        left -= most as u64;
    }
    if is_hole { file.set_len(size) } else { Ok(()) }
}

/// Removes what is at `place` and creates its parent directory.
fn make_way(place: &Path, depth: u32) -> io::Result<()> {
    remove(place)?;
    let Some(parent) = place.parent() else { return Ok(()) };
    if fs::metadata(parent).is_ok_and(|about| about.is_dir()) {
        return Ok(());
    }
    // Not every archive has entries for its directories.
    fs::DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    check_depth(parent, depth)
}

/// Through links, a short name can lead to a deep directory, and a later walk of such a tree would fail.
fn check_depth(directory: &Path, most: u32) -> io::Result<()> {
    rustix::process::chdir(directory)?;
    let place = rustix::process::getcwd(Vec::new());
    rustix::process::chdir("/")?;
    let deep = match place {
        Ok(place) => place.as_bytes().iter().filter(|byte| **byte == b'/').count() as u64 > u64::from(most),
        // Longer than any valid path.
        Err(rustix::io::Errno::NAMETOOLONG | rustix::io::Errno::RANGE) => true,
        Err(error) => return Err(error.into()),
    };
    if deep { Err(wrong(format!("it has directories more than {most} deep"))) } else { Ok(()) }
}

fn remove(place: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(place) {
        Ok(about) if about.is_dir() => fs::remove_dir_all(place),
        Ok(_) => fs::remove_file(place),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Sets owner, mode, attributes and time, in an order in which none undoes another.
fn dress(place: &Path, entry: &ArchiveEntry) -> io::Result<()> {
    lchown(place, Some(entry.uid), Some(entry.gid))?;
    let is_link = matches!(entry.kind, EntryKind::Symlink(_));
    if !is_link {
        fs::set_permissions(place, fs::Permissions::from_mode(entry.mode))?;
        set_attributes(place, entry)?;
    }
    set_time(place, entry.mtime)
}

fn set_attributes(place: &Path, entry: &ArchiveEntry) -> io::Result<()> {
    for (name, value) in entry.attributes.iter().filter(|(name, _)| is_kept(name)) {
        set_attribute(place, OsStr::from_bytes(name), value)?;
    }
    Ok(())
}

pub(super) fn set_attribute(place: &Path, name: &OsStr, value: &[u8]) -> io::Result<()> {
    match rustix::fs::lsetxattr(place, name, value, XattrFlags::empty()) {
        // Not every file system supports attributes.
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        set => Ok(set?),
    }
}

pub(super) fn set_time(place: &Path, time: (i64, u32)) -> io::Result<()> {
    Ok(rustix::fs::utimensat(CWD, place, &times(time), AtFlags::SYMLINK_NOFOLLOW)?)
}

fn times((seconds, nanoseconds): (i64, u32)) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec: seconds, tv_nsec: nanoseconds.into() },
    }
}
