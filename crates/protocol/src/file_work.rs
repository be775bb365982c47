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
        #[serde(default, skip_serializing_if = "is_zero")]
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
    /// Removes a file, a symbolic link itself, or an empty directory.
    RemoveFile {
        /// What to remove.
        path: String,
        /// Removes a directory with everything in it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        recursive: bool,
    },
    /// Renames within one file system, and replaces a file at `to` atomically.
    RenameFile {
        /// The present name.
        path: String,
        /// The new name.
        to: String,
    },
    /// Creates a directory.
    MakeDirectory {
        /// The directory to create.
        path: String,
        /// Creates missing directories above it too; one that exists is not a fault.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        parents: bool,
        /// Permission bits.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mode: Option<u32>,
    },
    /// Writes one line of JSON per change to stdout: [`FileChange`]. It ends when it is killed.
    WatchFiles {
        /// The directory or file to watch.
        path: String,
        /// Watches everything below too.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        recursive: bool,
    },
}

impl Work {
    /// The name of the action on the wire; contains nothing that the client sent.
    pub fn word(&self) -> &'static str {
        match self {
            Self::ReadFile { .. } => "read_file",
            Self::WriteFile { .. } => "write_file",
            Self::ListFiles { .. } => "list_files",
            Self::RemoveFile { .. } => "remove_file",
            Self::RenameFile { .. } => "rename_file",
            Self::MakeDirectory { .. } => "make_directory",
            Self::WatchFiles { .. } => "watch_files",
        }
    }

    /// Whether it reads bytes from the client.
    pub fn has_stdin(&self) -> bool {
        matches!(self, Self::WriteFile { .. })
    }

    /// Whether it only waits for something to happen, so that it does not keep its sandbox from being idle.
    pub fn is_background(&self) -> bool {
        matches!(self, Self::WatchFiles { .. })
    }
}

/// One line of a watch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChange {
    /// What happened.
    #[serde(rename = "type")]
    pub kind: FileChangeKind,
    /// Relative to the watched directory; for the watched path itself, its last part; empty with `ready` and
    /// `overflow`. Invalid UTF-8 becomes U+FFFD.
    pub name: String,
    /// The new name, with `rename`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// What happened to a watched file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileChangeKind {
    /// The first line: every later change is reported.
    Ready,
    /// It was created, or moved into a watched directory.
    Create,
    /// Its content changed.
    Write,
    /// It was removed, or moved out of the watched directories.
    Remove,
    /// It was renamed within the watched directories.
    Rename,
    /// Permissions, owner or times changed.
    Chmod,
    /// Changes were lost, or there are more directories than can be watched: list the directory to be sure.
    Overflow,
    /// A kind that a newer server knows.
    #[serde(other)]
    Other,
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

fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn one() -> u32 {
    1
}

fn is_one(depth: &u32) -> bool {
    *depth == 1
}
