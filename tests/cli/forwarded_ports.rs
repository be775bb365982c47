//! `baton port-forward` and the ports of the Rust client, against the server itself.

use std::net::SocketAddr;

use baton::bus::LeaveReason;
use baton_client::{Error, Options, Sandbox};
use baton_protocol::id::SandboxId;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
};

use crate::{
    pipes::baton,
    script::soon,
    test_server::{World, until},
};

/// A program on the port that sends back everything once it has all of it, after a greeting.
async fn echo(world: &World, id: &SandboxId, port: u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    world.ports.listen(id, port, listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                stream.write_all(b"hello\n").await.unwrap();
                let mut heard = Vec::new();
                if stream.read_to_end(&mut heard).await.is_ok() {
                    let _ = stream.write_all(&heard).await;
                }
            });
        }
    });
}

async fn sandbox(world: &World) -> Sandbox {
    let options = Options::default().persistent(true);
    Sandbox::create(&format!("ws://{}", world.address), options).await.unwrap()
}

/// `baton port-forward` of these ports, once it listens, and its local addresses.
async fn forward(world: &World, sandbox: &Sandbox, ports: &[&str]) -> (Child, Vec<SocketAddr>) {
    let mut command: Command = baton(&format!("ws://{}", world.address));
    command.env("BATON_TOKEN", &sandbox.token().0).arg("port-forward").arg(sandbox.id().as_str()).args(ports);
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut addresses = Vec::new();
    for _ in ports {
        let line = soon(lines.next_line()).await.unwrap().expect("a line for each port");
        let address = line.strip_prefix("Forwarding ").and_then(|rest| rest.split(' ').next()).unwrap();
        addresses.push(address.parse().unwrap());
    }
    (child, addresses)
}

/// What the program on the port sends back.
async fn exchange(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut heard = Vec::new();
    soon(stream.read_to_end(&mut heard)).await.unwrap();
    heard
}

#[tokio::test]
async fn local_ports_lead_inside_until_ctrl_c_and_wait_for_a_sandbox_that_moves() {
    let world = World::with_storage().await;
    let sandbox = sandbox(&world).await;
    echo(&world, sandbox.id(), 5432).await;
    echo(&world, sandbox.id(), 80).await;
    let (mut child, addresses) = forward(&world, &sandbox, &[":5432", ":80"]).await;
    let bytes: Vec<u8> = (0..500_000_u32).map(|number| (number % 251) as u8).collect();
    for address in &addresses {
        assert!(exchange(*address, &bytes).await == [b"hello\n", &bytes[..]].concat());
    }
    // It leaves: the open connection is reset, and the next one brings it back.
    let mut open = TcpStream::connect(addresses[0]).await.unwrap();
    let mut greeting = [0; 6];
    soon(open.read_exact(&mut greeting)).await.unwrap();
    let id = sandbox.id().clone();
    sandbox.checkpoint().await.unwrap();
    until(async || world.count() == 0 && !world.front_board.is_held(&id)).await;
    assert_eq!(exchange(addresses[1], b"again").await, b"hello\nagain");
    assert_eq!(world.count(), 1);
    drop(open);

    let pid = nix::unistd::Pid::from_raw(child.id().unwrap() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    let status = soon(child.wait()).await.unwrap();
    assert_eq!(status.code(), Some(130));
    assert!(TcpStream::connect(addresses[0]).await.is_err());
}

#[tokio::test]
async fn a_port_without_a_server_resets_the_connection_and_is_named() {
    let world = World::new().await;
    let sandbox = Sandbox::create(&format!("ws://{}", world.address), Options::default()).await.unwrap();
    let (mut child, addresses) = forward(&world, &sandbox, &[":81"]).await;
    let mut stream = TcpStream::connect(addresses[0]).await.unwrap();
    assert!(matches!(soon(stream.read(&mut [0; 8])).await, Ok(0) | Err(_)));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let line = soon(lines.next_line()).await.unwrap().unwrap();
    assert!(line.contains("to port 81: ") && line.contains("nothing listens on this port"), "{line}");
}

#[tokio::test]
async fn the_client_opens_connections_and_makes_links() {
    let world = World::new().await;
    let sandbox = Sandbox::create(&format!("ws://{}", world.address), Options::default()).await.unwrap();
    echo(&world, sandbox.id(), 7).await;
    let mut connection = sandbox.port(7).connect().await.unwrap();
    connection.write_all(b"bytes").await.unwrap();
    connection.shutdown().await.unwrap();
    let mut heard = Vec::new();
    soon(connection.read_to_end(&mut heard)).await.unwrap();
    assert_eq!(heard, b"hello\nbytes");
    let Err(Error::Connection(text)) = sandbox.port(8).connect().await else { panic!("nothing listens there") };
    assert!(text.contains("nothing listens"), "{text}");
    let link =
        format!("http://{}/sandboxes/{}/ports/7/?sandbox_token={}", world.address, sandbox.id(), sandbox.token().0);
    assert_eq!(sandbox.url(7), link);

    let mut connection = sandbox.port(7).connect().await.unwrap();
    soon(connection.read_exact(&mut [0; 6])).await.unwrap();
    world.leave(sandbox.id(), LeaveReason::Room, false);
    let reset = soon(connection.read(&mut [0; 8])).await.unwrap_err();
    assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionReset);
}
