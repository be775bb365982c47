//! Servers on ports of a sandbox, and clients that write HTTP themselves, so that a test sees every byte.

use std::time::Duration;

use baton_protocol::id::SandboxId;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::{test_server::World, wire_client::Client};

const PATIENCE: Duration = Duration::from_secs(30);

pub async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("in time")
}

/// A program in the sandbox listens on `port` and handles each connection so.
pub async fn listen<F>(world: &World, id: &SandboxId, port: u16, handle: impl Fn(RawHttp) -> F + Send + 'static)
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    world.ports.listen(id, port, listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(handle(RawHttp::new(stream)));
        }
    });
}

/// A server that answers every request with its head, as it came.
pub async fn mirror(world: &World, id: &SandboxId, port: u16) {
    listen(world, id, port, |mut http| async move {
        let head = http.head().await;
        http.write(&format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{head}", head.len())).await;
    })
    .await;
}

/// One end of a connection that carries HTTP.
pub struct RawHttp {
    pub stream: TcpStream,
    pub read: Vec<u8>,
}

impl RawHttp {
    pub fn new(stream: TcpStream) -> Self {
        Self { stream, read: Vec::new() }
    }

    pub async fn connect(world: &World) -> Self {
        Self::new(TcpStream::connect(world.address).await.unwrap())
    }

    pub async fn write(&mut self, text: &str) {
        // The other side may be gone, which its test finds out.
        let _ = self.stream.write_all(text.as_bytes()).await;
    }

    /// Everything up to the empty line, in lower case.
    pub async fn head(&mut self) -> String {
        let head = self.until(b"\r\n\r\n").await;
        String::from_utf8(head).unwrap().to_ascii_lowercase()
    }

    /// Everything up to and with `mark`.
    pub async fn until(&mut self, mark: &[u8]) -> Vec<u8> {
        loop {
            if let Some(at) = self.read.windows(mark.len()).position(|window| window == mark) {
                let rest = self.read.split_off(at + mark.len());
                return std::mem::replace(&mut self.read, rest);
            }
            let read = within(self.stream.read_buf(&mut self.read)).await.unwrap();
            assert_ne!(read, 0, "it ended after {}", String::from_utf8_lossy(&self.read));
        }
    }

    /// What follows, up to the end of the connection.
    pub async fn rest(&mut self) -> Vec<u8> {
        let mut rest = std::mem::take(&mut self.read);
        // A connection that is reset has ended too.
        let _ = within(self.stream.read_to_end(&mut rest)).await;
        rest
    }
}

/// Sends a request with these further header lines, and returns head and body of the response.
pub async fn ask(world: &World, method: &str, path: &str, headers: &str) -> (String, String) {
    let mut http = RawHttp::connect(world).await;
    let host = if headers.contains("host:") { "" } else { "host: api.example\r\n" };
    http.write(&format!("{method} {path} HTTP/1.1\r\n{host}connection: close\r\n{headers}\r\n")).await;
    let head = http.head().await;
    let body = String::from_utf8_lossy(&http.rest().await).into_owned();
    (head, body)
}

pub fn status(head: &str) -> u16 {
    head.split(' ').nth(1).unwrap().parse().unwrap()
}

pub fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

/// The path of a port, and the header with the token.
pub fn port_of(client: &Client, port: u16) -> (String, String) {
    (format!("/sandboxes/{}/ports/{port}", client.id()), format!("x-sandbox-token: {}\r\n", client.token()))
}
