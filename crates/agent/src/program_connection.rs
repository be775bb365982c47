//! One connection between a program and the server: the agent's end of its socket, and where both directions are.
//!
//! What the program writes is read only when it can be sent on, so it needs no memory here.

use std::{os::fd::OwnedFd, time::Duration};

use baton_protocol::{
    agent::MAX_CONNECTION_PAYLOAD,
    frame::{self, FrameKind, Stream},
};
use rustix::{
    io::{self, Errno},
    net::{RecvFlags, recv, sockopt},
};

use crate::connection_input::ConnectionInput;

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionStage {
    /// The server was asked to dial.
    Dialling,
    /// The socket connects to this port of 127.0.0.1, or of ::1.
    Connecting {
        port: u16,
        is_last: bool,
    },
    Open,
}

/// What came of an attempt to send a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmitOutcome {
    Sent,
    /// There is nothing to send until something changes.
    Nothing,
    /// The program reset it.
    Broken,
}

#[derive(Debug)]
pub struct ProgramConnection {
    pub socket: OwnedFd,
    pub stage: ConnectionStage,
    pub input: ConnectionInput,
    sent: u64,
    credit: u64,
    /// The socket may have bytes or its end to read.
    is_readable: bool,
    has_ended: bool,
    /// It is in the queue of those that may have something to send.
    pub is_queued: bool,
}

impl ProgramConnection {
    pub fn new(socket: OwnedFd, stage: ConnectionStage) -> Self {
        Self {
            socket,
            stage,
            input: ConnectionInput::default(),
            sent: 0,
            credit: 0,
            is_readable: true,
            has_ended: false,
            is_queued: false,
        }
    }

    pub fn set_credit(&mut self, offset: u64) {
        self.credit = self.credit.max(offset);
    }

    pub fn set_readable(&mut self) {
        self.is_readable = true;
    }

    pub fn may_emit(&self) -> bool {
        self.stage == ConnectionStage::Open && self.is_readable && !self.has_ended && self.sent < self.credit
    }

    /// Reads once from the program, and adds a frame with that or with the end.
    pub fn emit(&mut self, number: u32, scratch: &mut [u8], out: &mut Vec<u8>) -> EmitOutcome {
        if !self.may_emit() {
            return EmitOutcome::Nothing;
        }
        let most = (self.credit - self.sent).min(MAX_CONNECTION_PAYLOAD as u64) as usize;
        let most = most.min(scratch.len());
        let read = loop {
            match recv(&self.socket, &mut scratch[..most], RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                read => break read,
            }
        };
        match read {
            Ok((0, _)) => {
                self.has_ended = true;
                frame::encode(out, FrameKind::ConnectionOutputEof, Stream::Stdin, number, self.sent, 0, &[]);
                EmitOutcome::Sent
            }
            Ok((count, _)) => {
                let piece = &scratch[..count];
                frame::encode(out, FrameKind::ConnectionOutput, Stream::Stdin, number, self.sent, 0, &[piece]);
                self.sent += count as u64;
                EmitOutcome::Sent
            }
            Err(Errno::AGAIN) => {
                self.is_readable = false;
                EmitOutcome::Nothing
            }
            Err(_) => EmitOutcome::Broken,
        }
    }

    /// Whether both directions have ended and nothing is left to pass on.
    pub fn is_done(&self) -> bool {
        self.has_ended && self.input.is_ended()
    }

    /// Closes it so that the program gets an error at once, instead of an end that could be taken for a success.
    pub fn reset(self) {
        reset(self.socket);
    }
}

/// Closes a socket with a reset.
pub fn reset(socket: OwnedFd) {
    let _: io::Result<()> = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
}
