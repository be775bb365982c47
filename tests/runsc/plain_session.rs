//! A reader of the agent's frames that insists on every byte once and in order.

use std::{collections::BTreeMap, time::Duration};

use baton::{
    clock::SharedClock,
    runtime::{AgentLinks, FrameLink},
};
use baton_protocol::{
    agent::{AgentExec, AgentState, ExecState, Exit},
    frame::{Frame, FrameKind, Stream},
    id::{ExecId, SandboxId},
};

/// So much of a stream may be on its way.
const WINDOW: u64 = 128 << 10;
const EVENT_TIMEOUT: Duration = Duration::from_secs(30);

/// The line of this number, its end included.
pub type Line = fn(u64) -> String;

/// What was read of one stream, or of which lines it must consist.
#[derive(Debug, Default)]
pub struct Got {
    pub bytes: Vec<u8>,
    /// With lines expected, bytes are compared and thrown away.
    lines: Option<(Line, u64)>,
    pub at: u64,
    pub ended: bool,
    replay: u64,
}

impl Got {
    /// Must consist of these lines.
    pub fn expecting(line: Line) -> Self {
        Self { lines: Some((line, 0)), ..Self::default() }
    }

    pub fn push(&mut self, payload: &[u8], exec: u32) {
        self.at += payload.len() as u64;
        self.bytes.extend_from_slice(payload);
        let Some((line, next)) = &mut self.lines else { return };
        let mut done = 0;
        loop {
            let (expected, rest) = (line(*next), &self.bytes[done..]);
            let compared = expected.len().min(rest.len());
            assert_eq!(
                String::from_utf8_lossy(&rest[..compared]),
                String::from_utf8_lossy(&expected.as_bytes()[..compared]),
                "exec {exec}, line {next}, at {}",
                self.at
            );
            if rest.len() < expected.len() {
                break;
            }
            done += expected.len();
            *next += 1;
        }
        self.bytes.drain(..done);
    }

    pub fn lines(&self) -> u64 {
        self.lines.map_or(0, |(_, next)| next)
    }
}

#[derive(Debug, Default)]
pub struct Command {
    pub stdout: Got,
    pub stderr: Got,
    pub exit: Option<Exit>,
    pub started: bool,
    /// Everything given to stdin so far.
    stdin: Vec<u8>,
}

impl Command {
    fn stream(&mut self, stream: Stream) -> &mut Got {
        if stream == Stream::Stderr { &mut self.stderr } else { &mut self.stdout }
    }

    pub fn is_done(&self) -> bool {
        self.exit.is_some() && self.stdout.ended && self.stderr.ended
    }
}

/// What a client knows; it outlives its links.
#[derive(Debug)]
pub struct Client {
    clock: SharedClock,
    link: Option<FrameLink>,
    requests: u64,
    replays: u64,
    pub execs: BTreeMap<u32, Command>,
    pub pongs: u64,
}

pub fn command(argv: &[&str]) -> AgentExec {
    AgentExec {
        exec_id: ExecId::parse("x").unwrap(),
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

impl Client {
    pub fn attached(clock: SharedClock, containers: &dyn AgentLinks, id: &SandboxId) -> Self {
        let mut client = Self { clock, link: None, requests: 0, replays: 0, execs: BTreeMap::new(), pongs: 0 };
        client.attach(containers, id);
        client
    }

    pub fn attach(&mut self, containers: &dyn AgentLinks, id: &SandboxId) {
        self.link = Some(containers.open(id).expect("it runs here"));
    }

    pub async fn send(&self, frame: Frame) {
        let link = self.link.as_ref().expect("attached");
        let sent = self.clock.timeout(EVENT_TIMEOUT, link.to_agent.send(frame)).await;
        // A link that closed is noticed by whoever reads.
        let _ = sent.expect("the agent takes frames");
    }

    /// Starts a command, whose stdout must consist of these lines if they are given.
    pub async fn exec(&mut self, asked: AgentExec, lines: Option<Line>) -> u32 {
        self.requests += 1;
        let number = u32::try_from(self.requests).unwrap();
        let asked = AgentExec { exec_id: ExecId::parse(&format!("x{number}")).unwrap(), ..asked };
        let payload = serde_json::to_vec(&asked).unwrap();
        self.send(Frame::new(FrameKind::Exec).exec(number).sequence(self.requests).payload(payload)).await;
        let stdout = Got { lines: lines.map(|line| (line, 0)), ..Got::default() };
        self.execs.insert(number, Command { stdout, ..Command::default() });
        for stream in [Stream::Stdout, Stream::Stderr] {
            self.send(Frame::new(FrameKind::Credit).exec(number).stream(stream).offset(WINDOW)).await;
        }
        number
    }

    pub async fn stdin(&mut self, exec: u32, bytes: &[u8]) {
        let command = self.execs.get_mut(&exec).unwrap();
        let offset = command.stdin.len() as u64;
        command.stdin.extend_from_slice(bytes);
        self.send(Frame::new(FrameKind::Stdin).exec(exec).offset(offset).payload(bytes)).await;
    }

    pub async fn stdin_eof(&mut self, exec: u32) {
        let offset = self.execs[&exec].stdin.len() as u64;
        self.send(Frame::new(FrameKind::StdinEof).exec(exec).offset(offset)).await;
    }

    /// Takes frames until something is so. The link may not close meanwhile.
    pub async fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let clock = self.clock.clone();
        let waited = clock.timeout(EVENT_TIMEOUT, async {
            while !is_so(self) {
                assert!(self.step().await, "the link closed while waiting: {what}");
            }
        });
        if waited.await.is_err() {
            panic!("it never came: {what}; {:?}", self.summary());
        }
    }

    pub async fn done(&mut self, exec: u32) -> &Command {
        self.until("the command ends", |client| client.execs[&exec].is_done()).await;
        &self.execs[&exec]
    }

    pub fn summary(&self) -> Vec<(u32, u64, u64, bool)> {
        self.execs
            .iter()
            .map(|(exec, command)| (*exec, command.stdout.at, command.stderr.at, command.exit.is_some()))
            .collect()
    }

    /// Takes one frame; `false` when the link is closed.
    pub async fn step(&mut self) -> bool {
        let link = self.link.as_mut().expect("attached");
        let behind = link.behind.clone();
        let frame = tokio::select! {
            frame = link.from_agent.recv() => frame,
            () = behind.noted() => {
                // On a slow machine more comes than fits: it is asked for again.
                for (exec, stream) in behind.drain() {
                    self.replays += 1;
                    let replay = self.replays;
                    let got = self.execs.get_mut(&exec).unwrap().stream(stream);
                    got.replay = replay;
                    let at = got.at;
                    self.send(Frame::new(FrameKind::Replay).exec(exec).stream(stream).offset(at).sequence(replay)).await;
                }
                return true;
            }
        };
        let Some(frame) = frame else { return false };
        self.take(frame).await;
        true
    }

    /// Takes what comes within `span`.
    pub async fn read_for(&mut self, span: Duration) {
        let clock = self.clock.clone();
        let until = clock.now() + span;
        while clock.now() < until {
            if clock.timeout(until - clock.now(), self.step()).await != Ok(true) {
                return;
            }
        }
    }

    async fn take(&mut self, frame: Frame) {
        let exec = frame.exec;
        match frame.kind {
            FrameKind::Started => self.execs.get_mut(&exec).unwrap().started = true,
            FrameKind::Exit => {
                let exit = serde_json::from_slice(&frame.payload).unwrap();
                self.execs.get_mut(&exec).unwrap().exit = Some(exit);
            }
            FrameKind::Data => {
                let got = self.execs.get_mut(&exec).unwrap().stream(frame.stream);
                if frame.sequence != got.replay {
                    return;
                }
                assert_eq!(frame.offset, got.at, "exec {exec}: no byte is lost or doubled");
                got.push(&frame.payload, exec);
                let at = got.at;
                self.send(Frame::new(FrameKind::Ack).exec(exec).stream(frame.stream).offset(at)).await;
                self.send(Frame::new(FrameKind::Credit).exec(exec).stream(frame.stream).offset(at + WINDOW)).await;
            }
            FrameKind::Eof => {
                let got = self.execs.get_mut(&exec).unwrap().stream(frame.stream);
                if frame.sequence == got.replay {
                    assert_eq!(frame.offset, got.at);
                    got.ended = true;
                }
            }
            FrameKind::Execs => {
                let state: AgentState = serde_json::from_slice(&frame.payload).unwrap();
                for known in state.execs {
                    self.resume(known).await;
                }
            }
            FrameKind::Pong => self.pongs += 1,
            FrameKind::StdinAck => {}
            other => panic!("{other:?} is not for a client"),
        }
    }

    /// Asks what runs, and goes on where it stopped reading.
    pub async fn reconnect(&mut self, containers: &dyn AgentLinks, id: &SandboxId) {
        self.attach(containers, id);
        let before = self.replays;
        self.send(Frame::new(FrameKind::List)).await;
        self.until("the list of commands", |client| client.replays > before).await;
    }

    async fn resume(&mut self, known: ExecState) {
        self.replays += 1;
        let (exec, replay) = (known.exec, self.replays);
        let command = self.execs.get_mut(&exec).expect("a command that was asked for");
        if known.exit.is_some() {
            command.exit = known.exit;
        }
        let mut frames = Vec::new();
        for (stream, range) in [(Stream::Stdout, known.stdout), (Stream::Stderr, known.stderr)] {
            let got = command.stream(stream);
            assert!(range.from <= got.at && got.at <= range.to, "exec {exec}: {} is within {range:?}", got.at);
            got.replay = replay;
            frames.push(Frame::new(FrameKind::Replay).exec(exec).stream(stream).offset(got.at).sequence(replay));
            frames.push(Frame::new(FrameKind::Credit).exec(exec).stream(stream).offset(got.at + WINDOW));
        }
        let rest = command.stdin[usize::try_from(known.stdin).unwrap()..].to_vec();
        if !rest.is_empty() {
            frames.push(Frame::new(FrameKind::Stdin).exec(exec).offset(known.stdin).payload(rest));
        }
        for frame in frames {
            self.send(frame).await;
        }
    }
}
