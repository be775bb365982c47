//! Frames between the server and the agent.
//!
//! An input is two bytes and then what comes through the pipe. The first byte says whether checksums are made right,
//! since no mutation would find one, and how it is read; the second in what pieces it comes.

#[allow(dead_code, reason = "not everything a session does can be done here")]
#[path = "../../src/api/exec_input.rs"]
mod exec_input;
#[path = "../../crates/agent/src/decoder.rs"]
mod intake;
#[allow(dead_code, reason = "not everything a session does can be done here")]
#[path = "../../src/api/stream_cursor.rs"]
mod stream_cursor;

use baton_protocol::{
    agent::{AgentExec, AgentState, Assign, Exit, Hello, Relieve, Restored, Resync},
    event::StdStream,
    frame::{Broken, Decoder, Frame, FrameKind, HEADER, MAX_PAYLOAD, Stream},
};

use self::{
    exec_input::ExecInput,
    intake::AgentDecoder,
    stream_cursor::{Delivery, StreamCursor, WINDOW},
};
use crate::round_trip;

const MARKER: [u8; 16] = *b"the fuzz marker.";

/// What comes through the pipe, and in what pieces.
struct Pipe {
    bytes: Vec<u8>,
    piece: usize,
    has_marker: bool,
}

impl Pipe {
    fn of(data: &[u8]) -> Option<Self> {
        let ([how, piece], bytes) = data.split_first_chunk::<2>()?;
        let mut bytes = bytes.to_vec();
        if how & 1 == 1 {
            repair(&mut bytes);
        }
        Some(Self { bytes, piece: usize::from(*piece) + 1, has_marker: how & 2 == 2 })
    }
}

/// Gives every frame its right checksum.
fn repair(mut bytes: &mut [u8]) {
    loop {
        if bytes.starts_with(&MARKER) {
            bytes = &mut bytes[MARKER.len()..];
            continue;
        }
        let Some(length) = bytes.first_chunk::<4>().map(|length| u32::from_le_bytes(*length) as usize) else { return };
        let Some(frame) = HEADER.checked_add(length).and_then(|end| bytes.split_at_mut_checked(end)) else { return };
        let (frame, rest) = frame;
        let crc = crc32c::crc32c_append(crc32c::crc32c(&frame[..28]), &frame[HEADER..]);
        frame[28..HEADER].copy_from_slice(&crc.to_le_bytes());
        bytes = rest;
    }
}

/// Frames from the server, as the agent reads them.
pub fn agent_intake(data: &[u8]) {
    let Some(pipe) = Pipe::of(data) else { return };
    let frames = |piece: usize| {
        let (mut intake, mut frames) = (AgentDecoder::default(), Vec::new());
        if pipe.has_marker {
            intake.set_marker(MARKER);
        }
        for bytes in pipe.bytes.chunks(piece) {
            intake.push(bytes);
            loop {
                match intake.next_frame() {
                    Ok(Some(frame)) => frames.push(frame),
                    Ok(None) => break,
                    Err(_) => {}
                }
            }
            intake.shrink();
        }
        frames
    };
    let taken = frames(pipe.piece);
    // A frame that was cut where the marker goes on as it does is whole, if its end comes before the rest of the marker.
    assert!(pipe.has_marker || taken == frames(pipe.bytes.len().max(1)), "the pieces make a difference");
    for frame in &taken {
        check(frame);
        let payload = &frame.payload;
        match frame.kind {
            FrameKind::Assign => drop(round_trip::<Assign>(payload)),
            FrameKind::Exec => drop(round_trip::<AgentExec>(payload)),
            FrameKind::Resync => drop(round_trip::<Resync>(payload)),
            FrameKind::Restored | FrameKind::Forked => drop(round_trip::<Restored>(payload)),
            FrameKind::Relieve => drop(round_trip::<Relieve>(payload)),
            _ => {}
        }
    }
}

/// A frame is as long as it may be, and comes back as it was.
fn check(frame: &Frame) {
    assert!(frame.payload.len() <= MAX_PAYLOAD);
    let (mut bytes, mut decoder) = (Vec::new(), Decoder::default());
    frame.encode(&mut bytes);
    decoder.push(&bytes);
    assert_eq!(decoder.next_frame().as_ref(), Ok(&Some(frame.clone())));
}

/// Frames from the agent, as the server reads them, and what a session makes of their numbers.
pub fn agent_frames(data: &[u8]) {
    let Some(pipe) = Pipe::of(data) else { return };
    let taken = server_frames(&pipe.bytes, pipe.piece);
    assert_eq!(taken, server_frames(&pipe.bytes, pipe.bytes.len().max(1)), "the pieces make a difference");
    let mut session = Session { delivery: Delivery::new(1), input: ExecInput::new(true) };
    for frame in taken.unwrap_or_else(|(frames, _)| frames) {
        check(&frame);
        session.hear(&frame);
    }
}

/// All whole frames, the long ones read to where they stay.
fn server_frames(bytes: &[u8], piece: usize) -> Result<Vec<Frame>, (Vec<Frame>, Broken)> {
    let (mut decoder, mut long, mut frames) = (Decoder::default(), None, Vec::new());
    for mut bytes in bytes.chunks(piece) {
        while !bytes.is_empty() {
            let Some(mut begun) = long.take() else {
                decoder.push(bytes);
                bytes = &[];
                loop {
                    match decoder.next_frame() {
                        Ok(Some(frame)) => frames.push(frame),
                        Ok(None) => break,
                        Err(broken) => return Err((frames, broken)),
                    }
                }
                long = decoder.take_long();
                continue;
            };
            let (now, later) = bytes.split_at(begun.missing().min(bytes.len()));
            begun.payload().extend_from_slice(now);
            bytes = later;
            if begun.missing() > 0 {
                long = Some(begun);
                continue;
            }
            match begun.finish() {
                Ok(frame) => frames.extend(frame),
                Err(broken) => return Err((frames, broken)),
            }
        }
    }
    Ok(frames)
}

/// As much of a session as has to do with numbers of the agent's.
struct Session {
    delivery: Delivery,
    input: ExecInput,
}

impl Session {
    fn hear(&mut self, frame: &Frame) {
        match frame.kind {
            FrameKind::Data => self.data(frame),
            FrameKind::Eof => {
                let Some(cursor) = cursor_of(&mut self.delivery, frame.stream) else { return };
                let before = cursor.next();
                let gap = cursor.end(frame.offset, frame.sequence);
                assert!(gap.is_none_or(|(from, to)| from < to && from == before));
                assert!(cursor.next() >= before);
            }
            FrameKind::StdinAck => {
                self.input.acknowledge(frame.offset);
                let end = self.input.end();
                let _ = self.input.push(None, &frame.payload, false);
                assert!(self.input.end() >= end);
                while let Some(sent) = self.input.next_frame(1) {
                    check(&sent);
                }
            }
            FrameKind::Exit => {
                if let Some(exit) = round_trip::<Exit>(&frame.payload) {
                    self.delivery.exited(exit);
                }
            }
            FrameKind::Hello => drop(round_trip::<Hello>(&frame.payload)),
            FrameKind::Execs | FrameKind::ResyncAck => {
                let Some(state) = round_trip::<AgentState>(&frame.payload) else { return };
                for told in &state.execs {
                    self.delivery.settle(told.stdout.to, told.stderr.to);
                    for (output, range) in [(StdStream::Stdout, told.stdout), (StdStream::Stderr, told.stderr)] {
                        *self.delivery.cursor(output) =
                            StreamCursor::resumed(range.nearest(frame.offset), frame.sequence);
                    }
                    self.input = ExecInput::resumed(told.stdin, !told.stdin_closed);
                }
            }
            _ => {}
        }
        for output in [StdStream::Stdout, StdStream::Stderr] {
            let cursor = self.delivery.cursor(output);
            assert!(cursor.sent() <= cursor.next() && cursor.credit() >= cursor.confirmed());
        }
        let _ = (self.delivery.take_exit(), self.delivery.mark(), self.delivery.is_over());
    }

    fn data(&mut self, frame: &Frame) {
        let Some(cursor) = cursor_of(&mut self.delivery, frame.stream) else { return };
        let before = cursor.next();
        let Some(taken) = cursor.advance(frame.offset, frame.sequence, frame.payload.len()) else {
            assert_eq!(cursor.next(), before);
            return;
        };
        assert!(taken.skip <= frame.payload.len() && taken.offset >= before && cursor.next() > before);
        assert!(taken.gap.is_none_or(|(from, to)| from == before && to == taken.offset && from < to));
        cursor.decode(&frame.payload[taken.skip..]);
        let confirmed = cursor.confirmed();
        cursor.confirm(frame.offset.wrapping_add(WINDOW));
        assert!(cursor.confirmed() >= confirmed && cursor.confirmed() <= cursor.next());
    }
}

fn cursor_of(delivery: &mut Delivery, stream: Stream) -> Option<&mut StreamCursor> {
    match stream {
        Stream::Stdout => Some(delivery.cursor(StdStream::Stdout)),
        Stream::Stderr => Some(delivery.cursor(StdStream::Stderr)),
        Stream::Stdin | Stream::Exit | Stream::Tree => None,
    }
}
