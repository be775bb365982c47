//! Uploads to the bucket: from disk, never through the library's buffer.
//!
//! The file is read at the offset the service asks for, with a checksum known beforehand. The SHA-256 is computed while
//! the file is read, and the last piece is held back until it matches, so that a wrong file never becomes an object.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path, sync::Arc};

use baton_gcs::{Boxed, UploadOptions};
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{Gcs, named, wanted_generation, written};
use crate::storage::{
    local_files::{Sum, local_error},
    store::{Digest, Error, Precondition, ProgressFn, Result, Written},
};

/// The size of one read, off the event loop.
const PIECE: u64 = 1 << 20;

impl Gcs {
    pub(super) async fn send_file(
        &self,
        key: &str,
        file: &Path,
        condition: &Precondition,
        digest: &Digest,
        progress: ProgressFn<'_>,
    ) -> Result<Written> {
        let (moved, mut news) = watch::channel(UploadProgress::default());
        let source = Source::open(key, file, digest.clone(), moved).await?;
        let client = self.bounded(key, self.client(key)).await?;
        let (sha256, crc32c) = (digest.sha256.clone(), digest.crc32c);
        let upload = UploadOptions { sha256, crc32c, if_generation: wanted_generation(key, condition)? };
        let mut sending = client.upload(&self.bucket, key, Box::new(source), upload);
        let answer = loop {
            tokio::select! {
                biased;
                answer = &mut sending => break answer,
                changed = news.changed() => {
                    let UploadProgress { done, wrong } = news.borrow_and_update().clone();
                    if let Some(why) = wrong {
                        return Err(Error::Damaged { key: key.to_owned(), why });
                    }
                    if changed.is_err() {
                        // The source is finished: only the answer is missing, so wait for it with the stall timeout.
                        break self.clock.timeout(self.stall_timeout, &mut sending).await.map_err(|late| {
                            Error::Unavailable { key: key.to_owned(), why: late.to_string() }
                        })?;
                    }
                    progress(done);
                }
                () = self.clock.sleep(self.stall_timeout) => {
                    let stall = humantime::format_duration(self.stall_timeout);
                    return Err(Error::Unavailable { key: key.to_owned(), why: format!("nothing moved for {stall}") });
                }
            }
        };
        if let Some(why) = news.borrow().wrong.clone() {
            return Err(Error::Damaged { key: key.to_owned(), why });
        }
        match answer {
            Ok(about) => {
                progress(digest.size);
                Ok(written(&about))
            }
            Err(baton_gcs::Error::NotFound) => {
                self.bounded(key, self.check_bucket(key)).await?;
                Err(Error::Unavailable { key: key.to_owned(), why: "the service has forgotten the upload".to_owned() })
            }
            Err(error) => {
                let error = named(key, error);
                if matches!(error, Error::Conflict(_)) && *condition == Precondition::Absent {
                    return self.compare_existing(key, digest).await;
                }
                Err(error)
            }
        }
    }

    /// Compares the existing object with ours: it may be from an attempt whose answer was lost, or a conflicting one.
    async fn compare_existing(&self, key: &str, digest: &Digest) -> Result<Written> {
        let work = async {
            let about = self.client(key).await?.about(&self.bucket, key).await;
            let about = self.with_object(key, about).await?;
            let same = about.sha256.as_ref() == Some(&digest.sha256)
                && about.size == digest.size
                && about.crc32c == Some(digest.crc32c);
            if same { Ok(written(&about)) } else { Err(Error::Conflict(key.to_owned())) }
        };
        self.bounded(key, work).await
    }
}

/// Reported by the source while the library reads from it.
#[derive(Clone, Debug, Default)]
struct UploadProgress {
    done: u64,
    /// Why the file does not match its digest or cannot be read.
    wrong: Option<String>,
}

struct Source {
    digest: Digest,
    position: u64,
    read: Arc<Mutex<Reading>>,
    news: watch::Sender<UploadProgress>,
}

impl Source {
    async fn open(key: &str, file: &Path, digest: Digest, news: watch::Sender<UploadProgress>) -> Result<Self> {
        let (name, path) = (key.to_owned(), file.to_owned());
        let opened = tokio::task::spawn_blocking(move || {
            let failed = |error: io::Error| local_error(&name, &error);
            let file = File::open(path).map_err(failed)?;
            let size = file.metadata().map_err(failed)?.len();
            Ok((file, size))
        });
        let broken = |error: tokio::task::JoinError| Error::Other { key: key.to_owned(), why: error.to_string() };
        let (file, size) = opened.await.map_err(broken)??;
        if size == 0 {
            digest.verify(key, &Digest::of(b""))?;
        } else {
            digest.verify(key, &Digest { size, ..digest.clone() })?;
        }
        let read = Reading { key: key.to_owned(), file, sum: Sum::default() };
        Ok(Self { digest, position: 0, read: Arc::new(Mutex::new(read)), news })
    }
}

/// The file and the running digest of its first bytes. The library may cancel a pending read, so the digest is updated
/// only here, off the event loop, where nothing is cancelled midway.
struct Reading {
    key: String,
    file: File,
    sum: Sum,
}

impl Reading {
    /// Reads at `position`; also returns how far the file is hashed. The last bytes need a matching digest.
    fn piece(&mut self, position: u64, digest: &Digest) -> io::Result<(Bytes, u64)> {
        let bytes = self.bytes(position, digest)?;
        // Usually one iteration; none if these bytes are sent again, several if an earlier read was cancelled.
        while self.sum.size() < position + bytes.len() as u64 {
            let summed = self.sum.size();
            match summed.checked_sub(position) {
                Some(known) => self.sum.add(&bytes[known as usize..]),
                None => {
                    let missing = self.bytes(summed, digest)?;
                    self.sum.add(&missing);
                }
            }
            if self.sum.size() == digest.size {
                digest.verify(&self.key, &self.sum.clone().finish()).map_err(io::Error::other)?;
            }
        }
        Ok((bytes.into(), self.sum.size()))
    }

    fn bytes(&self, position: u64, digest: &Digest) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; (digest.size - position).min(PIECE) as usize];
        self.file.read_exact_at(&mut bytes, position)?;
        Ok(bytes)
    }
}

impl baton_gcs::UploadSource for Source {
    fn next(&mut self) -> Boxed<'_, Option<io::Result<Bytes>>> {
        Box::pin(self.pull())
    }

    fn seek(&mut self, offset: u64) {
        self.position = offset;
    }

    fn size(&self) -> u64 {
        self.digest.size
    }
}

impl Source {
    async fn pull(&mut self) -> Option<io::Result<Bytes>> {
        let position = self.position;
        if position >= self.digest.size {
            return None;
        }
        let (read, digest) = (self.read.clone(), self.digest.clone());
        let reading = tokio::task::spawn_blocking(move || read.lock().piece(position, &digest));
        let piece = reading.await.map_err(io::Error::other).and_then(|piece| piece);
        self.news.send_modify(|news| match &piece {
            Ok((_, summed)) => news.done = *summed,
            Err(error) => news.wrong = Some(error.to_string()),
        });
        Some(piece.map(|(bytes, _)| {
            self.position += bytes.len() as u64;
            bytes
        }))
    }
}
