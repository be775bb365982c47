//! The binary WebSocket frame of `baton.v1`: output to the client, stdin from it.
//!
//! ```text
//!  ┌────────┬────────────┬──────────────┬─────────┐
//!  │ stream │ exec (u32) │ offset (u64) │ payload │   big endian
//!  └────────┴────────────┴──────────────┴─────────┘
//! ```

use crate::frame::Stream;

/// The length of the header in bytes.
pub const HEADER: usize = 13;

/// A part of one stream of one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BinaryChunk<'a> {
    /// Stdin from the client; stdout or stderr from the server.
    pub stream: Stream,
    /// The command's number, from EXECUTION_RUNNING.
    pub exec: u32,
    /// The offset of the first payload byte in its stream.
    pub offset: u64,
    /// The bytes themselves; may be empty.
    pub payload: &'a [u8],
}

/// Why a binary message is not a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedFrame {
    /// The message is shorter than a header.
    #[error("A binary message is at least {HEADER} bytes long.")]
    TooShort,
    /// The first byte names no stream of a command.
    #[error("The first byte of a binary message is 0 (stdin), 1 (stdout) or 2 (stderr).")]
    Stream,
}

impl<'a> BinaryChunk<'a> {
    /// Copies header and payload into one message; [`wrap`] avoids the copy.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER + self.payload.len());
        out.extend_from_slice(&header(self.stream, self.exec, self.offset));
        out.extend_from_slice(self.payload);
        out
    }

    /// Parses one message. The payload borrows from it.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MalformedFrame> {
        let Some((header, payload)) = bytes.split_first_chunk::<HEADER>() else { return Err(MalformedFrame::TooShort) };
        let stream = match header[0] {
            0 => Stream::Stdin,
            1 => Stream::Stdout,
            2 => Stream::Stderr,
            _ => return Err(MalformedFrame::Stream),
        };
        let exec = header[1..5].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let offset = header[5..13].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        Ok(Self { stream, exec, offset, payload })
    }
}

/// Prepends the header to a payload, in place if the capacity suffices.
pub fn wrap(stream: Stream, exec: u32, offset: u64, mut payload: Vec<u8>) -> Vec<u8> {
    payload.splice(0..0, header(stream, exec, offset));
    payload
}

fn header(stream: Stream, exec: u32, offset: u64) -> [u8; HEADER] {
    let mut header = [stream as u8; HEADER];
    header[1..5].copy_from_slice(&exec.to_be_bytes());
    header[5..].copy_from_slice(&offset.to_be_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_comes_back_as_it_was() {
        let chunk = BinaryChunk { stream: Stream::Stderr, exec: 0x0102_0304, offset: 1 << 40, payload: b"\xff\0x" };
        let bytes = chunk.encode();
        assert_eq!(bytes[..HEADER], [2, 1, 2, 3, 4, 0, 0, 1, 0, 0, 0, 0, 0]);
        assert_eq!(BinaryChunk::decode(&bytes), Ok(chunk));
        assert_eq!(wrap(chunk.stream, chunk.exec, chunk.offset, chunk.payload.to_vec()), bytes);
    }

    #[test]
    fn what_is_short_or_of_no_stream_is_malformed() {
        assert_eq!(BinaryChunk::decode(&[1; 12]), Err(MalformedFrame::TooShort));
        assert_eq!(BinaryChunk::decode(&[3; 13]), Err(MalformedFrame::Stream));
    }
}
