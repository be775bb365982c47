//! The child that extracts an archive: it shuts itself into the fresh tree before it reads a byte of
//! it, and keeps no right but those over owners and modes. Links can lead nowhere else, devices cannot
//! be made.
//!
//! ```text
//!   baton extract-archive TREE SIZE ENTRIES DEPTH layer|complete|base [BASE] < ARCHIVE
//!   links to BASE ─▶ chroot, rights dropped ─▶ entries ─▶ owners and times of directories ─▶ one line
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
            fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, lchown, symlink},
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
    entries::{Entry, Kind, Limits, Reader, open, shown_path, wrong},
    farm::farm,
    is_kept,
};

pub const VERB: &str = "extract-archive";

const USAGE: &str = "usage: baton extract-archive TREE SIZE ENTRIES DEPTH layer|complete|base [BASE] < ARCHIVE";
const CHUNK: usize = 64 << 10;

/// The code with which the child ends when the disk, not the archive, is to blame.
pub const NO_SPACE: u8 = 28;

/// The verb. Says on stdout how many entries and bytes there were, on stderr what was wrong.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let words: Vec<_> = arguments.collect();
    let text = |at: usize| words.get(at).and_then(|word| word.to_str());
    let number = |at: usize| text(at).and_then(|word| word.parse::<u64>().ok());
    let asked = (words.first(), number(1), number(2), number(3).and_then(|depth| depth.try_into().ok()), text(4));
    let (Some(tree), Some(size), Some(entries), Some(depth), Some(kind @ ("layer" | "complete" | "base"))) = asked
    else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let base = words.get(5).map(Path::new);
    match run(Path::new(tree), base, kind, Limits { size, entries, depth }) {
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

fn run(tree: &Path, base: Option<&Path>, kind: &str, limits: Limits) -> io::Result<(u64, u64)> {
    let (is_layer, is_base) = (kind == "layer", kind == "base");
    let archive = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    rustix::process::umask(Mode::empty());
    if let Some(base) = base {
        farm(base, tree)?;
    }
    confine(tree, limits.size)?;
    let tally = extract(open(archive)?, is_layer, limits)?;
    if !is_base {
        furnish()?;
    }
    Ok(tally)
}

/// From here on there is nothing but the tree.
fn confine(tree: &Path, size: u64) -> io::Result<()> {
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
    rustix::thread::set_capabilities(None, kept)?;
    // What counts itself wrong is stopped by the kernel.
    let most = Rlimit { current: Some(size), maximum: Some(size) };
    Ok(rustix::process::setrlimit(Resource::Fsize, most)?)
}

/// Extracts into the root of this process.
fn extract(source: impl Read, is_layer: bool, limits: Limits) -> io::Result<(u64, u64)> {
    let mut reader = Reader::new(source, limits);
    let mut gone = BTreeSet::new();
    let mut directories = Vec::new();
    while let Some(entry) = reader.next()? {
        let place = Path::new("/").join(&entry.path);
        let named = |error: io::Error| {
            if error.kind() == io::ErrorKind::InvalidData {
                return error;
            }
            io::Error::new(error.kind(), format!("{}: {error}", shown_path(&entry.path)))
        };
        match &entry.kind {
            Kind::Whiteout if is_layer => {
                gone.insert(entry.path.clone());
                remove(&place).map_err(named)?;
            }
            Kind::Link(target) if is_layer && gone.contains(target) => {
                gone.insert(entry.path.clone());
                remove(&place).map_err(named)?;
            }
            Kind::Directory => {
                directory(&place, &entry, is_layer).map_err(named)?;
                directories.push(entry);
            }
            // The sandbox has devices of its own.
            Kind::Whiteout | Kind::Device => {}
            Kind::File | Kind::Sparse(_) | Kind::Link(_) | Kind::Symlink(_) | Kind::Fifo => {
                if entry.path.as_os_str().is_empty() {
                    return Err(wrong("its root is not a directory"));
                }
                other(&place, &entry, &mut reader).map_err(named)?;
            }
        }
    }
    // Deepest first: what is written below a directory changes its time.
    directories.sort_by(|one, other| other.path.cmp(&one.path));
    for entry in &directories {
        let place = Path::new("/").join(&entry.path);
        // A later entry may have taken its place.
        if fs::symlink_metadata(&place).is_ok_and(|about| about.is_dir()) {
            dress(&place, entry)?;
        }
    }
    Ok(reader.tally())
}

/// Where a container has mounts. runsc would make what is missing, in a tree that others use already.
const MOUNTS: [&str; 6] = ["/.baton", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm"];
/// An empty `/tmp` would get a file system of its own, which snapshots miss.
const KEEP: &str = "/tmp/.keep";
const KEPT: &str = "This file keeps /tmp on the root file system.\n";

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
    if is_empty { fs::write(KEEP, KEPT) } else { Ok(()) }
}

fn directory(place: &Path, entry: &Entry, is_layer: bool) -> io::Result<()> {
    if entry.path.as_os_str().is_empty() {
        return Ok(());
    }
    let found = fs::symlink_metadata(place).is_ok_and(|about| about.is_dir());
    if found && !(is_layer && entry.is_opaque()) {
        return Ok(());
    }
    make_way(place)?;
    fs::DirBuilder::new().mode(0o700).create(place)
}

fn other(place: &Path, entry: &Entry, content: &mut impl Read) -> io::Result<()> {
    make_way(place)?;
    match &entry.kind {
        Kind::File => {
            let mut file = fresh(place)?;
            write_with_holes(content, &mut file, entry.size)?;
        }
        Kind::Sparse(pieces) => {
            let mut file = fresh(place)?;
            for (offset, length) in pieces {
                file.seek(SeekFrom::Start(*offset))?;
                io::copy(&mut content.take(*length), &mut file)?;
            }
            file.set_len(entry.size)?;
        }
        // A link shares all it has with its target, which may belong to the base: nothing is set.
        Kind::Link(target) => return fs::hard_link(Path::new("/").join(target), place),
        Kind::Symlink(target) => symlink(target, place)?,
        Kind::Fifo => rustix::fs::mknodat(CWD, place, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?,
        Kind::Directory | Kind::Whiteout | Kind::Device => {}
    }
    dress(place, entry)
}

fn fresh(place: &Path) -> io::Result<File> {
    File::options().write(true).create_new(true).mode(0o600).open(place)
}

/// Runs of zeros become holes.
fn write_with_holes(content: &mut impl Read, file: &mut File, size: u64) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK.min(usize::try_from(size).unwrap_or(CHUNK).max(1))];
    let mut left = size;
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
        content.read_exact(&mut chunk[..most])?;
        if chunk[..most].iter().all(|byte| *byte == 0) {
            file.seek(SeekFrom::Current(i64::try_from(most).map_err(io::Error::other)?))?;
        } else {
            file.write_all(&chunk[..most])?;
        }
        left -= most as u64;
    }
    file.set_len(size)
}

/// Nothing stands there any more, and there is a directory to put it in.
fn make_way(place: &Path) -> io::Result<()> {
    remove(place)?;
    let Some(parent) = place.parent() else { return Ok(()) };
    if fs::metadata(parent).is_ok_and(|about| about.is_dir()) {
        return Ok(());
    }
    // Not every archive names its directories.
    fs::DirBuilder::new().recursive(true).mode(0o755).create(parent)
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

/// Owner, mode, attributes and time, in the order in which none undoes another.
fn dress(place: &Path, entry: &Entry) -> io::Result<()> {
    lchown(place, Some(entry.uid), Some(entry.gid))?;
    let is_link = matches!(entry.kind, Kind::Symlink(_));
    if !is_link {
        fs::set_permissions(place, fs::Permissions::from_mode(entry.mode))?;
        for (name, value) in entry.attributes.iter().filter(|(name, _)| is_kept(name)) {
            set_attribute(place, OsStr::from_bytes(name), value)?;
        }
    }
    set_time(place, entry.mtime)
}

pub(super) fn set_attribute(place: &Path, name: &OsStr, value: &[u8]) -> io::Result<()> {
    match rustix::fs::lsetxattr(place, name, value, XattrFlags::empty()) {
        // Not every file system can hold them.
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        set => Ok(set?),
    }
}

pub(super) fn set_time(place: &Path, (seconds, nanoseconds): (i64, u32)) -> io::Result<()> {
    let times = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec: seconds, tv_nsec: nanoseconds.into() },
    };
    Ok(rustix::fs::utimensat(CWD, place, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}
