//! The stdin of a command: bytes that the server sent and the command has not read yet.

use std::{collections::VecDeque, os::fd::OwnedFd};

use crc32fast::Hasher as Crc32;
use rustix::{
    io::{self, Errno},
    termios,
};

use crate::{
    exec_spawn,
    poll::{Epoll, PollSource},
};

/// Maximum bytes held for a command that does not read; the sender keeps the rest.
pub const MOST_HELD: usize = 1 << 20;

/// The outcome of bytes for stdin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputOutcome {
    /// The new bytes were accepted, as far as they fit.
    Yes,
    /// Bytes before these are missing.
    Gap,
    /// The command does not read stdin any more.
    Closed,
}

#[derive(Debug)]
pub struct StdinPipe {
    to: Option<OwnedFd>,
    is_terminal: bool,
    watched: bool,
    /// Its pipe was enlarged, because much data passed through it.
    enlarged: bool,
    held: VecDeque<u8>,
    /// Everything below this offset is written or held.
    taken: u64,
    /// Of everything below that offset, so that a client can tell its own bytes from those of another one.
    crc32: Crc32,
    /// The end was received and is not passed on yet.
    ending: bool,
    /// The offset at which the end was passed on.
    ended_at: Option<u64>,
    /// The terminal is at the start of a line: one end-of-file character suffices.
    at_line_start: bool,
    pub ack_due: bool,
    pub gone_due: bool,
}

impl StdinPipe {
    pub fn new(to: Option<OwnedFd>, is_terminal: bool) -> Self {
        Self {
            to,
            is_terminal,
            watched: false,
            enlarged: false,
            held: VecDeque::new(),
            taken: 0,
            crc32: Crc32::new(),
            ending: false,
            ended_at: None,
            at_line_start: true,
            ack_due: false,
            gone_due: false,
        }
    }

    pub fn taken(&self) -> u64 {
        self.taken
    }

    pub fn crc32(&self) -> u32 {
        self.crc32.clone().finalize()
    }

    /// The number of bytes written to the command's pipe.
    pub fn written(&self) -> u64 {
        self.taken - self.held.len() as u64
    }

    pub fn is_closed(&self) -> bool {
        self.to.is_none()
    }

    /// Accepts the new part of `bytes`, which begin at `offset`. Idempotent.
    pub fn accept(&mut self, offset: u64, bytes: &[u8]) -> InputOutcome {
        let end = offset.saturating_add(bytes.len() as u64);
        if end <= self.taken {
            self.ack_due = true;
            return InputOutcome::Yes;
        }
        if self.to.is_none() {
            self.gone_due = true;
            return InputOutcome::Closed;
        }
        if offset > self.taken || self.ending {
            return InputOutcome::Gap;
        }
        let fresh = &bytes[(self.taken - offset) as usize..];
        let room = MOST_HELD - self.held.len();
        let fresh = &fresh[..fresh.len().min(room)];
        self.crc32.update(fresh);
        self.held.extend(fresh);
        self.taken += fresh.len() as u64;
        InputOutcome::Yes
    }

    /// Ends stdin at `offset`. Idempotent.
    pub fn end(&mut self, offset: u64) -> InputOutcome {
        if self.ended_at == Some(offset) {
            return InputOutcome::Yes;
        }
        if self.to.is_none() {
            return InputOutcome::Closed;
        }
        if offset != self.taken {
            return InputOutcome::Gap;
        }
        self.ending = true;
        InputOutcome::Yes
    }

    /// Writes as much as the command's pipe accepts, and waits for the pipe if that is not all.
    pub fn flush(&mut self, poll: &Epoll, source: PollSource) -> io::Result<()> {
        let Some(to) = &self.to else { return Ok(()) };
        while !self.held.is_empty() {
            let (front, _) = self.held.as_slices();
            match io::write(to, front) {
                Ok(0) | Err(Errno::AGAIN) => {
                    if !self.is_terminal && !std::mem::replace(&mut self.enlarged, true) {
                        exec_spawn::enlarge(to);
                        continue;
                    }
                    return self.watch(poll, source, true);
                }
                Ok(count) => {
                    self.at_line_start = front[count - 1] == b'\n';
                    self.held.drain(..count);
                    self.ack_due = true;
                }
                Err(Errno::INTR) => {}
                Err(_) => {
                    self.close(poll);
                    self.gone_due = true;
                    return Ok(());
                }
            }
        }
        self.held = VecDeque::new();
        if self.ending {
            if self.is_terminal {
                // The first one completes an unfinished line, the second one is the end itself.
                let eof =
                    termios::tcgetattr(to).map_or(4, |modes| modes.special_codes[termios::SpecialCodeIndex::VEOF]);
                let ends = if self.at_line_start { &[eof][..] } else { &[eof, eof] };
                if let Err(Errno::AGAIN | Errno::INTR) = io::write(to, ends) {
                    return self.watch(poll, source, true);
                }
                self.at_line_start = true;
            }
            self.ending = false;
            self.ended_at = Some(self.taken);
            if !self.is_terminal {
                self.close(poll);
                return Ok(());
            }
        }
        self.watch(poll, source, false)
    }

    fn watch(&mut self, poll: &Epoll, source: PollSource, wanted: bool) -> io::Result<()> {
        if let Some(to) = &self.to {
            if wanted && !self.watched {
                poll.watch_output(to, source)?;
            } else if !wanted && self.watched {
                poll.forget(to);
            }
            self.watched = wanted;
        }
        Ok(())
    }

    pub fn close(&mut self, poll: &Epoll) {
        if let Some(to) = self.to.take()
            && self.watched
        {
            poll.forget(to);
        }
        self.held = VecDeque::new();
        self.ending = false;
    }
}
