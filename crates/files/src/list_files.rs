//! Lists a directory: one line of JSON per entry.

use std::{
    fs::{self, Metadata},
    io::{self, BufWriter, Write},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Component, Path},
};

use baton_protocol::file_work::{FileEntry, FileKind};

use crate::{CHUNK, Fault, TransferTotals, walk::Walk};

/// Lists `path`: with depth 0, or if it is not a directory, `path` itself; otherwise its entries. Links are not
/// followed, except for `path` if it leads to a directory.
pub fn list(
    path: &Path,
    depth: u32,
    to: &mut dyn Write,
    tell: &mut dyn FnMut(&Fault),
) -> Result<TransferTotals, Fault> {
    let fault = |error: io::Error| Fault::of(&error, path);
    let mut to = BufWriter::with_capacity(CHUNK, to);
    let mut done = TransferTotals::default();
    let found = fs::symlink_metadata(path).map_err(fault)?;
    let is_directory = found.is_dir() || fs::metadata(path).is_ok_and(|followed| followed.is_dir());
    if depth == 0 || !is_directory {
        let entry = entry(last_part(path), path, &found);
        write_line(&mut to, &entry).map_err(fault)?;
        done.members += 1;
    } else {
        for found in Walk::new(path, depth as usize) {
            match &found.metadata {
                Ok(metadata) => {
                    let entry = entry(found.name.to_string_lossy().into_owned(), &found.path, metadata);
                    write_line(&mut to, &entry).map_err(fault)?;
                    done.members += 1;
                }
                Err(error) => {
                    let fault = Fault::of(error, &found.path);
                    if found.name.as_os_str().is_empty() {
                        return Err(fault);
                    }
                    tell(&fault);
                    done.faults += 1;
                }
            }
        }
    }
    to.flush().map_err(fault)?;
    Ok(done)
}

/// The last part of the path; for the root it is `/`.
fn last_part(path: &Path) -> String {
    let last = path.components().next_back().map(Component::as_os_str).unwrap_or(path.as_os_str());
    last.to_string_lossy().into_owned()
}

fn entry(name: String, path: &Path, metadata: &Metadata) -> FileEntry {
    let kind = metadata.file_type();
    let kind = if kind.is_file() {
        FileKind::File
    } else if kind.is_dir() {
        FileKind::Directory
    } else if kind.is_symlink() {
        FileKind::Symlink
    } else {
        debug_assert!(kind.is_socket() || kind.is_fifo() || kind.is_char_device() || kind.is_block_device());
        FileKind::Other
    };
    let target = (kind == FileKind::Symlink).then(|| fs::read_link(path).ok()).flatten();
    FileEntry {
        name,
        kind,
        size: metadata.size(),
        mode: metadata.mode() & 0o7777,
        mtime_ms: metadata.mtime().saturating_mul(1000).saturating_add(metadata.mtime_nsec() / 1_000_000),
        target: target.map(|target| target.to_string_lossy().into_owned()),
    }
}

fn write_line(to: &mut impl Write, entry: &FileEntry) -> io::Result<()> {
    serde_json::to_writer(&mut *to, entry)?;
    to.write_all(b"\n")
}
