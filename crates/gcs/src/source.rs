//! What an upload is read from, as the library wants it.

use std::io;

use bytes::Bytes;
use google_cloud_storage::streaming_source::{Seek, SizeHint, StreamingSource};

use crate::Boxed;

/// A content that can be read from any place in it. A read may be dropped in the middle.
pub trait Source: Send + Sync + 'static {
    /// The next piece; `None` at the end.
    fn next(&mut self) -> Boxed<'_, Option<io::Result<Bytes>>>;
    /// Where the next piece begins.
    fn seek(&mut self, offset: u64);
    fn size(&self) -> u64;
}

pub(crate) struct Pulled(pub(crate) Box<dyn Source>);

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
