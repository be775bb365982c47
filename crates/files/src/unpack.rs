//! Unpacks an archive into a directory.

use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{self, Read},
    os::{fd::BorrowedFd, unix::ffi::OsStrExt},
    path::Path,
};

use rustix::{
    fs::{
        AtFlags, FileType, Mode, fchmod, futimens, linkat, mkdirat, renameat, statat, symlinkat, unlinkat, utimensat,
    },
    io::Errno,
};

use crate::{
    Fault, How, TransferTotals, copy,
    open_directory::{OpenDirectory, enter, parts, stays_inside},
    tar::{Member, MemberKind, TarReader},
    write::{times, unused_name, write, write_at},
};

/// Where the archive comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// From the owner of the directory it is unpacked in: links may point anywhere, modes are kept.
    Known,
    /// From an untrusted source: a link that leads out of the directory is left out, and no file is setuid or setgid.
    Stranger,
}

impl Trust {
    fn mode_bits(self) -> u32 {
        match self {
            Self::Known => 0o7777,
            Self::Stranger => 0o777,
        }
    }
}

/// Unpacks the archive read from `from` into the directory `into`, which is created if it is missing.
///
/// No member is written outside it, whatever the archive contains and whatever exists there. A member that cannot be
/// unpacked is reported and left out; input that is not an archive is an error.
pub fn unpack(
    from: &mut dyn Read,
    into: &Path,
    trust: Trust,
    tell: &mut dyn FnMut(&Fault),
) -> Result<TransferTotals, Fault> {
    let archive = TarReader::new(from);
    unpack_members(archive, None, into, trust, tell)
}

/// Restores to `to` what the archive contains: a directory if its first member is `./`, else its only file. An empty
/// archive creates nothing. This is the inverse of [`pack`](crate::pack), under another name.
pub fn fetch(
    from: &mut dyn Read,
    to: &Path,
    trust: Trust,
    tell: &mut dyn FnMut(&Fault),
) -> Result<TransferTotals, Fault> {
    let fault = |error: io::Error| Fault::of(&error, to);
    let mut archive = TarReader::new(from);
    let Some(first) = archive.next_member().map_err(fault)? else { return Ok(TransferTotals::default()) };
    match first.kind {
        MemberKind::Directory if parts(&first.name).is_some_and(|parts| parts.is_empty()) => {
            unpack_members(archive, Some(first), to, trust, tell)
        }
        MemberKind::File => {
            let mode = Some(first.mode & trust.mode_bits());
            let how = How { mode, mtime: Some(first.mtime), size: Some(first.size) };
            let done = write(to, &mut archive, &how)?;
            copy(&mut archive.into_inner(), &mut io::sink()).map_err(fault)?;
            Ok(done)
        }
        MemberKind::Directory | MemberKind::Symlink | MemberKind::HardLink | MemberKind::Other => {
            Err(Fault::new("EINVAL", "Not an archive of a file or directory", to))
        }
    }
}

fn unpack_members(
    mut archive: TarReader<&mut dyn Read>,
    mut first: Option<Member>,
    into: &Path,
    trust: Trust,
    tell: &mut dyn FnMut(&Fault),
) -> Result<TransferTotals, Fault> {
    let fault = |error: io::Error| Fault::of(&error, into);
    let is_new = !into.exists();
    fs::create_dir_all(into).map_err(fault)?;
    let place = OpenDirectory::open(into).map_err(fault)?;
    let mut unpacking = Unpacking { place, trust, made: Vec::new(), done: TransferTotals::default() };
    loop {
        let next = match first.take() {
            Some(first) => Some(first),
            None => archive.next_member().map_err(fault)?,
        };
        let Some(member) = next else { break };
        let Some(parts) = parts(&member.name) else {
            unpacking.done.faults += 1;
            tell(&Fault::new("EINVAL", "A name that leads out of the directory", name_of(&member)));
            continue;
        };
        unpacking.leave(&parts);
        if parts.is_empty() {
            if is_new && member.kind == MemberKind::Directory {
                unpacking.made.push(Made::of(parts, &member));
            }
            continue;
        }
        match unpacking.member(&member, parts, &mut archive) {
            Ok(()) => unpacking.done.members += 1,
            Err(fault) => {
                unpacking.done.faults += 1;
                // The next member would fail too.
                if fault.code == "ENOSPC" {
                    return Err(fault);
                }
                tell(&fault);
            }
        }
    }
    unpacking.finish();
    // The sender sends the archive to its end, so read it to its end.
    copy(&mut archive.into_inner(), &mut io::sink()).map_err(fault)?;
    Ok(unpacking.done)
}

fn name_of(member: &Member) -> &Path {
    Path::new(OsStr::from_bytes(&member.name))
}

struct Unpacking {
    place: OpenDirectory,
    trust: Trust,
    /// Directories above the last member that this archive created, deepest last. They get mode and mtime
    /// once complete, so that the mode does not block new entries and the entries do not change the mtime.
    made: Vec<Made>,
    done: TransferTotals,
}

struct Made {
    parts: Vec<OsString>,
    mode: u32,
    mtime: (i64, u32),
}

impl Made {
    fn of(parts: Vec<OsString>, member: &Member) -> Self {
        Self { parts, mode: member.mode, mtime: member.mtime }
    }
}

impl Unpacking {
    fn member(&mut self, member: &Member, mut parts: Vec<OsString>, data: &mut dyn Read) -> Result<(), Fault> {
        let fault = |error: io::Error| Fault::of(&error, name_of(member));
        let mode = member.mode & self.trust.mode_bits();
        let Some(name) = parts.pop() else { return Ok(()) };
        let trust = self.trust;
        match member.kind {
            MemberKind::File => {
                let how = How { mode: Some(mode), mtime: Some(member.mtime), size: Some(member.size) };
                let parent = self.place.directory(&parts, true).map_err(fault)?;
                self.done.bytes += write_at(parent, &name, data, &how, None).map_err(fault)?;
            }
            MemberKind::Directory => {
                let parent = self.place.directory(&parts, true).map_err(fault)?;
                let is_new = match mkdirat(parent, &name, Mode::from_raw_mode(0o777)) {
                    Ok(()) => true,
                    Err(Errno::EXIST) => false,
                    Err(error) => return Err(fault(error.into())),
                };
                // The existing entry may be a file or a link.
                enter(parent, &name).map_err(|error| fault(error.into()))?;
                if is_new {
                    parts.push(name);
                    self.made.push(Made::of(parts, member));
                }
            }
            MemberKind::Symlink => {
                if trust == Trust::Stranger && !stays_inside(&member.link, parts.len()) {
                    return Err(Fault::new("EPERM", "A link that leads out of the directory", name_of(member)));
                }
                let parent = self.place.directory(&parts, true).map_err(fault)?;
                let target = OsStr::from_bytes(&member.link);
                put(parent, &name, |unused| {
                    symlinkat(target, parent, unused)?;
                    let _ = utimensat(parent, unused, &times(member.mtime), AtFlags::SYMLINK_NOFOLLOW);
                    Ok(())
                })
                .map_err(fault)?;
            }
            MemberKind::HardLink => self.hard_link(member, &parts, &name)?,
            MemberKind::Other => {
                return Err(Fault::new("EINVAL", "Neither a file nor a directory nor a link", name_of(member)));
            }
        }
        Ok(())
    }

    /// Adds another name for an existing file. Only for files: the target of a symbolic link
    /// means something else in another directory.
    fn hard_link(&mut self, member: &Member, to: &[OsString], name: &OsStr) -> Result<(), Fault> {
        let fault = |error: io::Error| Fault::of(&error, name_of(member));
        let outside = || Fault::new("EPERM", "A link that leads out of the directory", name_of(member));
        let mut from = parts(&member.link).ok_or_else(outside)?;
        let first = from.pop().ok_or_else(outside)?;
        let from = rustix::io::fcntl_dupfd_cloexec(self.place.directory(&from, false).map_err(fault)?, 3)
            .map_err(|error| fault(error.into()))?;
        let found = statat(&from, &first, AtFlags::SYMLINK_NOFOLLOW).map_err(|error| fault(error.into()))?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(Fault::new("EPERM", "A hard link to what is no file", name_of(member)));
        }
        let parent = self.place.directory(to, true).map_err(fault)?;
        put(parent, name, |unused| linkat(&from, &first, parent, unused, AtFlags::empty())).map_err(fault)
    }

    /// Completes the directories that do not contain the next member.
    fn leave(&mut self, next: &[OsString]) {
        while let Some(made) = self.made.pop_if(|made| !next.starts_with(&made.parts)) {
            self.settle(&made);
        }
    }

    fn finish(&mut self) {
        while let Some(made) = self.made.pop() {
            self.settle(&made);
        }
    }

    /// Sets mode and mtime. Errors are ignored: the files exist.
    fn settle(&mut self, made: &Made) {
        let bits = self.trust.mode_bits();
        let Ok(directory) = self.place.directory(&made.parts, false) else { return };
        let _ = futimens(directory, &times(made.mtime));
        let _ = fchmod(directory, Mode::from_raw_mode(made.mode & bits));
    }
}

/// Creates an entry under a temporary name, then renames it to `name`; an existing entry is replaced.
fn put(parent: BorrowedFd<'_>, name: &OsStr, make: impl FnOnce(&str) -> rustix::io::Result<()>) -> io::Result<()> {
    let unused = unused_name()?;
    make(&unused)?;
    let named = renameat(parent, &unused, parent, name);
    // The temporary name still exists if the rename failed, or if both were names of the same file.
    let _ = unlinkat(parent, &unused, AtFlags::empty());
    Ok(named?)
}
