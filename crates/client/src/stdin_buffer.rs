//! Input that was written to a command and not yet accepted by it, so that it can be sent again.
//!
//! ```text
//!   acked ≤ sent ≤ reached ≤ end        offsets in the command's stdin
//!   └───────── chunks ─────────┘
//! ```

use std::collections::VecDeque;

use bytes::Bytes;

/// The maximum number of unacknowledged bytes; a writer waits for free space.
pub(crate) const WINDOW: usize = 1 << 20;
/// The largest part sent at once.
pub(crate) const PART: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct StdinBuffer {
    chunks: VecDeque<Bytes>,
    acked: u64,
    sent: u64,
    /// The highest offset sent so far, on any connection.
    reached: u64,
    end: u64,
    /// The CRC-32 of everything below `acked`; `None` if the server does not tell that of earlier clients.
    crc32: Option<u32>,
    closed: bool,
    eof_sent: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StdinPart {
    Data { offset: u64, bytes: Bytes },
    Eof { offset: u64 },
}

impl Default for StdinBuffer {
    fn default() -> Self {
        let (chunks, crc32) = (VecDeque::new(), Some(0));
        Self { chunks, acked: 0, sent: 0, reached: 0, end: 0, crc32, closed: false, eof_sent: false }
    }
}

impl StdinBuffer {
    pub(crate) fn write(&mut self, bytes: Bytes) {
        self.end += bytes.len() as u64;
        self.chunks.push_back(bytes);
    }

    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    pub(crate) fn acked(&self) -> u64 {
        self.acked
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// The next part to send.
    pub(crate) fn next(&mut self) -> Option<StdinPart> {
        if self.sent < self.end {
            let mut skip = (self.sent - self.acked) as usize;
            let chunk = self.chunks.iter().find(|chunk| {
                let here = skip < chunk.len();
                if !here {
                    skip -= chunk.len();
                }
                here
            })?;
            let bytes = chunk.slice(skip..chunk.len().min(skip + PART));
            let offset = self.sent;
            self.sent += bytes.len() as u64;
            self.reached = self.reached.max(self.sent);
            return Some(StdinPart::Data { offset, bytes });
        }
        if self.closed && !self.eof_sent {
            self.eof_sent = true;
            return Some(StdinPart::Eof { offset: self.end });
        }
        None
    }

    /// Everything below `offset` was accepted. Returns how much space that frees.
    pub(crate) fn ack(&mut self, offset: u64) -> usize {
        let freed = offset.min(self.end).saturating_sub(self.acked);
        self.acked += freed;
        self.sent = self.sent.max(self.acked);
        self.reached = self.reached.max(self.acked);
        let mut left = freed as usize;
        while let Some(chunk) = self.chunks.front_mut().filter(|_| left > 0) {
            let accepted = chunk.split_to(chunk.len().min(left));
            if chunk.is_empty() {
                self.chunks.pop_front();
            }
            left -= accepted.len();
            self.crc32 = self.crc32.map(|crc| {
                let mut hasher = crc32fast::Hasher::new_with_initial(crc);
                hasher.update(&accepted);
                hasher.finalize()
            });
        }
        freed as usize
    }

    /// Whether something was sent and not acknowledged yet.
    pub(crate) fn is_under_way(&self) -> bool {
        self.sent > self.acked || self.eof_sent
    }

    /// Prepares for a new connection, on which the command has accepted `accepted` bytes with this CRC-32: what it has
    /// not accepted is sent again, including the end. Returns how much space that frees.
    ///
    /// Bytes that were never sent from here are another client's; what was not sent yet comes after them.
    pub(crate) fn resume(&mut self, accepted: u64, crc32: Option<u32>) -> Result<usize, StdinConflict> {
        let mut freed = 0;
        if accepted < self.acked {
            return Err(StdinConflict::RolledBack);
        } else if accepted <= self.reached {
            freed = self.ack(accepted);
            if self.crc32.is_some() && crc32.is_some() && self.crc32 != crc32 {
                return Err(StdinConflict::Interleaved);
            }
        } else if self.acked < self.reached {
            return Err(StdinConflict::Interleaved);
        } else {
            self.end = self.end.saturating_add(accepted - self.acked);
            (self.acked, self.reached) = (accepted, accepted);
        }
        self.crc32 = crc32;
        self.sent = self.acked;
        self.eof_sent = false;
        Ok(freed)
    }
}

/// Why input cannot continue on a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StdinConflict {
    #[error("the sandbox was rolled back to before input that the command had accepted")]
    RolledBack,
    #[error(
        "another client wrote input while the connection was down; it is not known whether the last input from here arrived"
    )]
    Interleaved,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(offset: u64, text: &'static str) -> Option<StdinPart> {
        Some(StdinPart::Data { offset, bytes: Bytes::from_static(text.as_bytes()) })
    }

    #[test]
    fn what_was_not_taken_is_sent_again() {
        let mut stdin = StdinBuffer::default();
        stdin.write(Bytes::from_static(b"abc"));
        stdin.write(Bytes::from_static(b"def"));
        stdin.close();
        assert_eq!(stdin.next(), data(0, "abc"));
        assert_eq!(stdin.next(), data(3, "def"));
        assert_eq!(stdin.next(), Some(StdinPart::Eof { offset: 6 }));
        assert_eq!(stdin.next(), None);
        assert_eq!(stdin.resume(4, None), Ok(4));
        assert_eq!(stdin.next(), data(4, "ef"));
        assert_eq!(stdin.next(), Some(StdinPart::Eof { offset: 6 }));
    }

    #[test]
    fn input_for_a_command_that_has_some_already_follows_it() {
        let mut stdin = StdinBuffer::default();
        stdin.write(Bytes::from_static(b"abc"));
        assert_eq!(stdin.resume(2, None), Ok(0));
        assert_eq!(stdin.next(), data(2, "abc"));
        stdin.close();
        assert_eq!(stdin.next(), Some(StdinPart::Eof { offset: 5 }));
        assert_eq!(stdin.ack(4), 2);
        assert_eq!(stdin.resume(4, None), Ok(0));
        assert_eq!(stdin.next(), data(4, "c"));
    }

    #[test]
    fn input_that_was_not_sent_yet_follows_what_another_client_wrote() {
        let mut stdin = StdinBuffer::default();
        stdin.write(Bytes::from_static(b"abc"));
        assert_eq!(stdin.next(), data(0, "abc"));
        assert_eq!(stdin.ack(3), 3);
        stdin.write(Bytes::from_static(b"later"));
        stdin.close();
        assert_eq!(stdin.resume(7, None), Ok(0));
        assert_eq!(stdin.next(), data(7, "later"));
        assert_eq!(stdin.next(), Some(StdinPart::Eof { offset: 12 }));
        assert_eq!(stdin.ack(12), 5);
        // Nothing of this client is in flight: the end follows whatever others wrote.
        assert_eq!(stdin.resume(20, None), Ok(0));
        assert_eq!(stdin.next(), Some(StdinPart::Eof { offset: 20 }));
    }

    #[test]
    fn input_that_may_be_lost_or_was_rolled_back_is_a_conflict() {
        let mut stdin = StdinBuffer::default();
        stdin.write(Bytes::from_static(b"abc"));
        assert_eq!(stdin.next(), data(0, "abc"));
        assert_eq!(stdin.resume(4, None), Err(StdinConflict::Interleaved));
        assert_eq!(stdin.ack(2), 2);
        assert_eq!(stdin.resume(1, None), Err(StdinConflict::RolledBack));
    }

    #[test]
    fn bytes_of_another_client_are_not_taken_for_those_in_flight() {
        let mut stdin = StdinBuffer::default();
        stdin.write(Bytes::from_static(b"ab"));
        stdin.write(Bytes::from_static(b"cdef"));
        stdin.next();
        stdin.next();
        assert_eq!(stdin.ack(1), 1);
        assert_eq!(stdin.resume(3, Some(crc32fast::hash(b"abc"))), Ok(2));
        assert_eq!(stdin.next(), data(3, "def"));
        assert_eq!(stdin.resume(4, Some(crc32fast::hash(b"abcX"))), Err(StdinConflict::Interleaved));
    }

    #[test]
    fn an_acknowledgement_frees_only_what_there_is() {
        let mut stdin = StdinBuffer::default();
        stdin.write(Bytes::from_static(b"abc"));
        assert_eq!(stdin.ack(2), 2);
        assert_eq!(stdin.ack(1), 0);
        assert_eq!(stdin.ack(100), 1);
        assert_eq!(stdin.next(), None);
    }

    #[test]
    fn large_writes_go_in_parts() {
        let mut stdin = StdinBuffer::default();
        stdin.write(Bytes::from(vec![7; PART + 1]));
        let Some(StdinPart::Data { offset: 0, bytes }) = stdin.next() else { panic!() };
        assert_eq!(bytes.len(), PART);
        let Some(StdinPart::Data { offset, bytes }) = stdin.next() else { panic!() };
        assert_eq!((offset, bytes.len()), (PART as u64, 1));
    }
}
