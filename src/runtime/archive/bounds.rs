//! Limits for composing an archive: entries, bytes on disk, and bytes of names held in memory.

use std::{
    ffi::{OsStr, OsString},
    io::{self, Write},
};

use baton_protocol::limits::show_size;

use super::entries::ArchiveLimits;

/// Maximum size in bytes of the names held at the same time, each with `NAME` bytes of overhead.
const NAMES: u64 = 64 << 20;
const NAME: u64 = 96;

fn too_large(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, message)
}

/// The remaining budget of each.
#[derive(Debug)]
pub struct ArchiveBudget {
    entries: u64,
    most_entries: u64,
    names: u64,
}

impl ArchiveBudget {
    pub fn new(limits: ArchiveLimits) -> Self {
        Self { entries: limits.entries, most_entries: limits.entries, names: NAMES }
    }

    /// Counts an entry of the archive.
    pub fn entry(&mut self) -> io::Result<()> {
        let left = self.entries.checked_sub(1);
        self.entries = left.ok_or_else(|| too_large(format!("it has more than {} entries", self.most_entries)))?;
        Ok(())
    }

    /// Counts a name held in memory.
    pub fn count_name(&mut self, name: &OsStr) -> io::Result<()> {
        let left = self.names.checked_sub(cost(name));
        self.names = left.ok_or_else(|| too_large("its directories or links have too many long names".to_owned()))?;
        Ok(())
    }

    /// Stops counting names that are no longer held.
    pub fn release(&mut self, names: &[OsString]) {
        self.names += names.iter().map(|name| cost(name)).sum::<u64>();
    }
}

fn cost(name: &OsStr) -> u64 {
    name.len() as u64 + NAME
}

/// A writer that accepts a limited number of bytes.
#[derive(Debug)]
pub struct Capped<W> {
    pub target: W,
    pub left: u64,
    pub most: u64,
}

impl<W: Write> Write for Capped<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            return Err(too_large(format!("it holds more than {}", show_size(self.most))));
        }
        let count = self.target.write(bytes)?;
        self.left -= count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.target.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bound_holds_to_the_last_and_not_beyond() {
        let mut bounds = ArchiveBudget::new(ArchiveLimits { entries: 2, ..ArchiveLimits::NONE });
        bounds.entry().unwrap();
        bounds.entry().unwrap();
        assert_eq!(bounds.entry().unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        let name = OsString::from("n".repeat(usize::try_from((NAMES / 2) - NAME).unwrap()));
        bounds.count_name(&name).unwrap();
        bounds.count_name(&name).unwrap();
        assert_eq!(bounds.count_name(OsStr::new("x")).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        bounds.release(&[name.clone(), name.clone()]);
        bounds.count_name(&name).unwrap();

        let mut capped = Capped { target: Vec::new(), left: 5, most: 5 };
        capped.write_all(b"12345").unwrap();
        assert_eq!(capped.write_all(b"6").unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(capped.target, b"12345");
    }
}
