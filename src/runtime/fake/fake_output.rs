//! One output stream of a simulated command: offsets, credit, replay and rings as in the real agent.

use baton_protocol::{
    agent::{RING_ATTACHED, RING_DETACHED, Range},
    frame::{Frame, Kind, Stream},
};
use serde::{Deserialize, Serialize};

/// The longest data frame.
const CHUNK: u64 = 256 << 10;

/// Whether a client is attached, which decides how much is held and what happens to the rest.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub attached: bool,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Output {
    base: u64,
    held: Vec<u8>,
    sent: u64,
    pub credit: u64,
    replay: u64,
    eof: bool,
    eof_sent: bool,
    eof_told: bool,
}

impl Output {
    fn end(&self) -> u64 {
        self.base + self.held.len() as u64
    }

    pub fn range(&self) -> Range {
        Range { from: self.base, to: self.end(), eof: self.eof }
    }

    pub fn is_done(&self) -> bool {
        self.eof_told && self.held.is_empty()
    }

    /// How many bytes may be written before the command has to wait.
    pub fn room(&self, room: Room) -> u64 {
        match room.attached {
            true => RING_ATTACHED.saturating_sub(self.held.len() as u64),
            false => RING_DETACHED,
        }
    }

    pub fn has_room(&self, room: Room) -> bool {
        self.room(room) > 0
    }

    pub fn push(&mut self, bytes: &[u8], room: Room) {
        self.held.extend_from_slice(bytes);
        if !room.attached {
            let over = self.held.len().saturating_sub(RING_DETACHED as usize);
            self.held.drain(..over);
            self.base += over as u64;
            self.sent = self.sent.max(self.base);
        }
    }

    pub fn close(&mut self) {
        self.eof = true;
    }

    pub fn ack(&mut self, offset: u64) {
        let freed = offset.clamp(self.base, self.end()) - self.base;
        self.held.drain(..freed as usize);
        self.base += freed;
        self.sent = self.sent.max(self.base);
    }

    pub fn replay(&mut self, offset: u64, sequence: u64) {
        self.sent = offset.clamp(self.base, self.end());
        self.replay = sequence;
        self.eof_sent = false;
    }

    pub fn resync(&mut self) {
        self.sent = self.base;
        (self.credit, self.replay, self.eof_sent) = (0, 0, false);
        self.eof_told |= self.eof;
    }

    pub fn emit(&mut self, exec: u32, stream: Stream, frames: &mut Vec<Frame>) {
        let until = self.credit.min(self.end());
        let frame = |kind| Frame::new(kind).stream(stream).exec(exec).sequence(self.replay);
        while self.sent < until {
            let most = (until - self.sent).min(CHUNK);
            let from = (self.sent - self.base) as usize;
            let payload = &self.held[from..from + most as usize];
            frames.push(frame(Kind::Data).offset(self.sent).payload(payload));
            self.sent += most;
        }
        if self.eof && !self.eof_sent && self.sent == self.end() && self.credit >= self.end() {
            frames.push(frame(Kind::Eof).offset(self.sent));
            (self.eof_sent, self.eof_told) = (true, true);
        }
    }
}
