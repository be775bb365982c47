//! The content of an object as a stream.

use std::fmt;

use bytes::Bytes;
use google_cloud_storage::read_object::ReadObjectResponse;

use crate::{Boxed, Result, classify};

/// A stream of content. Pieces are returned before the library has compared the checksum: only a clean end proves them.
pub struct Content(pub(crate) ReadObjectResponse);

impl Content {
    /// The next piece; `None` at the end.
    pub fn next_piece(&mut self) -> Boxed<'_, Option<Result<Bytes>>> {
        Box::pin(async { self.0.next().await.map(|chunk| chunk.map_err(|error| classify::error(&error))) })
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Content").finish_non_exhaustive()
    }
}
