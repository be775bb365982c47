//! Programs in a sandbox of a networked machine: what they write, and what the client hears of their connections.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::{binary::BinaryChunk, frame::Stream};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    fixture::clock,
    servers::Server,
    websocket_client::{Dialect, Heard, Key, Socket},
};

/// What every program here begins with. An attempt at a connection is one line of output.
const PRELUDE: &str = r#"
import errno, json, os, select, socket, struct, sys, threading, time

def how_it_failed(error):
    if isinstance(error, socket.gaierror):
        return {socket.EAI_NONAME: 'NXDOMAIN', socket.EAI_AGAIN: 'AGAIN'}.get(error.errno, str(error))
    if isinstance(error, TimeoutError):
        return 'TIMEOUT'
    return errno.errorcode.get(error.errno, str(error))

# Connects, says hello, and reads the answer.
def attempt(host, port=7, family=socket.AF_INET):
    began = time.monotonic()
    try:
        address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
        with socket.socket(family, socket.SOCK_STREAM) as link:
            link.settimeout(30)
            link.connect(address)
            link.sendall(b'hello')
            how = link.recv(64).decode() or 'EOF'
    except OSError as error:
        how = how_it_failed(error)
    print(json.dumps({'host': str(host), 'how': how, 'seconds': time.monotonic() - began}), flush=True)

def connect(host, port):
    link = socket.create_connection((host, port), timeout=60)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link
"#;

/// How an attempt at a connection ended, and after how long.
#[derive(Clone, Debug, Deserialize)]
pub struct Attempt {
    #[expect(dead_code, reason = "shown when an attempt ends in a way that it should not")]
    pub host: String,
    /// What was read, or how it failed.
    pub how: String,
    pub seconds: f64,
}

/// A program that was started.
#[derive(Debug, Default)]
struct SpawnedProgram {
    number: Option<u64>,
    /// Its stdout and stderr.
    written: [Vec<u8>; 2],
    /// Set when it has ended.
    code: Option<Option<i64>>,
}

/// A sandbox, and the connection of its client.
#[derive(Debug)]
pub struct Programs {
    pub socket: Socket,
    pub key: Key,
    spawned: BTreeMap<String, SpawnedProgram>,
    /// Every `egress_denied`.
    denied: Vec<Value>,
}

impl Programs {
    /// A new sandbox; `egress` as in its config message.
    pub async fn start(server: &Server, egress: Value) -> Self {
        let mut config = crate::live_handoff::movable();
        config["network"] = json!({"egress": egress});
        Self::start_as(server, config).await
    }

    pub async fn start_as(server: &Server, config: Value) -> Self {
        let (socket, key) = Socket::create(server, Dialect::V1, config).await;
        Self::of(socket, key)
    }

    fn of(socket: Socket, key: Key) -> Self {
        Self { socket, key, spawned: BTreeMap::new(), denied: vec![] }
    }

    /// A sandbox that exists; it comes to this server.
    pub async fn attach(server: &Server, key: &Key) -> Self {
        let mut socket = Socket::attach(server, Dialect::V1, key).await;
        socket.status("RUNNING").await;
        Self::of(socket, key.clone())
    }

    /// Comes to another server and goes on there.
    pub async fn move_to(&mut self, server: &Server) {
        let mut socket = Socket::attach(server, Dialect::V1, &self.key).await;
        socket.status("RUNNING").await;
        self.spawned.clear();
        self.socket = socket;
    }

    /// Starts a program.
    pub async fn spawn(&mut self, argv: &[&str], env: &[(&str, &str)]) -> String {
        let id = format!("exec-{}", u128::from_be_bytes(clock().bits()[..16].try_into().unwrap()));
        self.spawned.insert(id.clone(), SpawnedProgram::default());
        let env: serde_json::Map<_, _> = env.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        self.socket.send(json!({"action": "exec", "exec_id": id, "argv": argv, "env": env})).await;
        id
    }

    /// Runs a program to its end: its stdout, its stderr and its exit code.
    pub async fn run(&mut self, argv: &[&str], env: &[(&str, &str)]) -> (String, String, Option<i64>) {
        let id = self.spawn(argv, env).await;
        self.finish(&id).await
    }

    /// Waits for the end of a program.
    pub async fn finish(&mut self, id: &str) -> (String, String, Option<i64>) {
        loop {
            if self.spawned.get(id).is_some_and(|program| program.code.is_some()) {
                let SpawnedProgram { written, code, .. } = self.spawned.remove(id).unwrap();
                let [stdout, stderr] = written.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
                return (stdout, stderr, code.flatten());
            }
            let heard = self.socket.next().await;
            self.take(heard);
        }
    }

    fn take(&mut self, heard: Heard) {
        match heard {
            Heard::Event(event) if event["event"] == "egress_denied" => self.denied.push(event),
            Heard::Event(event) => {
                assert_ne!(event["event"], "error", "{event}");
                let Some(program) = event["exec_id"].as_str().and_then(|id| self.spawned.get_mut(id)) else { return };
                match event["status"].as_str() {
                    Some("SANDBOX_EXECUTION_RUNNING") => program.number = event["exec"].as_u64(),
                    Some("SANDBOX_EXECUTION_DONE") => program.code = Some(event["exit_code"].as_i64()),
                    Some(_) | None => {}
                }
            }
            Heard::Bytes(bytes) => {
                let chunk = BinaryChunk::decode(&bytes).unwrap();
                let number = Some(u64::from(chunk.exec));
                if let Some(program) = self.spawned.values_mut().find(|program| program.number == number) {
                    program.written[usize::from(chunk.stream == Stream::Stderr)].extend_from_slice(chunk.payload);
                }
            }
            Heard::End(code) => panic!("closed with {code:?}; heard {:?}", self.socket.statuses),
        }
    }

    /// Runs Python, which must succeed; what it writes.
    pub async fn python(&mut self, code: &str) -> String {
        let (stdout, stderr, code) = self.run(&["python3", "-c", &(PRELUDE.to_owned() + code)], &[]).await;
        assert_eq!(code, Some(0), "{stdout}{stderr}");
        stdout
    }

    /// Starts Python that goes on.
    pub async fn spawn_python(&mut self, code: &str) -> String {
        self.spawn(&["python3", "-c", &(PRELUDE.to_owned() + code)], &[]).await
    }

    /// Runs Python that attempts connections.
    pub async fn attempts(&mut self, code: &str) -> Vec<Attempt> {
        let written = self.python(code).await;
        written.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
    }

    pub async fn attempt(&mut self, host: &str, port: u16) -> Attempt {
        self.attempts(&format!("attempt({host:?}, {port})")).await.remove(0)
    }

    /// Waits for the news of a refused connection.
    pub async fn hears_denied(&mut self, host: &str) -> Value {
        loop {
            if let Some(event) = self.denied.iter().find(|event| event["host"] == host) {
                return event.clone();
            }
            let heard = self.socket.next().await;
            self.take(heard);
        }
    }

    pub async fn kill(self) {
        self.socket.kill().await;
    }
}

impl Attempt {
    /// Refused, and not by running out of time.
    pub fn assert_refused(&self, how: &str) {
        assert_eq!(self.how, how, "{self:?}");
        assert!(self.seconds < AT_ONCE.as_secs_f64(), "{self:?}");
    }

    pub fn assert_reached(&self) {
        assert_eq!(self.how, "hello", "{self:?}");
    }
}

/// How long a refusal may take on a machine that does much else.
pub const AT_ONCE: Duration = Duration::from_secs(1);
