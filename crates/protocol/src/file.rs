//! Files of a sandbox: what is asked for, and what a listing says.
//!
//! A transfer is an exec without a program of the sandbox's: it has a number, offsets, an end and
//! an exit code like any other, and so it goes on after a reconnect and after a move.

use serde::{Deserialize, Serialize};

/// Deepest listing; also what "everything below" means.
pub const MAX_DEPTH: u32 = 256;

/// What to do with files. The same words on the wire and to the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Work {
    /// The file's bytes come on stdout.
    ReadFile {
        path: String,
        /// Where to begin.
        #[serde(default, skip_serializing_if = "is_nought")]
        offset: u64,
        /// How much to read at most.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        length: Option<u64>,
        /// A tar archive of the file or directory instead.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        archive: bool,
    },
    /// What comes on stdin becomes the file, all at once, when stdin ends.
    WriteFile {
        path: String,
        /// Permission bits.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mode: Option<u32>,
        /// Milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mtime_ms: Option<i64>,
        /// If another number of bytes comes, nothing is written.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size: Option<u64>,
        /// Stdin is a tar archive, and `path` the directory it is unpacked in.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        archive: bool,
    },
    /// One line of JSON per file on stdout: [`Entry`].
    ListFiles {
        path: String,
        /// 0: only what is at `path` itself; 1: what is in it; more: what is below that.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        depth: u32,
    },
}

impl Work {
    pub fn word(&self) -> &'static str {
        match self {
            Self::ReadFile { .. } => "read_file",
            Self::WriteFile { .. } => "write_file",
            Self::ListFiles { .. } => "list_files",
        }
    }

    /// It takes bytes from the client.
    pub fn has_stdin(&self) -> bool {
        matches!(self, Self::WriteFile { .. })
    }
}

/// One line of a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Relative to the path asked for; of that path itself, its last part. What is no UTF-8 is U+FFFD.
    pub name: String,
    pub kind: Kind,
    #[serde(default)]
    pub size: u64,
    /// Permission bits.
    #[serde(default)]
    pub mode: u32,
    /// Milliseconds since 1970.
    #[serde(default)]
    pub mtime_ms: i64,
    /// Where a symbolic link points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    File,
    Directory,
    Symlink,
    /// A device, a socket, a pipe.
    #[serde(other)]
    Other,
}

fn is_nought(number: &u64) -> bool {
    *number == 0
}

fn one() -> u32 {
    1
}

fn is_one(depth: &u32) -> bool {
    *depth == 1
}
