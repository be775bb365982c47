//! A network between clients and servers: it cuts, counts, and leads elsewhere.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};

use super::servers::Server;

#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

#[derive(Debug)]
struct Shared {
    server: Mutex<String>,
    connections: AtomicU32,
    /// Of both directions.
    bytes: AtomicU64,
    /// Every connection of an older number ends.
    end: watch::Sender<u64>,
}

impl Proxy {
    /// Cuts each of its first connections after `after` bytes of either direction, each a little later than the last.
    pub async fn start(server: &Server, cuts: u32, after: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            server: Mutex::new(server.address.clone()),
            connections: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            end: watch::Sender::new(0),
        });
        let all = shared.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut pairs = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let number = all.connections.fetch_add(1, Ordering::SeqCst);
                let left = if number < cuts { after + u64::from(number) * 4_001 } else { u64::MAX };
                pairs.spawn(pass(client, all.clone(), left));
            }
        });
        Self { address, shared, _tasks: tasks }
    }

    pub fn url(&self) -> String {
        format!("ws://{}", self.address)
    }

    pub fn connections(&self) -> u32 {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// What went through so far, in both directions.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::SeqCst)
    }

    /// Waits until so much went through.
    pub async fn after_bytes(&self, count: u64) {
        while self.bytes() < count {
            crate::fixture::clock().sleep(std::time::Duration::from_millis(2)).await;
        }
    }

    /// Cuts what there is; whoever comes back is led to another server.
    pub fn lead_to(&self, server: &Server) {
        self.shared.server.lock().unwrap().clone_from(&server.address);
        self.shared.end.send_modify(|end| *end += 1);
    }
}

async fn pass(client: TcpStream, shared: Arc<Shared>, left: u64) {
    let mut end = shared.end.subscribe();
    let address = shared.server.lock().unwrap().clone();
    let Ok(server) = TcpStream::connect(address).await else { return };
    for socket in [&client, &server] {
        // A cut is a reset: what was under way is lost.
        socket.set_zero_linger().unwrap();
    }
    let ((client_in, client_out), (server_in, server_out)) = (client.into_split(), server.into_split());
    tokio::select! {
        () = copy(client_in, server_out, left, &shared) => {}
        () = copy(server_in, client_out, left, &shared) => {}
        _ = end.changed() => {}
    }
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, mut left: u64, shared: &Shared) {
    let mut buffer = vec![0; 32 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        if left < count as u64 || to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
        left -= count as u64;
        shared.bytes.fetch_add(count as u64, Ordering::SeqCst);
    }
}
