//! An archive to a directory.

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
    Done, Fault, How, copy,
    place::{Place, enter, parts, stays_inside},
    tar::{Kind, Member, Reader},
    write::{times, unused_name, write, write_at},
};

/// Whose archive it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Of whoever owns the place it is unpacked in: links may point anywhere, modes are kept.
    Known,
    /// Of a stranger: a link that leads out of the directory is left out, and no file runs as another user.
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

/// Unpacks the archive that `from` gives into the directory `into`, which is made if it is missing.
///
/// No member is written outside it, whatever the archive says and whatever lies there. A member that cannot be
/// unpacked is told and left out; what is no archive at all is an error.
pub fn unpack(from: &mut dyn Read, into: &Path, trust: Trust, tell: &mut dyn FnMut(&Fault)) -> Result<Done, Fault> {
    let archive = Reader::new(from);
    unpack_members(archive, None, into, trust, tell)
}

/// Makes `to` what the archive is of: a directory if its first member is `./`, else the one file in it. An empty
/// archive makes nothing. What was packed by [`pack`](crate::pack) comes out so under another name.
pub fn fetch(from: &mut dyn Read, to: &Path, trust: Trust, tell: &mut dyn FnMut(&Fault)) -> Result<Done, Fault> {
    let fault = |error: io::Error| Fault::of(&error, to);
    let mut archive = Reader::new(from);
    let Some(first) = archive.next_member().map_err(fault)? else { return Ok(Done::default()) };
    match first.kind {
        Kind::Directory if parts(&first.name).is_some_and(|parts| parts.is_empty()) => {
            unpack_members(archive, Some(first), to, trust, tell)
        }
        Kind::File => {
            let mode = Some(first.mode & trust.mode_bits());
            let how = How { mode, mtime: Some(first.mtime), size: Some(first.size) };
            let done = write(to, &mut archive, &how)?;
            copy(&mut archive.into_inner(), &mut io::sink()).map_err(fault)?;
            Ok(done)
        }
        Kind::Directory | Kind::Symlink | Kind::HardLink | Kind::Other => {
            Err(Fault::new("EINVAL", "Not an archive of a file or directory", to))
        }
    }
}

fn unpack_members(
    mut archive: Reader<&mut dyn Read>,
    mut first: Option<Member>,
    into: &Path,
    trust: Trust,
    tell: &mut dyn FnMut(&Fault),
) -> Result<Done, Fault> {
    let fault = |error: io::Error| Fault::of(&error, into);
    let is_new = !into.exists();
    fs::create_dir_all(into).map_err(fault)?;
    let place = Place::open(into).map_err(fault)?;
    let mut unpacking = Unpacking { place, trust, made: Vec::new(), done: Done::default() };
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
            if is_new && member.kind == Kind::Directory {
                unpacking.made.push(Made::of(parts, &member));
            }
            continue;
        }
        match unpacking.member(&member, parts, &mut archive) {
            Ok(()) => unpacking.done.members += 1,
            Err(fault) => {
                unpacking.done.faults += 1;
                // The next one would not fare better.
                if fault.code == "ENOSPC" {
                    return Err(fault);
                }
                tell(&fault);
            }
        }
    }
    unpacking.finish();
    // Whoever sends it sends it to its end.
    copy(&mut archive.into_inner(), &mut io::sink()).map_err(fault)?;
    Ok(unpacking.done)
}

fn name_of(member: &Member) -> &Path {
    Path::new(OsStr::from_bytes(&member.name))
}

struct Unpacking {
    place: Place,
    trust: Trust,
    /// Directories on the way to the last member that this archive made, the deepest last: they get
    /// mode and time when they are left, so that neither hinders or is changed by what is put in.
    made: Vec<Made>,
    done: Done,
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
            Kind::File => {
                let how = How { mode: Some(mode), mtime: Some(member.mtime), size: Some(member.size) };
                let parent = self.place.directory(&parts, true).map_err(fault)?;
                self.done.bytes += write_at(parent, &name, data, &how, None).map_err(fault)?;
            }
            Kind::Directory => {
                let parent = self.place.directory(&parts, true).map_err(fault)?;
                let is_new = match mkdirat(parent, &name, Mode::from_raw_mode(0o777)) {
                    Ok(()) => true,
                    Err(Errno::EXIST) => false,
                    Err(error) => return Err(fault(error.into())),
                };
                // What is there may be a file, or a link.
                enter(parent, &name).map_err(|error| fault(error.into()))?;
                if is_new {
                    parts.push(name);
                    self.made.push(Made::of(parts, member));
                }
            }
            Kind::Symlink => {
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
            Kind::HardLink => self.hard_link(member, &parts, &name)?,
            Kind::Other => {
                return Err(Fault::new("EINVAL", "Neither a file nor a directory nor a link", name_of(member)));
            }
        }
        Ok(())
    }

    /// Another name for a file that is already there, and only for a file: a link's text means
    /// something else in another directory.
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

    /// Directories that the next member is not in are complete.
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

    /// What cannot be set stays as it is: the files are there.
    fn settle(&mut self, made: &Made) {
        let bits = self.trust.mode_bits();
        let Ok(directory) = self.place.directory(&made.parts, false) else { return };
        let _ = futimens(directory, &times(made.mtime));
        let _ = fchmod(directory, Mode::from_raw_mode(made.mode & bits));
    }
}

/// Makes something under a name nobody has, then gives it its own; what had that is replaced.
fn put(parent: BorrowedFd<'_>, name: &OsStr, make: impl FnOnce(&str) -> rustix::io::Result<()>) -> io::Result<()> {
    let unused = unused_name()?;
    make(&unused)?;
    let named = renameat(parent, &unused, parent, name);
    // It is still there if it failed, or if both were names of one file.
    let _ = unlinkat(parent, &unused, AtFlags::empty());
    Ok(named?)
}
