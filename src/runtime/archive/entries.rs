//! Reads an untrusted tar archive entry by entry: with bounded memory and no path outside the root.
//!
//! The `tar` crate reads the headers. Extended headers (long names, attributes, maps of sparse files) are read
//! here, since they must be bounded and attributes may hold any byte.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use baton_files::tar::pax;
use tar::{GnuExtSparseHeader, Header};

const BLOCK: u64 = 512;
/// Maximum size of one entry's extended headers: a path has at most 4 KiB, an attribute 64 KiB.
const AROUND: u64 = 1 << 20;
const LONGEST_PATH: usize = 4000;
const LONGEST_NAME: usize = 255;
const MOST_PIECES: usize = 100_000;
const ATTRIBUTE: &[u8] = b"SCHILY.xattr.";

/// Maximum content of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchiveLimits {
    /// Bytes of all files, with holes counted as written.
    pub size: u64,
    pub entries: u64,
    /// Maximum depth of directories.
    pub depth: u32,
}

impl ArchiveLimits {
    /// For archives made on this machine.
    pub const NONE: ArchiveLimits = ArchiveLimits { size: u64::MAX, entries: u64::MAX, depth: u32::MAX };
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryKind {
    File,
    /// The positions of the stored pieces in the file.
    Sparse(Vec<(u64, u64)>),
    Link(PathBuf),
    Symlink(OsString),
    Directory,
    Fifo,
    /// A character device 0:0: in a layer, a removed name.
    Whiteout,
    /// Any other device. It is never created.
    Device,
}

/// One entry, without its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveEntry {
    /// Relative, without `.` and `..`; empty is the root itself.
    pub path: PathBuf,
    pub kind: EntryKind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime: (i64, u32),
    /// Size of the resulting file.
    pub size: u64,
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

impl ArchiveEntry {
    pub fn is_opaque(&self) -> bool {
        self.kind == EntryKind::Directory
            && self.attributes.iter().any(|(name, value)| name == super::OPAQUE.as_bytes() && value == b"y")
    }
}

pub fn wrong(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

/// Opens a `.tar`, `.tar.gz` or `.tar.zst` as a tar stream, told apart by their first bytes.
pub fn open(file: File) -> io::Result<Box<dyn Read>> {
    let mut file = BufReader::with_capacity(256 << 10, file);
    let start = file.fill_buf()?;
    if start.starts_with(&[0x1f, 0x8b]) {
        Ok(Box::new(BufReader::with_capacity(256 << 10, flate2::bufread::MultiGzDecoder::new(file))))
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Ok(Box::new(BufReader::with_capacity(256 << 10, zstd::Decoder::with_buffer(file)?)))
    } else {
        Ok(Box::new(file))
    }
}

/// Reads entries; its `Read` implementation returns the content of the latest entry.
pub struct ArchiveReader<R> {
    source: R,
    limits: ArchiveLimits,
    entries: u64,
    size: u64,
    /// Bytes of content not read yet, and of the padding after it.
    left: u64,
    padding: u64,
}

#[derive(Default)]
struct ExtendedHeaders {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<(i64, u32)>,
    attributes: Vec<(Vec<u8>, Vec<u8>)>,
    /// Size of all attributes in bytes.
    held: u64,
}

impl<R: Read> ArchiveReader<R> {
    pub fn new(source: R, limits: ArchiveLimits) -> Self {
        Self { source, limits, entries: 0, size: 0, left: 0, padding: 0 }
    }

    /// The number of entries and bytes so far.
    pub fn count_entries(&self) -> (u64, u64) {
        (self.entries, self.size)
    }

    /// The next entry; skips unread content of the previous one.
    pub fn next(&mut self) -> io::Result<Option<ArchiveEntry>> {
        let mut around = ExtendedHeaders::default();
        loop {
            self.skip()?;
            let Some(header) = self.header()? else { return Ok(None) };
            let stored = number(header.entry_size())?;
            match header.entry_type().as_byte() {
                b'L' => around.path = Some(self.text(stored)?),
                b'K' => around.link = Some(self.text(stored)?),
                b'x' => {
                    let bytes = self.around(stored)?;
                    around.read(&bytes)?;
                }
                // Global defaults: only comments, in practice.
                b'g' => drop(self.around(stored)?),
                _ => return self.entry(&header, around).map(Some),
            }
        }
    }

    fn entry(&mut self, header: &Header, around: ExtendedHeaders) -> io::Result<ArchiveEntry> {
        self.entries += 1;
        if self.entries > self.limits.entries {
            return Err(wrong(format!("it has more than {} entries", self.limits.entries)));
        }
        let named = around.path.unwrap_or_else(|| header.path_bytes().into_owned());
        let path = clean(&named, self.limits.depth)?;
        let link = around.link.or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned));
        let stored = around.size.map_or_else(|| number(header.entry_size()), Ok)?;
        let mut size = 0;
        let kind = match header.entry_type().as_byte() {
            b'0' | 0 | b'7' if named.ends_with(b"/") => EntryKind::Directory,
            b'0' | 0 | b'7' => {
                size = stored;
                EntryKind::File
            }
            b'S' => {
                let (pieces, real) = self.pieces(header, stored)?;
                size = real;
                EntryKind::Sparse(pieces)
            }
            b'1' => EntryKind::Link(clean(&link.unwrap_or_default(), self.limits.depth)?),
            b'2' => {
                let target = link.unwrap_or_default();
                if target.is_empty() || target.len() > LONGEST_PATH || target.contains(&0) {
                    return Err(wrong("a symbolic link leads nowhere"));
                }
                EntryKind::Symlink(OsString::from_vec(target))
            }
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            b'3' => match (header.device_major(), header.device_minor()) {
                (Ok(Some(0)), Ok(Some(0))) => EntryKind::Whiteout,
                _ => EntryKind::Device,
            },
            b'4' => EntryKind::Device,
            other => {
                return Err(wrong(format!("it has an entry of the unknown kind {:?}", char::from(other))));
            }
        };
        // Links and directories have no content, whatever some writers store there.
        self.expect(stored)?;
        self.count(size)?;
        let mtime = around.mtime.unwrap_or((i64::try_from(number(header.mtime())?).unwrap_or(0), 0));
        Ok(ArchiveEntry {
            path,
            kind,
            mode: number(header.mode())? & 0o7777,
            uid: owner(around.uid.map_or_else(|| number(header.uid()), Ok)?)?,
            gid: owner(around.gid.map_or_else(|| number(header.gid()), Ok)?)?,
            mtime,
            size,
            attributes: around.attributes,
        })
    }

    /// The map of a sparse file in GNU tar's old format, and the size of the file.
    fn pieces(&mut self, header: &Header, stored: u64) -> io::Result<(Vec<(u64, u64)>, u64)> {
        let bad = || wrong("the map of a sparse file is wrong");
        let gnu = header.as_gnu().ok_or_else(bad)?;
        let real = number(gnu.real_size())?;
        let mut pieces = Vec::new();
        for piece in gnu.sparse.iter().filter(|piece| !piece.is_empty()) {
            pieces.push((number(piece.offset())?, number(piece.length())?));
        }
        let mut more = gnu.is_extended();
        while more {
            let mut next = GnuExtSparseHeader::new();
            self.source.read_exact(next.as_mut_bytes())?;
            for piece in next.sparse.iter().filter(|piece| !piece.is_empty()) {
                pieces.push((number(piece.offset())?, number(piece.length())?));
            }
            if pieces.len() > MOST_PIECES {
                return Err(bad());
            }
            more = next.is_extended();
        }
        let (mut end, mut sum) = (0, 0);
        for (offset, length) in &pieces {
            if *offset < end {
                return Err(bad());
            }
            end = offset.checked_add(*length).ok_or_else(bad)?;
            sum += length;
        }
        if sum == stored && end <= real { Ok((pieces, real)) } else { Err(bad()) }
    }

    fn count(&mut self, size: u64) -> io::Result<()> {
        self.size = self.size.saturating_add(size);
        if self.size > self.limits.size {
            return Err(wrong(format!("it holds more than {} bytes", self.limits.size)));
        }
        Ok(())
    }

    fn expect(&mut self, stored: u64) -> io::Result<()> {
        self.left = stored;
        self.padding = stored.wrapping_neg() % BLOCK;
        // Skipped content has to be read too.
        if stored > self.limits.size {
            Err(wrong(format!("it holds more than {} bytes", self.limits.size)))
        } else {
            Ok(())
        }
    }

    fn skip(&mut self) -> io::Result<()> {
        let rest = self.left.saturating_add(self.padding);
        (self.left, self.padding) = (0, 0);
        let skipped = io::copy(&mut (&mut self.source).take(rest), &mut io::sink())?;
        if skipped == rest { Ok(()) } else { Err(early()) }
    }

    /// Returns `None` at the end, which is a block of zeros.
    fn header(&mut self) -> io::Result<Option<Header>> {
        let mut header = Header::new_old();
        self.source.read_exact(header.as_mut_bytes()).map_err(|_| early())?;
        let bytes = header.as_bytes();
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let sum: u32 = bytes[..148].iter().chain(&bytes[156..]).map(|byte| u32::from(*byte)).sum();
        let damaged = || wrong("it is no tar archive, or damaged");
        if header.cksum().map_err(|_| damaged())? == sum + 8 * 32 { Ok(Some(header)) } else { Err(damaged()) }
    }

    fn around(&mut self, stored: u64) -> io::Result<Vec<u8>> {
        if stored > AROUND {
            return Err(too_much());
        }
        // Also bounds an endless sequence of such headers without an entry.
        self.count(BLOCK + stored)?;
        let mut bytes = vec![0; usize::try_from(stored).map_err(io::Error::other)?];
        self.source.read_exact(&mut bytes).map_err(|_| early())?;
        (self.left, self.padding) = (0, stored.wrapping_neg() % BLOCK);
        Ok(bytes)
    }

    /// A long name, which ends at its first zero byte.
    fn text(&mut self, stored: u64) -> io::Result<Vec<u8>> {
        let mut bytes = self.around(stored)?;
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        bytes.truncate(end);
        Ok(bytes)
    }
}

impl<R: Read> Read for ArchiveReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let count = self.source.read(&mut buffer[..most])?;
        if count == 0 {
            return Err(early());
        }
        self.left -= count as u64;
        Ok(count)
    }
}

impl ExtendedHeaders {
    fn read(&mut self, bytes: &[u8]) -> io::Result<()> {
        let bad = || wrong("the extended header of an entry is wrong");
        let number = |value: &[u8]| std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).ok_or_else(bad);
        for (name, value) in pax::records(bytes).map_err(|_| bad())? {
            match name {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(number(value)?),
                b"uid" => self.uid = Some(number(value)?),
                b"gid" => self.gid = Some(number(value)?),
                b"mtime" => self.mtime = Some(pax::time(value).ok_or_else(bad)?),
                _ if name.starts_with(b"GNU.sparse.") => {
                    return Err(wrong(
                        "it has sparse files in a format that is not supported: write it with --format=gnu",
                    ));
                }
                _ => {
                    if let Some(attribute) = name.strip_prefix(ATTRIBUTE) {
                        self.attributes.push((attribute.to_vec(), value.to_vec()));
                        // One entry may have several such headers.
                        self.held += (attribute.len() + value.len()) as u64;
                        if self.held > AROUND {
                            return Err(too_much());
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// A header field. Hides the error of the `tar` crate, which quotes the field with any terminal control
/// characters.
fn number<T>(field: io::Result<T>) -> io::Result<T> {
    field.map_err(|_| wrong("a header has a field that is no number"))
}

fn owner(number: u64) -> io::Result<u32> {
    // The kernel takes the highest id to mean "leave unchanged".
    u32::try_from(number).ok().filter(|id| *id != u32::MAX).ok_or_else(|| wrong("an entry has an impossible owner"))
}

/// Normalizes a path to one below the root; refuses `..`.
pub fn clean(path: &[u8], depth: u32) -> io::Result<PathBuf> {
    let outside = || wrong(format!("it names a path outside: {}", shown(path)));
    if path.contains(&0) || path.len() > LONGEST_PATH {
        return Err(wrong(format!("it has a path that cannot be: {}", shown(path))));
    }
    let mut clean = PathBuf::new();
    let mut parts = 0_u32;
    for part in path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".") {
        if part == b".." {
            return Err(outside());
        }
        if part.len() > LONGEST_NAME {
            return Err(wrong(format!("it has a name that is too long: {}", shown(part))));
        }
        parts += 1;
        if parts > depth {
            return Err(wrong(format!("it has directories more than {depth} deep")));
        }
        clean.push(OsString::from_vec(part.to_vec()));
    }
    Ok(clean)
}

/// A name of arbitrary bytes, escaped and shortened for messages.
pub fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_debug().take(120).collect()
}

pub fn shown_path(path: &Path) -> String {
    shown(path.as_os_str().as_encoded_bytes())
}

fn too_much() -> io::Error {
    wrong("an entry has too long a name or too many attributes")
}

fn early() -> io::Error {
    wrong("it ends early")
}

#[cfg(test)]
mod tests;
