//! Tar as a stream of members: ustar with pax headers, and GNU's long names when reading.
//!
//! ```text
//!   ┌ pax header ┐  optional: long names, large sizes, fractions of seconds
//!   │ header 512 │  name, kind, mode, size, mtime, link
//!   │ data, up to the next multiple of 512 │
//!   … two blocks of zeroes at the end
//! ```
//! What is read may come from a stranger: nothing is kept in memory but one member's names, and
//! those up to a limit.

mod header;
pub mod pax;
mod reader;
mod writer;

pub use self::{reader::Reader, writer::Writer};

const BLOCK: usize = 512;

/// One member of an archive, without its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// As it stands in the archive: nothing about it was checked.
    pub name: Vec<u8>,
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// Bytes of data that follow; nought for all but files.
    pub size: u64,
    /// Seconds and nanoseconds since 1970.
    pub mtime: (i64, u32),
    /// Where a link points.
    pub link: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    /// Another name of an earlier member.
    HardLink,
    /// A device, a pipe, or something that only other programs know.
    Other,
}
