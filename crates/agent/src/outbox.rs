//! Frames for the server: answers first, then output. Nothing here ever blocks.
//!
//! Output is written directly from its ring, interleaved with the bytes here. What the pipe does not accept is
//! copied at once, so that no ring has to keep bytes for the outbox.

use std::{io::IoSlice, os::fd::AsFd};

use baton_protocol::frame::{self, FrameKind, Stream};
use rustix::io::{self, Errno};

/// Log lines are dropped while more than this is pending.
const MAX_PENDING_WITH_LOGS: usize = 64 << 10;
/// The server's frames are not read while more than this is pending.
const MAX_PENDING: usize = 1 << 20;
/// Anything shorter is copied: another piece in a write costs as much.
const WORTH_A_PIECE: usize = 4 << 10;

/// Output of a command to write from its ring.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub exec: u32,
    pub stream: Stream,
    pub offset: u64,
    pub len: usize,
    /// How many of the outbox's own bytes precede it.
    at: usize,
}

#[derive(Debug, Default)]
pub struct Outbox {
    /// Answers that are not being written yet.
    answers: Vec<u8>,
    /// Bytes being written, from `written` on.
    bytes: Vec<u8>,
    written: usize,
    /// The pieces from rings in between; empty after a partial write.
    pieces: Vec<Piece>,
    /// The total length of the pieces.
    borrowed: usize,
}

impl Outbox {
    pub fn answers(&mut self) -> &mut Vec<u8> {
        &mut self.answers
    }

    pub fn log(&mut self, text: &str) {
        if !self.is_crowded() {
            frame::encode(&mut self.answers, FrameKind::Log, Stream::Stdin, 0, 0, 0, &[text.as_bytes()]);
        }
    }

    pub fn is_full(&self) -> bool {
        self.answers.len() > MAX_PENDING
    }

    /// Whether so much is pending that nothing should be begun that will be answered.
    pub fn is_crowded(&self) -> bool {
        self.answers.len() >= MAX_PENDING_WITH_LOGS
    }

    /// Drops everything and starts with `bytes`: a new server discards everything before them.
    pub fn restart(&mut self, bytes: Vec<u8>) {
        *self = Self { answers: bytes, ..Self::default() };
    }

    /// Starts a new batch with the pending answers, if the last one is written. Returns whether it did.
    pub fn refill(&mut self) -> bool {
        if self.is_waiting() {
            return false;
        }
        self.written = 0;
        self.bytes.clear();
        if self.answers.len() > self.bytes.capacity() {
            self.bytes = std::mem::take(&mut self.answers);
        } else {
            self.bytes.append(&mut self.answers);
        }
        true
    }

    /// The buffer to which small frames are added after a refill.
    pub fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Adds a frame of output that is held in two pieces.
    pub fn add(&mut self, exec: u32, stream: Stream, offset: u64, replay: u64, held: [&[u8]; 2]) {
        let len = held[0].len() + held[1].len();
        if len < WORTH_A_PIECE {
            frame::encode(&mut self.bytes, FrameKind::Data, stream, exec, offset, replay, &held);
            return;
        }
        self.bytes.extend_from_slice(&frame::header(FrameKind::Data, stream, exec, offset, replay, &held));
        self.pieces.push(Piece { exec, stream, offset, len, at: self.bytes.len() });
        self.borrowed += len;
    }

    /// The number of bytes to write.
    pub fn size(&self) -> usize {
        self.bytes.len() - self.written + self.borrowed
    }

    /// Whether anything is left to write.
    pub fn is_waiting(&self) -> bool {
        self.written < self.bytes.len()
    }

    /// Writes once; returns `false` if the server's pipe is full. `held` returns the bytes of a piece.
    pub fn write<'a>(&mut self, to: impl AsFd, held: impl Fn(&Piece) -> [&'a [u8]; 2]) -> io::Result<bool> {
        let mut slices = Vec::with_capacity(3 * self.pieces.len() + 1);
        let mut from = self.written;
        for piece in &self.pieces {
            slices.push(IoSlice::new(&self.bytes[from..piece.at]));
            slices.extend(held(piece).into_iter().filter(|part| !part.is_empty()).map(IoSlice::new));
            from = piece.at;
        }
        slices.push(IoSlice::new(&self.bytes[from..]));
        let (count, is_open) = match io::writev(to, &slices) {
            Ok(count) => (count, true),
            Err(Errno::AGAIN) => (0, false),
            Err(Errno::INTR) => (0, true),
            Err(error) => return Err(error),
        };
        if self.pieces.is_empty() {
            self.written += count;
            return Ok(is_open);
        }
        let mut rest = &mut slices[..];
        IoSlice::advance_slices(&mut rest, count);
        let rest: Vec<u8> = rest.iter().map(|slice| &**slice).collect::<Vec<_>>().concat();
        match rest.is_empty() {
            true => self.bytes.clear(),
            false => self.bytes = rest,
        }
        (self.written, self.borrowed) = (0, 0);
        self.pieces.clear();
        Ok(is_open)
    }

    pub fn is_slack(&self) -> bool {
        !self.is_waiting() && self.bytes.capacity() + self.answers.capacity() > 0
    }

    pub fn shrink(&mut self) {
        if !self.is_waiting() && self.answers.is_empty() {
            *self = Self::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_protocol::frame::Decoder;

    use super::*;

    #[test]
    fn a_flood_of_log_lines_is_cut_and_answers_are_not() {
        let mut outbox = Outbox::default();
        for _ in 0..10_000 {
            outbox.log("a line that nobody reads");
        }
        assert!(outbox.answers.len() < 2 * MAX_PENDING_WITH_LOGS && !outbox.is_full());
        frame::encode(outbox.answers(), FrameKind::Pong, Stream::Stdin, 0, 0, 7, &[]);
        let mut decoder = Decoder::default();
        assert!(outbox.refill());
        decoder.push(outbox.bytes());
        let mut last = None;
        while let Some(frame) = decoder.next_frame().unwrap() {
            last = Some(frame);
        }
        assert_eq!(last.map(|frame| frame.sequence), Some(7));
    }

    /// Reads everything available.
    fn drain(reader: impl AsFd) -> Vec<u8> {
        let mut got = Vec::new();
        let mut chunk = vec![0; 1 << 20];
        while let Ok(count @ 1..) = io::read(&reader, &mut chunk[..]) {
            got.extend_from_slice(&chunk[..count]);
        }
        got
    }

    fn pipe() -> (std::os::fd::OwnedFd, std::os::fd::OwnedFd) {
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap()
    }

    #[test]
    fn a_restart_leaves_nothing_of_what_was_there() {
        let (reader, writer) = pipe();
        let mut outbox = Outbox::default();
        assert!(outbox.refill());
        outbox.bytes().extend_from_slice(b"half written");
        outbox.add(1, Stream::Stdout, 0, 0, [&[1; 9000], &[]]);
        outbox.log("never sent");
        outbox.restart(b"nonce".to_vec());
        assert!(outbox.refill());
        assert!(outbox.write(&writer, |_| unreachable!("nothing is left of it")).unwrap() && !outbox.is_waiting());
        assert_eq!(drain(&reader), b"nonce");
    }

    #[test]
    fn output_is_written_from_its_ring_and_what_a_full_pipe_leaves_is_kept() {
        let (reader, writer) = pipe();
        let held: [Vec<u8>; 3] = [5_000, 10, 200_000].map(|len| (0..len).map(|at| (at * 7) as u8).collect());
        let split = |bytes: &'static [u8], at: usize| -> [&'static [u8]; 2] { [&bytes[..at], &bytes[at..]] };
        let held: [&'static [u8]; 3] = held.map(|bytes| &*bytes.leak());
        let mut outbox = Outbox::default();
        outbox.log("first");
        assert!(outbox.refill());
        let mut wanted = outbox.bytes().clone();
        for (exec, bytes) in (1..).zip(held) {
            outbox.add(exec, Stream::Stderr, 77, 9, split(bytes, bytes.len() / 3));
            frame::encode(&mut wanted, FrameKind::Data, Stream::Stderr, exec, 77, 9, &[bytes]);
        }
        assert_eq!(outbox.size(), wanted.len());
        let find = |piece: &Piece| split(held[piece.exec as usize - 1], 1);
        assert!(outbox.write(&writer, find).unwrap());
        let mut got = drain(&reader);
        assert!(got.len() < wanted.len() && outbox.is_waiting(), "a pipe of 64 KiB is full");
        assert_eq!(outbox.size(), wanted.len() - got.len());
        while outbox.is_waiting() {
            outbox.write(&writer, |_| unreachable!("the rest was copied")).unwrap();
            got.extend(drain(&reader));
        }
        assert!(got == wanted && outbox.refill());
    }

    #[test]
    fn a_full_pipe_is_told_and_costs_nothing_that_was_to_be_written() {
        let (reader, writer) = pipe();
        while io::write(&writer, &[0; 4096]).is_ok() {}
        let mut outbox = Outbox::default();
        assert!(outbox.refill());
        outbox.add(1, Stream::Stdout, 0, 0, [&[3; 5000], &[]]);
        let size = outbox.size();
        assert!(!outbox.write(&writer, |_| [&[3; 5000], &[]]).unwrap());
        assert_eq!(outbox.size(), size);
        assert!(!outbox.refill(), "it is still on its way");
        drain(&reader);
        assert!(outbox.write(&writer, |_| unreachable!("it was copied")).unwrap());
        assert_eq!(drain(&reader).len(), size);
    }
}
