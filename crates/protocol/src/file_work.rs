//! Files of a sandbox: the requests, and the entries of a listing.
//!
//! A transfer is an exec that runs no program of the sandbox: like any exec it has a number, offsets, an end and
//! an exit code, so it continues after a reconnect and after a handoff.

use serde::{Deserialize, Serialize};

/// The maximum depth of a listing; also what "everything below" means.
pub const MAX_DEPTH: u32 = 256;

/// Work with files. Clients and the agent use the same JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Work {
    /// Sends the file's bytes on stdout.
    ReadFile {
        /// The file or directory; relative to the working directory of the exec.
        path: String,
        /// The offset to start at.
        #[serde(default, skip_serializing_if = "is_nought")]
        offset: u64,
        /// The maximum number of bytes to read.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        length: Option<u64>,
        /// Sends a tar archive of the file or directory instead.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        archive: bool,
    },
    /// Replaces the file atomically with the bytes from stdin, when stdin ends.
    WriteFile {
        /// The file, or the directory to unpack into; missing directories are created.
        path: String,
        /// Permission bits.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mode: Option<u32>,
        /// Milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mtime_ms: Option<i64>,
        /// The expected number of bytes; if it differs, nothing is written.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size: Option<u64>,
        /// Stdin is a tar archive, and `path` is the directory to unpack it in.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        archive: bool,
    },
    /// Writes one line of JSON per file to stdout: [`FileEntry`].
    ListFiles {
        /// The directory to list, or a single file.
        path: String,
        /// 0: only `path` itself; 1: its entries; more: further levels below.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        depth: u32,
    },
}

impl Work {
    /// The name of the action on the wire; contains nothing that the client sent.
    pub fn word(&self) -> &'static str {
        match self {
            Self::ReadFile { .. } => "read_file",
            Self::WriteFile { .. } => "write_file",
            Self::ListFiles { .. } => "list_files",
        }
    }

    /// Whether it reads bytes from the client.
    pub fn has_stdin(&self) -> bool {
        matches!(self, Self::WriteFile { .. })
    }
}

/// One line of a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Relative to the requested path; for that path itself, its last part. Invalid UTF-8 becomes U+FFFD.
    pub name: String,
    /// What the entry is; symbolic links are not followed.
    pub kind: FileKind,
    /// The size in bytes, as `stat` reports it.
    #[serde(default)]
    pub size: u64,
    /// Permission bits.
    #[serde(default)]
    pub mode: u32,
    /// Milliseconds since 1970.
    #[serde(default)]
    pub mtime_ms: i64,
    /// The target of a symbolic link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// The type of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link, which is not followed.
    Symlink,
    /// A device, a socket or a pipe.
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
