//! The stdin of one command: bytes the client sent that the agent has not taken yet. Pure.

use std::collections::VecDeque;

use baton_protocol::frame::{Frame, FrameKind, Stream};

/// How much may be in flight to a command that does not read; the agent buffers no more.
const STDIN_WINDOW: u64 = 1 << 20;
const MAX_STDIN_FRAME: usize = 256 << 10;

#[derive(Debug, Default)]
pub struct ExecInput {
    /// Whether the command reads stdin from the client.
    pub is_open: bool,
    /// Whether the client has sent the end of its input.
    has_ended: bool,
    is_end_sent: bool,
    /// Offset up to which bytes were passed on to the agent.
    sent: u64,
    acknowledged: u64,
    /// Whether it is known how much of what was passed on before this session is still in flight.
    ack_state: AckState,
    pending: VecDeque<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum AckState {
    #[default]
    Known,
    Unknown,
    /// The agent was asked.
    Requested,
}

/// Why bytes are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputError {
    Closed,
    /// Bytes before these are missing.
    Gap,
}

impl ExecInput {
    pub fn new(is_open: bool) -> Self {
        Self { is_open, ..Self::default() }
    }

    /// The input of a command that started before this session.
    pub fn resumed(taken: u64, is_open: bool) -> Self {
        Self {
            is_open,
            sent: taken,
            acknowledged: taken.saturating_sub(STDIN_WINDOW),
            ack_state: AckState::Unknown,
            ..Self::default()
        }
    }

    /// Adds bytes that come before all input of the client.
    pub fn set_prelude(&mut self, bytes: Vec<u8>) {
        self.pending = bytes.into();
        self.has_ended = !self.is_open;
    }

    /// The offset of the next byte.
    pub fn end(&self) -> u64 {
        self.sent.saturating_add(self.pending.len() as u64)
    }

    pub fn buffered(&self) -> usize {
        self.pending.len()
    }

    /// Takes the new part of `bytes`. Without an offset they go to the end.
    pub fn push(&mut self, offset: Option<u64>, bytes: &[u8], eof: bool) -> Result<(), InputError> {
        let offset = offset.unwrap_or_else(|| self.end());
        if offset > self.end() {
            return Err(InputError::Gap);
        }
        let fresh = bytes.get((self.end() - offset) as usize..).unwrap_or_default();
        if !fresh.is_empty() && (!self.is_open || self.has_ended) {
            return Err(InputError::Closed);
        }
        self.pending.extend(fresh);
        self.has_ended |= eof;
        Ok(())
    }

    pub fn acknowledge(&mut self, offset: u64) {
        self.ack_state = AckState::Known;
        self.acknowledged = self.acknowledged.max(offset.min(self.sent));
    }

    /// Closes the input: the command reads no more. Returns whether bytes were lost.
    pub fn close(&mut self) -> bool {
        let lost = self.is_open && self.end() > self.acknowledged;
        self.is_open = false;
        self.pending = VecDeque::new();
        self.is_end_sent = true;
        lost
    }

    /// The next frame that may be sent to the agent.
    pub fn next_frame(&mut self, exec: u32) -> Option<Frame> {
        if self.ack_state != AckState::Known && !self.pending.is_empty() {
            // Bytes that the agent has already make it report how far it is; an empty frame is enough.
            let ask = Frame::new(FrameKind::Stdin).exec(exec).stream(Stream::Stdin).offset(self.sent);
            return (std::mem::replace(&mut self.ack_state, AckState::Requested) == AckState::Unknown).then_some(ask);
        }
        let room = self.acknowledged.saturating_add(STDIN_WINDOW).saturating_sub(self.sent) as usize;
        let count = self.pending.len().min(room).min(MAX_STDIN_FRAME);
        if count > 0 {
            let payload: Vec<u8> = self.pending.drain(..count).collect();
            let frame =
                Frame::new(FrameKind::Stdin).exec(exec).stream(Stream::Stdin).offset(self.sent).payload(payload);
            self.sent = self.sent.saturating_add(count as u64);
            if self.pending.is_empty() {
                self.pending = VecDeque::new();
            }
            return Some(frame);
        }
        if self.has_ended && self.pending.is_empty() && !std::mem::replace(&mut self.is_end_sent, true) {
            return Some(Frame::new(FrameKind::StdinEof).exec(exec).stream(Stream::Stdin).offset(self.sent));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_goes_once_and_the_end_after_them() {
        let mut input = ExecInput::new(true);
        assert_eq!(input.push(Some(0), b"abc", false), Ok(()));
        assert_eq!(input.push(Some(1), b"bcd", true), Ok(()));
        assert_eq!(input.push(Some(9), b"x", false), Err(InputError::Gap));
        assert_eq!(input.push(None, b"x", false), Err(InputError::Closed));
        let frame = input.next_frame(7).unwrap();
        assert_eq!(
            (frame.kind, frame.exec, frame.offset, frame.payload.as_slice()),
            (FrameKind::Stdin, 7, 0, &b"abcd"[..])
        );
        let frame = input.next_frame(7).unwrap();
        assert_eq!((frame.kind, frame.offset), (FrameKind::StdinEof, 4));
        assert!(input.next_frame(7).is_none());
    }

    #[test]
    fn a_command_that_does_not_read_gets_no_more_than_a_window() {
        let mut input = ExecInput::new(true);
        input.push(None, &vec![1; 3 << 20], false).unwrap();
        let mut sent = 0;
        while let Some(frame) = input.next_frame(1) {
            assert_eq!(frame.offset, sent);
            sent += frame.payload.len() as u64;
        }
        assert_eq!((sent, input.buffered()), (STDIN_WINDOW, 2 << 20));
        input.acknowledge(100);
        assert_eq!(input.next_frame(1).unwrap().payload.len(), 100);
        assert!(input.close());
        assert!(!input.close(), "it was lost already");
    }

    #[test]
    fn of_a_resumed_command_it_is_asked_first_how_much_there_is_room_for() {
        let mut input = ExecInput::resumed(5 << 20, true);
        assert!(input.next_frame(1).is_none());
        input.push(None, b"more", false).unwrap();
        let ask = input.next_frame(1).unwrap();
        assert_eq!((ask.offset, ask.payload.len()), (5 << 20, 0));
        assert!(input.next_frame(1).is_none());
        // The command reads nothing: the agent buffers a whole window.
        input.acknowledge(4 << 20);
        assert!(input.next_frame(1).is_none());
        input.acknowledge((4 << 20) + 3);
        assert_eq!(input.next_frame(1).unwrap().payload, b"mor");
    }

    #[test]
    fn a_prelude_to_a_closed_stdin_ends_it() {
        let mut input = ExecInput::new(false);
        input.set_prelude(b"code".to_vec());
        assert_eq!(input.next_frame(1).unwrap().payload, b"code");
        assert_eq!(input.next_frame(1).unwrap().kind, FrameKind::StdinEof);
        assert_eq!(input.push(None, b"x", false), Err(InputError::Closed));
    }
}
