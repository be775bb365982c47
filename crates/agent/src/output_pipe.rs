//! One output stream of a command: the bytes not acknowledged yet, and how many of them may be sent.
//!
//! ```text
//!   base ───────── sent ───────── end        offsets in the stream
//!     held            to be sent    │
//!                  └── up to the credit ────▶
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use baton_protocol::{
    agent::{RING_ATTACHED, RING_DETACHED, Range},
    frame::{self, FrameKind, Stream},
};
use rustix::io::{self, Errno};

use crate::{
    exec_spawn,
    outbox::Outbox,
    poll::{Epoll, PollSource},
    ring::Ring,
};

/// Longest data frame, and longest read before a stream is known to carry much data.
pub const CHUNK: usize = 256 << 10;
/// Longest read of a stream that carries much data: larger reads are faster.
const MOST_READ: usize = 1 << 20;
/// A read of this size means that the command writes faster than the agent reads.
const LARGE_READ: usize = 32 << 10;

#[derive(Debug)]
pub struct OutputPipe {
    ring: Ring,
    /// `None` once the stream has ended.
    from: Option<OwnedFd>,
    watched: bool,
    /// Its pipe was enlarged, because much data passed through it.
    enlarged: bool,
    sent: u64,
    credit: u64,
    /// The number of the last replay.
    replay: u64,
    eof_sent: bool,
    /// The end was reported at least once, in a frame or in a state.
    eof_told: bool,
}

impl OutputPipe {
    pub fn new(from: Option<OwnedFd>) -> Self {
        Self {
            ring: Ring::default(),
            from,
            watched: false,
            enlarged: false,
            sent: 0,
            credit: 0,
            replay: 0,
            eof_sent: false,
            eof_told: false,
        }
    }

    /// A stream that has ended already.
    pub fn ended_with(text: &str) -> Self {
        let mut pipe = Self::new(None);
        pipe.ring.push(text.as_bytes(), RING_DETACHED as usize);
        pipe
    }

    pub fn range(&self) -> Range {
        Range { from: self.ring.base(), to: self.ring.end(), eof: self.from.is_none() }
    }

    pub fn source(&self) -> Option<BorrowedFd<'_>> {
        self.from.as_ref().map(AsFd::as_fd)
    }

    /// Whether nothing of it has to be kept.
    pub fn is_done(&self) -> bool {
        self.eof_told && self.ring.is_empty()
    }

    pub fn ack(&mut self, offset: u64) {
        self.ring.free_below(offset);
        self.sent = self.sent.max(self.ring.base());
    }

    pub fn set_credit(&mut self, offset: u64) {
        self.credit = offset;
    }

    pub fn replay(&mut self, offset: u64, sequence: u64) {
        self.sent = offset.clamp(self.ring.base(), self.ring.end());
        self.replay = sequence;
        self.eof_sent = false;
    }

    /// Restarts for a new server that knows the range: nothing is sent until it grants credit.
    pub fn resync(&mut self) {
        self.sent = self.ring.base();
        self.credit = 0;
        self.replay = 0;
        self.eof_sent = false;
        self.eof_told |= self.from.is_none();
    }

    /// Watches for more bytes only while there is space for them.
    pub fn watch(&mut self, poll: &Epoll, source: PollSource, attached: bool) -> io::Result<()> {
        let Some(from) = &self.from else { return Ok(()) };
        let wanted = !attached || (self.ring.len() as u64) < RING_ATTACHED;
        if wanted && !self.watched {
            poll.watch_input(from, source)?;
        } else if !wanted && self.watched {
            poll.forget(from);
        }
        self.watched = wanted;
        Ok(())
    }

    /// Reads once. While no client is attached, the oldest bytes are dropped to make space.
    pub fn fill(&mut self, poll: &Epoll, scratch: &mut [u8], attached: bool) {
        let Some(from) = &self.from else { return };
        let limit = if attached { RING_ATTACHED } else { RING_DETACHED } as usize;
        let room = if attached { limit.saturating_sub(self.ring.len()) } else { limit };
        if room == 0 {
            return;
        }
        // With enough space in the ring, read directly into it.
        let read = if attached && self.ring.free() >= CHUNK.min(room) {
            let read = io::readv(from, &mut self.ring.spare(room.min(MOST_READ)));
            self.ring.commit(read.unwrap_or(0));
            read
        } else {
            let most = room.min(scratch.len());
            let read = io::read(from, &mut scratch[..most]);
            self.ring.push(&scratch[..read.unwrap_or(0)], limit);
            read
        };
        match read {
            Ok(0) => self.close(poll),
            Ok(count) => {
                self.sent = self.sent.max(self.ring.base());
                if count >= LARGE_READ && !std::mem::replace(&mut self.enlarged, true) {
                    exec_spawn::enlarge(from);
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            // The last writer of a terminal is gone.
            Err(_) => self.close(poll),
        }
    }

    /// Appends text of the agent itself, while the stream is open. Held bytes are not dropped: while a client is
    /// attached, there is always space for a little more.
    pub fn add(&mut self, text: &[u8]) {
        if self.from.is_some() {
            self.ring.push(text, RING_DETACHED as usize);
            self.sent = self.sent.max(self.ring.base());
        }
    }

    pub fn close(&mut self, poll: &Epoll) {
        if let Some(from) = self.from.take()
            && self.watched
        {
            poll.forget(from);
        }
    }

    /// Adds one frame, if there is one to send.
    pub fn emit(&mut self, exec: u32, stream: Stream, out: &mut Outbox) -> bool {
        let until = self.credit.min(self.ring.end());
        if self.sent < until {
            let most = (until - self.sent).min(CHUNK as u64) as usize;
            out.add(exec, stream, self.sent, self.replay, self.ring.pieces(self.sent, most));
            self.sent += most as u64;
            return true;
        }
        let end = self.ring.end();
        if self.from.is_none() && !self.eof_sent && self.sent == end && self.credit >= end {
            frame::encode(out.bytes(), FrameKind::Eof, stream, exec, end, self.replay, &[]);
            self.eof_sent = true;
            self.eof_told = true;
            return true;
        }
        false
    }

    /// The held bytes from `offset` on.
    pub fn held(&self, offset: u64, len: usize) -> [&[u8]; 2] {
        self.ring.pieces(offset, len)
    }

    pub fn shrink(&mut self) {
        self.ring.shrink();
    }

    pub fn is_slack(&self) -> bool {
        self.ring.is_slack()
    }
}
