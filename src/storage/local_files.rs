//! Local files during transfers to and from a store: hashed while they are copied, aborted when the caller is gone.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
    time::Duration,
};

use baton_protocol::id::hex;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

use super::store::{Digest, Error, ProgressFn, Result};
use crate::clock::SharedClock;

/// The read size for large files.
pub const CHUNK: usize = 1 << 20;
/// The initial read size: most files are small.
const FIRST_READ: usize = 16 << 10;

/// Computes size, SHA-256 and CRC32C in one pass.
#[derive(Clone, Debug, Default)]
pub struct Sum {
    size: u64,
    sha256: Sha256,
    crc32c: u32,
}

impl Sum {
    pub fn add(&mut self, bytes: &[u8]) {
        self.size += bytes.len() as u64;
        self.sha256.update(bytes);
        self.crc32c = crc32c::crc32c_append(self.crc32c, bytes);
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn finish(self) -> Digest {
        Digest { size: self.size, sha256: hex(&self.sha256.finalize()), crc32c: self.crc32c }
    }
}

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        let mut sum = Sum::default();
        sum.add(bytes);
        sum.finish()
    }

    /// Returns `Damaged`, naming the difference, unless `found` equals this digest.
    pub fn verify(&self, key: &str, found: &Digest) -> Result<()> {
        let why = if found.size != self.size {
            format!("{} bytes instead of {}", found.size, self.size)
        } else if found.sha256 != self.sha256 {
            "its SHA-256 is another".to_owned()
        } else if found.crc32c != self.crc32c {
            "its CRC32C is another".to_owned()
        } else {
            return Ok(());
        };
        Err(Error::Damaged { key: key.to_owned(), why })
    }
}

/// Maps the error of a local file operation to a store error.
pub fn local_error(key: &str, error: &io::Error) -> Error {
    let (key, why) = (key.to_owned(), error.to_string());
    if error.kind() == io::ErrorKind::NotFound {
        Error::NotFound(key)
    } else if matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) {
        Error::Denied { key, why }
    } else {
        Error::Unavailable { key, why }
    }
}

/// Reports the progress of blocking work to the future that waits for it.
#[derive(Debug)]
pub struct Reporter(watch::Sender<u64>);

impl Reporter {
    pub fn report(&self, done: u64) {
        self.0.send_replace(done);
    }

    /// Fails once the waiting future was dropped: the work must stop and publish nothing.
    pub fn check_cancelled(&self, key: &str) -> Result<()> {
        if self.0.is_closed() {
            return Err(Error::Unavailable { key: key.to_owned(), why: "the caller was cancelled".to_owned() });
        }
        Ok(())
    }
}

/// Runs blocking work off the event loop, forwards its progress, and abandons it after `stall` without progress. The
/// work itself stops at its next [`Reporter::check_cancelled`].
pub async fn run_blocking<T: Send + 'static>(
    clock: &SharedClock,
    key: &str,
    stall: Duration,
    progress: ProgressFn<'_>,
    work: impl FnOnce(&Reporter) -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, mut done) = watch::channel(0);
    if !clock.has_threads() {
        let ended = work(&Reporter(sender))?;
        progress(*done.borrow_and_update());
        return Ok(ended);
    }
    let mut task = tokio::task::spawn_blocking(move || {
        let reporter = Reporter(sender);
        work(&reporter)
    });
    let unavailable = |why: String| Error::Unavailable { key: key.to_owned(), why };
    loop {
        let moved = async {
            if done.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            *done.borrow_and_update()
        };
        tokio::select! {
            biased;
            ended = &mut task => {
                let ended = ended.map_err(|error| unavailable(error.to_string()))??;
                progress(*done.borrow_and_update());
                return Ok(ended);
            }
            count = moved => progress(count),
            () = clock.sleep(stall) => {
                return Err(unavailable(format!("nothing moved for {}", humantime::format_duration(stall))));
            }
        }
    }
}

/// Copies all of `source` and returns its digest.
pub fn copy(key: &str, source: &mut dyn Read, mut target: impl Write, reporter: &Reporter) -> Result<Digest> {
    let mut sum = Sum::default();
    let mut chunk = vec![0; FIRST_READ];
    loop {
        reporter.check_cancelled(key)?;
        let count = match source.read(&mut chunk) {
            Ok(0) => return Ok(sum.finish()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(local_error(key, &error)),
        };
        sum.add(&chunk[..count]);
        target.write_all(&chunk[..count]).map_err(|error| local_error(key, &error))?;
        reporter.report(sum.size());
        if count == chunk.len() {
            chunk.resize(CHUNK, 0);
        }
    }
}

/// The digest of a local file, which is read once.
pub async fn digest(clock: &SharedClock, file: &Path, stall: Duration, progress: ProgressFn<'_>) -> Result<Digest> {
    let key = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (name, path) = (key.clone(), file.to_owned());
    run_blocking(clock, &key, stall, progress, move |reporter| {
        let mut source = File::open(path).map_err(|error| local_error(&name, &error))?;
        copy(&name, &mut source, io::sink(), reporter)
    })
    .await
}

/// A temporary file beside `target` that is renamed to `target` when complete, or removed.
pub fn draft(key: &str, target: &Path) -> Result<tempfile::NamedTempFile> {
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    tempfile::Builder::new().prefix(".draft-").tempfile_in(folder).map_err(|error| local_error(key, &error))
}

/// What a download accepts.
#[derive(Clone, Debug)]
pub enum Wanted {
    This(Digest),
    /// Any content of up to this many bytes.
    AtMost(u64),
}

impl Wanted {
    /// The maximum number of bytes.
    pub fn most(&self) -> u64 {
        match self {
            Self::This(digest) => digest.size,
            Self::AtMost(most) => *most,
        }
    }

    /// Fails if `size` exceeds the maximum.
    pub fn check_cancelled(&self, key: &str, size: u64) -> Result<()> {
        let most = self.most();
        if size <= most {
            return Ok(());
        }
        Err(Error::Damaged { key: key.to_owned(), why: format!("more than {most} bytes") })
    }
}

/// The last steps of a download: verify, then rename into place.
pub fn verify_and_rename(
    key: &str,
    draft: tempfile::NamedTempFile,
    target: &Path,
    wanted: &Wanted,
    found: Digest,
    reporter: &Reporter,
) -> Result<Digest> {
    match wanted {
        Wanted::This(digest) => digest.verify(key, &found)?,
        Wanted::AtMost(_) => wanted.check_cancelled(key, found.size)?,
    }
    reporter.check_cancelled(key)?;
    draft.persist(target).map_err(|error| local_error(key, &error.error))?;
    Ok(found)
}
