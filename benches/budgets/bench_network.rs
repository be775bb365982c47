//! Rows 18 and 19: connections of a program in a sandbox, with a plain relay in user space on loopback beside them.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::{
    bench_client::{Client, Dialect},
    bench_fixture::{Place, Store},
    bench_table::{Line, Table, Times},
};

const STREAMS: u32 = 3;
/// 256 MiB in pieces of 256 KiB.
const PIECES: usize = 1024;
const PIECE: usize = 256 << 10;
const CONNECTIONS: usize = 200;
const ROUND_TRIPS: usize = 500;

/// Prints the seconds that each step took.
const PROGRAM: &str = "
import socket, sys, time
host, port, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def connect():
    link = socket.create_connection((host, port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link
def done(began): print(time.monotonic() - began)
if what == 'connect':
    for number in range(200):
        began = time.monotonic()
        with connect() as link: link.sendall(b'x'); link.recv(1)
        done(began)
    sys.exit()
link = connect()
began = time.monotonic()
if what == 'out':
    piece = bytes(256 << 10)
    for number in range(1024): link.sendall(piece)
    link.shutdown(socket.SHUT_WR); link.recv(1); done(began)
elif what == 'in':
    space = bytearray(256 << 10)
    link.sendall(b'x')
    while link.recv_into(space): pass
    done(began)
else:
    for number in range(500):
        began = time.monotonic()
        link.sendall(bytes(64)); link.recv(64, socket.MSG_WAITALL)
        done(began)
";

/// Servers outside, each also behind a relay.
struct Peers {
    echo: [SocketAddr; 2],
    sink: [SocketAddr; 2],
    source: [SocketAddr; 2],
    _tasks: JoinSet<()>,
}

async fn listen<F: Future<Output = std::io::Result<()>> + Send + 'static>(
    tasks: &mut JoinSet<()>,
    host: IpAddr,
    serve: impl Fn(TcpStream) -> F + Send + 'static,
) -> Result<SocketAddr> {
    let listener = TcpListener::bind((host, 0)).await?;
    let address = listener.local_addr()?;
    tasks.spawn(async move {
        let mut open = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            while open.try_join_next().is_some() {}
            let _ = stream.set_nodelay(true);
            open.spawn(serve(stream));
        }
    });
    Ok(address)
}

impl Peers {
    async fn start(host: IpAddr) -> Result<Self> {
        let mut tasks = JoinSet::new();
        let echo = listen(&mut tasks, host, |mut stream| async move {
            let (mut read, mut write) = stream.split();
            tokio::io::copy(&mut read, &mut write).await.map(drop)
        });
        let echo = echo.await?;
        let sink = listen(&mut tasks, host, |mut stream| async move {
            let mut space = vec![0; PIECE];
            while stream.read(&mut space).await? > 0 {}
            stream.write_all(b"x").await
        });
        let sink = sink.await?;
        let source = listen(&mut tasks, host, |mut stream| async move {
            stream.read_u8().await?;
            let piece = vec![0; PIECE];
            for _ in 0..PIECES {
                stream.write_all(&piece).await?;
            }
            stream.shutdown().await
        });
        let source = source.await?;
        let mut both = Vec::new();
        for address in [echo, sink, source] {
            let relay = listen(&mut tasks, host, move |mut stream| async move {
                let mut outer = TcpStream::connect(address).await?;
                outer.set_nodelay(true)?;
                copy_bidirectional(&mut stream, &mut outer).await.map(drop)
            });
            both.push([address, relay.await?]);
        }
        let [echo, sink, source] = both.try_into().ok().context("three peers")?;
        Ok(Self { echo, sink, source, _tasks: tasks })
    }
}

/// The address of this machine that its connections come from; nothing is sent to learn it.
fn own_address() -> Result<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect("192.0.2.1:9").context("rows 18 and 19 need a machine with an address")?;
    Ok(socket.local_addr()?.ip())
}

async fn connect(to: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// What the program does, without a sandbox.
async fn floor(to: SocketAddr, what: &str) -> Result<Times> {
    let mut times = Times::default();
    if what == "connect" {
        for _ in 0..CONNECTIONS {
            let began = Instant::now();
            let mut link = connect(to).await?;
            link.write_all(b"x").await?;
            link.read_u8().await?;
            times.add(began.elapsed());
        }
        return Ok(times);
    }
    let mut link = connect(to).await?;
    let mut space = vec![0; PIECE];
    let began = Instant::now();
    match what {
        "out" => {
            for _ in 0..PIECES {
                link.write_all(&space).await?;
            }
            link.shutdown().await?;
            link.read_u8().await?;
            times.add(began.elapsed());
        }
        "in" => {
            link.write_all(b"x").await?;
            while link.read(&mut space).await? > 0 {}
            times.add(began.elapsed());
        }
        _ => {
            for _ in 0..ROUND_TRIPS {
                let began = Instant::now();
                link.write_all(&[0; 64]).await?;
                link.read_exact(&mut space[..64]).await?;
                times.add(began.elapsed());
            }
        }
    }
    Ok(times)
}

async fn ours(client: &mut Client, name: &str, to: SocketAddr, what: &str) -> Result<Times> {
    let (host, port) = (to.ip().to_string(), to.port().to_string());
    let argv = ["python3", "-c", PROGRAM, &host, &port, what];
    let mut written = Vec::new();
    let request = json!({"action": "exec", "exec_id": name, "argv": argv});
    client
        .run(&request, |bytes| {
            written.extend_from_slice(bytes);
            Ok(())
        })
        .await?;
    let seconds = String::from_utf8(written)?;
    let seconds = seconds.lines().map(|line| Ok(Duration::from_secs_f64(line.parse()?)));
    let times: Times = seconds.collect::<Result<Vec<_>>>()?.into_iter().collect();
    Ok(times)
}

pub async fn measure(place: &Place, rows: &[u32], table: &mut Table) -> Result<()> {
    let host = own_address()?;
    let peers = Peers::start(host).await?;
    let own = host.to_string();
    let settings = [
        ("BATON_WARM", "0"),
        ("BATON_EGRESS", "any"),
        ("BATON_EGRESS_EXEMPT", own.as_str()),
        ("BATON_EGRESS_LIMITS", "opens=off"),
    ];
    let server = place.server_with("network", Store::Directory(&place.data("network")?), &settings).await?;
    let (mut client, _) = Client::create(&server, Dialect::V1, &json!({})).await?;
    if rows.contains(&18) {
        for (what, to, title) in [
            ("out", peers.sink, "256 MiB out of a sandbox, one connection"),
            ("in", peers.source, "256 MiB into a sandbox, one connection"),
        ] {
            let (mut through_agent, mut through_relay) = (Times::default(), Times::default());
            for number in 0..STREAMS {
                through_relay.add(floor(to[1], what).await?.median());
                through_agent.add(ours(&mut client, &format!("{what}{number}"), to[0], what).await?.median());
            }
            table.add(throughput(title, &through_agent, &through_relay));
        }
    }
    if rows.contains(&19) {
        for (what, title) in [("connect", "connect, one byte each way, close"), ("ping", "a round trip of 64 bytes")] {
            let through_relay = floor(peers.echo[1], what).await?;
            let through_agent = ours(&mut client, what, peers.echo[0], what).await?;
            table
                .add(Line { is_met: None, ..Line::ratio("19", title, &through_agent, &through_relay, 2.0, "printed") });
        }
    }
    client.kill().await?;
    server.stop().await
}

/// More is better here.
fn throughput(what: &'static str, ours: &Times, floor: &Times) -> Line {
    let speed = |times: &Times| format!("{:.0} MB/s", (PIECES * PIECE) as f64 / 1e6 / times.median().as_secs_f64());
    Line {
        row: "18",
        what,
        ours: speed(ours),
        floor: speed(floor),
        ratio: Some(floor.ratio(ours)),
        budget: "printed",
        is_met: None,
    }
}
