//! Tar as a stream of members: ustar with pax headers, and GNU's long names when reading.
//!
//! ```text
//!   ┌ pax header ┐  optional: long names, large sizes, fractions of seconds
//!   │ header 512 │  name, kind, mode, size, mtime, link
//!   │ data, up to the next multiple of 512 │
//!   … two blocks of zeroes at the end
//! ```
//! The input may be hostile: only the names of one member are kept in memory, and those only up to
//! a limit.

mod header;
pub mod pax;
mod reader;
mod writer;

pub use self::{reader::TarReader, writer::TarWriter};

const BLOCK: usize = 512;

/// One member of an archive, without its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The name as found in the archive, unchecked.
    pub name: Vec<u8>,
    pub kind: MemberKind,
    /// Permission bits.
    pub mode: u32,
    /// The number of data bytes that follow; zero for everything but files.
    pub size: u64,
    /// Seconds and nanoseconds since 1970.
    pub mtime: (i64, u32),
    /// The target of a link.
    pub link: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberKind {
    File,
    Directory,
    Symlink,
    /// Another name of an earlier member.
    HardLink,
    /// A device, a pipe, or a type that only other programs know.
    Other,
}
