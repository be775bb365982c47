//! One stream of output between the connection and its reader: in order, once, bounded.
//!
//! ```text
//!   acked ≤ taken ≤ received        offsets in the stream
//!           └ queue ┘
//! ```
//! The server sends at most a window beyond the acknowledged offset, and only bytes that the reader
//! took are acknowledged: a slow reader slows the command down, not the connection.

use std::{
    collections::VecDeque,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;

/// Send an acknowledgement after this many bytes.
pub(crate) const ACK_EVERY: u64 = 256 << 10;
/// More than any window the server grants: beyond this, the socket is not read until the reader catches up.
pub(crate) const FLOOD: usize = 4 << 20;

/// A part of a command's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// The next bytes of the stream.
    Data(Bytes),
    /// The bytes `from..to` were lost: no client read them for too long.
    Gap {
        /// The offset of the first lost byte.
        from: u64,
        /// The offset of the first byte that follows.
        to: u64,
    },
    /// The sandbox was rolled back to an older checkpoint: the bytes from `to` on follow again.
    Rewound {
        /// The offset that the stream continues from.
        to: u64,
    },
}

#[derive(Debug)]
struct Item {
    chunk: Chunk,
    /// The reader's offset after this item.
    end: u64,
    /// How often the stream had been rewound when the item arrived.
    rewinds: u32,
    /// Its position among the items of both streams.
    order: u64,
}

#[derive(Debug, Default)]
pub(crate) struct OutputBuffer {
    queue: VecDeque<Item>,
    buffered: usize,
    received: u64,
    taken: u64,
    acked: u64,
    rewinds: u32,
    discarded: bool,
    ended: bool,
    waker: Option<Waker>,
}

/// Bytes before this frame are missing, and the server did not report a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hole;

impl OutputBuffer {
    pub(crate) fn starting_at(offset: u64) -> Self {
        Self { received: offset, taken: offset, acked: offset, ..Self::default() }
    }

    /// Appends the bytes; drops those that were received before.
    pub(crate) fn push(&mut self, offset: u64, mut bytes: Bytes, order: u64) -> Result<(), Hole> {
        if offset > self.received {
            return Err(Hole);
        }
        let known = self.received - offset;
        if known >= bytes.len() as u64 {
            return Ok(());
        }
        let bytes = bytes.split_off(known as usize);
        self.received = self.received.saturating_add(bytes.len() as u64);
        self.put(Chunk::Data(bytes), order);
        Ok(())
    }

    pub(crate) fn gap(&mut self, to: u64, order: u64) {
        if to > self.received {
            let from = self.received;
            self.received = to;
            self.put(Chunk::Gap { from, to }, order);
        }
    }

    pub(crate) fn rewind(&mut self, to: u64, order: u64) {
        if to < self.received {
            self.rewinds = self.rewinds.wrapping_add(1);
            self.received = to;
            self.taken = self.taken.min(to);
            self.acked = self.acked.min(to);
            self.put(Chunk::Rewound { to }, order);
        }
    }

    fn put(&mut self, chunk: Chunk, order: u64) {
        if self.discarded || self.ended {
            self.taken = self.received;
            return;
        }
        if let Chunk::Data(bytes) = &chunk {
            self.buffered += bytes.len();
        }
        self.queue.push_back(Item { chunk, end: self.received, rewinds: self.rewinds, order });
        self.wake();
    }

    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Chunk>> {
        match self.pop() {
            Some(chunk) => Poll::Ready(Some(chunk)),
            None if self.ended || self.discarded => Poll::Ready(None),
            None => {
                self.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    fn pop(&mut self) -> Option<Chunk> {
        let item = self.queue.pop_front()?;
        if let Chunk::Data(bytes) = &item.chunk {
            self.buffered -= bytes.len();
        }
        // An item from before a rewind advances the reader, but not the acknowledged offset.
        if item.rewinds == self.rewinds {
            self.taken = item.end;
        }
        Some(item.chunk)
    }

    /// The position of its next item among the items of both streams.
    pub(crate) fn order(&self) -> Option<u64> {
        self.queue.front().map(|item| item.order)
    }

    /// Discards the output, so that the command does not wait for a reader.
    pub(crate) fn discard(&mut self) {
        self.discarded = true;
        self.queue.clear();
        self.buffered = 0;
        self.taken = self.received;
        self.wake();
    }

    /// No more output will follow.
    pub(crate) fn end(&mut self) {
        self.ended = true;
        self.wake();
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    pub(crate) fn is_ack_due(&self) -> bool {
        self.taken >= self.acked.saturating_add(ACK_EVERY)
    }

    /// The offset to acknowledge now.
    pub(crate) fn ack(&mut self) -> u64 {
        self.acked = self.acked.max(self.taken);
        self.acked
    }

    /// Everything received, read or not: the server may discard it.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// The offset to send on a reconnect; the server counts from it.
    pub(crate) fn named(&mut self) -> u64 {
        self.acked = self.received;
        self.received
    }

    /// Whether it holds more than the server may send, and is not being read.
    pub(crate) fn is_flooded(&self) -> bool {
        self.buffered > FLOOD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(pipe: &mut OutputBuffer) -> Vec<Chunk> {
        std::iter::from_fn(|| pipe.pop()).collect()
    }

    fn data(text: &'static str) -> Chunk {
        Chunk::Data(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn repeated_bytes_arrive_once() {
        let mut pipe = OutputBuffer::default();
        for (offset, text) in [(0, "abc"), (0, "abc"), (1, "bcd"), (4, "e"), (2, "c")] {
            pipe.push(offset, Bytes::from(text), 0).unwrap();
        }
        assert_eq!(taken(&mut pipe), [data("abc"), data("d"), data("e")]);
        assert_eq!(pipe.ack(), 5);
    }

    #[test]
    fn a_hole_is_not_passed_over() {
        let mut pipe = OutputBuffer::default();
        assert_eq!(pipe.push(1, Bytes::from_static(b"x"), 0), Err(Hole));
        pipe.gap(10, 0);
        pipe.push(10, Bytes::from_static(b"x"), 0).unwrap();
        assert_eq!(taken(&mut pipe), [Chunk::Gap { from: 0, to: 10 }, data("x")]);
    }

    #[test]
    fn offsets_at_the_end_of_all_offsets_saturate() {
        let mut pipe = OutputBuffer::starting_at(u64::MAX - 1);
        pipe.push(u64::MAX - 2, Bytes::from_static(b"abcd"), 0).unwrap();
        pipe.gap(u64::MAX, 1);
        assert_eq!((taken(&mut pipe), pipe.is_ack_due(), pipe.ack()), (vec![data("bcd")], true, u64::MAX));
        assert_eq!(pipe.push(u64::MAX, Bytes::from_static(b"e"), 2), Ok(()));
        pipe.rewind(0, 3);
        assert!(!pipe.is_ack_due());
    }

    #[test]
    fn only_what_was_read_is_acknowledged() {
        let mut pipe = OutputBuffer::default();
        let half = Bytes::from(vec![0; ACK_EVERY as usize / 2]);
        for n in 0..4 {
            pipe.push(n * half.len() as u64, half.clone(), n).unwrap();
        }
        assert!(!pipe.is_ack_due());
        pipe.pop();
        assert!(!pipe.is_ack_due());
        pipe.pop();
        assert!(pipe.is_ack_due());
        assert_eq!(pipe.ack(), ACK_EVERY);
        assert!(!pipe.is_ack_due());
    }

    #[test]
    fn what_nobody_reads_is_acknowledged_as_it_comes() {
        let mut pipe = OutputBuffer::default();
        pipe.push(0, Bytes::from_static(b"ab"), 0).unwrap();
        pipe.discard();
        pipe.push(2, Bytes::from(vec![0; ACK_EVERY as usize]), 0).unwrap();
        assert!(pipe.is_ack_due() && pipe.queue.is_empty());
        assert_eq!(pipe.ack(), ACK_EVERY + 2);
    }

    #[test]
    fn after_a_rewind_the_older_items_confirm_nothing() {
        let mut pipe = OutputBuffer::default();
        pipe.push(0, Bytes::from_static(b"abcd"), 0).unwrap();
        pipe.rewind(2, 1);
        pipe.push(2, Bytes::from_static(b"CDE"), 2).unwrap();
        assert_eq!(pipe.pop(), Some(data("abcd")));
        assert_eq!(pipe.ack(), 0);
        assert_eq!(taken(&mut pipe), [Chunk::Rewound { to: 2 }, data("CDE")]);
        assert_eq!(pipe.ack(), 5);
    }
}
