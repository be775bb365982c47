//! A double of the agent: frames in, frames out, over programs that say what they write.
//!
//! The code of a command is a list of steps, one per line:
//! `out "text"`, `err "text"`, `bytes [255, 0]`, `flood N` (bytes that [`pattern`] gives),
//! `wait MS`, `cat` (stdin to stdout until its end), `sleep` (for ever), `orphan` (something
//! it started keeps its streams open), `exit N`.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex},
    time::Duration,
};

use baton::runtime::{AgentLinks, Behind, FrameLink};
use baton_protocol::{
    agent::{self, AgentState, ExecState, Exit, RING_ATTACHED, Range},
    frame::{Frame, FrameKind, Stream},
    id::SandboxId,
};
use tokio::{sync::mpsc, time::Instant};

/// The byte at an offset of everything `flood` writes.
pub fn pattern(offset: u64) -> u8 {
    let mixed = (offset ^ (offset >> 13)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    b'a' + ((mixed >> 40) % 26) as u8
}

#[derive(Debug, Default)]
struct Out {
    base: u64,
    ring: VecDeque<u8>,
    sent: u64,
    credit: u64,
    replay: u64,
    ended: bool,
    end_sent: bool,
}

impl Out {
    fn end(&self) -> u64 {
        self.base + self.ring.len() as u64
    }

    fn room(&self) -> usize {
        (RING_ATTACHED as usize).saturating_sub(self.ring.len())
    }

    fn ack(&mut self, offset: u64) {
        let count = offset.clamp(self.base, self.end()) - self.base;
        self.ring.drain(..count as usize);
        self.base += count;
        self.sent = self.sent.max(self.base);
    }

    fn next_frame(&mut self, exec: u32, stream: Stream) -> Option<Frame> {
        let until = self.credit.min(self.end());
        let frame = |kind| Frame::new(kind).exec(exec).stream(stream).sequence(self.replay);
        if self.sent < until {
            let count = (until - self.sent).min(256 << 10);
            let start = (self.sent - self.base) as usize;
            let payload: Vec<u8> = self.ring.range(start..start + count as usize).copied().collect();
            let frame = frame(FrameKind::Data).offset(self.sent).payload(payload);
            self.sent += count;
            return Some(frame);
        }
        if self.ended && !self.end_sent && self.sent == self.end() && self.credit >= self.end() {
            self.end_sent = true;
            return Some(frame(FrameKind::Eof).offset(self.end()));
        }
        None
    }
}

#[derive(Debug)]
enum Step {
    Out(Vec<u8>),
    Err(Vec<u8>),
    Flood(u64),
    Wait(Option<Instant>, Duration),
    Cat,
    Sleep,
    Orphan,
    Exit(i32),
}

#[derive(Debug)]
struct Exec {
    start: agent::AgentExec,
    steps: VecDeque<Step>,
    stdout: Out,
    stderr: Out,
    stdin: Vec<u8>,
    taken: u64,
    stdin_ended: bool,
    orphan: bool,
    exit: Option<Exit>,
    exit_acked: bool,
}

impl Exec {
    /// Goes on until something is missing.
    fn step(&mut self) {
        while self.exit.is_none() {
            match self.steps.front_mut() {
                None => self.end(Some(0), None),
                Some(Step::Out(bytes)) if self.stdout.room() >= bytes.len() => self.stdout.ring.extend(bytes.drain(..)),
                Some(Step::Err(bytes)) if self.stderr.room() >= bytes.len() => self.stderr.ring.extend(bytes.drain(..)),
                Some(Step::Flood(left)) => {
                    let count = self.stdout.room().min(*left as usize) as u64;
                    let from = self.stdout.end();
                    self.stdout.ring.extend((from..from + count).map(pattern));
                    *left -= count;
                    if *left > 0 {
                        return;
                    }
                }
                Some(Step::Wait(until, span)) => {
                    let until = *until.get_or_insert_with(|| Instant::now() + *span);
                    if Instant::now() < until {
                        return;
                    }
                }
                Some(Step::Cat) => {
                    self.stdout.ring.extend(self.stdin.drain(..));
                    if !self.stdin_ended {
                        return;
                    }
                }
                Some(Step::Orphan) => self.orphan = true,
                Some(Step::Exit(code)) => {
                    let code = *code;
                    self.end(Some(code), None);
                }
                Some(Step::Sleep | Step::Out(_) | Step::Err(_)) => return,
            }
            self.steps.pop_front();
        }
    }

    fn end(&mut self, code: Option<i32>, signal: Option<i32>) {
        if self.exit.is_none() {
            self.exit = Some(Exit { code, signal, duration_ms: 7, ..Exit::default() });
            self.stdout.ended = !self.orphan;
            self.stderr.ended = !self.orphan;
        }
    }

    fn state(&self, exec: u32) -> ExecState {
        let range = |out: &Out| Range { from: out.base, to: out.end(), eof: out.ended };
        ExecState {
            command: String::new(),
            started_ms: 0,
            exec,
            exec_id: self.start.exec_id.clone(),
            pid: 7,
            pty: self.start.pty.is_some(),
            background: false,
            stdin: self.taken,
            stdin_crc32: None,
            stdin_closed: !self.start.stdin,
            stdout: range(&self.stdout),
            stderr: range(&self.stderr),
            exit: self.exit.clone(),
        }
    }
}

fn steps(argv: &[String]) -> Option<VecDeque<Step>> {
    let code = argv.last()?;
    code.lines()
        .map(|line| {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            let text = || serde_json::from_str::<String>(rest).map(String::into_bytes).ok();
            Some(match word {
                "out" => Step::Out(text()?),
                "err" => Step::Err(text()?),
                "bytes" => Step::Out(serde_json::from_str(rest).ok()?),
                "flood" => Step::Flood(rest.parse().ok()?),
                "wait" => Step::Wait(None, Duration::from_millis(rest.parse().ok()?)),
                "cat" => Step::Cat,
                "sleep" => Step::Sleep,
                "orphan" => Step::Orphan,
                "exit" => Step::Exit(rest.parse().ok()?),
                _ => return None,
            })
        })
        .collect()
}

/// Everything in one sandbox.
#[derive(Debug, Default)]
pub struct Agent {
    execs: BTreeMap<u32, Exec>,
    last_request: u64,
    last_exec: u32,
    answers: VecDeque<Frame>,
    /// What the server asked of it, for tests that look.
    pub signals: Vec<(u32, u64, Stream)>,
    pub sizes: Vec<u64>,
    /// Sent as they are, right after the next command began.
    pub forged: Vec<Frame>,
    /// Told in place of what is so.
    pub forged_state: Option<AgentState>,
}

impl Agent {
    fn take(&mut self, frame: &Frame) {
        match frame.kind {
            FrameKind::Exec => return self.exec(frame),
            FrameKind::List => {
                let execs = self.execs.iter().map(|(number, exec)| exec.state(*number)).collect();
                let state =
                    AgentState { version: 1, last_request: self.last_request, last_exec: self.last_exec, execs };
                let state = self.forged_state.clone().unwrap_or(state);
                self.answers.push_back(Frame::new(FrameKind::Execs).payload(serde_json::to_vec(&state).unwrap()));
                return;
            }
            FrameKind::Signal => self.signals.push((frame.exec, frame.offset, frame.stream)),
            FrameKind::Resize => self.sizes.push(frame.offset),
            _ => {}
        }
        let Some(exec) = self.execs.get_mut(&frame.exec) else { return };
        let out = match frame.stream {
            Stream::Stderr => &mut exec.stderr,
            _ => &mut exec.stdout,
        };
        match frame.kind {
            FrameKind::Ack if frame.stream == Stream::Exit => exec.exit_acked = true,
            FrameKind::Ack => out.ack(frame.offset),
            FrameKind::Credit => out.credit = frame.offset,
            FrameKind::Replay => {
                out.sent = frame.offset.clamp(out.base, out.end());
                out.replay = frame.sequence;
                out.end_sent = false;
            }
            FrameKind::Stdin => {
                assert_eq!(frame.offset, exec.taken, "stdin comes in order");
                exec.taken += frame.payload.len() as u64;
                exec.stdin.extend_from_slice(&frame.payload);
                self.answers.push_back(Frame::new(FrameKind::StdinAck).exec(frame.exec).offset(exec.taken));
            }
            FrameKind::StdinEof => exec.stdin_ended = true,
            FrameKind::Signal if matches!(frame.offset, 2 | 9 | 15) => {
                exec.orphan = false;
                exec.end(None, Some(frame.offset as i32));
                self.answers.push_back(exit_frame(frame.exec, exec.exit.as_ref().unwrap()));
            }
            _ => {}
        }
    }

    fn exec(&mut self, frame: &Frame) {
        assert_eq!(frame.sequence, self.last_request + 1, "requests are numbered");
        self.last_request = frame.sequence;
        self.last_exec = frame.exec;
        let start: agent::AgentExec = serde_json::from_slice(&frame.payload).unwrap();
        let Some(steps) = steps(&start.argv) else {
            let exit = Exit { error: Some("There is no such command.".into()), ..Exit::default() };
            return self.answers.push_back(exit_frame(frame.exec, &exit));
        };
        self.answers.push_back(Frame::new(FrameKind::Started).exec(frame.exec).sequence(frame.sequence).offset(7));
        self.answers.extend(self.forged.drain(..).map(|forged| forged.exec(frame.exec)));
        let exec = Exec {
            steps,
            stdout: Out::default(),
            stderr: Out::default(),
            stdin: vec![],
            taken: 0,
            stdin_ended: !start.stdin,
            orphan: false,
            exit: None,
            exit_acked: false,
            start,
        };
        self.execs.insert(frame.exec, exec);
    }

    fn next_frame(&mut self) -> Option<Frame> {
        for (number, exec) in &mut self.execs {
            if exec.exit.is_none() {
                exec.step();
                if let Some(exit) = &exec.exit {
                    // As the real one: the end may come before the output.
                    self.answers.push_back(exit_frame(*number, exit));
                }
            }
        }
        if let Some(answer) = self.answers.pop_front() {
            return Some(answer);
        }
        let frame = self.execs.iter_mut().find_map(|(number, exec)| {
            let stderr = exec.stderr.next_frame(*number, Stream::Stderr);
            stderr.or_else(|| exec.stdout.next_frame(*number, Stream::Stdout))
        });
        let over = |out: &Out| out.end_sent && out.ring.is_empty();
        self.execs.retain(|_, exec| !(exec.exit_acked && over(&exec.stdout) && over(&exec.stderr)));
        frame
    }

    fn wake_at(&self) -> Option<Instant> {
        let waits = self.execs.values().filter_map(|exec| match exec.steps.front() {
            Some(Step::Wait(until, _)) if exec.exit.is_none() => *until,
            _ => None,
        });
        waits.min()
    }

    /// As if nobody had read for long: the oldest bytes are gone.
    pub fn drop_oldest(&mut self, exec: u32, count: u64) {
        let out = &mut self.execs.get_mut(&exec).unwrap().stdout;
        out.ack(out.base + count);
    }

    /// How much of a command's stdout has gone to the server.
    pub fn sent(&self, exec: u32) -> u64 {
        self.execs[&exec].stdout.sent
    }

    pub fn starts(&self) -> Vec<agent::AgentExec> {
        self.execs.values().map(|exec| exec.start.clone()).collect()
    }
}

fn exit_frame(exec: u32, exit: &Exit) -> Frame {
    Frame::new(FrameKind::Exit).exec(exec).payload(serde_json::to_vec(exit).unwrap())
}

type Ends = (mpsc::Receiver<Frame>, mpsc::Sender<Frame>);

/// One container: its agent, and whoever holds the link.
#[derive(Debug, Clone)]
pub struct Container {
    pub agent: Arc<Mutex<Agent>>,
    links: mpsc::UnboundedSender<Ends>,
}

impl Container {
    pub fn start(agent: Arc<Mutex<Agent>>) -> Self {
        let (links, received) = mpsc::unbounded_channel();
        tokio::spawn(run(agent.clone(), received));
        Self { agent, links }
    }
}

async fn run(agent: Arc<Mutex<Agent>>, mut links: mpsc::UnboundedReceiver<Ends>) {
    let mut link: Option<Ends> = None;
    let mut ready: Option<Frame> = None;
    loop {
        let Some((from, to)) = &mut link else {
            match links.recv().await {
                Some(ends) => link = Some(ends),
                None => return,
            }
            continue;
        };
        if ready.is_none() {
            ready = agent.lock().unwrap().next_frame();
        }
        let wake_at = agent.lock().unwrap().wake_at().unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        let linked = tokio::select! {
            biased;
            ends = links.recv() => match ends {
                Some(ends) => Some(Some(ends)),
                None => return,
            },
            frame = from.recv() => match frame {
                Some(frame) => {
                    agent.lock().unwrap().take(&frame);
                    None
                }
                None => Some(None),
            },
            permit = to.reserve(), if ready.is_some() => match (permit, ready.take()) {
                (Ok(permit), Some(frame)) => {
                    permit.send(frame);
                    None
                }
                _ => Some(None),
            },
            () = tokio::time::sleep_until(wake_at), if ready.is_none() => None,
        };
        if let Some(linked) = linked {
            (link, ready) = (linked, None);
        }
    }
}

/// The containers of one instance.
#[derive(Debug, Default)]
pub struct Containers(pub Mutex<BTreeMap<SandboxId, Container>>);

impl AgentLinks for Containers {
    fn open(&self, id: &SandboxId) -> Option<FrameLink> {
        let containers = self.0.lock().unwrap();
        let container = containers.get(id)?;
        let (to_agent, from_server) = mpsc::channel(16);
        let (to_server, from_agent) = mpsc::channel(4);
        container.links.send((from_server, to_server)).ok()?;
        Some(FrameLink { to_agent, from_agent, behind: Behind::default() })
    }
}
