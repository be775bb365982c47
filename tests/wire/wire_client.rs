//! A client that hears events as short words, so that a test reads like the table of scenarios.

use std::time::Duration;

use baton_protocol::{
    binary::BinaryChunk,
    event::{Event, Status, Update},
    id::SandboxId,
};
use futures::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async,
    tungstenite::{self, Message, client::IntoClientRequest},
};

use super::test_server::World;

pub type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;
const EVENT_TIMEOUT: Duration = Duration::from_secs(20);

pub struct Client {
    pub socket: Socket,
    pub id: Option<SandboxId>,
    pub token: Option<String>,
    /// The last status, with its fields.
    pub last: Option<Update>,
}

/// Something a server says.
#[derive(Debug)]
pub enum Said {
    Event(Event),
    Bytes { stream: u8, exec: u32, offset: u64, payload: Vec<u8> },
    Closed(Option<u16>),
}

/// Opens a WebSocket, or the HTTP status that refused it.
pub async fn connect(world: &World, path: &str, headers: &[(&'static str, &str)]) -> Result<Socket, u16> {
    let mut request = format!("ws://{}{path}", world.address).into_client_request().unwrap();
    for (name, value) in headers {
        request.headers_mut().append(*name, value.parse().unwrap());
    }
    match connect_async(request).await {
        Ok((socket, _)) => Ok(socket),
        Err(tungstenite::Error::Http(response)) => Err(response.status().as_u16()),
        Err(error) => panic!("{error}"),
    }
}

pub const V1: [(&str, &str); 1] = [("sec-websocket-protocol", "baton.v1")];

impl Client {
    pub fn new(socket: Socket) -> Self {
        Self { socket, id: None, token: None, last: None }
    }

    /// With details: what is left of the events without them is the subject of `documents`.
    pub async fn create(world: &World) -> Self {
        Self::new(connect(world, "/create?details=1", &[]).await.unwrap())
    }

    /// A plain client whose sandbox runs, with the config `{}` or `config`.
    pub async fn running(world: &World, config: &str) -> Self {
        let mut client = Self::create(world).await;
        client.hears("CREATING").await;
        client.says(config).await;
        while client.word().await != "RUNNING" {}
        client
    }

    pub async fn running_v1(world: &World, config: &str) -> Self {
        let mut client = Self::new(connect(world, "/create", &V1).await.unwrap());
        client.hears("hello CREATING").await;
        client.says(config).await;
        while client.word().await != "RUNNING" {}
        client
    }

    /// Another socket for the same sandbox.
    pub async fn again(&self, world: &World, headers: &[(&'static str, &str)]) -> Self {
        Self::attached_with(world, self.id(), &self.token(), headers).await
    }

    pub async fn attached(world: &World, id: &SandboxId, token: &str) -> Self {
        Self::attached_with(world, id, token, &[]).await
    }

    async fn attached_with(world: &World, id: &SandboxId, token: &str, headers: &[(&'static str, &str)]) -> Self {
        let socket = connect(world, &format!("/attach/{id}?sandbox_token={token}&details=1"), headers).await.unwrap();
        Self { socket, id: Some(id.clone()), token: Some(token.to_owned()), last: None }
    }

    pub fn token(&self) -> String {
        self.token.clone().unwrap()
    }

    pub fn id(&self) -> &SandboxId {
        self.id.as_ref().unwrap()
    }

    pub async fn says(&mut self, text: &str) {
        self.socket.send(Message::text(text)).await.unwrap();
    }

    pub async fn exec(&mut self, code: &str) {
        let message = serde_json::json!({"language": "bash", "code": code});
        self.says(&message.to_string()).await;
    }

    /// Pings are no news: a server that only pings is silent too.
    pub async fn next(&mut self) -> Said {
        // A moment longer than whoever waits for words and can say which came.
        tokio::time::timeout(EVENT_TIMEOUT + Duration::from_secs(1), self.news()).await.expect("the server is silent")
    }

    async fn news(&mut self) -> Said {
        loop {
            return match self.socket.next().await {
                Some(Ok(Message::Text(text))) => Said::Event(self.learn(Event::parse(&text).unwrap())),
                Some(Ok(Message::Binary(bytes))) => {
                    let chunk = BinaryChunk::decode(&bytes).unwrap();
                    let payload = chunk.payload.to_vec();
                    Said::Bytes { stream: chunk.stream as u8, exec: chunk.exec, offset: chunk.offset, payload }
                }
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => continue,
                Some(Ok(Message::Close(frame))) => Said::Closed(frame.map(|frame| frame.code.into())),
                None | Some(Err(_)) => Said::Closed(None),
            };
        }
    }

    fn learn(&mut self, event: Event) -> Event {
        if let Event::SandboxId { sandbox_id, sandbox_token, .. } = &event {
            self.id = Some(sandbox_id.clone());
            self.token = Some(sandbox_token.0.clone());
        }
        if let Event::StatusUpdate(update) = &event {
            self.last = Some(update.clone());
        }
        event
    }

    pub async fn word(&mut self) -> String {
        match self.next().await {
            Said::Event(Event::StatusUpdate(update)) => update.status.as_str()["SANDBOX_".len()..].to_owned(),
            Said::Event(Event::SandboxId { .. }) => "sandbox_id".to_owned(),
            Said::Event(Event::Stdout { data }) => format!("out:{data}"),
            Said::Event(Event::Stderr { data }) => format!("err:{data}"),
            Said::Event(Event::Error { .. }) => "E".to_owned(),
            Said::Event(Event::Hello { .. }) => "hello".to_owned(),
            Said::Event(Event::StdinAck { offset, .. }) => format!("stdin_ack:{offset}"),
            Said::Event(Event::OutputGap { from, to, .. }) => format!("gap:{from}-{to}"),
            Said::Event(Event::RolledBack { .. }) => "rolled_back".to_owned(),
            Said::Event(Event::EgressDenied { host, .. }) => format!("denied:{host}"),
            Said::Event(Event::OutputRewound { to, .. }) => format!("rewound:{to}"),
            Said::Event(Event::Forked { .. }) => "forked".to_owned(),
            Said::Event(Event::IdleTimeout { idle_timeout }) => format!("idle_timeout:{idle_timeout:?}"),
            Said::Bytes { stream, exec, offset, payload } => {
                format!("{stream}/{exec}@{offset}:{}", String::from_utf8_lossy(&payload))
            }
            Said::Closed(Some(code)) => format!("close:{code}"),
            Said::Closed(None) => "broken".to_owned(),
        }
    }

    /// Hears exactly these words, in this order. A word with a space in it is written with `_`.
    #[track_caller]
    pub fn hears(&mut self, words: &str) -> impl Future<Output = ()> {
        let at = std::panic::Location::caller();
        async move {
            let mut heard = vec![];
            for _ in words.split_whitespace() {
                let word = tokio::time::timeout(EVENT_TIMEOUT, self.word()).await;
                let word = word.unwrap_or_else(|_| panic!("the server is silent after {heard:?}, at {at}"));
                let over = word.starts_with("close:") || word == "broken";
                heard.push(word.replace([' ', '\n'], "_"));
                if over {
                    break;
                }
            }
            assert_eq!(heard.join(" "), words.split_whitespace().collect::<Vec<_>>().join(" "), "at {at}");
        }
    }

    /// Everything that is written on stdout until the command is done.
    pub async fn stdout(&mut self) -> String {
        let mut text = String::new();
        loop {
            match self.next().await {
                Said::Event(Event::Stdout { data }) => text.push_str(&data),
                Said::Event(Event::StatusUpdate(update)) if update.status == Status::ExecutionDone => return text,
                Said::Event(Event::StatusUpdate(update)) if update.status == Status::ExecutionRunning => {}
                other => panic!("{other:?}"),
            }
        }
    }

    pub fn message(&self) -> &str {
        self.last.as_ref().and_then(|update| update.message.as_deref()).unwrap_or_default()
    }

    /// The connection breaks, without a word.
    pub fn cut(self) {
        let MaybeTlsStream::Plain(stream) = self.socket.into_inner() else { return };
        // Reset, as when a machine vanishes and comes back.
        let _ = stream.set_zero_linger();
    }
}
