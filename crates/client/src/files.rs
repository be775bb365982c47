//! Files of a sandbox, and transfers between it and this machine.
//!
//! ```text
//!   here ──pack──▶ bridge ──stdin──▶ the work in the sandbox
//!   here ◀─unpack─ bridge ◀─stdout── the work in the sandbox
//! ```
//! Each transfer is a command of the sandbox's agent, so it continues after a reconnect and after a handoff.
//! Separate threads access the disk, and only a few pieces are in memory at a time.

mod bridge;
mod path_entries;
mod working;

use std::{fmt, fs, os::unix::fs::MetadataExt, path::Path, sync::Arc, time::Duration};

use baton_files::{Fault, Trust};
use baton_protocol::file_work::{FileEntry, Work};
use bytes::Bytes;
use futures::{Stream, StreamExt};

pub use self::path_entries::FileWatch;
use self::{bridge::BridgePart, working::Working};
use crate::{Error, Exec, Sandbox};

/// Called with the number of further bytes that were transferred.
pub type OnBytes = Arc<dyn Fn(u64) + Send + Sync>;
/// Called with each file that was left out, and why.
pub type OnLeftOut = Arc<dyn Fn(&str) + Send + Sync>;

/// How files are transferred. Unset fields have the same defaults as for commands.
#[derive(Clone, Default)]
pub struct Transfer {
    /// The user inside the sandbox whose permissions apply.
    pub user: Option<String>,
    /// The directory in the sandbox that relative paths start from.
    pub cwd: Option<String>,
    /// Counts only time in which the sandbox ran.
    pub timeout: Option<Duration>,
    /// Reports progress, on the task or thread that transfers. It must not block.
    pub on_bytes: Option<OnBytes>,
    /// Reports files that were skipped, such as sockets and names that leave the directory.
    pub on_left_out: Option<OnLeftOut>,
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("user", &self.user).field("cwd", &self.cwd).finish_non_exhaustive()
    }
}

impl Transfer {
    fn moved(&self, bytes: usize) {
        if let Some(on_bytes) = &self.on_bytes {
            on_bytes(bytes as u64);
        }
    }

    fn left_out(&self, line: &str) {
        if let Some(on_left_out) = &self.on_left_out {
            on_left_out(line);
        }
    }
}

/// Attributes of a new file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileMode {
    /// Permission bits; by default those of the replaced file, or those of new files.
    pub mode: Option<u32>,
    /// Milliseconds since 1970.
    pub mtime_ms: Option<i64>,
    /// The expected number of bytes; if it differs, nothing is written.
    pub size: Option<u64>,
}

/// A file's bytes, piece by piece. Dropping it before the end cancels the transfer.
#[derive(Debug)]
pub struct Reading {
    working: Working,
    how: Transfer,
}

impl Reading {
    /// The next piece; `None` after the last one. After an error, the bytes received so far are incomplete.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        match self.working.next().await? {
            Some(bytes) => {
                self.how.moved(bytes.len());
                Ok(Some(bytes))
            }
            None => self.working.finish().await?.map(|()| None),
        }
    }
}

impl Sandbox {
    /// Reads a whole file. Returns [`Error::File`] with code `ENOENT` if it does not exist.
    pub async fn read_file(&self, path: &str) -> Result<Vec<u8>, Error> {
        let mut reading = self.read_stream(path, &Transfer::default()).await?;
        let mut content = Vec::new();
        while let Some(bytes) = reading.next().await? {
            content.extend_from_slice(&bytes);
        }
        Ok(content)
    }

    /// Reads a file piece by piece.
    pub async fn read_stream(&self, path: &str, how: &Transfer) -> Result<Reading, Error> {
        let work = Work::ReadFile { path: path.to_owned(), offset: 0, length: None, archive: false };
        Ok(Reading { working: self.work(work, how).await?, how: how.clone() })
    }

    /// Writes a file atomically: a reader sees the old or the new content. Missing directories are created.
    pub async fn write_file(&self, path: &str, content: impl Into<Bytes>) -> Result<(), Error> {
        let content = content.into();
        let mode = FileMode { size: Some(content.len() as u64), ..FileMode::default() };
        let content = futures::stream::iter([Ok::<_, Error>(content)]);
        self.write_stream(path, mode, content, &Transfer::default()).await
    }

    /// Like [`write_file`](Self::write_file), but piece by piece. If the stream fails, nothing is written.
    pub async fn write_stream(
        &self,
        path: &str,
        mode: FileMode,
        content: impl Stream<Item = Result<Bytes, Error>>,
        how: &Transfer,
    ) -> Result<(), Error> {
        let FileMode { mode, mtime_ms, size } = mode;
        let work = Work::WriteFile { path: path.to_owned(), mode, mtime_ms, size, archive: false };
        let mut working = self.work(work, how).await?;
        let control = working.control();
        let feed = async {
            futures::pin_mut!(content);
            while let Some(bytes) = content.next().await {
                let bytes = bytes.inspect_err(|_| control.give_up())?;
                how.moved(bytes.len());
                // The work's outcome tells why it stopped reading.
                if control.write_stdin(bytes).await.is_err() {
                    return Ok(());
                }
            }
            control.close_stdin();
            Ok(())
        };
        let (fed, finished) = futures::join!(feed, working.finish());
        fed.and(finished?)
    }

    /// Lists a directory, or with depth 0 `path` itself; links are not followed.
    pub async fn list_files(&self, path: &str, depth: u32) -> Result<Vec<FileEntry>, Error> {
        let work = Work::ListFiles { path: path.to_owned(), depth };
        let mut working = self.work(work, &Transfer::default()).await?;
        let mut text = Vec::new();
        while let Some(bytes) = working.next().await? {
            text.extend_from_slice(&bytes);
        }
        working.finish().await??;
        let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let read = |line| serde_json::from_slice(line).map_err(|_| Error::Protocol("a listing is damaged".into()));
        lines.map(read).collect()
    }

    /// Copies a file or directory of this machine to `path`, with modes and times.
    pub async fn upload(&self, local: impl AsRef<Path>, path: &str) -> Result<(), Error> {
        self.upload_with(local, path, &Transfer::default()).await
    }

    /// Like [`upload`](Self::upload). If files are left out, all others are copied, and the error is that of the first.
    pub async fn upload_with(&self, local: impl AsRef<Path>, path: &str, how: &Transfer) -> Result<(), Error> {
        let local = local.as_ref().to_owned();
        let path = path.to_owned();
        let about = fs::metadata(&local).map_err(|error| Error::from(Fault::of(&error, &local)))?;
        let archive = about.is_dir();
        let work = Work::WriteFile {
            path,
            mode: (!archive).then_some(about.mode() & 0o7777),
            mtime_ms: (!archive).then_some(about.mtime() * 1000 + about.mtime_nsec() / 1_000_000),
            size: (!archive).then_some(about.len()),
            archive,
        };
        let mut working = self.work(work, how).await?;
        let (mut writer, mut parts) = bridge::to_wire();
        let (tell, faults) = telling(how);
        let packed = tokio::task::spawn_blocking(move || {
            let mut tell = tell;
            let sent = match archive {
                true => baton_files::pack(&local, &mut writer, &mut tell).map(drop),
                false => bridge::copy(&local, &mut writer).map_err(|error| Fault::of(&error, &local)),
            };
            sent.map(|()| writer.end())
        });
        let control = working.control();
        let feed = async move {
            while let Some(part) = parts.recv().await {
                match part {
                    BridgePart::Data(bytes) => {
                        let count = bytes.len();
                        // The work's outcome tells why it stopped reading.
                        if control.write_stdin(bytes).await.is_err() {
                            return;
                        }
                        how.moved(count);
                    }
                    BridgePart::End => return control.close_stdin(),
                }
            }
            // A partial file must not be written.
            control.give_up();
        };
        let ((), finished) = futures::join!(feed, working.finish());
        let packed = packed.await.map_err(|_| Error::Ended("the thread that packs stopped".into()))?;
        let finished = finished?;
        // If the reader is gone, the sandbox's error explains it; every other error is ours.
        match (packed, finished) {
            (Err(fault), Ok(())) => Err(fault.into()),
            (Err(fault), Err(_)) if !bridge::is_gone(&fault) => Err(fault.into()),
            (_, Err(error)) => Err(error),
            (Ok(()), Ok(())) => first_of(&faults),
        }
    }

    /// Copies the file or directory at `path` to `local` on this machine.
    /// The archive comes from inside the sandbox and is not trusted: nothing is written outside `local`.
    pub async fn download(&self, path: &str, local: impl AsRef<Path>) -> Result<(), Error> {
        self.download_with(path, local, &Transfer::default()).await
    }

    /// Like [`download`](Self::download). If files are left out, all others are copied, and the error is that of the
    /// first.
    pub async fn download_with(&self, path: &str, local: impl AsRef<Path>, how: &Transfer) -> Result<(), Error> {
        let work = Work::ReadFile { path: path.to_owned(), offset: 0, length: None, archive: true };
        let mut working = self.work(work, how).await?;
        let (parts, mut reader) = bridge::from_wire();
        let local = local.as_ref().to_owned();
        let (tell, faults) = telling(how);
        let unpacked = tokio::task::spawn_blocking(move || {
            let mut tell = tell;
            baton_files::fetch(&mut reader, &local, Trust::Stranger, &mut tell)
        });
        let mut lost = None;
        loop {
            match working.next().await {
                Ok(Some(bytes)) => {
                    let count = bytes.len();
                    // The receiver reports itself why it stopped.
                    if parts.send(BridgePart::Data(bytes)).await.is_err() {
                        break;
                    }
                    how.moved(count);
                }
                Ok(None) => {
                    let _ = parts.send(BridgePart::End).await;
                    break;
                }
                Err(error) => {
                    lost = Some(error);
                    break;
                }
            }
        }
        drop(parts);
        let unpacked = unpacked.await.map_err(|_| Error::Ended("the thread that unpacks stopped".into()))?;
        if let Some(error) = lost {
            return Err(error);
        }
        let unpacked = unpacked.map(drop).map_err(Error::from);
        if unpacked.is_err() && !working.is_read_to_end() {
            return unpacked;
        }
        // An error in the sandbox comes first: a broken archive is only its consequence.
        working.finish().await?.and(unpacked).and_then(|()| first_of(&faults))
    }

    async fn work(&self, work: Work, how: &Transfer) -> Result<Working, Error> {
        let mut exec = Exec::file(work);
        if let Some(user) = &how.user {
            exec = exec.user(user);
        }
        if let Some(cwd) = &how.cwd {
            exec = exec.cwd(cwd);
        }
        if let Some(timeout) = how.timeout {
            exec = exec.timeout(timeout);
        }
        Ok(Working::new(self.exec(exec).await?, how.clone()))
    }
}

type Faults = Arc<std::sync::Mutex<Option<(Fault, u64)>>>;

/// Returns the callback that a thread calls for each file it leaves out, and where the first of these is kept.
fn telling(how: &Transfer) -> (impl FnMut(&Fault) + Send + 'static, Faults) {
    let (faults, how) = (Faults::default(), how.clone());
    let kept = faults.clone();
    let tell = move |fault: &Fault| {
        how.left_out(&fault.to_string());
        if let Ok(mut kept) = kept.lock() {
            match &mut *kept {
                Some((_, count)) => *count += 1,
                none => *none = Some((fault.clone(), 1)),
            }
        }
    };
    (tell, faults)
}

fn first_of(faults: &Faults) -> Result<(), Error> {
    let kept = faults.lock().ok().and_then(|mut kept| kept.take());
    match kept {
        None => Ok(()),
        Some((fault, 1)) => Err(fault.into()),
        Some((fault, count)) => {
            let message = format!("{} (and {} more)", fault.text, count - 1);
            Err(Error::File { code: fault.code.to_owned(), message })
        }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self::File { code: fault.code.to_owned(), message: fault.text }
    }
}
