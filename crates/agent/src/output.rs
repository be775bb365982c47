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
    poll::{Poll, Source},
    ring::Ring,
};

/// Longest read and longest data frame: the read's size makes the speed.
pub const CHUNK: usize = 256 << 10;

#[derive(Debug)]
pub struct Output {
    ring: Ring,
    /// `None`: the stream has ended.
    from: Option<OwnedFd>,
    watched: bool,
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
        let most = room.min(scratch.len());
        if most == 0 {
            return;
        }
        match io::read(from, &mut scratch[..most]) {
            Ok(0) => self.close(poll),
            Ok(count) => {
                self.ring.push(&scratch[..count], limit);
                self.sent = self.sent.max(self.ring.base());
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            // A terminal's last writer is gone.
            Err(_) => self.close(poll),
        }
    }

    pub fn close(&mut self, poll: &Poll) {
        if let Some(from) = self.from.take()
            && self.watched
        {
            poll.forget(from);
        }
    }

    /// Appends one frame if there is one to send.
    pub fn emit(&mut self, exec: u32, stream: Stream, out: &mut Vec<u8>) -> bool {
        let until = self.credit.min(self.ring.end());
        if self.sent < until {
            let most = (until - self.sent).min(CHUNK as u64) as usize;
            let pieces = self.ring.pieces(self.sent, most);
            frame::encode(out, Kind::Data, stream, exec, self.sent, self.replay, &pieces);
            self.sent += most as u64;
            return true;
        }
        let end = self.ring.end();
        if self.from.is_none() && !self.eof_sent && self.sent == end && self.credit >= end {
            frame::encode(out, Kind::Eof, stream, exec, end, self.replay, &[]);
            self.eof_sent = true;
            self.eof_told = true;
            return true;
        }
        false
    }

    pub fn tidy(&mut self) {
        self.ring.tidy();
    }

    pub fn is_slack(&self) -> bool {
        self.ring.is_slack()
    }
}
