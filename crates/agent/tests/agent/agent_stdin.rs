//! Input of commands: offsets, repeats, gaps, and readers that do not read.

use baton_protocol::{
    agent::AgentExec,
    frame::{Frame, FrameKind, Stream},
};

use crate::probe::{ALL, AgentProcess, command, shell};

fn listening(exec: AgentExec) -> AgentExec {
    AgentExec { stdin: true, ..exec }
}

fn stdin(number: u32, offset: u64, bytes: &[u8]) -> Frame {
    Frame::new(FrameKind::Stdin).exec(number).offset(offset).payload(bytes)
}

fn end(number: u32, offset: u64) -> Frame {
    Frame::new(FrameKind::StdinEof).exec(number).offset(offset)
}

#[test]
fn a_command_without_stdin_reads_its_end_at_once() {
    let mut probe = AgentProcess::start();
    assert_eq!(probe.run(1, &command(&["cat"])).exit.code, Some(0));
}

#[test]
fn bytes_reach_a_command_in_order_and_once_with_their_end() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &listening(command(&["cat"])));
    probe.send(stdin(1, 0, b"hello "));
    probe.send(stdin(1, 0, b"hello "));
    probe.send(stdin(1, 3, b"lo world"));
    probe.send(stdin(1, 99, b"from the future"));
    probe.send(end(1, 99));
    probe.wait_until(|frame| frame.kind == FrameKind::StdinAck && frame.offset == 11);
    let state = probe.state();
    assert_eq!((state.execs[0].stdin, state.execs[0].stdin_closed), (11, false));
    probe.send(end(1, 11));
    probe.send(end(1, 11));
    let outcome = probe.collect(1, ALL);
    assert_eq!(outcome.text(), "hello world");
    assert_eq!(outcome.exit.code, Some(0));
}

#[test]
fn more_than_a_pipe_holds_flows_as_fast_as_the_command_reads() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &listening(shell("sleep 0.1; sha256sum")));
    let bytes: Vec<u8> = (0..8u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let (mut sent, mut acked) = (0, 0);
    while acked < bytes.len() {
        // The sender's part: never more on its way than the agent takes.
        while sent < bytes.len() && sent - acked < 1 << 20 {
            let until = bytes.len().min(sent + 100_000).min(acked + (1 << 20));
            probe.send(stdin(1, sent as u64, &bytes[sent..until]));
            sent = until;
        }
        acked = probe.wait_for(FrameKind::StdinAck, 1).offset as usize;
    }
    probe.send(end(1, sent as u64));
    let expected = {
        use std::io::Write;
        let mut child = std::process::Command::new("sha256sum")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
    };
    assert_eq!(probe.collect(1, ALL).text(), expected);
}

#[test]
fn what_a_command_does_not_read_is_not_taken_without_end() {
    let mut probe = AgentProcess::start();
    probe.started(1, &listening(command(&["sleep", "1000"])));
    let megabyte = vec![7; 1 << 20];
    for part in 0..8 {
        probe.send(stdin(1, part << 20, &megabyte));
    }
    let state = probe.state();
    // One megabyte in the pipe, one held.
    assert!(state.execs[0].stdin >= 1 << 20 && state.execs[0].stdin <= 2 << 20, "{}", state.execs[0].stdin);
}

#[test]
fn a_command_that_closed_its_stdin_says_so() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &listening(shell("exec <&-; echo closed; exec sleep 1000")));
    probe.credit(1, Stream::Stdout, ALL);
    probe.wait_for(FrameKind::Data, 1);
    probe.send(stdin(1, 0, b"too late"));
    probe.wait_until(|frame| frame.kind == FrameKind::StdinAck && frame.stream == Stream::Exit);
    assert!(probe.state().execs[0].stdin_closed);
    probe.exec(2, &command(&["sleep", "1000"]));
    probe.send(stdin(2, 0, b"nobody asked"));
    probe.wait_until(|frame| frame.kind == FrameKind::StdinAck && frame.exec == 2 && frame.stream == Stream::Exit);
}
