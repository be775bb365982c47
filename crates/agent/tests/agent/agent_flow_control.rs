//! Output: credit, acknowledgement, replay, back-pressure, and beginning anew.

use std::time::{Duration, Instant};

use baton_protocol::{
    agent::{RING_ATTACHED, RING_DETACHED},
    frame::{Frame, FrameKind, Stream},
};

use crate::probe::{ALL, AgentProcess, command, shell};

/// Prints the numbers from 1 on, eight characters each.
fn counting(count: u64) -> baton_protocol::agent::AgentExec {
    command(&["seq", "-f", "%07.0f", "1", &count.to_string()])
}

fn counted(from: u64, to: u64) -> Vec<u8> {
    let lines: String = (from / 8..to.div_ceil(8)).map(|line| format!("{:07}\n", line + 1)).collect();
    lines.as_bytes()[(from % 8) as usize..][..(to - from) as usize].to_vec()
}

#[test]
fn small_and_large_writes_arrive_byte_for_byte() {
    let mut probe = AgentProcess::start();
    let script = "import os\nfor i in range(2000): os.write(1, bytes([i % 251]))";
    let small = probe.run(1, &command(&["python3", "-c", script]));
    assert_eq!(small.stdout, (0..2000).map(|at| (at % 251) as u8).collect::<Vec<u8>>());
    let script = "import os\nb = bytes(range(256)) * 4096\nfor i in range(20): os.write(1, b)";
    let large = probe.run(2, &command(&["python3", "-c", script]));
    assert_eq!(large.stdout.len(), 20 << 20);
    assert!(large.stdout.iter().enumerate().all(|(at, byte)| at as u8 == *byte));
}

#[test]
fn nothing_is_sent_beyond_the_credit() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &counting(1000));
    probe.wait_for_state(|state| state.execs[0].stdout.to == 8000);
    assert!(probe.settle().iter().all(|frame| !matches!(frame.kind, FrameKind::Data)));
    probe.credit(1, Stream::Stdout, 100);
    assert_eq!(probe.wait_for(FrameKind::Data, 1).payload, counted(0, 100));
    assert!(probe.settle().iter().all(|frame| frame.kind != FrameKind::Data));
    probe.credit(1, Stream::Stdout, 8000);
    let frame = probe.wait_for(FrameKind::Data, 1);
    assert_eq!((frame.offset, frame.payload), (100, counted(100, 8000)));
    let eof = probe.wait_until(|frame| frame.kind == FrameKind::Eof && frame.stream == Stream::Stdout);
    assert_eq!(eof.offset, 8000);
}

#[test]
fn a_small_window_moves_all_of_a_large_output() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &counting(500_000));
    let outcome = probe.collect(1, 100_000);
    assert_eq!(outcome.stdout, counted(0, 4_000_000));
}

#[test]
fn a_command_that_nobody_reads_is_held_back_and_the_agent_stays_small() {
    let mut probe = AgentProcess::start();
    probe.started(1, &command(&["yes"]));
    probe.wait_for_state(|state| state.execs[0].stdout.to == RING_ATTACHED);
    // It is written to for as long as somebody would; the pipe is full and the ring does not move.
    std::thread::sleep(Duration::from_millis(100));
    let state = probe.state();
    assert_eq!((state.execs[0].stdout.from, state.execs[0].stdout.to), (0, RING_ATTACHED));
    assert!(probe.memory() < 16 << 20, "{} bytes", probe.memory());
    // An acknowledgement makes room, also for bytes that were never sent.
    probe.ack(1, Stream::Stdout, 1000);
    probe.wait_for_state(|state| state.execs[0].stdout.to == RING_ATTACHED + 1000);
}

#[test]
fn with_nobody_there_a_command_goes_on_and_its_last_bytes_are_kept() {
    let mut probe = AgentProcess::start();
    let total = 20_000_000;
    probe.exec(1, &counting(total / 8));
    probe.send(Frame::new(FrameKind::Detached));
    probe.exit(1);
    let state = probe.wait_for_state(|state| state.execs[0].stdout.eof);
    let range = state.execs[0].stdout;
    assert_eq!((range.from, range.to), (total - RING_DETACHED, total));
    probe.send(Frame::new(FrameKind::Attached));
    probe.credit(1, Stream::Stdout, ALL);
    let (mut at, mut got) = (range.from, Vec::new());
    while at < total {
        let frame = probe.wait_for(FrameKind::Data, 1);
        assert_eq!(frame.offset, at);
        at += frame.payload.len() as u64;
        got.extend(frame.payload);
    }
    assert!(got == counted(range.from, total));
}

#[test]
fn a_replay_begins_where_it_is_told_and_carries_its_number() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &counting(1000));
    probe.credit(1, Stream::Stdout, ALL);
    let eof = |frame: &Frame| frame.kind == FrameKind::Eof && frame.stream == Stream::Stdout;
    assert_eq!(probe.wait_until(eof).sequence, 0);
    probe.ack(1, Stream::Stdout, 800);
    probe.settle();
    for (asked, from, sequence) in [(4000, 4000, 5), (0, 800, 6), (9999, 8000, 7)] {
        probe.send(Frame::new(FrameKind::Replay).exec(1).stream(Stream::Stdout).offset(asked).sequence(sequence));
        if from < 8000 {
            let frame = probe.wait_for(FrameKind::Data, 1);
            assert_eq!((frame.offset, frame.sequence), (from, sequence));
            assert_eq!(frame.payload, counted(from, 8000));
        }
        let frame = probe.wait_until(eof);
        assert_eq!((frame.offset, frame.sequence), (8000, sequence));
    }
}

#[test]
fn one_loud_command_does_not_silence_another() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &command(&["yes"]));
    probe.credit(1, Stream::Stdout, ALL);
    probe.exec(2, &shell("for i in 1 2 3 4 5; do echo $i; sleep 0.02; done"));
    for stream in [Stream::Stdout, Stream::Stderr] {
        probe.credit(2, stream, ALL);
    }
    let (mut loud, mut quiet, mut open) = (0, Vec::new(), 2);
    while open > 0 {
        let frame = probe.next_frame();
        match (frame.kind, frame.exec) {
            (FrameKind::Data, 1) => {
                assert_eq!(frame.offset, loud);
                loud += frame.payload.len() as u64;
                probe.ack(1, Stream::Stdout, loud);
            }
            (FrameKind::Data, 2) => quiet.extend(frame.payload),
            (FrameKind::Eof, 2) => open -= 1,
            _ => {}
        }
    }
    assert_eq!(quiet, b"1\n2\n3\n4\n5\n");
}

#[test]
fn a_resync_in_the_middle_of_a_stream_loses_and_doubles_nothing() {
    let mut probe = AgentProcess::start();
    let total: u64 = 4_000_000;
    probe.exec(1, &counting(total / 8));
    let mut got: Vec<u8> = Vec::new();
    for round in 0..20u8 {
        probe.credit(1, Stream::Stdout, got.len() as u64 + 150_000);
        // A part of a frame that its server could not finish, cut anywhere.
        let mut torn = Vec::new();
        Frame::new(FrameKind::Stdin).exec(1).payload(vec![round; 500]).encode(&mut torn);
        torn.truncate(usize::from(round) * 26);
        probe.write(&torn);
        let nonce = [round + 100; 16];
        probe.write(&AgentProcess::resync_bytes(nonce, u64::from(round) + 7));
        let state = probe.resynced(nonce, u64::from(round) + 7);
        assert_eq!((state.last_request, state.execs[0].stdout.from), (1, got.len() as u64));
        assert!(probe.settle().iter().all(|frame| frame.kind != FrameKind::Data), "sent without credit");
        let until = (got.len() as u64 + 100_000).min(total);
        probe.credit(1, Stream::Stdout, until);
        while (got.len() as u64) < until {
            let frame = probe.wait_for(FrameKind::Data, 1);
            assert_eq!((frame.offset, frame.sequence), (got.len() as u64, 0));
            got.extend(frame.payload);
        }
        probe.ack(1, Stream::Stdout, got.len() as u64);
    }
    assert!(got == counted(0, got.len() as u64));
}

#[test]
fn an_exit_told_by_a_resync_is_not_told_again() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &shell("echo hi; exit 4"));
    probe.wait_for_state(|state| state.execs[0].stdout.eof && state.execs[0].exit.is_some());
    probe.write(&AgentProcess::resync_bytes([9; 16], 3));
    let state = probe.resynced([9; 16], 3);
    assert_eq!(state.execs[0].exit.as_ref().and_then(|exit| exit.code), Some(4));
    assert!(probe.settle().iter().all(|frame| !matches!(frame.kind, FrameKind::Exit | FrameKind::Started)));
    // So is the end of its streams: acknowledged as they are, nothing more has to be sent.
    probe.ack(1, Stream::Stdout, 3);
    probe.ack(1, Stream::Exit, 0);
    assert_eq!(probe.state().execs, []);
}

#[test]
fn garbage_never_ends_the_agent_and_the_marker_brings_it_back() {
    let mut probe = AgentProcess::start();
    probe.write(&vec![0xff; 3_000_000]);
    probe.write(&AgentProcess::resync_bytes([3; 16], 1));
    assert_eq!(probe.resynced([3; 16], 1).execs, []);
    probe.run(1, &command(&["true"]));
    for kind in FrameKind::ALL.into_iter().filter(|kind| !matches!(kind, FrameKind::Ping)) {
        probe.send(Frame::new(kind).exec(77).stream(Stream::Tree).offset(u64::MAX).sequence(2).payload(*b"\0{[\xff"));
    }
    probe.settle();
    assert_eq!(probe.run(2, &shell("echo alive")).text(), "alive\n");
}

#[test]
fn memory_goes_back_when_everything_is_acknowledged() {
    let mut probe = AgentProcess::start();
    probe.run(1, &command(&["true"]));
    let before = probe.memory();
    probe.exec(2, &command(&["head", "-c", "4000000", "/dev/zero"]));
    probe.wait_for_state(|state| state.execs[0].stdout.to == 4_000_000);
    assert!(probe.memory() > before + (3 << 20));
    probe.collect(2, ALL);
    let deadline = Instant::now() + crate::probe::FRAME_TIMEOUT;
    while probe.memory() > before + (1 << 20) {
        assert!(Instant::now() < deadline, "{} bytes, {before} before", probe.memory());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Not a promise of every machine: printed for people, and only a floor is checked.
#[test]
fn output_flows_fast() {
    let mut probe = AgentProcess::start();
    let total: u64 = 256 << 20;
    let script = format!("import os\nb = bytes(1 << 20)\nfor i in range({}): os.write(1, b)", total >> 20);
    probe.exec(1, &command(&["python3", "-c", &script]));
    let began = Instant::now();
    let (mut have, mut acked) = (0, 0);
    probe.credit(1, Stream::Stdout, 8 << 20);
    while have < total {
        let frame = probe.wait_for(FrameKind::Data, 1);
        have += frame.payload.len() as u64;
        if have - acked >= 256 << 10 {
            acked = have;
            probe.ack(1, Stream::Stdout, have);
            probe.credit(1, Stream::Stdout, have + (8 << 20));
        }
    }
    let speed = total as f64 / began.elapsed().as_secs_f64() / 1e6;
    println!("{speed:.0} MB/s");
    assert!(speed > 5.0, "{speed:.0} MB/s");
}
