//! File operations for both ends of a transfer: inside a sandbox, and on the client's machine.
//!
//! | module | does |
//! |---|---|
//! | `write` | writes a file completely or not at all |
//! | [`list`] | lists a directory |
//! | [`remove`], [`rename`], [`make_directory`] | change a directory |
//! | [`watch`] | reports changes as they happen |
//! | [`tar`] | reads and writes archives as a stream of members; touches no files |
//! | [`pack`], [`unpack`] | convert a directory to an archive and back |
//! | [`Fault`] | what failed, as one line |
//!
//! Everything streams: memory use depends neither on file sizes nor on the sizes that an untrusted archive claims.

mod file_changes;
mod file_fault;
mod list_files;
mod open_directory;
mod pack;
pub mod tar;
mod unpack;
mod walk;
mod watch_files;
mod write;

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    path::Path,
};

use baton_protocol::file_work::Work;

pub use self::{
    file_changes::{make_directory, remove, rename},
    file_fault::{Fault, plain},
    list_files::list,
    pack::pack,
    unpack::{Trust, fetch, unpack},
    watch_files::{MAX_WATCHED, watch},
    write::{How, write},
};

/// The number of bytes moved at a time.
pub const CHUNK: usize = 256 << 10;

/// How much was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferTotals {
    pub members: u64,
    pub bytes: u64,
    /// The number of entries left out; each was reported.
    pub faults: u64,
}

/// Does `work` and reports each fault. `Ok` with faults means that the work is incomplete.
pub fn run(
    work: &Work,
    from: &mut dyn Read,
    to: &mut dyn Write,
    tell: &mut dyn FnMut(&Fault),
) -> Result<TransferTotals, Fault> {
    match work {
        Work::ReadFile { path, archive: true, .. } => pack(Path::new(path), to, tell),
        Work::ReadFile { path, offset, length, archive: false } => read(Path::new(path), *offset, *length, to),
        Work::WriteFile { path, archive: true, .. } => unpack(from, Path::new(path), Trust::Known, tell),
        Work::WriteFile { path, mode, mtime_ms, size, archive: false } => {
            let how = How { mode: *mode, mtime: mtime_ms.map(time_of), size: *size };
            write(Path::new(path), from, &how)
        }
        Work::ListFiles { path, depth } => list(Path::new(path), *depth, to, tell),
        Work::RemoveFile { path, recursive } => remove(Path::new(path), *recursive),
        Work::RenameFile { path, to } => rename(Path::new(path), Path::new(to)),
        Work::MakeDirectory { path, parents, mode } => make_directory(Path::new(path), *parents, *mode),
        Work::WatchFiles { path, recursive } => watch(Path::new(path), *recursive, to),
    }
}

fn read(path: &Path, offset: u64, length: Option<u64>, to: &mut dyn Write) -> Result<TransferTotals, Fault> {
    let fault = |error: io::Error| Fault::of(&error, path);
    if fs::metadata(path).map_err(fault)?.is_dir() {
        return Err(Fault::new("EISDIR", "Is a directory", path));
    }
    let mut file = File::open(path).map_err(fault)?;
    if offset > 0 {
        file.seek(SeekFrom::Start(offset)).map_err(fault)?;
    }
    let bytes = copy(&mut file.take(length.unwrap_or(u64::MAX)), to).map_err(fault)?;
    Ok(TransferTotals { members: 1, bytes, faults: 0 })
}

/// Converts milliseconds since 1970 to the seconds and nanoseconds of a file time.
pub fn time_of(milliseconds: i64) -> (i64, u32) {
    (milliseconds.div_euclid(1000), milliseconds.rem_euclid(1000) as u32 * 1_000_000)
}

/// Copies in large pieces: each is a system call, and these are expensive in a sandbox.
fn copy(from: &mut dyn Read, to: &mut dyn Write) -> io::Result<u64> {
    let mut buffer = vec![0; CHUNK];
    let mut total = 0;
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return to.flush().map(|()| total),
            Ok(count) => {
                to.write_all(&buffer[..count])?;
                total += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
