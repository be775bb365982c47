//! Downloads from the bucket: into a draft, verified, and only then under the final name.
//!
//! The library returns bytes before it has compared the checksum, and resumes broken connections. So the file appears
//! only after the stream has ended and its SHA-256 matches.

use std::{io::Write, path::Path, sync::Arc, sync::atomic::AtomicBool, sync::atomic::Ordering};

use bytes::Bytes;
use tokio::sync::mpsc;

use super::{Gcs, named};
use crate::storage::{
    local_files::{self, Sum, Wanted, local_error},
    store::{Digest, Error, ProgressFn, Result},
};

/// Chunks buffered between network and disk.
const UNDER_WAY: usize = 16;

impl Gcs {
    pub(super) async fn fetch_file(
        &self,
        key: &str,
        file: &Path,
        wanted: Wanted,
        progress: ProgressFn<'_>,
    ) -> Result<Digest> {
        let (chunks, feed) = mpsc::channel(UNDER_WAY);
        let whole = Arc::new(AtomicBool::new(false));
        let fetching = self.stream(key, chunks, whole.clone());
        let (name, target) = (key.to_owned(), file.to_owned());
        // The network times out first; the writer then ends by itself and leaves no draft behind.
        let storing = local_files::run_blocking(&self.clock, key, 2 * self.stall_timeout, progress, move |reporter| {
            store(&name, &target, &wanted, feed, &whole, reporter)
        });
        tokio::pin!(fetching, storing);
        tokio::select! {
            biased;
            fetched = &mut fetching => {
                let stored = storing.await;
                fetched?;
                stored
            },
            stored = &mut storing => stored,
        }
    }

    /// Forwards the content; `whole` is set when the stream ended normally.
    async fn stream(&self, key: &str, chunks: mpsc::Sender<Bytes>, whole: Arc<AtomicBool>) -> Result<()> {
        let stalled = |late: crate::clock::Elapsed| Error::Unavailable { key: key.to_owned(), why: late.to_string() };
        let failed = |error| named(key, error);
        let start = async {
            let opened = self.client(key).await?.open(&self.bucket, key).await;
            self.with_object(key, opened).await
        };
        let mut content = self.clock.timeout(self.stall_timeout, start).await.map_err(stalled)??;
        while let Some(chunk) = self.clock.timeout(self.stall_timeout, content.next_piece()).await.map_err(stalled)? {
            if chunks.send(chunk.map_err(failed)?).await.is_err() {
                // The receiver has failed and reports why.
                return Ok(());
            }
        }
        whole.store(true, Ordering::SeqCst);
        Ok(())
    }
}

/// Writes chunks to a draft as they arrive. Blocks.
fn store(
    key: &str,
    target: &Path,
    wanted: &Wanted,
    mut feed: mpsc::Receiver<Bytes>,
    whole: &AtomicBool,
    reporter: &local_files::Reporter,
) -> Result<Digest> {
    let failed = |error: std::io::Error| local_error(key, &error);
    let mut draft = local_files::draft(key, target)?;
    let mut sum = Sum::default();
    while let Some(chunk) = feed.blocking_recv() {
        reporter.check_cancelled(key)?;
        sum.add(&chunk);
        wanted.check_cancelled(key, sum.size())?;
        draft.write_all(&chunk).map_err(failed)?;
        reporter.report(sum.size());
    }
    if !whole.load(Ordering::SeqCst) {
        return Err(Error::Unavailable { key: key.to_owned(), why: "it ended early".to_owned() });
    }
    local_files::verify_and_rename(key, draft, target, wanted, sum.finish(), reporter)
}
