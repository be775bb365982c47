//! Tells a connection to a port that was reset from one that has ended.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::PortStream;

/// One end of a [`PortStream`]. Reading fails if the other end was dropped before it was shut down; unless this end was
/// shut down first, when a drop cannot be told from an end.
#[derive(Debug)]
pub struct PortBytes {
    stream: PortStream,
    is_shut: bool,
}

impl PortBytes {
    pub fn new(stream: PortStream) -> Self {
        Self { stream, is_shut: false }
    }
}

impl AsyncRead for PortBytes {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (before, has_room) = (buffer.filled().len(), buffer.remaining() > 0);
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let has_ended = has_room && buffer.filled().len() == before;
        // A stream whose other end is dropped takes no more bytes, not even none.
        if has_ended
            && !self.is_shut
            && let Poll::Ready(Err(_)) = Pin::new(&mut self.stream).poll_write(context, &[])
        {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PortBytes {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_shut = true;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn an_end_is_an_end_and_a_drop_is_a_reset() {
        let (one, mut other) = tokio::io::duplex(16);
        let mut one = PortBytes::new(one);
        other.write_all(b"last").await.unwrap();
        other.shutdown().await.unwrap();
        let mut heard = Vec::new();
        one.read_to_end(&mut heard).await.unwrap();
        assert_eq!(heard, b"last");
        one.write_all(b"on it goes").await.unwrap();

        let (one, mut other) = tokio::io::duplex(16);
        let mut one = PortBytes::new(one);
        other.write_all(b"last").await.unwrap();
        drop(other);
        heard.clear();
        assert_eq!(one.read_to_end(&mut heard).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        assert_eq!(heard, b"last", "what came before it is not lost");
    }
}
