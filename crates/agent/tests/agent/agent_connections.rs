//! Connections to ports inside: streams of frames over real sockets.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
};

use baton_protocol::{
    agent::{ListeningPorts, MAX_CONNECTION_PAYLOAD, NetworkAccess, PORT_CONNECTION},
    frame::{Frame, FrameKind},
};

use super::probe::{ALL, AgentProcess, command};

fn about(kind: FrameKind, number: u32) -> Frame {
    Frame::new(kind).exec(PORT_CONNECTION | number)
}

impl AgentProcess {
    fn about_connection(&mut self, kind: FrameKind, number: u32) -> Frame {
        self.wait_for(kind, PORT_CONNECTION | number)
    }

    /// Connects to a listener. Returns the program's end, and up to which offset it may be sent.
    fn connect(&mut self, listener: &TcpListener, number: u32) -> (TcpStream, u64) {
        let port = listener.local_addr().unwrap().port();
        self.send(about(FrameKind::Connect, number).offset(port.into()));
        let accepted = self.about_connection(FrameKind::Accepted, number);
        (listener.accept().unwrap().0, accepted.offset)
    }
}

fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

#[test]
fn each_direction_ends_by_itself_and_then_the_connection_is_forgotten() {
    let (mut probe, listener) = (AgentProcess::start(), listener());
    let (mut program, _) = probe.connect(&listener, 1);
    program.write_all(b"hello").unwrap();
    program.shutdown(Shutdown::Write).unwrap();
    assert!(probe.settle().is_empty(), "without credit nothing is read");
    probe.send(about(FrameKind::ConnectionCredit, 1).offset(3));
    assert_eq!(probe.about_connection(FrameKind::ConnectionOutput, 1).payload, b"hel");
    probe.send(about(FrameKind::ConnectionCredit, 1).offset(100));
    let rest = probe.about_connection(FrameKind::ConnectionOutput, 1);
    assert_eq!((rest.offset, rest.payload.as_slice()), (3, &b"lo"[..]));
    assert_eq!(probe.about_connection(FrameKind::ConnectionOutputEof, 1).offset, 5);

    probe.send(about(FrameKind::ConnectionInput, 1).payload(*b"answer"));
    probe.send(about(FrameKind::ConnectionInputEof, 1).offset(6));
    let mut answer = String::new();
    program.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "answer");
    probe.send(about(FrameKind::ConnectionInput, 1).offset(6).payload(*b"unknown"));
    assert!(probe.settle().is_empty());
}

#[test]
fn a_reset_is_passed_on_in_both_directions_and_a_port_without_a_listener_is_closed() {
    let (mut probe, listener) = (AgentProcess::start(), listener());
    let (mut program, _) = probe.connect(&listener, 1);
    probe.send(about(FrameKind::ConnectionReset, 1));
    assert_eq!(program.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);

    let (program, _) = probe.connect(&listener, 2);
    probe.send(about(FrameKind::ConnectionInput, 2).payload(*b"not read"));
    probe.settle();
    // Bytes that were not read make it a reset.
    drop(program);
    probe.about_connection(FrameKind::ConnectionClosed, 2);

    let port = listener.local_addr().unwrap().port();
    drop(listener);
    probe.send(about(FrameKind::Connect, 3).offset(port.into()));
    probe.about_connection(FrameKind::ConnectionClosed, 3);
    for (number, port) in [(4, 0), (5, 1 << 16)] {
        probe.send(about(FrameKind::Connect, number).offset(port));
        probe.about_connection(FrameKind::ConnectionClosed, number);
    }
}

#[test]
fn a_program_that_does_not_read_holds_back_its_own_connection_and_nothing_else() {
    let (mut probe, listener) = (AgentProcess::start(), listener());
    let (stuck, mut may_send) = probe.connect(&listener, 1);
    let mut sent = 0;
    // Until the kernel takes no more, and the window is used up.
    let piece = vec![7; MAX_CONNECTION_PAYLOAD];
    loop {
        while sent + piece.len() as u64 <= may_send {
            probe.send(about(FrameKind::ConnectionInput, 1).offset(sent).payload(piece.clone()));
            sent += piece.len() as u64;
        }
        let frames = probe.settle();
        match frames.iter().rfind(|frame| frame.kind == FrameKind::ConnectionInputCredit) {
            Some(frame) => may_send = frame.offset,
            None => break,
        }
    }
    let (mut other, _) = probe.connect(&listener, 2);
    probe.send(about(FrameKind::ConnectionInput, 2).payload(*b"x"));
    other.read_exact(&mut [0]).unwrap();
    assert_eq!(probe.run(1, &command(&["echo", "alive"])).text(), "alive\n");
    // More than was granted is refused.
    let beyond = vec![7; (may_send - sent) as usize + 1];
    probe.send(about(FrameKind::ConnectionInput, 1).offset(sent).payload(beyond));
    probe.about_connection(FrameKind::ConnectionClosed, 1);
    drop(stuck);
}

#[test]
fn a_loud_connection_does_not_silence_a_command_or_another_connection() {
    let (mut probe, listener) = (AgentProcess::start(), listener());
    let (mut loud, _) = probe.connect(&listener, 1);
    let (mut quiet, _) = probe.connect(&listener, 2);
    for number in [1, 2] {
        probe.send(about(FrameKind::ConnectionCredit, number).offset(ALL));
    }
    let writer = std::thread::spawn(move || while loud.write_all(&[1; 1 << 16]).is_ok() {});
    let mut have = 0;
    while have < 8 << 20 {
        have += probe.about_connection(FrameKind::ConnectionOutput, 1).payload.len();
    }
    quiet.write_all(b"whisper").unwrap();
    assert_eq!(probe.about_connection(FrameKind::ConnectionOutput, 2).payload, b"whisper");
    assert_eq!(probe.run(1, &command(&["echo", "heard"])).text(), "heard\n");
    probe.send(about(FrameKind::ConnectionReset, 1));
    writer.join().unwrap();
}

#[test]
fn a_resync_resets_every_connection_and_says_nothing_of_them() {
    let (mut probe, listener) = (AgentProcess::start(), listener());
    let (mut program, _) = probe.connect(&listener, 1);
    probe.write(&AgentProcess::resync_bytes([9; 16], 4));
    probe.resynced([9; 16], 4);
    assert_eq!(program.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    assert!(probe.settle().is_empty());
    probe.connect(&listener, 2);
}

#[test]
fn ports_are_listed_and_outside_a_sandbox_the_network_stays_as_it_is() {
    let (mut probe, listener) = (AgentProcess::start(), listener());
    let port = listener.local_addr().unwrap().port();
    probe.send(Frame::new(FrameKind::ListPorts).sequence(8));
    let ports = probe.wait_until(|frame| frame.kind == FrameKind::Ports && frame.sequence == 8);
    let ports: ListeningPorts = serde_json::from_slice(&ports.payload).unwrap();
    assert!(ports.ports.contains(&port) && ports.ports.is_sorted(), "{ports:?}");
    let access = serde_json::to_vec(&NetworkAccess { egress: true }).unwrap();
    probe.send(Frame::new(FrameKind::Network).payload(access));
    let answer = probe.wait_for(FrameKind::Log, 0);
    assert_eq!(answer.payload, b"outside a sandbox the network is not the agent's to change");
}
