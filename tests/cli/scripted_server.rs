//! The client and `baton run` against the server itself, over a connection that is cut.

use std::{
    net::SocketAddr,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use baton_client::{CheckpointOptions, Error, Exec, Language, Options, Sandbox, SandboxConfig, Token};
use baton_protocol::id::{ExecId, SandboxId};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::{
    pipes::baton,
    script::soon,
    scripted_agent::pattern,
    test_server::{World, until},
};

/// Passes bytes between a client and the server, and cuts each of its first connections after a while.
struct Proxy {
    address: SocketAddr,
    connections: Arc<AtomicU32>,
    _tasks: JoinSet<()>,
}

impl Proxy {
    async fn start(server: SocketAddr, cuts: u32, after: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicU32::new(0));
        let counted = connections.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut pairs = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let number = counted.fetch_add(1, Ordering::SeqCst);
                let left = if number < cuts { after + u64::from(number) * 4_001 } else { u64::MAX };
                pairs.spawn(pass(client, server, left));
            }
        });
        Self { address, connections, _tasks: tasks }
    }

    fn url(&self) -> String {
        format!("ws://{}", self.address)
    }
}

async fn pass(client: TcpStream, server: SocketAddr, left: u64) {
    let server = TcpStream::connect(server).await.unwrap();
    for socket in [&client, &server] {
        // A cut is a reset: what was under way is lost.
        socket.set_zero_linger().unwrap();
    }
    let ((client_in, client_out), (server_in, server_out)) = (client.into_split(), server.into_split());
    tokio::select! {
        () = copy(client_in, server_out, u64::MAX) => {}
        () = copy(server_in, client_out, left) => {}
    }
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, mut left: u64) {
    let mut buffer = vec![0; 32 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        if left < count as u64 || to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
        left -= count as u64;
    }
}

fn persistent() -> Options {
    let config =
        SandboxConfig { enable_checkpoint: true, enable_sandbox_handoff: Some(true), ..SandboxConfig::default() };
    Options { config, ..Options::default() }
}

fn steps(code: &str) -> Exec {
    Exec::code(Language::Bash, code)
}

fn flood(count: u64) -> Vec<u8> {
    (0..count).map(pattern).collect()
}

#[tokio::test]
async fn commands_run_end_and_are_refused() {
    let world = World::new().await;
    let url = format!("ws://{}", world.address);
    let sandbox = soon(Sandbox::create(&url, Options::default())).await.unwrap();
    let (one, two) = tokio::join!(
        sandbox.exec(steps("out \"one\"\nerr \"oh\"\nexit 3")),
        sandbox.exec(steps("bytes [255, 0]\nexit 0")),
    );
    let one = soon(one.unwrap().collect()).await.unwrap();
    assert_eq!((&one.stdout[..], &one.stderr[..], one.outcome.exit_code), (&b"one"[..], &b"oh"[..], Some(3)));
    assert_eq!(soon(two.unwrap().collect()).await.unwrap().stdout, [255, 0]);
    let mut sleeper = sandbox.exec(steps("sleep")).await.unwrap();
    let long = steps(&"#".repeat(200_000)).stdin();
    let (refused, fine) = tokio::join!(sandbox.exec(long), sandbox.exec(steps("exit 0")));
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    assert!(soon(fine.unwrap().wait()).await.unwrap().is_success());
    sleeper.kill().await.unwrap();
    assert_eq!(soon(sleeper.wait()).await.unwrap().signal, Some(9));
    soon(sandbox.kill()).await.unwrap();
    until(async || world.count() == 0).await;
}

#[tokio::test]
async fn output_and_input_are_exact_over_twenty_cuts() {
    const COUNT: u64 = 6 << 20;
    let world = World::new().await;
    let proxy = Proxy::start(world.address, 20, 200_000).await;
    let sandbox = soon(Sandbox::create(&proxy.url(), Options::default())).await.unwrap();
    let running = sandbox.exec(steps(&format!("flood {COUNT}\nexit 9"))).await.unwrap();
    let echo = sandbox.exec(steps("cat\nexit 0").stdin()).await.unwrap();
    let input = flood(1 << 20);
    let typing = echo.control();
    let (collected, echoed, typed) = tokio::join!(running.collect(), echo.collect(), async {
        for part in input.chunks(50_000) {
            typing.write_stdin(part.to_vec()).await?;
        }
        typing.close_stdin();
        Ok::<_, Error>(())
    });
    typed.unwrap();
    let (collected, echoed) = (collected.unwrap(), echoed.unwrap());
    assert_eq!((collected.outcome.exit_code, collected.lost), (Some(9), 0));
    assert!(collected.stdout == flood(COUNT), "{} bytes", collected.stdout.len());
    assert!(echoed.stdout == input, "{} bytes of {}", echoed.stdout.len(), input.len());
    assert!(proxy.connections.load(Ordering::SeqCst) > 15, "it was hardly cut");
}

#[tokio::test]
async fn a_sandbox_is_checkpointed_attached_and_handed_off() {
    let world = World::with_storage().await;
    let url = format!("ws://{}", world.address);
    let sandbox = soon(Sandbox::create(&url, persistent())).await.unwrap();
    let mut ticking = sandbox.exec(steps("out \"a\"\nsleep")).await.unwrap();
    let refused = soon(sandbox.checkpoint()).await;
    assert!(matches!(refused, Err(Error::Checkpoint(_))), "{refused:?}");
    soon(sandbox.handoff()).await.unwrap();
    assert!(soon(ticking.next()).await.is_some());
    let id: ExecId = ticking.id().clone();
    soon(sandbox.checkpoint_with(CheckpointOptions { live: true, keep_running: false })).await.unwrap();
    assert!(matches!(soon(ticking.wait()).await, Err(Error::Ended(_))));
    let again = soon(Sandbox::attach(&url, sandbox.id().clone(), sandbox.token().clone())).await.unwrap();
    let mut followed = again.follow(&id, baton_client::Offsets::default()).await.unwrap();
    followed.kill().await.unwrap();
    assert_eq!(soon(followed.wait()).await.unwrap().signal, Some(9));
    soon(again.kill()).await.unwrap();
}

#[tokio::test]
async fn who_may_not_attach_is_told_why() {
    let world = World::with_storage().await;
    let url = format!("ws://{}", world.address);
    let sandbox = soon(Sandbox::create(&url, persistent())).await.unwrap();
    let (id, token) = (sandbox.id().clone(), sandbox.token().clone());
    let other = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
    let wrong = soon(Sandbox::attach(&url, id.clone(), Token("wrong".into()))).await.unwrap_err();
    assert!(matches!(wrong, Error::Permission(_)), "{wrong:?}");
    assert_eq!(soon(Sandbox::attach(&url, other, token.clone())).await.unwrap_err(), Error::NotFound);
    assert_eq!(soon(Sandbox::attach(&url, id, token)).await.unwrap_err(), Error::InUse);
    soon(sandbox.kill()).await.unwrap();
}

#[tokio::test]
async fn baton_run_passes_everything_through_a_cut_connection() {
    const COUNT: u64 = 2 << 20;
    let world = World::new().await;
    let proxy = Proxy::start(world.address, 5, 300_000).await;
    let code = format!("flood {COUNT}\nerr \"done\"\nexit 5");
    let mut command = baton(&proxy.url());
    let child = command.args(["run", "--", "sh", "-c", &code]).stdin(Stdio::null()).spawn().unwrap();
    let output = soon(child.wait_with_output()).await.unwrap();
    assert_eq!((output.status.code(), &output.stderr[..]), (Some(5), &b"done"[..]));
    assert!(output.stdout == flood(COUNT));
    until(async || world.count() == 0).await;
}
