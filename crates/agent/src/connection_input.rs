//! Bytes from the server on their way to a program: those that its socket does not accept yet are held.
//!
//! ```text
//!   0 ────── passed ────── taken ────── granted       offsets
//!    written        held         may come
//! ```

use std::{collections::VecDeque, os::fd::AsFd};

use rustix::{
    io::{self, Errno},
    net::{SendFlags, Shutdown, send, shutdown},
};

use crate::input_credit::InputCredit;

/// Bytes that were not expected: the connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnexpectedInput;

#[derive(Debug, Default)]
pub struct ConnectionInput {
    held: VecDeque<u8>,
    passed: u64,
    granted: u64,
    /// The end was received; once it is passed on, the socket is shut down in this direction.
    is_ending: bool,
    is_ended: bool,
}

impl ConnectionInput {
    /// Opens the window again. Returns the offset up to which the server may send, if it is a new one.
    pub fn grant(&mut self, credit: &mut InputCredit, connections: usize) -> Option<u64> {
        if self.is_ending {
            return None;
        }
        let more = credit.raise(self.granted - self.passed, connections);
        self.granted += more;
        (more > 0).then_some(self.granted)
    }

    /// Takes bytes that begin at `offset`, and writes what the socket accepts.
    pub fn take(
        &mut self,
        socket: impl AsFd,
        offset: u64,
        bytes: &[u8],
        credit: &mut InputCredit,
    ) -> Result<io::Result<()>, UnexpectedInput> {
        let taken = self.passed + self.held.len() as u64;
        if self.is_ending || offset != taken || bytes.len() as u64 > self.granted - taken {
            return Err(UnexpectedInput);
        }
        let mut rest = bytes;
        while self.held.is_empty() && !rest.is_empty() {
            match send(&socket, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => {
                    self.passed += count as u64;
                    credit.release(count as u64);
                    rest = &rest[count..];
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return Ok(Err(error)),
            }
        }
        // Not more than that: reserved memory is part of every checkpoint.
        self.held.reserve_exact(rest.len());
        self.held.extend(rest);
        Ok(Ok(()))
    }

    /// Takes the end, which must be at `offset`.
    pub fn end(&mut self, offset: u64) -> Result<(), UnexpectedInput> {
        if self.is_ending || offset != self.passed + self.held.len() as u64 {
            return Err(UnexpectedInput);
        }
        self.is_ending = true;
        Ok(())
    }

    /// Writes what the socket accepts, and then the end.
    pub fn flush(&mut self, socket: impl AsFd, credit: &mut InputCredit) -> io::Result<()> {
        while !self.held.is_empty() {
            let (front, _) = self.held.as_slices();
            match send(&socket, front, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => {
                    self.held.drain(..count);
                    self.passed += count as u64;
                    credit.release(count as u64);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        if self.held.capacity() > 0 {
            self.held = VecDeque::new();
        }
        if self.is_ending && !self.is_ended {
            self.is_ended = true;
            shutdown(&socket, Shutdown::Write)?;
        }
        Ok(())
    }

    /// Whether everything was passed on, the end included.
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// What the server may still send, and what is held.
    pub fn outstanding(&self) -> u64 {
        self.granted - self.passed
    }
}
