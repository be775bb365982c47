//! One client with its command: it speaks `baton.v1` to the real API, counts every byte, and comes back.

use std::{fmt::Write, sync::OnceLock, time::Duration};

use baton_protocol::{
    binary::BinaryChunk,
    event::{Event, Status, StdStream, Update},
    id::{ExecId, SandboxId},
};
use futures::{SinkExt, StreamExt};
use serde_json::json;
use tokio::io::DuplexStream;
use tokio_tungstenite::{
    WebSocketStream, client_async_with_config,
    tungstenite::{Message, client::IntoClientRequest, protocol::WebSocketConfig},
};

use crate::{
    kinds::ScenarioKind,
    rng::Rng,
    sim_process::SimProcess,
    sim_world::World,
    time::{Instant, sleep, sleep_until, timeout},
    words::short,
};

pub const TOKEN: &str = "let me in";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientDialect {
    Plain,
    V1,
}

/// Between two lines of a command.
const EVERY: Duration = Duration::from_millis(1_500);

/// What a client has of its command's output, wherever it was connected.
#[derive(Debug)]
pub struct OutputReader {
    name: String,
    /// How often its command had to be started.
    starts: u32,
    runs: bool,
    next: u64,
    /// How much its command will have written, if that ends before the run.
    length: Option<u64>,
    /// Up to where it had bytes already, if an instance that did not know better sent it back.
    had: u64,
    /// [I3'] Its command began on an instance that had lost the sandbox and did not know it yet.
    is_stray: bool,
    /// The last it was told.
    pub told: Option<Status>,
}

impl OutputReader {
    pub fn new(name: String) -> Self {
        Self { name, starts: 0, is_stray: false, runs: false, next: 0, length: None, had: 0, told: None }
    }

    fn exec_id(&self) -> String {
        format!("{}-{}", self.name, self.starts)
    }

    pub fn bytes(&self) -> u64 {
        self.next
    }
}

struct Session<'a> {
    world: &'a World,
    process: &'a SimProcess,
    id: &'a SandboxId,
    /// What it does beside reading.
    rng: Option<&'a Rng>,
    reader: &'a mut OutputReader,
    socket: WebSocketStream<DuplexStream>,
    running: bool,
}

/// What the command `tick` writes, whenever it does.
fn text() -> &'static [u8] {
    static TEXT: OnceLock<Vec<u8>> = OnceLock::new();
    TEXT.get_or_init(|| {
        let mut text = String::new();
        for line in 0..10_000 {
            let _ = writeln!(text, "{line}");
        }
        text.into_bytes()
    })
}

/// How much so many lines of it are.
fn length(lines: u64) -> u64 {
    (0..lines).map(|line| line.to_string().len() as u64 + 1).sum()
}

/// Attaches, reads and asks for things until `stay`.
pub async fn visit(
    world: &World,
    process: &SimProcess,
    id: &SandboxId,
    rng: &Rng,
    reader: &mut OutputReader,
    stay: Instant,
) {
    let name = reader.name.clone();
    world.shared.oracle.note(format!("client {name} comes to {} for {}", process.at, short(id)));
    let Some(socket) = open(process, id, ClientDialect::V1, stay).await else { return };
    let session = Session { world, process, id, rng: Some(rng), reader, socket, running: false };
    tokio::select! {
        biased;
        () = overhear(world, process, id) => {}
        () = session.live(stay) => {}
    }
    world.shared.oracle.note(format!("client {name} of {} leaves", short(id)));
}

/// Attaches, hears what is said and says nothing, until `stay`.
pub async fn attach_briefly(process: &SimProcess, id: &SandboxId, stay: Instant) {
    let Some(mut socket) = open(process, id, ClientDialect::V1, stay).await else { return };
    loop {
        tokio::select! {
            biased;
            () = process.gone.cancelled() => return,
            () = sleep_until(stay) => return,
            message = socket.next() => if !matches!(message, Some(Ok(_))) { return },
        }
    }
}

/// What sessions are told, as it is told: clients may be slow.
async fn overhear(world: &World, process: &SimProcess, id: &SandboxId) {
    let mut follower = process.tools.bus.follow(id);
    loop {
        let posted = follower.next().await;
        world.shared.oracle.heard(process.at, process.name(), id, &posted.passing);
    }
}

/// Attaches again and again and only reads, unless there is nothing to attach to.
pub async fn read(world: &World, process: &SimProcess, id: &SandboxId, reader: &mut OutputReader, stay: Instant) {
    while Instant::now() < stay && reader.told != Some(Status::NotFound) {
        if let Some(socket) = open(process, id, ClientDialect::V1, stay).await {
            let session = Session { world, process, id, rng: None, reader, socket, running: false };
            session.live(stay).await;
        }
        sleep(Duration::from_millis(200)).await;
    }
}

pub async fn open(
    process: &SimProcess,
    id: &SandboxId,
    dialect: ClientDialect,
    stay: Instant,
) -> Option<WebSocketStream<DuplexStream>> {
    let request = format!("ws://baton/attach/{id}").into_client_request();
    let mut request = request.unwrap();
    request.headers_mut().insert("x-sandbox-token", TOKEN.parse().unwrap());
    if dialect == ClientDialect::V1 {
        request.headers_mut().insert("sec-websocket-protocol", "baton.v1".parse().unwrap());
    }
    // What a client reads into is made anew for every visit.
    let small = WebSocketConfig::default().read_buffer_size(4 << 10).write_buffer_size(4 << 10);
    tokio::select! {
        biased;
        () = process.gone.cancelled() => None,
        () = sleep_until(stay) => None,
        opened = client_async_with_config(request, process.connector.call(), Some(small)) => Some(opened.ok()?.0),
    }
}

impl Session<'_> {
    async fn live(mut self, stay: Instant) {
        let mut asks_at = self.asks_at();
        loop {
            tokio::select! {
                biased;
                () = self.process.gone.cancelled() => return,
                message = self.socket.next() => {
                    let Some(Ok(message)) = message else { return };
                    self.hear(message).await;
                }
                () = sleep_until(stay) => break,
                () = sleep_until(asks_at) => {
                    self.ask().await;
                    asks_at = self.asks_at();
                }
            }
            if let Some(rng) = self.rng.filter(|rng| rng.falls(2)) {
                // It does not read for a while.
                self.world.shared.faults.tally.count(ScenarioKind::SlowReader);
                sleep(rng.seconds(1, 25)).await;
            }
        }
        if self.rng.is_some_and(|rng| rng.falls(50)) {
            // Properly; else it is just gone.
            let _ = timeout(Duration::from_secs(1), self.socket.close(None)).await;
        } else if self.rng.is_some() {
            self.world.shared.faults.tally.count(ScenarioKind::Vanish);
        }
    }

    fn asks_at(&self) -> Instant {
        Instant::now() + self.rng.map_or(Duration::from_secs(3_600), |rng| rng.seconds(1, 100))
    }

    async fn say(&mut self, message: serde_json::Value) {
        // A server that takes nothing is left alone: the session ends by itself or is left.
        let _ = timeout(Duration::from_secs(5), self.socket.send(Message::text(message.to_string()))).await;
    }

    async fn ask(&mut self) {
        let is_fleeting = self.world.shared.fleeting.contains(self.id);
        let request = match self.rng.map_or(5, |rng| rng.below(6)) {
            3 if is_fleeting && self.running => {
                self.world.shared.oracle.may_end(self.id);
                json!({"action": "kill_sandbox"})
            }
            0 => json!({"action": "checkpoint", "live": true}),
            1 => json!({"action": "checkpoint", "live": true, "keep_running": true}),
            2 => json!({"action": "handoff"}),
            _ => json!({"action": "ack", "exec_id": self.reader.exec_id(), "stdout": self.reader.next}),
        };
        if self.running {
            self.say(request).await;
        }
    }

    async fn hear(&mut self, message: Message) {
        match message {
            Message::Text(text) => match Event::parse(&text) {
                Ok(event) => self.event(event).await,
                Err(error) => self.wrong(&format!("the server says {text}: {error}")),
            },
            Message::Binary(bytes) => self.chunk(&bytes).await,
            Message::Ping(_) | Message::Pong(_) | Message::Close(_) | Message::Frame(_) => {}
        }
    }

    async fn event(&mut self, event: Event) {
        match event {
            Event::StatusUpdate(update) => self.status(update).await,
            Event::OutputRewound { exec_id, stream: StdStream::Stdout, to }
                if exec_id.as_str() == self.reader.exec_id() =>
            {
                self.note(&format!("output goes back to {to}"));
                if to > self.reader.next {
                    self.wrong(&format!("bytes: rewound to {to}, and it had only {}", self.reader.next));
                }
                if !self.world.shared.oracle.has_gone_back(self.id) {
                    self.wrong("bytes: rewound, and the sandbox never went back in time");
                }
                // [I3'] What was taken over and does not know it yet knows an older time than the client.
                let is_true = !self.is_excused();
                self.reader.had = if is_true { to } else { self.reader.had.max(self.reader.next) };
                self.reader.next = to;
            }
            Event::OutputGap { from, to, .. } if from == self.reader.next && to <= self.reader.had => {
                self.note(&format!("had {from} to {to} before it was sent back"));
                self.reader.next = to;
            }
            Event::OutputGap { from, to, .. } => {
                self.wrong(&format!("bytes: {from} to {to} are said to be lost, and nothing drops them"));
            }
            _ => {}
        }
    }

    async fn status(&mut self, update: Update) {
        self.note(&format!("hears {}", update.status.as_str()));
        self.reader.told = Some(update.status);
        let ours = update.exec_id.as_ref().is_some_and(|exec_id| exec_id.as_str() == self.reader.exec_id());
        match update.status {
            Status::Running if !self.running => {
                self.running = true;
                let execs: Vec<ExecId> = update.execs.into_iter().flatten().map(|exec| exec.exec_id).collect();
                let known = execs.iter().any(|exec_id| exec_id.as_str() == self.reader.exec_id());
                self.note(&format!("runs with {} commands", execs.len()));
                if self.reader.runs && known {
                    let offsets = json!({self.reader.exec_id(): {"stdout": self.reader.next}});
                    return self.say(json!({"action": "reconnect", "offsets": offsets})).await;
                }
                // Of a command that has ended and was read to its end nothing is kept.
                let is_over = self.reader.length == Some(self.reader.next);
                let may_vanish = self.reader.is_stray || self.world.shared.oracle.has_gone_back(self.id);
                if self.reader.runs && !is_over && !may_vanish {
                    self.wrong("bytes: a command is gone, and the sandbox never went back in time");
                }
                self.reader.starts += 1;
                self.reader.is_stray = self.is_excused() && !self.holds();
                (self.reader.next, self.reader.had, self.reader.runs) = (0, 0, false);
                let lines = self.lines();
                self.reader.length = lines.map(length);
                let argv = ["tick".to_owned(), lines.unwrap_or(9_000).to_string(), EVERY.as_millis().to_string()];
                self.say(json!({"action": "exec", "exec_id": self.reader.exec_id(), "argv": argv})).await;
            }
            Status::ExecutionRunning if ours => self.reader.runs = true,
            Status::ExecutionError | Status::ExecutionDone if ours => self.reader.runs = false,
            _ => {}
        }
    }

    /// A running command keeps its sandbox where it is: with little room it ends soon, but for that of the last client.
    fn lines(&self) -> Option<u64> {
        self.world.shared.room.filter(|_| self.rng.is_some()).map(|_| 3 + u64::from(self.reader.starts) % 6)
    }

    async fn chunk(&mut self, bytes: &[u8]) {
        let Ok(BinaryChunk { offset, payload, .. }) = BinaryChunk::decode(bytes) else {
            return self.wrong("bytes: a frame that is none");
        };
        if offset != self.reader.next {
            return self.wrong(&format!("bytes: {offset} came, and {} was next", self.reader.next));
        }
        let end = offset + payload.len() as u64;
        if text().get(offset as usize..end as usize) != Some(payload) {
            return self.wrong(&format!("bytes: {offset} to {end} are not what was written"));
        }
        self.reader.next = end;
        if self.rng.is_none_or(|rng| rng.falls(30)) {
            self.say(json!({"action": "ack", "exec_id": self.reader.exec_id(), "stdout": end})).await;
        }
    }

    fn note(&self, line: &str) {
        let (name, at) = (&self.reader.name, self.process.at);
        self.world.shared.oracle.note(format!("client {name} at {at} of {}: {line}", short(self.id)));
    }

    /// This instance has the lease of its sandbox.
    fn holds(&self) -> bool {
        self.world.shared.oracle.holder(self.id) == Some(self.process.at)
    }

    fn is_excused(&self) -> bool {
        self.world.shared.machines[self.process.at].is_excused()
    }

    fn wrong(&self, what: &str) {
        // [I3'] After a machine stood still with its clock, what it has of a sandbox may be of another time.
        if self.is_excused() {
            return self.note(what);
        }
        self.world.shared.oracle.wrong(format!("client {}: {what}", self.reader.name));
    }
}
