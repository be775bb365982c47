//! Live handoff between servers: a sandbox full of running commands moves back and forth at
//! random moments, and its client reads every byte once.

use std::time::Duration;

use baton_fake_gcs::{FaultKind, InjectedFault, Op};
use futures::future::join_all;
use serde_json::{Value, json};

use crate::{
    fixture::{clock, eventually, processes},
    plain_session::Line,
    servers::{Machine, Server, Shared, is_proof},
    websocket_client::{Dialect, Heard, Key, Mind, Socket},
};

const TICKER: &str = "i=0; while :; do echo tick $i; echo tock $i >&2; i=$((i+1)); sleep 0.01; done";
/// Two children in the background: one writes into a named pipe, one only has to stay alive.
const CHILDREN: &str = "mkfifo /tmp/line
(i=0; while :; do echo $i; i=$((i+1)); sleep 0.01; done >/tmp/line) & one=$!
(while :; do sleep 0.1; done) & two=$!
while read x; do kill -0 $one && kill -0 $two && echo child $x; done </tmp/line";
const TYPIST: &str = "while read -r line; do echo \"<$line>\"; done";
/// A thread, a file, an unlinked file and a pipe to itself; reads back all it wrote.
const KEEPER: &str = r#"
import os, queue, threading, time
os.makedirs('/srv/kept', exist_ok=True)
kept = open('/srv/kept/file', 'w+')
lost = open('/tmp/unlinked', 'w+b', buffering=0)
os.unlink('/tmp/unlinked')
back, forth = os.pipe()
numbers = queue.Queue(1)
def count():
    n = 0
    while True:
        numbers.put(n)
        n += 1
threading.Thread(target=count, daemon=True).start()
while True:
    n = numbers.get()
    kept.write('%08d\n' % n); kept.flush()
    lost.write(b'%08d' % n)
    os.write(forth, b'%08d' % n)
    a = os.pread(kept.fileno(), 9, 9 * n).decode().strip()
    b = os.pread(lost.fileno(), 8, 8 * n).decode()
    c = os.read(back, 8).decode()
    print(n, a, b, c, os.fstat(kept.fileno()).st_size, os.fstat(lost.fileno()).st_nlink, flush=True)
    time.sleep(0.005)
"#;
/// Two processes that speak TCP with each other.
const LOOPBACK: &str = r#"
import os, socket, time
server = socket.create_server(('127.0.0.1', 0))
if os.fork() == 0:
    peer, _ = server.accept()
    while data := peer.recv(64):
        peer.sendall(data)
    os._exit(1)
link = socket.create_connection(server.getsockname())
n = 0
while True:
    link.sendall(b'%08d' % n)
    got = b''
    while len(got) < 8:
        part = link.recv(8 - len(got))
        assert part, 'the connection is gone'
        got += part
    print('echo', int(got), flush=True)
    n += 1
    time.sleep(0.005)
"#;

pub const MOVABLE: &str = r#"{"enable_checkpoint":true,"enable_sandbox_handoff":true,"idle_timeout":null}"#;

pub fn movable() -> Value {
    serde_json::from_str(MOVABLE).unwrap()
}

fn shell(code: &str) -> Value {
    json!({"argv": ["bash", "-c", code]})
}

fn python(code: &str) -> Value {
    json!({"argv": ["python3", "-c", code]})
}

/// A command that counts lines, for tests that need one to go on.
pub async fn tick(mind: &mut Mind, socket: &mut Socket) {
    mind.exec(socket, "tick", shell(TICKER), |n| format!("tick {n}\n"), Some(|n| format!("tock {n}\n"))).await;
}

pub struct Rng(u64);

impl Rng {
    pub fn fresh() -> Self {
        let seed = u64::from_le_bytes(clock().bits()[..8].try_into().unwrap());
        println!("seed {seed}");
        Self(seed)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Commands that write by themselves; each must go on after every move.
const STEADY: [&str; 5] = ["tick", "children", "keeper", "loopback", "fast"];
/// Commands that answer to what they are sent.
const TYPED: [&str; 2] = ["terminal", "reader"];

async fn start_everything(mind: &mut Mind, socket: &mut Socket) {
    let kept: Line = |n| format!("{n} {n:08} {n:08} {n:08} {} 0\n", 9 * (n + 1));
    tick(mind, socket).await;
    mind.exec(socket, "children", shell(CHILDREN), |n| format!("child {n}\n"), None).await;
    mind.exec(socket, "keeper", python(KEEPER), kept, None).await;
    mind.exec(socket, "loopback", python(LOOPBACK), |n| format!("echo {n}\n"), None).await;
    // As fast as it is acknowledged, so that a cut falls into the middle of frames.
    mind.exec(socket, "fast", json!({"argv": ["seq", "0", "1000000000000"]}), |n| format!("{n}\n"), None).await;
    let mut terminal = shell(TYPIST);
    terminal["pty"] = json!({"cols": 80, "rows": 24});
    terminal["stdin"] = json!(true);
    mind.exec(socket, "terminal", terminal, |n| format!("{n}\r\n<{n}>\r\n"), None).await;
    let mut reader = shell(TYPIST);
    reader["stdin"] = json!(true);
    mind.exec(socket, "reader", reader, |n| format!("<{n}>\n"), None).await;
}

/// Lets the store misbehave once in a while, if it can.
fn trouble(machine: &Machine, rng: &mut Rng) {
    let Shared::Bucket(bucket) = &machine.shared else { return };
    let fault = match rng.below(8) {
        0 => InjectedFault::new(Op::Write, FaultKind::Lost).on("lock.json"),
        1 => InjectedFault::new(Op::Any, FaultKind::Status(503)),
        2 => InjectedFault::new(Op::Write, FaultKind::Drop).on("manifest.json"),
        3 => InjectedFault::new(Op::Any, FaultKind::Delay(Duration::from_millis(300))),
        _ => return,
    };
    bucket.add_fault(fault);
}

const OLD_OWNER: [&str; 7] = [
    "LOCK_RELEASE_REQUESTED",
    "CHECKPOINTING",
    "DELETING",
    "LOCK_RELEASING",
    "LOCK_RELEASED",
    "DELETED",
    "CHECKPOINTED",
];
const NEW_OWNER: [&str; 4] = ["RESTORING", "LOCK_ACQUIRING", "LOCK_ACQUIRED", "RUNNING"];

pub async fn everything_moves(machine: &Machine, moves: u64) {
    let (one, two) = tokio::join!(machine.server("a"), machine.server("b"));
    let mut rng = Rng::fresh();
    let mut mind = Mind::default();
    let (mut socket, key) = Socket::create(&one, Dialect::V1, movable()).await;
    start_everything(&mut mind, &mut socket).await;
    let (mut typed, mut took) = (0u64, vec![]);
    for number in 0..moves {
        let to = if number % 2 == 0 { &two } else { &one };
        mind.ack(&mut socket).await;
        let before: Vec<_> = STEADY.iter().map(|id| mind.commands[*id].stdout.at).collect();
        let went_on = |mind: &Mind| STEADY.iter().zip(&before).all(|(id, at)| mind.commands[*id].stdout.at > *at);
        mind.until(&mut socket, "every command goes on", went_on).await;
        let answered = |mind: &Mind| TYPED.iter().all(|id| mind.commands[*id].stdout.lines() == typed);
        mind.until(&mut socket, "what was typed is answered", answered).await;
        mind.read_for(&mut socket, Duration::from_millis(rng.below(150))).await;
        trouble(machine, &mut rng);
        let began = clock().now();
        if rng.below(2) == 0 {
            // The client vanishes with its last words on the way.
            type_a_line(&mut mind, &mut socket, typed).await;
            drop(socket);
            clock().sleep(Duration::from_millis(rng.below(100))).await;
            socket = mind.come_back(to, &key).await;
        } else {
            // The old connection still types and reads while the new one waits.
            let mut next = Socket::attach(to, Dialect::V1, &key).await;
            clock().sleep(Duration::from_millis(rng.below(100))).await;
            type_a_line(&mut mind, &mut socket, typed).await;
            let code = loop {
                if let Some(code) = mind.step(&mut socket).await {
                    break code;
                }
            };
            assert_eq!(code, Some(1000), "heard {:?}", socket.statuses);
            let statuses: Vec<_> =
                socket.statuses.iter().filter(|status| OLD_OWNER.contains(&status.as_str())).collect();
            assert_eq!(statuses, OLD_OWNER, "heard {:?}", socket.statuses);
            mind.resume(&mut next).await;
            socket = next;
        }
        took.push(clock().now() - began);
        assert_eq!(socket.statuses[..4], NEW_OWNER, "move {number}");
        typed += 1;
    }
    let answered = |mind: &Mind| TYPED.iter().all(|id| mind.commands[*id].stdout.lines() == typed);
    mind.until(&mut socket, "the last line typed is answered", answered).await;
    for (id, command) in &mind.commands {
        assert!(command.done.is_none(), "{id} ended: {:?}", command.done);
        println!("{id}: {} lines, {} bytes", command.stdout.lines(), command.stdout.at);
    }
    if matches!(machine.shared, Shared::Directory) {
        let stored = || std::fs::read_dir(machine.data().join("sandbox_checkpoints")).unwrap().flatten();
        let whole = || stored().filter(|entry| entry.path().join("manifest.json").exists()).count();
        eventually("old checkpoints are deleted after the next renewal", || whole() <= 2).await;
    }
    took.sort_unstable();
    println!("{moves} moves: median {:?}, longest {:?}", took[took.len() / 2], took[took.len() - 1]);
    socket.kill().await;
    assert_eq!(machine.lock(&key.id)["purged"], json!(true));
    one.stop().await;
    two.stop().await;
}

async fn type_a_line(mind: &mut Mind, socket: &mut Socket, number: u64) {
    for id in TYPED {
        mind.stdin(socket, id, format!("{number}\n").as_bytes()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_of_every_kind_move_live_over_a_shared_directory() {
    let machine = Machine::with_a_directory().await;
    everything_moves(&machine, if is_proof() { 200 } else { 8 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_of_every_kind_move_live_over_cloud_storage_that_falters() {
    let machine = Machine::with_a_bucket().await;
    everything_moves(&machine, if is_proof() { 50 } else { 4 }).await;
}

/// Lines of eight bytes: where a piece of output belongs can be told from itself.
fn wide(n: usize) -> String {
    format!("{n:07}\n")
}

/// What a plain client has of a stream of wide lines.
#[derive(Default)]
struct Wide {
    /// The first byte that never came.
    next: usize,
    /// Where the current connection is, once that is known.
    at: Option<usize>,
    piece: String,
}

impl Wide {
    fn push(&mut self, text: &str) {
        self.piece += text;
        if self.at.is_none() {
            let Some(end) = self.piece.find('\n').filter(|end| self.piece.len() >= end + 8) else { return };
            let line: usize = self.piece[end + 1..end + 8].parse().unwrap();
            self.at = Some(line * 8 - (end + 1));
        }
        let from = self.at.unwrap();
        assert!(from <= self.next, "{} bytes are missing before {from}", from - self.next);
        let to = from + self.piece.len();
        let lines: String = (from / 8..=to / 8).map(wide).collect();
        assert_eq!(self.piece, lines[from % 8..from % 8 + self.piece.len()]);
        self.piece.clear();
        self.at = Some(to);
        self.next = self.next.max(to);
    }

    async fn read(&mut self, socket: &mut Socket, until: usize) {
        while self.next < until {
            match socket.next().await {
                Heard::Event(event) if event["event"] == "stdout" => self.push(event["data"].as_str().unwrap()),
                Heard::Event(event) => assert_ne!(event["event"], "error", "{event}"),
                Heard::Bytes(_) | Heard::End(_) => panic!("heard {:?}", socket.statuses),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_client_that_comes_back_elsewhere_misses_nothing() {
    let machine = Machine::with_a_directory().await;
    let (one, two) = tokio::join!(machine.server("a"), machine.server("b"));
    let mut rng = Rng::fresh();
    let (mut socket, key) = Socket::create(&one, Dialect::Plain, movable()).await;
    let code = "i=0; while :; do printf '%07d\\n' $i; i=$((i+1)); sleep 0.005; done";
    socket.send(json!({"language": "bash", "code": code})).await;
    let mut got = Wide::default();
    for number in 0..if is_proof() { 40 } else { 4 } {
        got.read(&mut socket, got.next + 200 + usize::try_from(rng.below(400)).unwrap()).await;
        drop(socket);
        socket = Socket::attach(if number % 2 == 0 { &two } else { &one }, Dialect::Plain, &key).await;
        socket.send(json!({"action": "reconnect"})).await;
        (got.at, got.piece) = (None, String::new());
        got.read(&mut socket, got.next + 8).await;
        assert_eq!(socket.statuses[..4], NEW_OWNER);
        assert_eq!(socket.statuses[4], "EXECUTION_RUNNING");
    }
    socket.send(json!({"action": "kill_process"})).await;
    socket.status("EXECUTION_DONE").await;
    println!("{} lines", got.next / 8);
    socket.kill().await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impatient_client_finds_its_command_wherever_it_stops_at_last() {
    let machine = Machine::with_a_directory().await;
    let servers = join_all(["a", "b", "c"].map(|name| machine.server(name))).await;
    let mut rng = Rng::fresh();
    let (socket, key, mut mind) = ticking(&servers[0]).await;
    drop(socket);
    let mut arrived = 0;
    for _ in 0..if is_proof() { 200 } else { 12 } {
        // Gone again before the sandbox could come, or a moment after.
        let mut socket = Socket::attach(&servers[usize::try_from(rng.below(3)).unwrap()], Dialect::V1, &key).await;
        if mind.resume_within(&mut socket, Duration::from_millis(rng.below(1_500))).await {
            mind.read_for(&mut socket, Duration::from_millis(rng.below(100))).await;
            arrived += 1;
        }
    }
    println!("arrived {arrived} times");
    let mut socket = mind.come_back(&servers[1], &key).await;
    let lines = mind.commands["tick"].stdout.lines();
    mind.until(&mut socket, "it goes on", |mind| mind.commands["tick"].stdout.lines() > lines).await;
    socket.kill().await;
    for server in servers {
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_sandboxes_move_at_once() {
    let machine = Machine::with_a_directory().await;
    let room = [("BATON_MAX_SANDBOXES", "16")];
    let (one, two) = tokio::join!(machine.server_with("a", &room), machine.server_with("b", &room));
    let sandboxes = join_all((0..10).map(|_| ticking(&one))).await;
    let moved = sandboxes.into_iter().map(|(socket, key, mut mind)| {
        let (machine, two) = (&machine, &two);
        async move {
            drop(socket);
            let mut socket = mind.come_back(two, &key).await;
            let lines = mind.commands["tick"].stdout.lines();
            mind.until(&mut socket, "it goes on", |mind| mind.commands["tick"].stdout.lines() > lines).await;
            assert_eq!(machine.lock(&key.id)["epoch"], json!(2));
            socket
        }
    });
    let sockets = join_all(moved).await;
    assert_eq!(processes(&one.state).len(), 0, "nothing is left where they were");
    join_all(sockets.into_iter().map(Socket::kill)).await;
    one.stop().await;
    two.stop().await;
}

/// A new sandbox on a server, with a command that counts.
pub async fn ticking(server: &Server) -> (Socket, Key, Mind) {
    let mut mind = Mind::default();
    let (mut socket, key) = Socket::create(server, Dialect::V1, movable()).await;
    tick(&mut mind, &mut socket).await;
    mind.until(&mut socket, "it counts", |mind| mind.commands["tick"].stdout.lines() > 3).await;
    (socket, key, mind)
}
