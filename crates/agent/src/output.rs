//! One output stream of a command: what was read and not yet acknowledged, and what of it may be sent.
//!
//! ```text
//!   base ───────── sent ───────── end        offsets in the stream
//!     held            to be sent    │
//!                  └── credit says how far ─▶
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use baton_protocol::{
    agent::{RING_ATTACHED, RING_DETACHED, Range},
    frame::{self, Kind, Stream},
};
use rustix::io::{self, Errno};

use crate::{
    outbox::Outbox,
    poll::{Poll, Source},
    ring::Ring,
    spawn,
};

/// Longest data frame, and longest read of what is not yet known to be much.
pub const CHUNK: usize = 256 << 10;
/// Longest read of what is much: the read's size makes the speed.
const MOST_READ: usize = 1 << 20;
/// So much in one read: the command writes faster than it is read.
const MUCH: usize = 32 << 10;

#[derive(Debug)]
pub struct Output {
    ring: Ring,
    /// `None`: the stream has ended.
    from: Option<OwnedFd>,
    watched: bool,
    /// Much came through its pipe.
    enlarged: bool,
    sent: u64,
    credit: u64,
    /// The number of the last replay.
    replay: u64,
    eof_sent: bool,
    /// The end was told at least once, by a frame or in a state.
    eof_told: bool,
}

impl Output {
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

    pub fn range(&self) -> Range {
        Range { from: self.ring.base(), to: self.ring.end(), eof: self.from.is_none() }
    }

    pub fn source(&self) -> Option<BorrowedFd<'_>> {
        self.from.as_ref().map(AsFd::as_fd)
    }

    /// Nothing of it has to be kept.
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

    /// A new server is there and was told the range: nothing is sent until it gives credit.
    pub fn resync(&mut self) {
        self.sent = self.ring.base();
        self.credit = 0;
        self.replay = 0;
        self.eof_sent = false;
        self.eof_told |= self.from.is_none();
    }

    /// Waits for more bytes exactly when there is room for them.
    pub fn watch(&mut self, poll: &Poll, source: Source, attached: bool) -> io::Result<()> {
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

    /// Reads once. While nobody is attached the oldest bytes make room.
    pub fn fill(&mut self, poll: &Poll, scratch: &mut [u8], attached: bool) {
        let Some(from) = &self.from else { return };
        let limit = if attached { RING_ATTACHED } else { RING_DETACHED } as usize;
        let room = if attached { limit.saturating_sub(self.ring.len()) } else { limit };
        if room == 0 {
            return;
        }
        // Where there is room already the bytes are read to where they stay.
        let read = if attached && self.ring.free() >= CHUNK.min(room) {
            let read = io::readv(from, &mut self.ring.spare(room.min(MOST_READ)));
            self.ring.take(read.unwrap_or(0));
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
                if count >= MUCH && !std::mem::replace(&mut self.enlarged, true) {
                    spawn::enlarge(from);
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            // A terminal's last writer is gone.
            Err(_) => self.close(poll),
        }
    }

    /// Appends something of the agent's own, as long as the stream is open. What is held of it stays: while somebody
    /// reads there is always room for a little more.
    pub fn add(&mut self, text: &[u8]) {
        if self.from.is_some() {
            self.ring.push(text, RING_DETACHED as usize);
            self.sent = self.sent.max(self.ring.base());
        }
    }

    pub fn close(&mut self, poll: &Poll) {
        if let Some(from) = self.from.take()
            && self.watched
        {
            poll.forget(from);
        }
    }

    /// Adds one frame if there is one to send.
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
            frame::encode(out.bytes(), Kind::Eof, stream, exec, end, self.replay, &[]);
            self.eof_sent = true;
            self.eof_told = true;
            return true;
        }
        false
    }

    /// What is held of it from `offset` on.
    pub fn held(&self, offset: u64, len: usize) -> [&[u8]; 2] {
        self.ring.pieces(offset, len)
    }

    pub fn tidy(&mut self) {
        self.ring.tidy();
    }

    pub fn is_slack(&self) -> bool {
        self.ring.is_slack()
    }
}
