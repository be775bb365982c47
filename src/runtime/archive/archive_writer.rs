//! Writes a tar archive: plain headers where they suffice, extended ones where they do not.

use std::{
    io::{self, Read, Write},
    os::unix::ffi::OsStrExt,
};

use baton_files::tar::pax;
use tar::{EntryType, Header};

use super::entries::{ArchiveEntry, EntryKind};

const BLOCK: u64 = 512;
const NAME_LENGTH: usize = 100;
/// Larger numbers do not fit into a plain header.
const OWNER: u32 = 0o7_777_777;
const SIZE: u64 = 0o77_777_777_777;

pub struct ArchiveWriter<W> {
    target: W,
}

impl<W: Write> ArchiveWriter<W> {
    pub fn new(target: W) -> Self {
        Self { target }
    }

    /// Adds an entry and, for a file, its content, which must have the size that the entry states.
    pub fn add(&mut self, entry: &ArchiveEntry, content: &mut dyn Read) -> io::Result<()> {
        let mut path = entry.path.as_os_str().as_bytes().to_vec();
        if entry.kind == EntryKind::Directory {
            path.extend_from_slice(if path.is_empty() { b"./" } else { b"/" });
        }
        let (kind, link, size): (_, &[u8], _) = match &entry.kind {
            EntryKind::File | EntryKind::Sparse(_) => (EntryType::Regular, b"", entry.size),
            EntryKind::Link(target) => (EntryType::Link, target.as_os_str().as_bytes(), 0),
            EntryKind::Symlink(target) => (EntryType::Symlink, target.as_bytes(), 0),
            EntryKind::Directory => (EntryType::Directory, b"", 0),
            EntryKind::Fifo => (EntryType::Fifo, b"", 0),
            EntryKind::Whiteout => (EntryType::Char, b"", 0),
            // It would never be extracted.
            EntryKind::Device => return Ok(()),
        };
        let extended = extended(entry, &path, link, size);
        if !extended.is_empty() {
            let mut header = self.header(EntryType::XHeader, b"extended", b"", extended.len() as u64);
            self.target.write_all(finish(&mut header))?;
            self.content(&mut &extended[..], extended.len() as u64)?;
        }
        let mut header = self.header(kind, &path, link, size);
        if kind == EntryType::Char {
            header.set_device_major(0)?;
            header.set_device_minor(0)?;
        }
        header.set_mode(entry.mode);
        header.set_uid(entry.uid.min(OWNER).into());
        header.set_gid(entry.gid.min(OWNER).into());
        header.set_mtime(u64::try_from(entry.mtime.0).unwrap_or(0).min(SIZE));
        self.target.write_all(finish(&mut header))?;
        self.content(content, size)
    }

    fn header(&self, kind: EntryType, path: &[u8], link: &[u8], size: u64) -> Header {
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        let old = header.as_old_mut();
        let fill = |field: &mut [u8], text: &[u8]| {
            let most = text.len().min(field.len());
            field[..most].copy_from_slice(&text[..most]);
        };
        fill(&mut old.name, path);
        fill(&mut old.linkname, link);
        header.set_size(size.min(SIZE));
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header
    }

    fn content(&mut self, content: &mut dyn Read, size: u64) -> io::Result<()> {
        let copied = io::copy(&mut content.take(size), &mut self.target)?;
        if copied != size {
            return Err(io::Error::other("a file became shorter while it was read"));
        }
        let padding = usize::try_from(size.wrapping_neg() % BLOCK).map_err(io::Error::other)?;
        self.target.write_all(&[0; BLOCK as usize][..padding])
    }

    pub fn finish(mut self) -> io::Result<W> {
        self.target.write_all(&[0; 2 * BLOCK as usize])?;
        Ok(self.target)
    }
}

fn finish(header: &mut Header) -> &[u8] {
    header.set_cksum();
    header.as_bytes()
}

/// The records that do not fit into the plain header.
fn extended(entry: &ArchiveEntry, path: &[u8], link: &[u8], size: u64) -> Vec<u8> {
    let mut records = Vec::new();
    let mut add = |name: &[u8], value: &[u8]| pax::record(&mut records, name, value);
    let is_plain = |text: &[u8]| text.len() <= NAME_LENGTH && text.is_ascii();
    if !is_plain(path) {
        add(b"path", path);
    }
    if !is_plain(link) {
        add(b"linkpath", link);
    }
    if size > SIZE {
        add(b"size", size.to_string().as_bytes());
    }
    if entry.uid > OWNER {
        add(b"uid", entry.uid.to_string().as_bytes());
    }
    if entry.gid > OWNER {
        add(b"gid", entry.gid.to_string().as_bytes());
    }
    let (seconds, nanoseconds) = entry.mtime;
    if nanoseconds != 0 || seconds < 0 {
        add(b"mtime", pax::time_text(entry.mtime).as_bytes());
    }
    for (name, value) in &entry.attributes {
        add(&[b"SCHILY.xattr.", &name[..]].concat(), value);
    }
    records
}
