//! Members in, bytes out.

use std::io::{self, Write};

use super::{BLOCK, Member, MemberKind, header, pax};

/// Writes one member after the other; as a [`Write`] it takes the data of the last member.
#[derive(Debug)]
pub struct TarWriter<W> {
    to: W,
    /// Bytes of the current member's data that are still to be written.
    left: u64,
    padding: usize,
}

impl<W: Write> TarWriter<W> {
    pub fn new(to: W) -> Self {
        Self { to, left: 0, padding: 0 }
    }

    /// Begins a member. Its data, exactly as long as its size, must be written next.
    ///
    /// # Errors
    /// If the data of the previous member is incomplete.
    pub fn member(&mut self, member: &Member) -> io::Result<()> {
        self.pad()?;
        let kind = match member.kind {
            MemberKind::File => b'0',
            MemberKind::HardLink => b'1',
            MemberKind::Symlink => b'2',
            MemberKind::Directory => b'5',
            MemberKind::Other => return Err(io::Error::new(io::ErrorKind::InvalidInput, "It cannot be in an archive")),
        };
        let records = records(member);
        if !records.is_empty() {
            let name = [&b"PaxHeader/"[..], &member.name].concat();
            let about = Member {
                name,
                kind: MemberKind::Other,
                size: records.len() as u64,
                mode: 0o644,
                link: Vec::new(),
                ..*member
            };
            self.to.write_all(&header::encode(&about, b'x'))?;
            self.to.write_all(&records)?;
            self.to.write_all(&[0; BLOCK][..padding(about.size)])?;
        }
        self.to.write_all(&header::encode(member, kind))?;
        (self.left, self.padding) = (member.size, padding(member.size));
        Ok(())
    }

    fn pad(&mut self) -> io::Result<()> {
        if self.left > 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "Data of a member is missing"));
        }
        self.to.write_all(&[0; BLOCK][..std::mem::take(&mut self.padding)])
    }

    /// Ends the archive.
    pub fn finish(mut self) -> io::Result<W> {
        self.pad()?;
        self.to.write_all(&[0; 2 * BLOCK])?;
        self.to.flush()?;
        Ok(self.to)
    }
}

impl<W: Write> Write for TarWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let most = self.left.min(bytes.len() as u64) as usize;
        let count = self.to.write(&bytes[..most])?;
        self.left -= count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// The records for values that do not fit into the header.
fn records(member: &Member) -> Vec<u8> {
    let mut records = Vec::new();
    let is_long = |text: &[u8]| text.len() > header::NAME_LENGTH || !text.is_ascii();
    let (name, link) = (is_long(&member.name), is_long(&member.link));
    let is_odd = |text: &[u8]| std::str::from_utf8(text).is_err();
    if name && is_odd(&member.name) || link && is_odd(&member.link) {
        pax::record(&mut records, b"hdrcharset", b"BINARY");
    }
    if name {
        pax::record(&mut records, b"path", &member.name);
    }
    if link {
        pax::record(&mut records, b"linkpath", &member.link);
    }
    if member.size > header::MOST_SIZE {
        pax::record(&mut records, b"size", member.size.to_string().as_bytes());
    }
    if member.mtime.1 > 0 || member.mtime.0 < 0 || member.mtime.0 > header::MOST_SIZE as i64 {
        pax::record(&mut records, b"mtime", pax::time_text(member.mtime).as_bytes());
    }
    records
}

fn padding(size: u64) -> usize {
    (BLOCK - size as usize % BLOCK) % BLOCK
}
