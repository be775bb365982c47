//! The server's side of the pipe, for tests: starts an agent as an ordinary child and talks to it.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, sync_channel},
    time::{Duration, Instant},
};

use baton_protocol::{
    agent::{AgentExec, AgentState, Assign, Exit, Hello, Pty, Resync},
    frame::{Decoder, Frame, FrameKind, Marker, Stream},
    id::{ExecId, hex},
};

/// Nothing a test waits for takes so long, however busy the machine is.
pub const FRAME_TIMEOUT: Duration = Duration::from_secs(60);
pub const MARKER: Marker = *b"\x91marker of tests";
pub const ALL: u64 = u64::MAX;

pub struct AgentProcess {
    pub child: Child,
    pub stdin: Option<ChildStdin>,
    output: Receiver<Vec<u8>>,
    decoder: Decoder,
    request: u64,
    /// Frames that came while another was waited for.
    kept: Vec<Frame>,
}

/// Everything that came of one command.
#[derive(Debug, Default)]
pub struct ExecOutput {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub exit: Exit,
}

impl ExecOutput {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

pub fn command(argv: &[&str]) -> AgentExec {
    AgentExec {
        exec_id: ExecId::parse("e").unwrap(),
        argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        env: BTreeMap::new(),
        cwd: None,
        user: None,
        stdin: false,
        pty: None,
        timeout_ms: None,
        file: None,
    }
}

pub fn shell(script: &str) -> AgentExec {
    command(&["bash", "-c", script])
}

pub fn on_terminal(exec: AgentExec) -> AgentExec {
    AgentExec { pty: Some(Pty { cols: 100, rows: 30 }), ..exec }
}

impl AgentProcess {
    /// An agent that has said hello and nothing else.
    pub fn unassigned() -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_baton-agent"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut from = child.stdout.take().unwrap();
        let stdin = child.stdin.take().unwrap();
        // The server's part: inside a sandbox the agent cannot do it.
        rustix::pipe::fcntl_setpipe_size(&from, 1 << 20).unwrap();
        rustix::pipe::fcntl_setpipe_size(&stdin, 1 << 20).unwrap();
        // Bounded, so that a test that does not read holds the agent back.
        let (sender, output) = sync_channel(4);
        std::thread::spawn(move || {
            let mut bytes = vec![0; 1 << 20];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        let mut probe =
            Self { child, stdin: Some(stdin), output, decoder: Decoder::default(), request: 0, kept: Vec::new() };
        let hello: Hello = serde_json::from_slice(&probe.wait_for(FrameKind::Hello, 0).payload).unwrap();
        assert_eq!(hello.version, 1);
        probe
    }

    pub fn start() -> Self {
        Self::assigned(Assign::default())
    }

    pub fn assigned(assign: Assign) -> Self {
        let mut probe = Self::unassigned();
        let assign = Assign { marker_inverted: hex(&MARKER.map(|byte| !byte)), ..assign };
        probe.send(Frame::new(FrameKind::Assign).payload(serde_json::to_vec(&assign).unwrap()));
        probe
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    pub fn send(&mut self, frame: Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.write(&bytes);
    }

    pub fn exec_frame(&mut self, number: u32, exec: &AgentExec) -> Frame {
        self.request += 1;
        let payload = serde_json::to_vec(exec).unwrap();
        Frame::new(FrameKind::Exec).exec(number).sequence(self.request).payload(payload)
    }

    /// Asks for a command and gives it no credit.
    pub fn exec(&mut self, number: u32, exec: &AgentExec) {
        let frame = self.exec_frame(number, exec);
        self.send(frame);
    }

    pub fn started(&mut self, number: u32, exec: &AgentExec) -> i32 {
        self.exec(number, exec);
        self.wait_for(FrameKind::Started, number).offset as i32
    }

    pub fn credit(&mut self, number: u32, stream: Stream, offset: u64) {
        self.send(Frame::new(FrameKind::Credit).exec(number).stream(stream).offset(offset));
    }

    pub fn ack(&mut self, number: u32, stream: Stream, offset: u64) {
        self.send(Frame::new(FrameKind::Ack).exec(number).stream(stream).offset(offset));
    }

    pub fn next_frame(&mut self) -> Frame {
        let deadline = Instant::now() + FRAME_TIMEOUT;
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                return frame;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let bytes = self.output.recv_timeout(left).expect("the agent says something");
            self.decoder.push(&bytes);
        }
    }

    /// The next frame of that kind about that exec; others are kept for later.
    pub fn wait_for(&mut self, kind: FrameKind, exec: u32) -> Frame {
        self.wait_until(|frame| frame.kind == kind && frame.exec == exec)
    }

    pub fn wait_until(&mut self, is_meant: impl Fn(&Frame) -> bool) -> Frame {
        if let Some(at) = self.kept.iter().position(&is_meant) {
            return self.kept.remove(at);
        }
        loop {
            let frame = self.next_frame();
            if is_meant(&frame) {
                return frame;
            }
            self.kept.push(frame);
        }
    }

    /// Everything the agent had to say before it answered.
    pub fn settle(&mut self) -> Vec<Frame> {
        self.request += 1;
        let sequence = self.request + 1_000_000;
        self.send(Frame::new(FrameKind::Ping).sequence(sequence));
        let mut frames = std::mem::take(&mut self.kept);
        loop {
            let frame = self.next_frame();
            if frame.kind == FrameKind::Pong && frame.sequence == sequence {
                return frames;
            }
            frames.push(frame);
        }
    }

    pub fn exit(&mut self, number: u32) -> Exit {
        serde_json::from_slice(&self.wait_for(FrameKind::Exit, number).payload).unwrap()
    }

    /// Reads both streams to their ends with the given window, acknowledging everything.
    pub fn collect(&mut self, number: u32, window: u64) -> ExecOutput {
        let (mut outcome, mut open, mut exit) = (ExecOutput::default(), 2, None);
        for stream in [Stream::Stdout, Stream::Stderr] {
            self.credit(number, stream, window);
        }
        while open > 0 || exit.is_none() {
            let frame = self.wait_until(|frame| frame.exec == number);
            let sink = if frame.stream == Stream::Stdout { &mut outcome.stdout } else { &mut outcome.stderr };
            match frame.kind {
                FrameKind::Data => {
                    assert_eq!(frame.offset, sink.len() as u64, "a byte lost or doubled");
                    sink.extend_from_slice(&frame.payload);
                    let have = sink.len() as u64;
                    assert!(have <= window.saturating_add(have - frame.payload.len() as u64), "sent beyond its credit");
                    self.ack(number, frame.stream, have);
                    self.credit(number, frame.stream, have.saturating_add(window));
                }
                FrameKind::Eof => {
                    assert_eq!(frame.offset, sink.len() as u64, "ended too early");
                    open -= 1;
                }
                FrameKind::Exit => {
                    exit = Some(serde_json::from_slice(&frame.payload).unwrap());
                    self.ack(number, Stream::Exit, 0);
                }
                _ => {}
            }
        }
        outcome.exit = exit.unwrap();
        outcome
    }

    pub fn run(&mut self, number: u32, exec: &AgentExec) -> ExecOutput {
        self.exec(number, exec);
        self.collect(number, ALL)
    }

    pub fn state(&mut self) -> AgentState {
        self.send(Frame::new(FrameKind::List).sequence(1));
        serde_json::from_slice(&self.wait_for(FrameKind::Execs, 0).payload).unwrap()
    }

    /// Looks again and again until the agent's state is as wanted.
    pub fn wait_for_state(&mut self, is_wanted: impl Fn(&AgentState) -> bool) -> AgentState {
        let deadline = Instant::now() + FRAME_TIMEOUT;
        loop {
            let state = self.state();
            if is_wanted(&state) {
                return state;
            }
            assert!(Instant::now() < deadline, "still {state:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn resync_bytes(nonce: [u8; 16], sequence: u64) -> Vec<u8> {
        let mut bytes = [MARKER, MARKER].concat();
        let resync = Resync { nonce: hex(&nonce) };
        let payload = serde_json::to_vec(&resync).unwrap();
        Frame::new(FrameKind::Resync).sequence(sequence).payload(payload).encode(&mut bytes);
        bytes
    }

    /// Throws away all output up to the nonce and returns the state that follows it.
    pub fn resynced(&mut self, nonce: [u8; 16], sequence: u64) -> AgentState {
        self.kept.clear();
        let deadline = Instant::now() + FRAME_TIMEOUT;
        while self.decoder.find(&nonce).is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            let bytes = self.output.recv_timeout(left).expect("the agent answers the resync");
            self.decoder.push(&bytes);
        }
        let at = self.decoder.find(&nonce).unwrap();
        self.decoder.skip(at + 16);
        let frame = self.next_frame();
        assert_eq!((frame.kind, frame.sequence), (FrameKind::ResyncAck, sequence));
        serde_json::from_slice(&frame.payload).unwrap()
    }

    /// Whether the process lives, as the sandbox itself sees it.
    pub fn is_alive(&mut self, pid: i32) -> bool {
        let number = 1_000_000 + self.request as u32;
        let looked = self.run(number, &shell(&format!("grep -q '^State:.[^Z]' /proc/{pid}/status")));
        looked.exit.code == Some(0)
    }

    pub fn wait_for_death(&mut self, pid: i32) {
        let deadline = Instant::now() + FRAME_TIMEOUT;
        while self.is_alive(pid) {
            assert!(Instant::now() < deadline, "process {pid} still lives");
        }
    }

    /// Memory the agent holds, in bytes.
    pub fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        drop(self.stdin.take());
        // It takes its commands with it, if it may.
        let deadline = Instant::now() + Duration::from_secs(10);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
