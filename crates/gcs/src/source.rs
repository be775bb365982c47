//! The source of an upload, adapted to the library.

use std::io;

use bytes::Bytes;
use google_cloud_storage::streaming_source::{Seek, SizeHint, StreamingSource};

use crate::Boxed;

/// Content that can be read from any offset. A read may be cancelled at any point.
pub trait UploadSource: Send + Sync + 'static {
    /// The next piece; `None` at the end.
    fn next(&mut self) -> Boxed<'_, Option<io::Result<Bytes>>>;
    /// Sets the offset of the next piece.
    fn seek(&mut self, offset: u64);
    fn size(&self) -> u64;
}

pub(crate) struct Pulled(pub(crate) Box<dyn UploadSource>);

impl StreamingSource for Pulled {
    type Error = io::Error;

    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        self.0.next().await
    }

    async fn size_hint(&self) -> io::Result<SizeHint> {
        Ok(SizeHint::with_exact(self.0.size()))
    }
}

impl Seek for Pulled {
    type Error = io::Error;

    async fn seek(&mut self, offset: u64) -> io::Result<()> {
        self.0.seek(offset);
        Ok(())
    }
}
