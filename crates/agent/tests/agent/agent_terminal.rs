//! Commands on a terminal of their own.

use baton_protocol::frame::{Frame, FrameKind, Stream};

use crate::probe::{ALL, AgentProcess, command, on_terminal, shell};

fn stdin(number: u32, offset: u64, bytes: &[u8]) -> Frame {
    Frame::new(FrameKind::Stdin).exec(number).offset(offset).payload(bytes)
}

/// Reads stdout until it contains `wanted`.
fn read_until(probe: &mut AgentProcess, number: u32, wanted: &str) -> String {
    let mut text = String::new();
    while !text.contains(wanted) {
        let frame = probe.wait_for(FrameKind::Data, number);
        text += &String::from_utf8_lossy(&frame.payload);
    }
    text
}

#[test]
fn a_terminal_has_a_size_and_belongs_to_the_command() {
    let mut probe = AgentProcess::start();
    let script = "stty size; test -t 0 -a -t 1 -a -t 2 && echo tty; echo hi > /dev/tty; echo $TERM; echo err >&2";
    let outcome = probe.run(1, &on_terminal(shell(script)));
    assert_eq!(outcome.text(), "30 100\r\ntty\r\nhi\r\nxterm-256color\r\nerr\r\n");
    assert_eq!((outcome.stderr.len(), outcome.exit.code), (0, Some(0)));
}

#[test]
fn a_new_size_is_seen_by_the_command() {
    let mut probe = AgentProcess::start();
    let script = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.05; done";
    probe.exec(1, &on_terminal(shell(script)));
    probe.credit(1, Stream::Stdout, ALL);
    read_until(&mut probe, 1, "ready");
    probe.send(Frame::new(FrameKind::Resize).exec(1).offset(132 | 43 << 32));
    read_until(&mut probe, 1, "43 132");
}

#[test]
fn a_line_typed_is_read_and_the_end_ends_it() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &on_terminal(command(&["cat"])));
    probe.send(stdin(1, 0, b"one\n"));
    probe.send(stdin(1, 4, b"two"));
    probe.send(Frame::new(FrameKind::StdinEof).exec(1).offset(7));
    let outcome = probe.collect(1, ALL);
    assert_eq!(outcome.exit.code, Some(0));
    assert_eq!(outcome.text().matches("one").count(), 2, "echoed and printed: {}", outcome.text());
    assert!(outcome.text().ends_with("two"), "{}", outcome.text());
}

#[test]
fn an_interrupt_reaches_the_job_in_front() {
    let mut probe = AgentProcess::start();
    let script = "set -m; (trap 'echo child; exit 5' INT; echo ready; while :; do sleep 0.05; done); echo shell $?";
    probe.exec(1, &on_terminal(shell(script)));
    probe.credit(1, Stream::Stdout, ALL);
    read_until(&mut probe, 1, "ready");
    probe.send(Frame::new(FrameKind::Signal).exec(1).offset(2));
    let text = read_until(&mut probe, 1, "shell");
    assert!(text.contains("child"), "{text:?}");
}

#[test]
fn a_key_is_a_signal_too() {
    let mut probe = AgentProcess::start();
    probe.exec(1, &on_terminal(shell("echo ready; exec sleep 1000")));
    probe.credit(1, Stream::Stdout, ALL);
    read_until(&mut probe, 1, "ready");
    probe.send(stdin(1, 0, b"\x03"));
    assert_eq!(probe.exit(1).signal, Some(2));
}
