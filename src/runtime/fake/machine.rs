//! The simulated agent: the frames of the real one, with programs that need no kernel.
//!
//! | command | does |
//! |---|---|
//! | `echo WORD…`, `warn WORD…` | writes the words to stdout, to stderr |
//! | `tick COUNT [MS]` | writes `0`, `1`, … one per line, every 10 ms or as asked |
//! | `flood BYTES` | writes that many bytes as fast as they are read |
//! | `cat` | copies stdin |
//! | `sleep SECONDS` | waits |
//! | `fail [CODE]` | ends with that code, or 1 |
//!
//! `bash -c` and `python3 -c` take one of these as their code.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::{
    agent::{self, ExecState, Exit, KEPT_EXITS, MAX_EXECS, State},
    frame::{Frame, Kind, Stream, VERSION},
    id::{ExecId, hex},
};
use serde::{Deserialize, Serialize};

use super::fake_output::{Output, Room};
use crate::runtime::Start;

/// The state of a simulated sandbox; its serialized form is the checkpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    pub marker: String,
    pub env: BTreeMap<String, String>,
    attached: bool,
    /// How long it has actually run.
    ran: Duration,
    last_request: u64,
    last_exec: u32,
    execs: BTreeMap<u32, Exec>,
    #[serde(skip)]
    answers: Vec<Frame>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Exec {
    exec_id: ExecId,
    request: u64,
    pid: i32,
    program: Program,
    stdin: u64,
    stdin_closed: bool,
    stdout: Output,
    stderr: Output,
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

impl Machine {
    pub fn new(start: &Start) -> Self {
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

    pub fn set_attached(&mut self, attached: bool) {
        self.attached = attached;
    }

    pub fn running(&self) -> u32 {
        self.execs.values().filter(|exec| exec.exit.is_none()).count() as u32
    }

    /// Advances it by `span`.
    pub fn run(&mut self, span: Duration) {
        self.ran += span;
        let room = Room { attached: self.attached };
        for (number, exec) in &mut self.execs {
            if exec.exit.is_none() {
                exec.step(self.ran, room);
            }
            if let Some(exit) = exec.end(self.ran) {
                self.answers.push(exit_frame(*number, exec.request, &exit));
            }
        }
        self.forget();
    }

    /// Time until the next event, if no frame arrives.
    pub fn rests_for(&self) -> Option<Duration> {
        let room = Room { attached: self.attached };
        let running = self.execs.values().filter(|exec| exec.exit.is_none());
        running.filter_map(|exec| exec.due(room)).min().map(|due| due.saturating_sub(self.ran))
    }

    pub fn take(&mut self, frame: Frame) {
        match frame.kind {
            Kind::Exec => self.exec(&frame),
            Kind::List => {
                let payload = serde_json::to_vec(&self.state()).unwrap_or_default();
                self.answers.push(Frame::new(Kind::Execs).sequence(frame.sequence).payload(payload));
            }
            Kind::Ping => self.answers.push(Frame::new(Kind::Pong).sequence(frame.sequence).payload(frame.payload)),
            Kind::Stdin | Kind::StdinEof | Kind::Ack | Kind::Credit | Kind::Replay | Kind::Signal => {
                let Some(exec) = self.execs.get_mut(&frame.exec) else { return };
                self.answers.extend(exec.take(&frame, Room { attached: self.attached }));
            }
            // There are no terminals here; the other frames are not for an agent or not allowed to the API.
            Kind::Resize
            | Kind::Assign
            | Kind::Attached
            | Kind::Detached
            | Kind::Resync
            | Kind::Restored
            | Kind::Forked
            | Kind::Relieve
            | Kind::Hello
            | Kind::Started
            | Kind::Data
            | Kind::Eof
            | Kind::Exit
            | Kind::ResyncAck
            | Kind::Pong
            | Kind::Log
            | Kind::StdinAck
            | Kind::Execs => {}
        }
        self.run(Duration::ZERO);
    }

    /// The frames to send now: answers, then output as far as credit allows.
    pub fn emit(&mut self) -> Vec<Frame> {
        let mut frames = std::mem::take(&mut self.answers);
        for (number, exec) in &mut self.execs {
            exec.stdout.emit(*number, Stream::Stdout, &mut frames);
            exec.stderr.emit(*number, Stream::Stderr, &mut frames);
        }
        self.forget();
        frames
    }

    fn state(&self) -> State {
        let execs = self.execs.iter().map(|(number, exec)| exec.state(*number)).collect();
        State { version: VERSION, last_request: self.last_request, last_exec: self.last_exec, execs }
    }

    fn exec(&mut self, frame: &Frame) {
        if frame.sequence <= self.last_request || self.execs.contains_key(&frame.exec) {
            return;
        }
        self.last_request = frame.sequence;
        self.last_exec = self.last_exec.max(frame.exec);
        let asked = serde_json::from_slice::<agent::Exec>(&frame.payload);
        let refusal = match asked {
            Ok(asked) if self.execs.len() < MAX_EXECS => match Exec::start(&asked, frame.sequence, self.ran) {
                Some(mut exec) => {
                    exec.pid = 100 + i32::try_from(frame.exec).unwrap_or(0);
                    let started = Frame::new(Kind::Started).exec(frame.exec).sequence(frame.sequence);
                    self.answers.push(started.offset(exec.pid.unsigned_abs().into()));
                    self.execs.insert(frame.exec, exec);
                    return;
                }
                None => "There is no such command",
            },
            Ok(_) => "There are too many commands already",
            Err(_) => "The agent does not understand the command",
        };
        let exit = Exit { error: Some(refusal.to_owned()), ..Exit::default() };
        self.answers.push(exit_frame(frame.exec, frame.sequence, &exit));
    }

    fn forget(&mut self) {
        self.execs.retain(|_, exec| !(exec.exit_acked && exec.stdout.is_done() && exec.stderr.is_done()));
        if !self.attached {
            let ended: Vec<_> = self.execs.iter().filter(|(_, exec)| exec.exit.is_some()).map(|(n, _)| *n).collect();
            for number in ended.iter().take(ended.len().saturating_sub(KEPT_EXITS)) {
                self.execs.remove(number);
            }
        }
    }
}

impl Exec {
    fn start(asked: &agent::Exec, request: u64, ran: Duration) -> Option<Self> {
        let mut words: Vec<&str> = asked.argv.iter().map(String::as_str).collect();
        let shell = words.first().is_some_and(|word| matches!(*word, "bash" | "sh" | "python3" | "python"));
        if shell && let Some(at) = words.iter().position(|word| *word == "-c") {
            words = words.get(at + 1)?.split_whitespace().collect();
        }
        let (name, rest) = words.split_first()?;
        let number = |at: usize, default: u64| rest.get(at).map_or(Some(default), |word| word.parse().ok());
        let (mut stdout, mut stderr) = (Output::default(), Output::default());
        let line = || format!("{}\n", rest.join(" ")).into_bytes();
        let program = match *name {
            "echo" => {
                stdout.push(&line(), Room { attached: false });
                Program::Ended { code: 0 }
            }
            "warn" => {
                stderr.push(&line(), Room { attached: false });
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
            _ => return None,
        };
        Some(Self {
            exec_id: asked.exec_id.clone(),
            request,
            pid: 0,
            program,
            stdin: 0,
            stdin_closed: !asked.stdin,
            stdout,
            stderr,
            began: ran,
            deadline: asked.timeout_ms.map(|span| ran + Duration::from_millis(span)),
            exit: None,
            exit_acked: false,
        })
    }

    /// Runs what is due; the program becomes [`Program::Ended`] when it is finished.
    fn step(&mut self, ran: Duration, room: Room) {
        let ended = Program::Ended { code: 0 };
        match &mut self.program {
            Program::Tick { next, count, every, due } => {
                while *next < *count && *due <= ran && self.stdout.has_room(room) {
                    self.stdout.push(format!("{next}\n").as_bytes(), room);
                    (*next, *due) = (*next + 1, *due + *every);
                }
                if *next >= *count {
                    self.program = ended;
                }
            }
            Program::Flood { written, count } => {
                // One ring at a time while detached, so that an endless flood stays finite.
                let bytes = self.stdout.room(room).min(*count - *written);
                self.stdout.push(&vec![b'x'; bytes as usize], room);
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

    /// When the next event is due, in machine time.
    fn due(&self, room: Room) -> Option<Duration> {
        let own = match &self.program {
            Program::Tick { due, .. } => self.stdout.has_room(room).then_some(*due),
            Program::Sleep { until } => Some(*until),
            Program::Flood { .. } | Program::Cat | Program::Ended { .. } => None,
        };
        own.into_iter().chain(self.deadline).min()
    }

    /// Its exit, reported once.
    fn end(&mut self, ran: Duration) -> Option<Exit> {
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
        Some(self.ended(Exit { code, signal, timed_out: timed_out && code.is_none(), duration_ms, ..Exit::default() }))
    }

    fn ended(&mut self, exit: Exit) -> Exit {
        self.stdout.close();
        self.stderr.close();
        self.stdin_closed = true;
        self.exit = Some(exit.clone());
        exit
    }

    fn take(&mut self, frame: &Frame, room: Room) -> Option<Frame> {
        let output = match frame.stream {
            Stream::Stdout => Some(&mut self.stdout),
            Stream::Stderr => Some(&mut self.stderr),
            Stream::Stdin | Stream::Exit | Stream::Tree => None,
        };
        match (frame.kind, output) {
            (Kind::Ack, Some(output)) => output.ack(frame.offset),
            (Kind::Credit, Some(output)) => output.credit = frame.offset,
            (Kind::Replay, Some(output)) => output.replay(frame.offset, frame.sequence),
            (Kind::Ack, None) if frame.stream == Stream::Exit => self.exit_acked |= self.exit.is_some(),
            (Kind::Stdin, _) if !self.stdin_closed && frame.offset <= self.stdin => {
                let known = usize::try_from(self.stdin - frame.offset).unwrap_or(usize::MAX);
                if let Some(fresh) = frame.payload.get(known..) {
                    self.stdin += fresh.len() as u64;
                    self.stdout.push(fresh, room);
                }
                return Some(Frame::new(Kind::StdinAck).exec(frame.exec).offset(self.stdin));
            }
            (Kind::StdinEof, _) if frame.offset == self.stdin => self.stdin_closed = true,
            (Kind::Signal, _) if self.exit.is_none() => {
                let signal = i32::try_from(frame.offset).ok();
                let exit = self.ended(Exit { signal, ..Exit::default() });
                return Some(exit_frame(frame.exec, self.request, &exit));
            }
            _ => {}
        }
        None
    }

    fn state(&self, exec: u32) -> ExecState {
        ExecState {
            exec,
            exec_id: self.exec_id.clone(),
            pid: self.pid,
            pty: false,
            stdin: self.stdin,
            stdin_closed: self.stdin_closed,
            stdout: self.stdout.range(),
            stderr: self.stderr.range(),
            exit: self.exit.clone(),
        }
    }
}

fn exit_frame(exec: u32, request: u64, exit: &Exit) -> Frame {
    let payload = serde_json::to_vec(exit).unwrap_or_default();
    Frame::new(Kind::Exit).stream(Stream::Exit).exec(exec).sequence(request).payload(payload)
}
