//! Bytes in, members out.

use std::io::{self, Read};

use super::{
    BLOCK, Member, MemberKind,
    header::{self, Block, Type},
    pax,
};

/// The longest pax header or long name: the most memory that one member may use.
const MOST_KEPT: u64 = 256 << 10;

/// Returns one member after the other; as a [`Read`] it is the data of the last member returned.
#[derive(Debug)]
pub struct TarReader<R> {
    from: R,
    /// Unread bytes of the current member's data.
    left: u64,
    padding: u64,
}

/// What the headers before a member state about it.
#[derive(Debug, Default)]
struct MemberHeaders {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    mtime: Option<(i64, u32)>,
    is_sparse: bool,
}

impl<R: Read> TarReader<R> {
    pub fn new(from: R) -> Self {
        Self { from, left: 0, padding: 0 }
    }

    /// The next member; `None` at the archive's end. Unread data of the last member is skipped.
    pub fn next_member(&mut self) -> io::Result<Option<Member>> {
        let mut said = MemberHeaders::default();
        loop {
            self.pass_over()?;
            let Some(block) = self.block()? else { return Ok(None) };
            if block == [0; BLOCK] {
                // The second zero block; some programs omit it.
                self.block()?;
                return Ok(None);
            }
            let found = header::decode(&block).map_err(damaged)?;
            (self.left, self.padding) = (found.size, padding(found.size));
            match found.kind {
                Type::Member(_) => return self.complete(found.member, said).map(Some),
                Type::Pax => said.read(&self.whole()?)?,
                Type::PaxGlobal => {}
                Type::GnuLongName => said.name = Some(long(self.whole()?)),
                Type::GnuLongLink => said.link = Some(long(self.whole()?)),
            }
        }
    }

    fn complete(&mut self, mut member: Member, said: MemberHeaders) -> io::Result<Member> {
        if let Some(size) = said.size.filter(|_| matches!(member.kind, MemberKind::File | MemberKind::Other)) {
            (self.left, self.padding) = (size, padding(size));
            member.size = if member.kind == MemberKind::File { size } else { 0 };
        }
        if said.is_sparse {
            // The data of a sparse member is not the file's content.
            (member.kind, member.size) = (MemberKind::Other, 0);
        }
        member.name = said.name.unwrap_or(member.name);
        // Old programs mark directories only by their names; a long name is known only now.
        if member.kind == MemberKind::File && member.name.ends_with(b"/") {
            (member.kind, member.size) = (MemberKind::Directory, 0);
        }
        member.link = said.link.unwrap_or(member.link);
        member.mtime = said.mtime.unwrap_or(member.mtime);
        Ok(member)
    }

    /// Returns `None` at the end of input, which is valid only between members.
    fn block(&mut self) -> io::Result<Option<Block>> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.from.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(cut_off()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Some(block))
    }

    fn whole(&mut self) -> io::Result<Vec<u8>> {
        if self.left > MOST_KEPT {
            return Err(damaged("A header is too long"));
        }
        let mut bytes = Vec::with_capacity(self.left as usize);
        self.by_ref().read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn pass_over(&mut self) -> io::Result<()> {
        let mut left = std::mem::take(&mut self.left) + std::mem::take(&mut self.padding);
        let mut scratch = [0; 16 << 10];
        while left > 0 {
            let most = left.min(scratch.len() as u64) as usize;
            match self.from.read(&mut scratch[..most]) {
                Ok(0) => return Err(cut_off()),
                Ok(count) => left -= count as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The reader, positioned after the archive's end.
    pub fn into_inner(self) -> R {
        self.from
    }
}

impl<R: Read> Read for TarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = self.left.min(buffer.len() as u64) as usize;
        if most == 0 {
            return Ok(0);
        }
        match self.from.read(&mut buffer[..most])? {
            0 => Err(cut_off()),
            count => {
                self.left -= count as u64;
                Ok(count)
            }
        }
    }
}

impl MemberHeaders {
    fn read(&mut self, bytes: &[u8]) -> io::Result<()> {
        for (key, value) in pax::records(bytes).map_err(damaged)? {
            match key {
                b"path" | b"GNU.sparse.name" => self.name = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"mtime" => self.mtime = pax::time(value),
                b"size" => {
                    let size = std::str::from_utf8(value).ok().and_then(|text| text.parse::<u64>().ok());
                    let size = size.filter(|size| *size <= i64::MAX as u64);
                    self.size = Some(size.ok_or_else(|| damaged("A member has no size"))?);
                }
                _ => {}
            }
            self.is_sparse |= key.starts_with(b"GNU.sparse.");
        }
        Ok(())
    }
}

fn long(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes.truncate(end);
    bytes
}

fn padding(size: u64) -> u64 {
    (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64
}

fn damaged(message: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "The archive ends in the middle")
}
