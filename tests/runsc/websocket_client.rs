//! A client on the wire, in either dialect: it can be cut off at any moment, and it insists on
//! every byte once and in order.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::{binary::BinaryChunk, frame::Stream};
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async,
    tungstenite::{Message, client::IntoClientRequest},
};

use super::{
    fixture::clock,
    plain_session::{Got, Line},
    servers::Server,
};

const EVENT_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Plain,
    V1,
}

/// How to come back to a sandbox.
#[derive(Clone, Debug)]
pub struct Key {
    pub id: String,
    pub token: String,
}

#[derive(Debug)]
pub enum Heard {
    Event(Value),
    Bytes(Vec<u8>),
    /// The close code, or that the connection broke.
    End(Option<u16>),
}

/// One WebSocket. Dropped, it is gone without a goodbye.
#[derive(Debug)]
pub struct Socket {
    pub stream: WebSocketStream<MaybeTlsStream<TcpStream>>,
    /// Every status heard, without the prefix; `E` for an error event.
    pub statuses: Vec<String>,
}

impl Socket {
    pub async fn open(server: &Server, path: &str, dialect: Dialect) -> Self {
        Self::open_with(server, path, dialect, &[]).await
    }

    pub async fn open_path(address: &str, path: &str) -> Self {
        Self::open_at(address, path, Dialect::V1, &[]).await
    }

    /// With more headers than a client needs.
    pub async fn open_with(server: &Server, path: &str, dialect: Dialect, headers: &[(&'static str, &str)]) -> Self {
        Self::open_at(&server.address, path, dialect, headers).await
    }

    async fn open_at(address: &str, path: &str, dialect: Dialect, headers: &[(&'static str, &str)]) -> Self {
        let mut request = format!("ws://{address}{path}").into_client_request().unwrap();
        if dialect == Dialect::V1 {
            request.headers_mut().insert("sec-websocket-protocol", "baton.v1".parse().unwrap());
        }
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        let connected = clock().timeout(EVENT_TIMEOUT, connect_async(request)).await.expect("it answers");
        Self { stream: connected.unwrap().0, statuses: vec![] }
    }

    /// A new sandbox that runs; `config` is what it is asked to be.
    pub async fn create(server: &Server, dialect: Dialect, config: Value) -> (Self, Key) {
        Self::create_at(&server.address, dialect, config).await
    }

    pub async fn create_at(address: &str, dialect: Dialect, config: Value) -> (Self, Key) {
        let mut socket = Self::open_at(address, "/create?details=1", dialect, &[]).await;
        socket.send(config).await;
        let event = socket.until("sandbox_id", |event| event["event"] == "sandbox_id").await;
        let text = |field: &str| event[field].as_str().expect("a text").to_owned();
        let key = Key { id: text("sandbox_id"), token: text("sandbox_token") };
        socket.status("RUNNING").await;
        (socket, key)
    }

    pub async fn attach(server: &Server, dialect: Dialect, key: &Key) -> Self {
        Self::attach_at(&server.address, dialect, key).await
    }

    pub async fn attach_at(address: &str, dialect: Dialect, key: &Key) -> Self {
        let path = format!("/attach/{}?sandbox_token={}&details=1", key.id, key.token);
        Self::open_at(address, &path, dialect, &[]).await
    }

    pub async fn send(&mut self, message: Value) {
        self.send_raw(Message::text(message.to_string())).await;
    }

    /// A connection that broke is noticed by whoever reads.
    async fn send_raw(&mut self, message: Message) {
        let _ = clock().timeout(EVENT_TIMEOUT, self.stream.send(message)).await.expect("the server takes messages");
    }

    /// Pings are no news: a server that only pings has fallen silent too.
    pub async fn next(&mut self) -> Heard {
        match clock().timeout(EVENT_TIMEOUT, self.news()).await {
            Ok(heard) => heard,
            Err(_) => panic!("the server fell silent after {:?}", self.statuses),
        }
    }

    async fn news(&mut self) -> Heard {
        loop {
            match self.stream.next().await {
                Some(Ok(Message::Text(text))) => {
                    let event: Value = serde_json::from_str(&text).unwrap();
                    // How far something is, is told of what takes long: on a busy machine of anything.
                    if let Some(status) = event["status"].as_str().filter(|_| event.get("progress").is_none()) {
                        self.statuses.push(status.trim_start_matches("SANDBOX_").to_owned());
                    } else if event["event"] == "error" {
                        self.statuses.push("E".to_owned());
                    }
                    return Heard::Event(event);
                }
                Some(Ok(Message::Binary(bytes))) => return Heard::Bytes(bytes.to_vec()),
                Some(Ok(Message::Close(frame))) => return Heard::End(frame.map(|frame| u16::from(frame.code))),
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Err(_)) | None => return Heard::End(None),
            }
        }
    }

    /// The first event that is wanted; output before it is thrown away.
    pub async fn until(&mut self, what: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        loop {
            match self.next().await {
                Heard::Event(event) if is_it(&event) => return event,
                Heard::Event(_) | Heard::Bytes(_) => {}
                Heard::End(code) => panic!("closed with {code:?} before {what}; heard {:?}", self.statuses),
            }
        }
    }

    /// Waits for a status, which is given without its prefix.
    pub async fn status(&mut self, status: &str) -> Value {
        let wanted = format!("SANDBOX_{status}");
        self.until(&wanted, |event| event["status"] == wanted.as_str()).await
    }

    /// Reads until the end; the close code.
    pub async fn end(&mut self) -> Option<u16> {
        loop {
            if let Heard::End(code) = self.next().await {
                return code;
            }
        }
    }

    /// Runs code in the plain way; what it wrote to stdout, and how it ended.
    pub async fn run(&mut self, language: &str, code: &str) -> (String, Value) {
        self.send(json!({"language": language, "code": code})).await;
        let mut written = String::new();
        loop {
            match self.next().await {
                Heard::Event(event) if event["event"] == "stdout" => written += event["data"].as_str().unwrap(),
                Heard::Event(event) if event["status"] == "SANDBOX_EXECUTION_DONE" => return (written, event),
                Heard::Event(event) if event["event"] == "error" => panic!("{event}"),
                Heard::Event(_) | Heard::Bytes(_) => {}
                Heard::End(code) => panic!("closed with {code:?} while a command ran; heard {:?}", self.statuses),
            }
        }
    }

    /// Ends the sandbox for good.
    pub async fn kill(mut self) {
        self.send(json!({"action": "kill_sandbox"})).await;
        self.status("KILLED").await;
        assert_eq!(self.end().await, Some(1000));
    }
}

#[derive(Debug, Default)]
pub struct Command {
    pub number: Option<u32>,
    pub stdout: Got,
    pub stderr: Got,
    /// Everything given to stdin so far.
    stdin: Vec<u8>,
    pub done: Option<Value>,
}

/// What a client of `baton.v1` knows of its commands; it outlives its sockets.
#[derive(Debug, Default)]
pub struct Mind {
    pub commands: BTreeMap<String, Command>,
}

impl Mind {
    /// Starts a command whose output must consist of these lines.
    pub async fn exec(&mut self, socket: &mut Socket, id: &str, request: Value, stdout: Line, stderr: Option<Line>) {
        let mut request = request;
        request["action"] = json!("exec");
        request["exec_id"] = json!(id);
        socket.send(request).await;
        let command = Command {
            stdout: Got::expecting(stdout),
            stderr: stderr.map(Got::expecting).unwrap_or_default(),
            ..Command::default()
        };
        self.commands.insert(id.to_owned(), command);
        self.until(socket, "it starts", |mind| mind.commands[id].number.is_some()).await;
    }

    pub async fn stdin(&mut self, socket: &mut Socket, id: &str, bytes: &[u8]) {
        let command = self.commands.get_mut(id).unwrap();
        let offset = command.stdin.len() as u64;
        command.stdin.extend_from_slice(bytes);
        let chunk =
            BinaryChunk { stream: Stream::Stdin, exec: command.number.expect("it runs"), offset, payload: bytes };
        socket.send_raw(Message::binary(chunk.encode())).await;
    }

    /// Takes one message; `Some` when the connection has ended.
    pub async fn step(&mut self, socket: &mut Socket) -> Option<Option<u16>> {
        let heard = socket.next().await;
        self.take(&heard);
        match heard {
            Heard::End(code) => Some(code),
            Heard::Event(_) | Heard::Bytes(_) => None,
        }
    }

    pub async fn until(&mut self, socket: &mut Socket, what: &str, is_so: impl Fn(&Self) -> bool) {
        let clock = clock();
        let waited = clock.timeout(EVENT_TIMEOUT, async {
            while !is_so(self) {
                let end = self.step(socket).await;
                assert_eq!(end, None, "the connection ended while waiting: {what}; heard {:?}", socket.statuses);
            }
        });
        if waited.await.is_err() {
            let at: Vec<_> = self.commands.iter().map(|(id, c)| (id, c.stdout.at, c.stdout.lines(), &c.done)).collect();
            panic!("it never came: {what}; {at:?}; heard {:?}", socket.statuses);
        }
    }

    /// Takes what comes within `span`; the connection may not end.
    pub async fn read_for(&mut self, socket: &mut Socket, span: Duration) {
        let until = clock().now() + span;
        while clock().now() < until {
            // However long: silence may be what is waited for.
            if let Ok(heard) = clock().timeout(until - clock().now(), socket.news()).await {
                self.take(&heard);
                assert!(!matches!(heard, Heard::End(_)), "heard {:?}", socket.statuses);
            }
        }
    }

    /// For so long nothing comes from any command.
    pub async fn stdout_rests(&mut self, socket: &mut Socket, span: Duration) {
        let written = |mind: &Self| mind.commands.values().map(|command| command.stdout.at).sum::<u64>();
        let before = written(self);
        self.read_for(socket, span).await;
        assert_eq!(written(self), before, "it stands still");
    }

    fn take(&mut self, heard: &Heard) {
        match heard {
            Heard::Bytes(bytes) => {
                let chunk = BinaryChunk::decode(bytes).unwrap();
                let command = self.commands.values_mut().find(|command| command.number == Some(chunk.exec)).unwrap();
                let got = if chunk.stream == Stream::Stderr { &mut command.stderr } else { &mut command.stdout };
                assert_eq!(chunk.offset, got.at, "exec {}: no byte is lost or doubled", chunk.exec);
                got.push(chunk.payload, chunk.exec);
            }
            Heard::Event(event) => {
                assert!(event["event"] != "output_gap" && event["event"] != "output_rewound", "{event}");
                assert!(event["event"] != "rolled_back", "{event}");
                let Some(command) = event["exec_id"].as_str().and_then(|id| self.commands.get_mut(id)) else { return };
                match event["status"].as_str() {
                    Some("SANDBOX_EXECUTION_RUNNING") => {
                        command.number = Some(u32::try_from(event["exec"].as_u64().unwrap()).unwrap());
                    }
                    Some("SANDBOX_EXECUTION_DONE") => command.done = Some(event.clone()),
                    Some("SANDBOX_EXECUTION_ERROR") => panic!("{event}"),
                    Some(_) | None => {}
                }
            }
            Heard::End(_) => {}
        }
    }

    /// Says how far every command's output was read.
    pub async fn ack(&self, socket: &mut Socket) {
        for (id, command) in &self.commands {
            let (stdout, stderr) = (command.stdout.at, command.stderr.at);
            socket.send(json!({"action": "ack", "exec_id": id, "stdout": stdout, "stderr": stderr})).await;
        }
    }

    /// Comes back to a sandbox, wherever it was, and goes on reading where it stopped.
    pub async fn come_back(&mut self, server: &Server, key: &Key) -> Socket {
        let mut socket = Socket::attach(server, Dialect::V1, key).await;
        self.resume(&mut socket).await;
        socket
    }

    /// As `resume`, for so long; whether the sandbox was there by then.
    pub async fn resume_within(&mut self, socket: &mut Socket, span: Duration) -> bool {
        clock().timeout(span, self.resume(socket)).await.is_ok()
    }

    /// On an attached socket: waits for RUNNING, names the offsets, sends stdin again that was not taken.
    pub async fn resume(&mut self, socket: &mut Socket) {
        let running = socket.status("RUNNING").await;
        let offsets: BTreeMap<_, _> = self
            .commands
            .iter()
            .map(|(id, command)| (id, json!({"stdout": command.stdout.at, "stderr": command.stderr.at})))
            .collect();
        socket.send(json!({"action": "reconnect", "offsets": offsets})).await;
        for view in running["execs"].as_array().unwrap() {
            let Some(command) = self.commands.get_mut(view["exec_id"].as_str().unwrap()) else { continue };
            assert_eq!(view["running"], json!(true), "every command is alive: {view}");
            let taken = view["stdin"].as_u64().unwrap();
            let rest = &command.stdin[usize::try_from(taken).unwrap()..];
            if !rest.is_empty() {
                let exec = u32::try_from(view["exec"].as_u64().unwrap()).unwrap();
                let chunk = BinaryChunk { stream: Stream::Stdin, exec, offset: taken, payload: rest };
                socket.send_raw(Message::binary(chunk.encode())).await;
            }
        }
        let known: Vec<_> = running["execs"].as_array().unwrap().iter().map(|view| view["exec_id"].clone()).collect();
        for id in self.commands.keys() {
            assert!(known.contains(&json!(id)), "{id} is not known any more: {known:?}");
        }
    }
}
