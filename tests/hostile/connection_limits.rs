//! Connections that are opened and then left idle: they are closed in time, and until then they keep no one out.

use std::{
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, routing::get};
use baton::api::ApiSettings;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};

use crate::scripted::{
    test_server::{Plan, World, until},
    wire_client::{Client, connect},
};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
const HALF_A_HEAD: &[u8] = b"GET /status HTTP/1.1\r\nhost: x\r\nx-more: ";

fn plan(change: fn(&mut ApiSettings)) -> Plan {
    Plan { has_storage: false, can_snapshot: false, change }
}

async fn open_from(last: u8, address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0))).unwrap();
    socket.connect(address).await.unwrap()
}

/// The status of an answer on a connection that is kept, or `None` when the connection ends first.
async fn ask(stream: &mut TcpStream) -> Option<u16> {
    stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.ok()?;
    let mut heard = Vec::new();
    while !heard.ends_with(b"running\"}") {
        match stream.read_buf(&mut heard).await {
            Ok(0) | Err(_) => return None,
            Ok(_) => {}
        }
    }
    String::from_utf8_lossy(&heard).split(' ').nth(1)?.parse().ok()
}

/// The server closes it while its clock is moved on.
async fn is_closed(world: &World, stream: &mut TcpStream) {
    let mut rest = Vec::new();
    tokio::select! {
        // Reset or ended: either way it is gone.
        _ = stream.read_to_end(&mut rest) => {}
        () = until(async || {
            world.clock.skip(Duration::from_secs(5));
            false
        }) => panic!("it stays open"),
    }
}

#[tokio::test]
async fn a_connection_that_is_idle_after_a_request_is_closed() {
    let world = World::new().await;
    let mut idle = TcpStream::connect(world.address).await.unwrap();
    assert_eq!(ask(&mut idle).await, Some(200));
    is_closed(&world, &mut idle).await;
}

#[tokio::test]
async fn with_a_longer_keep_alive_it_stays_and_answers() {
    let world = World::with(plan(|settings| settings.connections.keep_alive = Duration::from_secs(86_400))).await;
    let mut idle = TcpStream::connect(world.address).await.unwrap();
    for _ in 0..10 {
        assert_eq!(ask(&mut idle).await, Some(200));
        world.clock.skip(Duration::from_secs(600));
    }
}

#[tokio::test]
async fn a_head_that_never_ends_is_closed_however_it_dribbles() {
    let world = World::new().await;
    let mut slow = TcpStream::connect(world.address).await.unwrap();
    assert_eq!(ask(&mut slow).await, Some(200));
    slow.write_all(HALF_A_HEAD).await.unwrap();
    let dribbled = async {
        while slow.write_all(b"x").await.is_ok() {
            world.clock.skip(Duration::from_secs(1));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), dribbled).await.expect("it stays open");
}

#[tokio::test]
async fn a_head_that_is_too_long_is_refused() {
    let world = World::new().await;
    let mut long = TcpStream::connect(world.address).await.unwrap();
    long.write_all(HALF_A_HEAD).await.unwrap();
    let _ = long.write_all(&vec![b'x'; 64 << 10]).await;
    let mut heard = Vec::new();
    let _ = tokio::time::timeout(Duration::from_secs(20), long.read_to_end(&mut heard)).await.expect("it stays open");
    assert!(heard.starts_with(b"HTTP/1.1 431"), "{:?}", String::from_utf8_lossy(&heard));
}

#[tokio::test]
async fn http2_is_not_spoken() {
    let world = World::new().await;
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(PREFACE).await.unwrap();
    let mut heard = Vec::new();
    // It ends by itself: no clock is moved.
    let _ = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut heard)).await.expect("it stays open");
    assert!(heard.is_empty() || heard.starts_with(b"HTTP/1.1 "), "{heard:?}");

    let address = undefended(usize::MAX >> 4).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(PREFACE).await.unwrap();
    let mut settings = [0; 9];
    stream.read_exact(&mut settings).await.unwrap();
    assert_eq!(settings[3], 4, "the control speaks HTTP/2: a SETTINGS frame");
}

#[tokio::test]
async fn idle_connections_do_not_keep_a_probe_out() {
    let world = World::with(plan(|settings| settings.connections.connections = 8)).await;
    let mut client = Client::running(&world, "{}").await;
    let mut idle = Vec::new();
    for attack in [Attack::Silence, Attack::AfterARequest, Attack::HalfAHead] {
        for _ in 0..20 {
            idle.push(attack.mount(world.address).await);
        }
        let mut probe = TcpStream::connect(world.address).await.unwrap();
        assert_eq!(ask(&mut probe).await, Some(200), "{attack:?}");
        client.exec("out \"x\"").await;
        client.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
    }
}

/// Where connections are merely counted, eight of them are enough.
#[tokio::test]
async fn where_connections_are_only_counted_idle_ones_keep_a_probe_out() {
    let address = undefended(8).await;
    let mut idle = Vec::new();
    for _ in 0..8 {
        idle.push(Attack::AfterARequest.mount(address).await);
    }
    let mut probe = TcpStream::connect(address).await.unwrap();
    let others = async {
        for _ in 0..20 {
            for stream in &mut idle {
                assert_eq!(ask(stream).await, Some(200));
            }
        }
    };
    tokio::select! {
        answer = ask(&mut probe) => panic!("there was no place for it: {answer:?}"),
        () = others => {}
    }
}

#[tokio::test]
async fn strangers_keep_no_client_with_a_key_out_and_close_none_that_is_in() {
    let change = |settings: &mut ApiSettings| {
        settings.connections.connections = 6;
        settings.api_keys = baton::config::api_keys("alpha").unwrap();
    };
    let world = World::with(plan(change)).await;
    let mut idle = Vec::new();
    let mut clients = Vec::new();
    for _ in 0..4 {
        for _ in 0..10 {
            idle.push(Attack::AfterARequest.mount(world.address).await);
        }
        let socket = connect(&world, "/create?details=1", &[("x-api-key", "alpha")]).await.unwrap();
        let mut client = Client::new(socket);
        client.hears("CREATING").await;
        client.says("{}").await;
        client.hears("sandbox_id RUNNING").await;
        clients.push(client);
    }
    for client in &mut clients {
        client.exec("out \"x\"").await;
        client.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
    }
    // The last place is for newcomers alone: whoever would keep it is refused, and a probe is answered.
    for _ in 0..2 {
        let last = connect(&world, "/create", &[("x-api-key", "alpha")]).await;
        match last {
            Ok(socket) => clients.push(Client::new(socket)),
            Err(status) => assert_eq!(status, 503),
        }
    }
    assert_eq!(clients.len(), 5);
    let mut probe = TcpStream::connect(world.address).await.unwrap();
    assert_eq!(ask(&mut probe).await, Some(200));
}

#[tokio::test]
async fn one_address_closes_its_own_connections_when_it_opens_too_many() {
    let world = World::with(plan(|settings| settings.connections.per_peer = Some(3))).await;
    let mut bystander = open_from(2, world.address).await;
    assert_eq!(ask(&mut bystander).await, Some(200));
    let mut flood = Vec::new();
    for _ in 0..20 {
        let mut stream = open_from(3, world.address).await;
        assert_eq!(ask(&mut stream).await, Some(200));
        flood.push(stream);
    }
    let mut open = 0;
    for stream in &mut flood {
        open += u32::from(ask(stream).await.is_some());
    }
    assert_eq!((open, ask(&mut bystander).await), (3, Some(200)));
}

#[tokio::test]
async fn without_a_cap_per_address_one_may_have_them_all() {
    let world = World::new().await;
    let mut flood = Vec::new();
    for _ in 0..20 {
        flood.push(Attack::AfterARequest.mount(world.address).await);
    }
    for stream in &mut flood {
        assert_eq!(ask(stream).await, Some(200));
    }
}

#[derive(Clone, Copy, Debug)]
enum Attack {
    Silence,
    AfterARequest,
    HalfAHead,
}

impl Attack {
    async fn mount(self, address: SocketAddr) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        match self {
            Self::Silence => {}
            Self::AfterARequest => assert_eq!(ask(&mut stream).await, Some(200)),
            Self::HalfAHead => stream.write_all(HALF_A_HEAD).await.unwrap(),
        }
        stream
    }
}

/// A server that counts its connections and does nothing else about them.
async fn undefended(places: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = Router::new().route("/", get(|| async { r#"{"message":"Server is running"}"# }));
    let counted = Counted { listener, places: Arc::new(Semaphore::new(places)) };
    tokio::spawn(async move { axum::serve(counted, app).await });
    address
}

struct Counted {
    listener: TcpListener,
    places: Arc<Semaphore>,
}

struct Held {
    stream: TcpStream,
    _place: OwnedSemaphorePermit,
}

impl axum::serve::Listener for Counted {
    type Io = Held;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Held, SocketAddr) {
        let place = self.places.clone().acquire_owned().await.unwrap();
        let (stream, peer) = self.listener.accept().await.unwrap();
        (Held { stream, _place: place }, peer)
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl AsyncRead for Held {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Held {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
