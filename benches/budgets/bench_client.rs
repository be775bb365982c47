//! One WebSocket to a server, as thin as possible: what it waits for is what is timed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use baton_protocol::{
    binary::BinaryChunk,
    event::{Copied, Event, Status, Update},
    frame::Stream,
};
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    WebSocketStream, client_async_with_config,
    tungstenite::{Message, client::IntoClientRequest, http::HeaderValue, protocol::WebSocketConfig},
};

use crate::bench_fixture::Server;

const LIMIT: Duration = Duration::from_secs(150);
const ACK_EVERY: u64 = 256 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Plain,
    V1,
}

/// How to come back to a sandbox.
#[derive(Clone, Debug, Default)]
pub struct Ticket {
    pub id: String,
    pub token: String,
}

#[derive(Debug)]
pub struct Client {
    socket: WebSocketStream<TcpStream>,
    dialect: Dialect,
    pub ticket: Ticket,
    /// Copies of the sandbox that nobody has taken yet.
    copies: Vec<Ticket>,
}

/// Something the server said.
#[derive(Debug)]
pub enum Heard {
    Update(Box<Update>),
    /// Bytes of a command's stdout. In plain there is no offset.
    Output {
        offset: Option<u64>,
        bytes: Bytes,
    },
    Other,
    Closed(Option<u16>),
}

impl Client {
    /// A new sandbox, and the time from the connect to RUNNING.
    pub async fn create(server: &Server, dialect: Dialect, config: &Value) -> Result<(Self, Duration)> {
        let began = Instant::now();
        let mut client = Self::connect(&server.address, "/create", Ticket::default(), dialect).await?;
        client.send(config).await?;
        client.until(Status::Running).await?;
        ensure!(!client.ticket.id.is_empty(), "a sandbox without an id");
        Ok((client, began.elapsed()))
    }

    /// An existing one, and the time from the connect to RUNNING.
    pub async fn attach(server: &Server, dialect: Dialect, ticket: &Ticket) -> Result<(Self, Duration)> {
        let began = Instant::now();
        let mut client = Self::request_attach(server, dialect, ticket).await?;
        client.until(Status::Running).await?;
        Ok((client, began.elapsed()))
    }

    /// Asks for a sandbox and does not wait for it.
    pub async fn request_attach(server: &Server, dialect: Dialect, ticket: &Ticket) -> Result<Self> {
        Self::connect(&server.address, &format!("/attach/{}", ticket.id), ticket.clone(), dialect).await
    }

    async fn connect(address: &str, path: &str, ticket: Ticket, dialect: Dialect) -> Result<Self> {
        let mut request = format!("ws://{address}{path}").into_client_request()?;
        let headers = request.headers_mut();
        if dialect == Dialect::V1 {
            headers.insert("sec-websocket-protocol", HeaderValue::from_static("baton.v1"));
        }
        if !ticket.token.is_empty() {
            headers.insert("x-sandbox-token", HeaderValue::from_str(&ticket.token)?);
        }
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let config = WebSocketConfig::default().read_buffer_size(256 << 10);
        let (socket, _) = client_async_with_config(request, stream, Some(config)).await?;
        Ok(Self { socket, dialect, ticket, copies: Vec::new() })
    }

    pub async fn send(&mut self, request: &Value) -> Result<()> {
        Ok(self.socket.send(Message::Text(request.to_string().into())).await?)
    }

    pub async fn hear(&mut self) -> Result<Heard> {
        let message = tokio::time::timeout(LIMIT, self.socket.next()).await.context("the server says nothing")?;
        Ok(match message {
            None => Heard::Closed(None),
            Some(message) => match message? {
                Message::Text(text) => self.event(Event::parse(&text)?),
                Message::Binary(bytes) => {
                    let BinaryChunk { stream, offset, payload, .. } = BinaryChunk::decode(&bytes)?;
                    ensure!(stream == Stream::Stdout, "output on stderr: {}", String::from_utf8_lossy(payload));
                    Heard::Output { offset: Some(offset), bytes: bytes.slice_ref(payload) }
                }
                Message::Close(frame) => Heard::Closed(frame.map(|frame| frame.code.into())),
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => Heard::Other,
            },
        })
    }

    /// Answers the server's pings while something else takes its time.
    pub async fn beside<T>(&mut self, work: impl Future<Output = T>) -> Result<T> {
        tokio::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                heard = self.hear() => if let Heard::Closed(code) = heard? { bail!("closed with {code:?} meanwhile") },
            }
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "the rest says nothing that is measured")]
    fn event(&mut self, event: Event) -> Heard {
        match event {
            Event::StatusUpdate(update) => Heard::Update(Box::new(update)),
            Event::SandboxId { sandbox_id, sandbox_token, .. } => {
                self.ticket = Ticket { id: sandbox_id.to_string(), token: sandbox_token.0 };
                Heard::Other
            }
            Event::Forked { sandboxes } => {
                let ticket = |copy: Copied| Ticket { id: copy.sandbox_id.to_string(), token: copy.sandbox_token.0 };
                self.copies = sandboxes.into_iter().map(ticket).collect();
                Heard::Other
            }
            Event::Stdout { data } => Heard::Output { offset: None, bytes: data.into() },
            _ => Heard::Other,
        }
    }

    /// Waits for a status. An error in its place is ours too.
    pub async fn until(&mut self, wanted: Status) -> Result<Update> {
        loop {
            match self.hear().await? {
                Heard::Update(update) if update.status == wanted => return Ok(*update),
                Heard::Update(update) if update.status.as_str().ends_with("_ERROR") => {
                    bail!("{} came before {}: {:?}", update.status.as_str(), wanted.as_str(), update.message)
                }
                Heard::Closed(code) => bail!("closed with {code:?} before {}", wanted.as_str()),
                Heard::Update(_) | Heard::Output { .. } | Heard::Other => {}
            }
        }
    }

    /// The copies that were asked for.
    pub async fn copies(&mut self) -> Result<Vec<Ticket>> {
        while self.copies.is_empty() {
            match self.hear().await? {
                Heard::Update(update) if update.status == Status::Error => bail!("no copies: {:?}", update.message),
                Heard::Closed(code) => bail!("closed with {code:?} before the copies came"),
                Heard::Update(_) | Heard::Output { .. } | Heard::Other => {}
            }
        }
        Ok(std::mem::take(&mut self.copies))
    }

    /// Starts a command under this name.
    pub async fn start(&mut self, name: &str, argv: &[&str]) -> Result<()> {
        self.send(&json!({"action": "exec", "exec_id": name, "argv": argv})).await?;
        self.until(Status::ExecutionRunning).await.map(drop)
    }

    /// Runs a command to its end and hands on its output, of which no byte may be missing or twice there.
    pub async fn run(&mut self, request: &Value, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<Duration> {
        let name = request["exec_id"].as_str().unwrap_or_default().to_owned();
        let (mut taken, mut acked) = (0, 0);
        let began = Instant::now();
        self.send(request).await?;
        loop {
            match self.hear().await? {
                Heard::Output { offset, bytes } => {
                    ensure!(offset.is_none_or(|offset| offset == taken), "output at {offset:?} in place of {taken}");
                    take(&bytes)?;
                    taken += bytes.len() as u64;
                    if self.dialect == Dialect::V1 && taken >= acked + ACK_EVERY {
                        acked = taken;
                        self.send(&json!({"action": "ack", "exec_id": name, "stdout": taken, "stderr": 0})).await?;
                    }
                }
                Heard::Update(update) if update.status == Status::ExecutionDone => {
                    ensure!(update.exit_code == Some(0), "the command ended with {:?}", update.exit_code);
                    return Ok(began.elapsed());
                }
                Heard::Update(update) if update.status != Status::ExecutionRunning => {
                    bail!("{} during a command: {:?}", update.status.as_str(), update.message)
                }
                Heard::Closed(code) => bail!("closed with {code:?} during a command"),
                Heard::Update(_) | Heard::Other => {}
            }
        }
    }

    /// `true`, from the request to DONE, without a byte of output.
    pub async fn exec_true(&mut self, number: u32) -> Result<Duration> {
        let request = json!({"action": "exec", "exec_id": format!("t{number}"), "argv": ["true"]});
        let nothing = |bytes: &[u8]| {
            ensure!(bytes.is_empty(), "`true` wrote something");
            Ok(())
        };
        self.run(&request, nothing).await
    }

    /// From the request to CHECKPOINTED, running commands and all.
    pub async fn checkpoint(mut self) -> Result<(Update, Duration)> {
        let began = Instant::now();
        self.send(&json!({"action": "checkpoint", "live": true})).await?;
        let update = self.until(Status::Checkpointed).await?;
        let took = began.elapsed();
        self.until_closed().await?;
        Ok((update, took))
    }

    pub async fn kill(mut self) -> Result<()> {
        self.send(&json!({"action": "kill_sandbox"})).await?;
        self.until(Status::Killed).await?;
        self.until_closed().await
    }

    async fn until_closed(&mut self) -> Result<()> {
        while !matches!(self.hear().await?, Heard::Closed(_)) {}
        Ok(())
    }
}
