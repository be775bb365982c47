//! Packs a file or directory into an archive.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
};

use rustix::fs::OFlags;

use crate::{
    CHUNK, Fault, TransferTotals,
    tar::{Member, MemberKind, TarWriter},
    walk::Walk,
};

/// Writes an archive of `path`: for a directory its content, with names relative to it, after the member
/// `./`; for a file that file. Links are packed as links, except `path` itself, which is followed.
pub fn pack(path: &Path, to: &mut dyn Write, tell: &mut dyn FnMut(&Fault)) -> Result<TransferTotals, Fault> {
    let fault = |error: io::Error| Fault::of(&error, path);
    let real = fs::canonicalize(path).map_err(fault)?;
    let metadata = fs::metadata(&real).map_err(fault)?;
    let buffer = vec![0; CHUNK];
    let mut packing =
        Packing { archive: TarWriter::new(to), twice: BTreeMap::new(), buffer, done: TransferTotals::default(), tell };
    if !metadata.is_dir() {
        packing.add(&real, last_part(path), &metadata)?;
    } else {
        packing.add(&real, b"./".to_vec(), &metadata)?;
        for found in Walk::new(&real, usize::MAX) {
            match found.metadata {
                Ok(metadata) => packing.add(&found.path, found.name.as_os_str().as_bytes().to_vec(), &metadata)?,
                Err(error) => packing.leave_out(&Fault::of(&error, &found.path)),
            }
        }
    }
    packing.archive.finish().map_err(fault)?;
    Ok(packing.done)
}

/// The last part of the path. The root has none that could be in an archive, but it is a directory.
fn last_part(path: &Path) -> Vec<u8> {
    let last = path.file_name().unwrap_or(OsStr::new("file"));
    last.as_bytes().to_vec()
}

struct Packing<'a> {
    archive: TarWriter<&'a mut dyn Write>,
    /// Files with several names, each under the name that was found first.
    twice: BTreeMap<(u64, u64), Vec<u8>>,
    buffer: Vec<u8>,
    done: TransferTotals,
    tell: &'a mut dyn FnMut(&Fault),
}

impl Packing<'_> {
    fn leave_out(&mut self, fault: &Fault) {
        (self.tell)(fault);
        self.done.faults += 1;
    }

    /// Adds one entry, or leaves it out. Only a failure to write the archive is an error.
    fn add(&mut self, path: &Path, name: Vec<u8>, metadata: &Metadata) -> Result<(), Fault> {
        let mut member = Member {
            name,
            kind: MemberKind::File,
            mode: metadata.mode() & 0o7777,
            size: 0,
            mtime: (metadata.mtime(), metadata.mtime_nsec() as u32),
            link: Vec::new(),
        };
        let kind = metadata.file_type();
        if kind.is_dir() {
            member.kind = MemberKind::Directory;
            if !member.name.ends_with(b"/") {
                member.name.push(b'/');
            }
        } else if kind.is_symlink() {
            member.kind = MemberKind::Symlink;
            match fs::read_link(path) {
                Ok(target) => member.link = target.as_os_str().as_bytes().to_vec(),
                Err(error) => {
                    self.leave_out(&Fault::of(&error, path));
                    return Ok(());
                }
            }
        } else if kind.is_file() {
            let number = (metadata.dev(), metadata.ino());
            match self.twice.get(&number) {
                Some(first) => (member.kind, member.link) = (MemberKind::HardLink, first.clone()),
                None => {
                    if self.file(path, &mut member)? && metadata.nlink() > 1 {
                        self.twice.insert(number, member.name);
                    }
                    return Ok(());
                }
            }
        } else {
            self.leave_out(&Fault::new("EINVAL", "Neither a file nor a directory nor a link", path));
            return Ok(());
        }
        self.done.members += 1;
        self.archive.member(&member).map_err(|error| Fault::of(&error, path))
    }

    /// Fills the buffer, up to the end of the file.
    fn read_ahead(&mut self, file: &mut File) -> io::Result<usize> {
        let mut filled = 0;
        while filled < self.buffer.len() {
            match file.read(&mut self.buffer[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    /// Adds a file; returns whether it is in the archive.
    fn file(&mut self, path: &Path, member: &mut Member) -> Result<bool, Fault> {
        let written = |error: io::Error| Fault::of(&error, path);
        // The file may have been replaced by a pipe since, which must not block.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(path).and_then(|file| {
            let size = file.metadata()?.len();
            Ok((file, size))
        });
        let (mut file, size) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.leave_out(&Fault::of(&error, path));
                return Ok(false);
            }
        };
        let (early, size) = match size {
            // Files generated by the kernel report no size until they are read.
            0 => self.read_ahead(&mut file).map(|count| (count, count as u64)).unwrap_or_default(),
            size => (0, size),
        };
        member.size = size;
        self.archive.member(member).map_err(written)?;
        self.done.members += 1;
        self.archive.write_all(&self.buffer[..early]).map_err(written)?;
        self.done.bytes += early as u64;
        let mut left = size - early as u64;
        let mut why = Fault::new("EIO", "It became shorter while it was read", path);
        while left > 0 {
            let most = left.min(self.buffer.len() as u64) as usize;
            let count = match file.read(&mut self.buffer[..most]) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    why = Fault::of(&error, path);
                    break;
                }
            };
            self.archive.write_all(&self.buffer[..count]).map_err(written)?;
            left -= count as u64;
            self.done.bytes += count as u64;
        }
        if left > 0 {
            // The header states the size: missing bytes become zeroes, and the fault is reported.
            self.leave_out(&why);
            self.buffer.fill(0);
            while left > 0 {
                let most = left.min(self.buffer.len() as u64) as usize;
                self.archive.write_all(&self.buffer[..most]).map_err(written)?;
                left -= most as u64;
            }
        }
        Ok(true)
    }
}
