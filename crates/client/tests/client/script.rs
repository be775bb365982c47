//! A server that does what a test tells it, one line after the other.

use std::time::Duration;

use baton_protocol::{
    binary::BinaryChunk,
    event::{Event, ExecView, Kept, Status, Token, Update},
    frame::Stream,
    id::{ExecId, InstanceId, SandboxId},
    request::Request,
};
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_tungstenite::{
    WebSocketStream, accept_hdr_async,
    tungstenite::{
        Message,
        handshake::server,
        http::HeaderMap,
        protocol::{CloseFrame, frame::coding::CloseCode},
    },
};

/// Long enough for a busy machine, short enough to find a hang.
const EVENT_TIMEOUT: Duration = Duration::from_secs(20);

pub const ID: &str = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
pub const TOKEN: &str = "t0ken";

pub fn sandbox_id() -> SandboxId {
    SandboxId::parse(ID).unwrap()
}

pub fn token() -> Token {
    Token(TOKEN.into())
}

pub fn exec_id(text: &str) -> ExecId {
    ExecId::parse(text).unwrap()
}

/// Nothing in a test takes longer.
pub async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(EVENT_TIMEOUT, work).await.expect("it hangs")
}

pub struct Server {
    listener: TcpListener,
    /// Given to every client that connects.
    pub cookie: Option<&'static str>,
}

impl Server {
    pub async fn start() -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").await.unwrap(), cookie: None }
    }

    pub fn url(&self) -> String {
        format!("ws://{}", self.listener.local_addr().unwrap())
    }

    pub async fn tcp(&self) -> TcpStream {
        soon(self.listener.accept()).await.unwrap().0
    }

    /// Answers one HTTP request; returns its head.
    pub async fn answer(&self, status: &str, body: &str) -> String {
        let mut stream = self.tcp().await;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(soon(stream.read_u8()).await.unwrap());
        }
        let response =
            format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
        soon(stream.write_all(response.as_bytes())).await.unwrap();
        String::from_utf8(head).unwrap()
    }

    #[expect(clippy::result_large_err, reason = "the shape of the library's callback")]
    pub async fn accept(&self) -> ScriptedPeer {
        let (mut path, mut headers) = (String::new(), HeaderMap::new());
        let stream = self.tcp().await;
        let handshake = accept_hdr_async(stream, |request: &server::Request, mut response: server::Response| {
            path = request.uri().path().to_owned();
            headers = request.headers().clone();
            response.headers_mut().insert("sec-websocket-protocol", "baton.v1".parse().unwrap());
            if let Some(cookie) = self.cookie {
                response.headers_mut().insert("set-cookie", cookie.parse().unwrap());
            }
            Ok(response)
        });
        let socket = soon(handshake).await.unwrap();
        ScriptedPeer { path, headers, socket }
    }

    /// A new sandbox, as far as RUNNING.
    pub async fn create(&self) -> ScriptedPeer {
        let mut peer = self.accept().await;
        assert_eq!(peer.path, "/create");
        peer.hello().await;
        peer.status(Status::Creating).await;
        assert!(matches!(peer.request().await, Request::Config(_)));
        peer.say(&Event::SandboxId { sandbox_id: sandbox_id(), sandbox_token: token(), persistent: Some(true) }).await;
        peer.status(Status::Running).await;
        peer
    }

    /// A client that comes back, as far as RUNNING.
    pub async fn attach(&self, execs: Vec<ExecView>) -> ScriptedPeer {
        let mut peer = self.accept().await;
        assert_eq!(peer.path, format!("/attach/{ID}"));
        assert_eq!(peer.headers["x-sandbox-token"], TOKEN);
        peer.hello().await;
        peer.update(Update { execs: Some(execs), ..Update::new(Status::Running) }).await;
        peer
    }
}

/// One client, as the server sees it.
pub struct ScriptedPeer {
    pub path: String,
    pub headers: HeaderMap,
    socket: WebSocketStream<TcpStream>,
}

pub enum Heard {
    Request(Request),
    Binary(Bytes),
    Gone,
}

impl ScriptedPeer {
    pub async fn hello(&mut self) {
        let instance = InstanceId::from_bits([7; 16]);
        self.say(&Event::Hello { protocol: 1, max_frame: 1 << 20, max_execs: 1024, instance }).await;
    }

    pub async fn say(&mut self, event: &Event) {
        self.text(event.to_json()).await;
    }

    pub async fn text(&mut self, text: String) {
        soon(self.socket.send(Message::Text(text.into()))).await.unwrap();
    }

    pub async fn status(&mut self, status: Status) {
        self.say(&Event::status(status)).await;
    }

    pub async fn update(&mut self, update: Update) {
        self.say(&Event::StatusUpdate(update)).await;
    }

    /// An error status and its event.
    pub async fn refuse(&mut self, status: Status, message: &str) {
        for event in Event::refusal(status, message) {
            self.say(&event).await;
        }
    }

    pub async fn started(&mut self, id: &ExecId, number: u32) {
        let update = Update::new(Status::ExecutionRunning);
        self.update(Update { exec_id: Some(id.clone()), exec: Some(number), ..update }).await;
    }

    pub async fn done(&mut self, id: &ExecId, exit_code: i32) {
        let update = Update::new(Status::ExecutionDone);
        let update = Update { exec_id: Some(id.clone()), exit_code: Some(exit_code), duration_ms: Some(12), ..update };
        self.update(update).await;
    }

    /// EXECUTION_ERROR of one command.
    pub async fn gone(&mut self, id: &ExecId, message: &str) {
        let update = Update { message: Some(message.into()), ..Update::new(Status::ExecutionError) };
        self.update(Update { exec_id: Some(id.clone()), ..update }).await;
    }

    pub async fn output(&mut self, stream: Stream, number: u32, offset: u64, payload: &[u8]) {
        let frame = BinaryChunk { stream, exec: number, offset, payload }.encode();
        soon(self.socket.send(Message::Binary(frame.into()))).await.unwrap();
    }

    /// The same, for a client that may take its time.
    pub async fn output_slowly(&mut self, stream: Stream, number: u32, offset: u64, payload: &[u8]) {
        let frame = BinaryChunk { stream, exec: number, offset, payload }.encode();
        self.socket.send(Message::Binary(frame.into())).await.unwrap();
    }

    pub async fn heard(&mut self) -> Heard {
        loop {
            return match soon(self.socket.next()).await {
                Some(Ok(Message::Text(text))) => Heard::Request(Request::parse(&text).unwrap()),
                Some(Ok(Message::Binary(bytes))) => Heard::Binary(bytes),
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => continue,
                Some(Ok(Message::Close(_)) | Err(_)) | None => Heard::Gone,
            };
        }
    }

    pub async fn request(&mut self) -> Request {
        match self.heard().await {
            Heard::Request(request) => request,
            Heard::Binary(_) => panic!("a binary message instead of a request"),
            Heard::Gone => panic!("the client left"),
        }
    }

    /// The next exec request's id; acknowledgements before it are passed over.
    pub async fn exec(&mut self) -> ExecId {
        match self.request_but_ack().await {
            Request::Exec(exec) => exec.exec_id.expect("the client names its execs"),
            other => panic!("{other:?} instead of an exec"),
        }
    }

    pub async fn request_but_ack(&mut self) -> Request {
        loop {
            match self.request().await {
                Request::Ack { .. } => {}
                request => return request,
            }
        }
    }

    pub async fn stdin(&mut self) -> (u64, Bytes) {
        match self.heard().await {
            Heard::Binary(bytes) => {
                let chunk = BinaryChunk::decode(&bytes).unwrap();
                assert_eq!(chunk.stream, Stream::Stdin);
                (chunk.offset, bytes.slice(13..))
            }
            Heard::Request(request) => panic!("{request:?} instead of stdin"),
            Heard::Gone => panic!("the client left"),
        }
    }

    pub async fn close(mut self, code: u16) {
        let frame = CloseFrame { code: CloseCode::from(code), reason: "".into() };
        let _ = soon(self.socket.send(Message::Close(Some(frame)))).await;
        while !matches!(self.heard().await, Heard::Gone) {}
    }

    /// The connection breaks: no close frame.
    pub fn cut(self) {
        self.socket.get_ref().set_zero_linger().unwrap();
    }

    /// KILLING to KILLED, and the close.
    pub async fn killed(mut self) {
        for status in [Status::Killing, Status::Deleting, Status::Deleted, Status::Killed] {
            self.status(status).await;
        }
        self.close(1000).await;
    }
}

pub fn view(id: &ExecId, number: u32, stdin: u64) -> ExecView {
    ExecView {
        exec_id: id.clone(),
        exec: number,
        running: true,
        command: None,
        started_ms: None,
        stdin,
        stdin_crc32: None,
        stdout: Kept::default(),
        stderr: Kept::default(),
        exit_code: None,
        signal: None,
    }
}
