//! Servers in the outer network, at every address of it. Each connection that they accept is remembered.

use std::{
    net::{IpAddr, Ipv6Addr, TcpListener as StdTcpListener},
    sync::Arc,
};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};

use crate::network_fixture::Network;

/// Sends back what it gets; after the end it ends too.
pub const ECHO: u16 = 7;
/// Answers every path with the address it was reached at; `/to/HOST` redirects to `http://HOST/`.
pub const HTTP: u16 = 80;
/// Reads to the end, and then answers with the SHA-256 in hexadecimal digits.
pub const SINK: u16 = 7001;
/// Sends as many bytes as the line that it gets says, and ends.
pub const SOURCE: u16 = 7002;
/// Never reads and never writes.
pub const STUCK: u16 = 7003;
/// Ends its direction first; what it then still gets is remembered.
pub const HALF: u16 = 7004;
/// Nothing listens.
pub const NOTHING: u16 = 7005;

#[derive(Debug, Default)]
struct Memory {
    accepted: Vec<(IpAddr, u16)>,
    heard_after_the_end: Vec<String>,
}

#[derive(Debug)]
pub struct OuterServers {
    memory: Arc<Mutex<Memory>>,
    open: watch::Receiver<usize>,
    _tasks: JoinSet<()>,
}

impl OuterServers {
    pub fn start(network: &Network) -> Self {
        let memory = Arc::new(Mutex::new(Memory::default()));
        let (count, open) = watch::channel(0);
        let count = Arc::new(count);
        let mut tasks = JoinSet::new();
        for port in [ECHO, HTTP, SINK, SOURCE, STUCK, HALF] {
            let listener = network.within(|| StdTcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).unwrap());
            listener.set_nonblocking(true).unwrap();
            let listener = TcpListener::from_std(listener).unwrap();
            tasks.spawn(accept(listener, port, memory.clone(), count.clone()));
        }
        Self { memory, open, _tasks: tasks }
    }

    /// Every connection so far, by address and port.
    pub fn accepted(&self) -> Vec<(IpAddr, u16)> {
        self.memory.lock().accepted.clone()
    }

    pub fn accepted_at(&self, address: &str) -> usize {
        let address: IpAddr = address.parse().unwrap();
        self.accepted().iter().filter(|(at, _)| *at == address).count()
    }

    pub fn heard_after_the_end(&self) -> Vec<String> {
        self.memory.lock().heard_after_the_end.clone()
    }

    /// How many connections are open.
    pub fn open(&self) -> usize {
        *self.open.borrow()
    }
}

async fn accept(listener: TcpListener, port: u16, memory: Arc<Mutex<Memory>>, open: Arc<watch::Sender<usize>>) {
    let mut all = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        while all.try_join_next().is_some() {}
        let address = stream.local_addr().unwrap().ip().to_canonical();
        memory.lock().accepted.push((address, port));
        open.send_modify(|open| *open += 1);
        let (memory, open) = (memory.clone(), open.clone());
        all.spawn(async move {
            let _ = serve(stream, port, address, &memory).await;
            open.send_modify(|open| *open -= 1);
        });
    }
}

async fn serve(mut stream: TcpStream, port: u16, address: IpAddr, memory: &Mutex<Memory>) -> std::io::Result<()> {
    match port {
        ECHO => {
            let (mut read, mut write) = stream.split();
            tokio::io::copy(&mut read, &mut write).await?;
            write.shutdown().await
        }
        HTTP => http(stream, address).await,
        SINK => {
            let mut hash = Sha256::new();
            let mut buffer = vec![0; 256 << 10];
            loop {
                match stream.read(&mut buffer).await? {
                    0 => break,
                    count => hash.update(&buffer[..count]),
                }
            }
            let hash: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            stream.write_all(hash.as_bytes()).await?;
            stream.shutdown().await
        }
        SOURCE => {
            let size: u64 = line(&mut stream).await?.trim().parse().unwrap();
            let piece = bulk();
            let mut left = size;
            while left > 0 {
                let count = usize::try_from(left).unwrap().min(piece.len());
                stream.write_all(&piece[..count]).await?;
                left -= count as u64;
            }
            stream.shutdown().await
        }
        HALF => {
            stream.write_all(b"all that I say").await?;
            stream.shutdown().await?;
            let mut heard = String::new();
            stream.read_to_string(&mut heard).await?;
            memory.lock().heard_after_the_end.push(heard);
            Ok(())
        }
        _ => std::future::pending().await,
    }
}

/// A piece of what [`SOURCE`] sends, again and again: every byte tells where it stands.
pub fn bulk() -> Vec<u8> {
    (0..1_u32 << 18).flat_map(|number| number.wrapping_mul(2_654_435_761).to_le_bytes()).collect()
}

async fn line(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut line = Vec::new();
    loop {
        let byte = stream.read_u8().await?;
        if byte == b'\n' {
            return Ok(String::from_utf8_lossy(&line).into_owned());
        }
        line.push(byte);
    }
}

async fn http(mut stream: TcpStream, address: IpAddr) -> std::io::Result<()> {
    let request = line(&mut stream).await?;
    while !line(&mut stream).await?.trim().is_empty() {}
    let path = request.split(' ').nth(1).unwrap_or("/");
    let answer = match path.strip_prefix("/to/") {
        Some(host) => format!("HTTP/1.1 302 Found\r\nLocation: http://{host}/\r\nContent-Length: 0\r\n"),
        None => format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n", address.to_string().len()),
    };
    let body = if path.starts_with("/to/") { String::new() } else { address.to_string() };
    stream.write_all(format!("{answer}Connection: close\r\n\r\n{body}").as_bytes()).await?;
    stream.shutdown().await
}
