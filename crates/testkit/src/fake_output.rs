//! One output stream of a simulated command: offsets, credit, replay and rings as in the real agent.

use baton_protocol::{
    agent::{RING_ATTACHED, RING_DETACHED, Range},
    frame::{Frame, FrameKind, Stream},
};
use serde::{Deserialize, Serialize};

/// The longest payload of a data frame.
const MAX_CHUNK: u64 = 256 << 10;

/// Whether a client is attached: a full ring makes the command wait for an attached client, and drops the oldest
/// bytes otherwise.
#[derive(Clone, Copy, Debug)]
pub enum ClientPresence {
    Attached,
    Detached,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FakeOutput {
    base: u64,
    held: Vec<u8>,
    sent: u64,
    pub credit: u64,
    replay: u64,
    eof: bool,
    eof_sent: bool,
    eof_ever_sent: bool,
}

impl FakeOutput {
    fn end(&self) -> u64 {
        self.base + self.held.len() as u64
    }

    pub fn range(&self) -> Range {
        Range { from: self.base, to: self.end(), eof: self.eof }
    }

    pub fn is_done(&self) -> bool {
        self.eof_ever_sent && self.held.is_empty()
    }

    /// How many bytes can be written before the command has to wait.
    pub fn free_bytes(&self, client: ClientPresence) -> u64 {
        match client {
            ClientPresence::Attached => RING_ATTACHED.saturating_sub(self.held.len() as u64),
            ClientPresence::Detached => RING_DETACHED,
        }
    }

    pub fn push(&mut self, bytes: &[u8], client: ClientPresence) {
        self.held.extend_from_slice(bytes);
        match client {
            ClientPresence::Attached => {}
            ClientPresence::Detached => {
                let excess = self.held.len().saturating_sub(RING_DETACHED as usize);
                self.drop_oldest(excess);
            }
        }
    }

    fn drop_oldest(&mut self, count: usize) {
        self.held.drain(..count);
        self.base += count as u64;
        self.sent = self.sent.max(self.base);
    }

    pub fn close(&mut self) {
        self.eof = true;
    }

    pub fn ack(&mut self, offset: u64) {
        let acked = offset.clamp(self.base, self.end()) - self.base;
        self.drop_oldest(acked as usize);
    }

    pub fn replay(&mut self, offset: u64, sequence: u64) {
        self.sent = offset.clamp(self.base, self.end());
        self.replay = sequence;
        self.eof_sent = false;
    }

    pub fn resync(&mut self) {
        self.sent = self.base;
        (self.credit, self.replay, self.eof_sent) = (0, 0, false);
        self.eof_ever_sent |= self.eof;
    }

    /// Appends the frames that credit allows to send now.
    pub fn send_into(&mut self, frames: &mut Vec<Frame>, exec: u32, stream: Stream) {
        let until = self.credit.min(self.end());
        let frame = |kind| Frame::new(kind).stream(stream).exec(exec).sequence(self.replay);
        while self.sent < until {
            let length = (until - self.sent).min(MAX_CHUNK);
            let from = (self.sent - self.base) as usize;
            let payload = &self.held[from..from + length as usize];
            frames.push(frame(FrameKind::Data).offset(self.sent).payload(payload));
            self.sent += length;
        }
        if self.eof && !self.eof_sent && self.sent == self.end() && self.credit >= self.end() {
            frames.push(frame(FrameKind::Eof).offset(self.sent));
            (self.eof_sent, self.eof_ever_sent) = (true, true);
        }
    }
}
