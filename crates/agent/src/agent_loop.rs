//! Handles each frame: frames in, effects and frames out.

use std::{collections::BTreeMap, os::fd::AsFd, time::Duration};

use baton_protocol::{
    agent::{self, AgentState, Assign, Exit, Hello, KEPT_EXITS, MAX_EXECS, Relieve, Restored},
    frame::{self, Frame, FrameKind, MAX_PAYLOAD, Marker, Stream, VERSION},
};
use nix::sys::signal::Signal;
use rustix::io;
use serde::Serialize;

use crate::{
    active_time::Ran,
    decoder::AgentDecoder,
    exec_spawn::{self, ExecDefaults, SpawnError},
    inner_network::InnerNetwork,
    outbox::Outbox,
    output_pipe::{CHUNK, OutputPipe},
    poll::{Epoll, PollSource},
    rlimits::ProcessLimits,
    running_exec::{self, RunningExec},
    stdin_pipe::InputOutcome,
};

pub use events::SendProgress;

mod events;

#[derive(Debug)]
pub struct Agent {
    poll: Epoll,
    intake: AgentDecoder,
    pub outbox: Outbox,
    execs: BTreeMap<u32, RunningExec>,
    network: InnerNetwork,
    shared: ExecDefaults,
    is_assigned: bool,
    attached: bool,
    last_request: u64,
    last_exec: u32,
    /// The exec whose turn it is to send.
    turn: u32,
    ran: Ran,
    scratch: Vec<u8>,
}

impl Agent {
    pub fn new(poll: Epoll, now: Duration) -> Self {
        let mut agent = Self {
            poll,
            intake: AgentDecoder::default(),
            outbox: Outbox::default(),
            execs: BTreeMap::new(),
            network: InnerNetwork::new(),
            shared: ExecDefaults::default(),
            is_assigned: false,
            attached: true,
            last_request: 0,
            last_exec: 0,
            turn: 0,
            ran: Ran::new(now),
            scratch: vec![0; CHUNK],
        };
        let hello = Hello { version: VERSION, build: env!("CARGO_PKG_VERSION").to_owned() };
        agent.answer(FrameKind::Hello, 0, &hello);
        agent
    }

    pub fn poll(&self) -> &Epoll {
        &self.poll
    }

    /// Reads from the server once; returns `false` if the server is gone.
    pub fn listen(&mut self, from: impl AsFd) -> bool {
        match io::read(from, &mut self.scratch[..]) {
            Ok(0) => return false,
            Ok(count) => self.intake.push(&self.scratch[..count]),
            Err(io::Errno::AGAIN | io::Errno::INTR) => return true,
            Err(_) => return false,
        }
        loop {
            match self.intake.next_frame() {
                Ok(Some(frame)) => self.apply(&frame),
                Ok(None) => return true,
                Err(broken) => self.outbox.log(&format!("{broken}; looking for the marker")),
            }
        }
    }

    fn apply(&mut self, frame: &Frame) {
        if !self.is_assigned && !matches!(frame.kind, FrameKind::Assign | FrameKind::Ping) {
            self.outbox.log(&format!("{:?} before the assignment was ignored", frame.kind));
            return;
        }
        match frame.kind {
            FrameKind::Assign => self.assign(frame),
            FrameKind::Exec => self.exec(frame),
            FrameKind::Stdin | FrameKind::StdinEof => self.stdin(frame),
            FrameKind::Ack => self.ack(frame),
            FrameKind::Credit => self.on_output(frame, |output, frame| output.set_credit(frame.offset)),
            FrameKind::Replay => self.on_output(frame, |output, frame| output.replay(frame.offset, frame.sequence)),
            FrameKind::Signal => self.signal(frame),
            FrameKind::Resize => self.resize(frame),
            FrameKind::Attached | FrameKind::Detached => {
                self.attached = frame.kind == FrameKind::Attached;
                let numbers: Vec<u32> = self.execs.keys().copied().collect();
                numbers.into_iter().for_each(|number| self.watch(number));
                self.forget_old();
            }
            FrameKind::Resync => self.resync(frame),
            FrameKind::List => {
                let state = self.state();
                self.answer(FrameKind::Execs, frame.sequence, &state);
            }
            FrameKind::Restored | FrameKind::Forked => match serde_json::from_slice::<Restored>(&frame.payload) {
                Ok(restored) => self.shared.env.extend(restored.env),
                Err(error) => self.outbox.log(&format!("{:?} was not understood: {error}", frame.kind)),
            },
            FrameKind::Relieve => match serde_json::from_slice::<Relieve>(&frame.payload) {
                Ok(asked) => self.relieve(&asked),
                Err(error) => self.outbox.log(&format!("Relieve was not understood: {error}")),
            },
            FrameKind::Ping => {
                let answers = self.outbox.answers();
                frame::encode(answers, FrameKind::Pong, Stream::Stdin, 0, 0, frame.sequence, &[&frame.payload]);
            }
            FrameKind::Network
            | FrameKind::Resolved
            | FrameKind::Connect
            | FrameKind::Connected
            | FrameKind::ConnectionInput
            | FrameKind::ConnectionInputEof
            | FrameKind::ConnectionCredit
            | FrameKind::ConnectionReset
            | FrameKind::ListPorts => self.network.apply(frame, &self.poll, &mut self.outbox),
            FrameKind::Hello
            | FrameKind::Started
            | FrameKind::Data
            | FrameKind::Eof
            | FrameKind::Exit
            | FrameKind::ResyncAck
            | FrameKind::Pong
            | FrameKind::Log
            | FrameKind::StdinAck
            | FrameKind::Execs
            | FrameKind::Resolve
            | FrameKind::Dial
            | FrameKind::Accepted
            | FrameKind::ConnectionOutput
            | FrameKind::ConnectionOutputEof
            | FrameKind::ConnectionInputCredit
            | FrameKind::ConnectionClosed
            | FrameKind::Ports => self.outbox.log(&format!("{:?} is not for the agent", frame.kind)),
        }
    }

    fn assign(&mut self, frame: &Frame) {
        let assign = serde_json::from_slice::<Assign>(&frame.payload).ok();
        let Some((inverted, assign)) = assign.and_then(|assign| Some((bytes_of(&assign.marker_inverted)?, assign)))
        else {
            self.outbox.log("the assignment was not understood");
            return;
        };
        if self.is_assigned {
            self.outbox.log("a second assignment was ignored");
            return;
        }
        let marker: Marker = inverted.map(|byte| !byte);
        self.intake.set_marker(marker);
        let held = ProcessLimits { pids: assign.pids, files: assign.files };
        held.own().expect("a process may always lower its own limits");
        self.shared = ExecDefaults { env: assign.env, cwd: assign.cwd, held };
        if let Some(name) = assign.hostname {
            // Outside a sandbox the host name is not ours to change.
            if std::process::id() == 1 {
                let _ = rustix::system::sethostname(name.as_bytes());
            }
        }
        self.is_assigned = true;
    }

    fn exec(&mut self, frame: &Frame) {
        if frame.sequence <= self.last_request || self.execs.contains_key(&frame.exec) {
            return;
        }
        self.last_request = frame.sequence;
        self.last_exec = self.last_exec.max(frame.exec);
        let refusal = match serde_json::from_slice::<agent::AgentExec>(&frame.payload) {
            Err(_) => "The agent does not understand the command".to_owned(),
            Ok(asked) if self.make_room() => {
                let (number, request) = (frame.exec, frame.sequence);
                let exec = match exec_spawn::spawn(&asked, number, &self.shared) {
                    Ok(spawned) => RunningExec::started(&asked, number, request, spawned, self.ran.total()),
                    Err(SpawnError::Refused(error)) => RunningExec::refused(&asked, number, request, error),
                    Err(SpawnError::Program { code, text }) => {
                        let exec = RunningExec::unrunnable(&asked, number, request, code, &text);
                        exec.emit_started(self.outbox.answers());
                        exec
                    }
                };
                if exec.is_running() {
                    exec.emit_started(self.outbox.answers());
                } else {
                    exec.emit_exit(self.outbox.answers());
                }
                self.execs.insert(number, exec);
                self.watch(number);
                return;
            }
            Ok(_) => format!("There are {MAX_EXECS} commands already"),
        };
        let exit = Exit { error: Some(refusal), ..Exit::default() };
        running_exec::emit_exit(self.outbox.answers(), frame.exec, frame.sequence, &exit);
    }

    /// Makes space for one more command, if necessary by forgetting old ended ones. Returns whether there is any.
    fn make_room(&mut self) -> bool {
        if self.execs.len() >= MAX_EXECS {
            self.forget_ended(KEPT_EXITS);
        }
        self.execs.len() < MAX_EXECS
    }

    fn stdin(&mut self, frame: &Frame) {
        let Some(exec) = self.execs.get_mut(&frame.exec) else { return };
        let taken = match frame.kind == FrameKind::Stdin {
            true => exec.stdin.accept(frame.offset, &frame.payload),
            false => exec.stdin.end(frame.offset),
        };
        let flushed = exec.stdin.flush(&self.poll, PollSource::Stdin(frame.exec));
        if taken == InputOutcome::Gap {
            self.outbox.log(&format!("stdin of exec {} has a gap before {}", frame.exec, frame.offset));
        }
        self.check(flushed, frame.exec);
    }

    fn ack(&mut self, frame: &Frame) {
        let Some(exec) = self.execs.get_mut(&frame.exec) else { return };
        match frame.stream {
            Stream::Exit => exec.exit_acked |= exec.exit.is_some(),
            Stream::Stdout => exec.stdout.ack(frame.offset),
            Stream::Stderr => exec.stderr.ack(frame.offset),
            Stream::Stdin | Stream::Tree => {}
        }
        self.watch(frame.exec);
    }

    fn on_output(&mut self, frame: &Frame, change: impl Fn(&mut OutputPipe, &Frame)) {
        if let Some(output) = self.execs.get_mut(&frame.exec).and_then(|exec| exec.output(frame.stream)) {
            change(output, frame);
        }
    }

    fn signal(&mut self, frame: &Frame) {
        let Some(signal) = i32::try_from(frame.offset).ok().and_then(|number| Signal::try_from(number).ok()) else {
            self.outbox.log(&format!("there is no signal {}", frame.offset));
            return;
        };
        if frame.stream == Stream::Tree {
            self.signal_tree(frame.exec, signal);
        } else if let Some(exec) = self.execs.get(&frame.exec).filter(|exec| exec.is_running()) {
            exec.signal(signal);
        }
    }

    fn resize(&mut self, frame: &Frame) {
        if let Some(terminal) = self.execs.get(&frame.exec).and_then(RunningExec::terminal) {
            let _ = exec_spawn::resize(terminal, frame.offset as u16, (frame.offset >> 32) as u16);
        }
    }

    fn resync(&mut self, frame: &Frame) {
        let resync = serde_json::from_slice::<agent::Resync>(&frame.payload).ok();
        let Some(nonce) = resync.and_then(|resync| bytes_of(&resync.nonce)) else {
            self.outbox.log("the resync was not understood");
            return;
        };
        self.network.resync();
        self.outbox.restart(nonce.to_vec());
        let state = self.state();
        self.answer(FrameKind::ResyncAck, frame.sequence, &state);
        self.execs.values_mut().for_each(RunningExec::resync);
    }

    fn state(&self) -> AgentState {
        let execs = self.execs.values().map(RunningExec::state).collect();
        AgentState { version: VERSION, last_request: self.last_request, last_exec: self.last_exec, execs }
    }

    fn answer(&mut self, kind: FrameKind, sequence: u64, answer: &impl Serialize) {
        let payload = serde_json::to_vec(answer).unwrap_or_default();
        if payload.len() <= MAX_PAYLOAD {
            frame::encode(self.outbox.answers(), kind, Stream::Stdin, 0, 0, sequence, &[&payload]);
        }
    }

    fn watch(&mut self, number: u32) {
        let Some(exec) = self.execs.get_mut(&number) else { return };
        if exec.is_done() {
            self.remove(number);
            return;
        }
        let watched = exec.watch(&self.poll, self.attached);
        self.check(watched, number);
    }

    /// If the kernel cannot watch another stream, the command continues without its streams.
    fn check(&mut self, watched: io::Result<()>, number: u32) {
        if let Err(error) = watched {
            self.outbox.log(&format!("a stream of exec {number} cannot be watched: {error}"));
            if let Some(exec) = self.execs.get_mut(&number) {
                exec.close(&self.poll);
            }
        }
    }

    fn forget_old(&mut self) {
        if !self.attached {
            self.forget_ended(KEPT_EXITS);
        }
    }

    /// Forgets ended commands, except the newest `kept`.
    fn forget_ended(&mut self, kept: usize) {
        let ended: Vec<u32> = self.execs.values().filter(|exec| !exec.is_running()).map(|exec| exec.number).collect();
        let old = ended.len().saturating_sub(kept);
        ended.into_iter().take(old).for_each(|number| self.remove(number));
    }

    fn remove(&mut self, number: u32) {
        if let Some(mut exec) = self.execs.remove(&number) {
            exec.close(&self.poll);
        }
    }
}

fn bytes_of(hex: &str) -> Option<[u8; 16]> {
    let digits = hex.as_bytes().as_chunks::<2>().0;
    if hex.len() != 32 || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; 16];
    for (byte, digits) in bytes.iter_mut().zip(digits) {
        *byte = u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}
