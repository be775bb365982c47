//! What goes to the server: answers first, then output. Nothing here ever waits.

use std::os::fd::AsFd;

use baton_protocol::frame::{self, Kind, Stream};
use rustix::io::{self, Errno};

/// Log lines are dropped while more than this waits.
const MOST_WITH_LOGS: usize = 64 << 10;
/// The server is not listened to while more than this waits.
const MOST: usize = 1 << 20;

#[derive(Debug, Default)]
pub struct Outbox {
    /// Answers that are not yet on their way.
    answers: Vec<u8>,
    /// What is on its way, from `written` on.
    bytes: Vec<u8>,
    written: usize,
}

impl Outbox {
    pub fn answers(&mut self) -> &mut Vec<u8> {
        &mut self.answers
    }

    pub fn log(&mut self, text: &str) {
        if self.answers.len() < MOST_WITH_LOGS {
            frame::encode(&mut self.answers, Kind::Log, Stream::Stdin, 0, 0, 0, &[text.as_bytes()]);
        }
    }

    pub fn is_full(&self) -> bool {
        self.answers.len() > MOST
    }

    /// Drops everything and begins with `bytes`: a new server throws away what comes before them.
    pub fn restart(&mut self, bytes: Vec<u8>) {
        *self = Self { answers: bytes, ..Self::default() };
    }

    /// All was written: the answers go next, and then what is appended to the result.
    pub fn refill(&mut self) -> Option<&mut Vec<u8>> {
        if self.written < self.bytes.len() {
            return None;
        }
        self.written = 0;
        self.bytes.clear();
        if self.answers.len() > self.bytes.capacity() {
            self.bytes = std::mem::take(&mut self.answers);
        } else {
            self.bytes.append(&mut self.answers);
        }
        Some(&mut self.bytes)
    }

    /// Something is left to write.
    pub fn is_waiting(&self) -> bool {
        self.written < self.bytes.len()
    }

    /// Writes once; `false` when the server's pipe is full.
    pub fn write(&mut self, to: impl AsFd) -> io::Result<bool> {
        match io::write(to, &self.bytes[self.written..]) {
            Ok(count) => {
                self.written += count;
                Ok(true)
            }
            Err(Errno::AGAIN) => Ok(false),
            Err(Errno::INTR) => Ok(true),
            Err(error) => Err(error),
        }
    }

    pub fn is_slack(&self) -> bool {
        !self.is_waiting() && self.bytes.capacity() + self.answers.capacity() > 0
    }

    pub fn tidy(&mut self) {
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
        assert!(outbox.answers.len() < 2 * MOST_WITH_LOGS && !outbox.is_full());
        frame::encode(outbox.answers(), Kind::Pong, Stream::Stdin, 0, 0, 7, &[]);
        let mut decoder = Decoder::default();
        decoder.push(outbox.refill().unwrap());
        let mut last = None;
        while let Some(frame) = decoder.next_frame().unwrap() {
            last = Some(frame);
        }
        assert_eq!(last.map(|frame| frame.sequence), Some(7));
    }

    #[test]
    fn a_restart_leaves_nothing_of_what_was_there() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut outbox = Outbox::default();
        outbox.refill().unwrap().extend_from_slice(b"half written");
        outbox.log("never sent");
        outbox.restart(b"nonce".to_vec());
        assert_eq!(outbox.refill().unwrap(), b"nonce");
        assert!(outbox.write(&writer).unwrap() && !outbox.is_waiting());
        drop(writer);
        let mut got = Vec::new();
        while io::read(
            &reader,
            rustix::buffer::spare_capacity({
                got.reserve(64);
                &mut got
            }),
        )
        .unwrap()
            > 0
        {}
        assert_eq!(got, b"nonce");
    }
}
