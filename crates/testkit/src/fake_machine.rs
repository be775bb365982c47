//! The simulated agent: it exchanges the frames of the real one and runs programs that need no kernel.
//!
//! | command | what it does |
//! |---|---|
//! | `echo WORD…`, `warn WORD…` | writes the words to stdout, to stderr |
//! | `tick COUNT [MS]` | writes `0`, `1`, … one per line, every 10 ms or every MS |
//! | `flood BYTES` | writes that many bytes, as fast as they are read |
//! | `cat` | copies stdin |
//! | `sleep SECONDS` | waits |
//! | `fail [CODE]` | exits with that code, or 1 |
//! | `true` | exits with 0 |
//!
//! `bash -c` and `python3 -c` accept one of these as their code.

use std::{collections::BTreeMap, time::Duration};

use baton::runtime::StartSpec;
use baton_protocol::{
    agent::{self, AgentState, ExecState, Exit, KEPT_EXITS, MAX_EXECS},
    frame::{Frame, FrameKind, Stream, VERSION},
    id::{ExecId, hex},
};
use serde::{Deserialize, Serialize};

use super::fake_output::{ClientPresence, FakeOutput};

/// The state of a simulated sandbox; its serialized form is the checkpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FakeMachine {
    pub marker: String,
    pub env: BTreeMap<String, String>,
    attached: bool,
    /// Total time it has run; pauses do not count.
    ran: Duration,
    last_request: u64,
    last_exec: u32,
    execs: BTreeMap<u32, FakeExec>,
    #[serde(skip)]
    answers: Vec<Frame>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct FakeExec {
    exec_id: ExecId,
    request: u64,
    pid: i32,
    program: Program,
    stdin: u64,
    stdin_closed: bool,
    stdout: FakeOutput,
    stderr: FakeOutput,
    began: Duration,
    deadline: Option<Duration>,
    exit: Option<Exit>,
    exit_acked: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Program {
    Tick { next: u64, count: u64, every: Duration, due: Duration },
    Flood { written: u64, count: u64 },
    Cat,
    Sleep { until: Duration },
    Ended { code: i32 },
}

impl FakeMachine {
    pub fn new(start: &StartSpec) -> Self {
        Self { marker: hex(&start.marker), env: start.env.clone(), attached: true, ..Self::default() }
    }

    /// The state after a resync: nothing is sent until there is credit.
    pub fn restored(mut self) -> Self {
        for exec in self.execs.values_mut() {
            exec.stdout.resync();
            exec.stderr.resync();
        }
        self
    }

    fn client(&self) -> ClientPresence {
        if self.attached { ClientPresence::Attached } else { ClientPresence::Detached }
    }

    pub fn set_attached(&mut self, attached: bool) {
        self.attached = attached;
    }

    pub fn running_execs(&self) -> u32 {
        self.execs.values().filter(|exec| exec.exit.is_none()).count() as u32
    }

    /// Runs every command for `span`.
    pub fn run(&mut self, span: Duration) {
        self.ran += span;
        let client = self.client();
        for (number, exec) in &mut self.execs {
            if exec.exit.is_none() {
                exec.step(self.ran, client);
            }
            if let Some(exit) = exec.poll_exit(self.ran) {
                self.answers.push(exit_frame(*number, exec.request, &exit));
            }
        }
        self.drop_finished_execs();
    }

    /// Time until the next event, if no frame arrives.
    pub fn time_to_next_event(&self) -> Option<Duration> {
        let client = self.client();
        let running = self.execs.values().filter(|exec| exec.exit.is_none());
        running.filter_map(|exec| exec.due(client)).min().map(|due| due.saturating_sub(self.ran))
    }

    pub fn handle_frame(&mut self, frame: Frame) {
        match frame.kind {
            FrameKind::Exec => self.start_exec(&frame),
            FrameKind::List => {
                let payload = serde_json::to_vec(&self.state()).unwrap_or_default();
                self.answers.push(Frame::new(FrameKind::Execs).sequence(frame.sequence).payload(payload));
            }
            FrameKind::Ping => {
                self.answers.push(Frame::new(FrameKind::Pong).sequence(frame.sequence).payload(frame.payload))
            }
            FrameKind::Stdin
            | FrameKind::StdinEof
            | FrameKind::Ack
            | FrameKind::Credit
            | FrameKind::Replay
            | FrameKind::Signal => {
                let client = self.client();
                let Some(exec) = self.execs.get_mut(&frame.exec) else { return };
                self.answers.extend(exec.handle_frame(&frame, client));
            }
            // There are no terminals here; an agent does not receive the other frames, or not from the API.
            FrameKind::Resize
            | FrameKind::Assign
            | FrameKind::Attached
            | FrameKind::Detached
            | FrameKind::Resync
            | FrameKind::Restored
            | FrameKind::Forked
            | FrameKind::Relieve
            | FrameKind::Network
            | FrameKind::Resolved
            | FrameKind::Connect
            | FrameKind::Connected
            | FrameKind::ConnectionInput
            | FrameKind::ConnectionInputEof
            | FrameKind::ConnectionCredit
            | FrameKind::ConnectionReset
            | FrameKind::ListPorts
            | FrameKind::Resolve
            | FrameKind::Dial
            | FrameKind::Accepted
            | FrameKind::ConnectionOutput
            | FrameKind::ConnectionOutputEof
            | FrameKind::ConnectionInputCredit
            | FrameKind::ConnectionClosed
            | FrameKind::Ports
            | FrameKind::Hello
            | FrameKind::Started
            | FrameKind::Data
            | FrameKind::Eof
            | FrameKind::Exit
            | FrameKind::ResyncAck
            | FrameKind::Pong
            | FrameKind::Log
            | FrameKind::StdinAck
            | FrameKind::Execs => {}
        }
        self.run(Duration::ZERO);
    }

    /// Returns the frames to send now: answers, then output as far as credit allows.
    pub fn take_frames(&mut self) -> Vec<Frame> {
        let mut frames = std::mem::take(&mut self.answers);
        for (number, exec) in &mut self.execs {
            exec.stdout.send_into(&mut frames, *number, Stream::Stdout);
            exec.stderr.send_into(&mut frames, *number, Stream::Stderr);
        }
        self.drop_finished_execs();
        frames
    }

    fn state(&self) -> AgentState {
        let execs = self.execs.iter().map(|(number, exec)| exec.state(*number)).collect();
        AgentState { version: VERSION, last_request: self.last_request, last_exec: self.last_exec, execs }
    }

    fn start_exec(&mut self, frame: &Frame) {
        if frame.sequence <= self.last_request || self.execs.contains_key(&frame.exec) {
            return;
        }
        self.last_request = frame.sequence;
        self.last_exec = self.last_exec.max(frame.exec);
        let request = serde_json::from_slice::<agent::AgentExec>(&frame.payload);
        let refusal = match request {
            Ok(request) if self.execs.len() < MAX_EXECS => match FakeExec::start(&request, frame.sequence, self.ran) {
                Some(mut exec) => {
                    exec.pid = 100 + i32::try_from(frame.exec).unwrap_or(0);
                    let started = Frame::new(FrameKind::Started).exec(frame.exec).sequence(frame.sequence);
                    self.answers.push(started.offset(exec.pid.unsigned_abs().into()));
                    self.execs.insert(frame.exec, exec);
                    return;
                }
                None => "The command is empty, or an argument is not a number",
            },
            Ok(_) => "There are too many commands already",
            Err(_) => "The agent does not understand the command",
        };
        let exit = Exit { error: Some(refusal.to_owned()), ..Exit::default() };
        self.answers.push(exit_frame(frame.exec, frame.sequence, &exit));
    }

    fn drop_finished_execs(&mut self) {
        self.execs.retain(|_, exec| !(exec.exit_acked && exec.stdout.is_done() && exec.stderr.is_done()));
        if !self.attached {
            let ended: Vec<_> = self.execs.iter().filter(|(_, exec)| exec.exit.is_some()).map(|(n, _)| *n).collect();
            for number in ended.iter().take(ended.len().saturating_sub(KEPT_EXITS)) {
                self.execs.remove(number);
            }
        }
    }
}

impl FakeExec {
    fn start(request: &agent::AgentExec, sequence: u64, ran: Duration) -> Option<Self> {
        let mut words: Vec<&str> = request.argv.iter().map(String::as_str).collect();
        let shell = words.first().is_some_and(|word| matches!(*word, "bash" | "sh" | "python3" | "python"));
        if shell && let Some(at) = words.iter().position(|word| *word == "-c") {
            words = words.get(at + 1)?.split_whitespace().collect();
        }
        let (name, rest) = words.split_first()?;
        let number = |at: usize, default: u64| rest.get(at).map_or(Some(default), |word| word.parse().ok());
        let (mut stdout, mut stderr) = (FakeOutput::default(), FakeOutput::default());
        let line = || format!("{}\n", rest.join(" ")).into_bytes();
        let program = match *name {
            "echo" => {
                stdout.push(&line(), ClientPresence::Detached);
                Program::Ended { code: 0 }
            }
            "warn" => {
                stderr.push(&line(), ClientPresence::Detached);
                Program::Ended { code: 0 }
            }
            "tick" => {
                let every = Duration::from_millis(number(1, 10)?);
                Program::Tick { next: 0, count: number(0, u64::MAX)?, every, due: ran }
            }
            "flood" => Program::Flood { written: 0, count: number(0, u64::MAX)? },
            "cat" => Program::Cat,
            "sleep" => Program::Sleep { until: ran + Duration::from_secs(number(0, 1)?) },
            "fail" => Program::Ended { code: i32::try_from(number(0, 1)?).ok()? },
            "true" => Program::Ended { code: 0 },
            name => {
                let text = format!("{name}: command not found\n").into_bytes();
                stderr.push(&text, ClientPresence::Detached);
                Program::Ended { code: 127 }
            }
        };
        Some(Self {
            exec_id: request.exec_id.clone(),
            request: sequence,
            pid: 0,
            program,
            stdin: 0,
            stdin_closed: !request.stdin,
            stdout,
            stderr,
            began: ran,
            deadline: request.timeout_ms.map(|span| ran + Duration::from_millis(span)),
            exit: None,
            exit_acked: false,
        })
    }

    /// Runs the program up to `ran`; a finished program becomes [`Program::Ended`].
    fn step(&mut self, ran: Duration, client: ClientPresence) {
        let ended = Program::Ended { code: 0 };
        match &mut self.program {
            Program::Tick { next, count, every, due } => {
                while *next < *count && *due <= ran && self.stdout.free_bytes(client) > 0 {
                    self.stdout.push(format!("{next}\n").as_bytes(), client);
                    (*next, *due) = (*next + 1, *due + *every);
                }
                if *next >= *count {
                    self.program = ended;
                }
            }
            Program::Flood { written, count } => {
                // One ring per step while detached, so that an endless flood ends its step.
                let bytes = self.stdout.free_bytes(client).min(*count - *written);
                self.stdout.push(&vec![b'x'; bytes as usize], client);
                *written += bytes;
                if *written >= *count {
                    self.program = ended;
                }
            }
            Program::Cat if self.stdin_closed => self.program = ended,
            Program::Sleep { until } if *until <= ran => self.program = ended,
            Program::Cat | Program::Sleep { .. } | Program::Ended { .. } => {}
        }
    }

    /// When its next event is due, as total run time of the machine.
    fn due(&self, client: ClientPresence) -> Option<Duration> {
        let program = match &self.program {
            Program::Tick { due, .. } => (self.stdout.free_bytes(client) > 0).then_some(*due),
            Program::Sleep { until } => Some(*until),
            Program::Flood { .. } | Program::Cat | Program::Ended { .. } => None,
        };
        program.into_iter().chain(self.deadline).min()
    }

    /// Returns its exit, once.
    fn poll_exit(&mut self, ran: Duration) -> Option<Exit> {
        if self.exit.is_some() {
            return None;
        }
        let timed_out = self.deadline.is_some_and(|deadline| deadline <= ran);
        let (code, signal) = match self.program {
            Program::Ended { code } => (Some(code), None),
            _ if timed_out => (None, Some(9)),
            Program::Tick { .. } | Program::Flood { .. } | Program::Cat | Program::Sleep { .. } => return None,
        };
        let duration_ms = ran.saturating_sub(self.began).as_millis() as u64;
        Some(self.set_exit(Exit {
            code,
            signal,
            timed_out: timed_out && code.is_none(),
            duration_ms,
            ..Exit::default()
        }))
    }

    fn set_exit(&mut self, exit: Exit) -> Exit {
        self.stdout.close();
        self.stderr.close();
        self.stdin_closed = true;
        self.exit = Some(exit.clone());
        exit
    }

    fn handle_frame(&mut self, frame: &Frame, client: ClientPresence) -> Option<Frame> {
        let output = match frame.stream {
            Stream::Stdout => Some(&mut self.stdout),
            Stream::Stderr => Some(&mut self.stderr),
            Stream::Stdin | Stream::Exit | Stream::Tree => None,
        };
        match (frame.kind, output) {
            (FrameKind::Ack, Some(output)) => output.ack(frame.offset),
            (FrameKind::Credit, Some(output)) => output.credit = frame.offset,
            (FrameKind::Replay, Some(output)) => output.replay(frame.offset, frame.sequence),
            (FrameKind::Ack, None) if frame.stream == Stream::Exit => self.exit_acked |= self.exit.is_some(),
            (FrameKind::Stdin, _) if !self.stdin_closed && frame.offset <= self.stdin => {
                let known = usize::try_from(self.stdin - frame.offset).unwrap_or(usize::MAX);
                if let Some(fresh) = frame.payload.get(known..) {
                    self.stdin += fresh.len() as u64;
                    self.stdout.push(fresh, client);
                }
                return Some(Frame::new(FrameKind::StdinAck).exec(frame.exec).offset(self.stdin));
            }
            (FrameKind::StdinEof, _) if frame.offset == self.stdin => self.stdin_closed = true,
            (FrameKind::Signal, _) if self.exit.is_none() => {
                let signal = i32::try_from(frame.offset).ok();
                let exit = self.set_exit(Exit { signal, ..Exit::default() });
                return Some(exit_frame(frame.exec, self.request, &exit));
            }
            _ => {}
        }
        None
    }

    fn state(&self, exec: u32) -> ExecState {
        ExecState {
            command: String::new(),
            started_ms: 0,
            exec,
            exec_id: self.exec_id.clone(),
            pid: self.pid,
            pty: false,
            background: false,
            stdin: self.stdin,
            stdin_crc32: None,
            stdin_closed: self.stdin_closed,
            stdout: self.stdout.range(),
            stderr: self.stderr.range(),
            exit: self.exit.clone(),
        }
    }
}

fn exit_frame(exec: u32, request: u64, exit: &Exit) -> Frame {
    let payload = serde_json::to_vec(exit).unwrap_or_default();
    Frame::new(FrameKind::Exit).stream(Stream::Exit).exec(exec).sequence(request).payload(payload)
}
