//! What the client says and hears, in which order, and how it ends.

use std::time::Duration;

use crate::script::{Heard, Server, exec_id, sandbox_id, soon, token};
use baton_client::{
    CheckpointOptions, Chunk, Connection, Cpus, Error, Exec, Language, Limits, Options, Sandbox, StdStream,
};
use baton_protocol::{
    event::{Copied, Event, Status, Update},
    frame::Stream,
    id::{CheckpointId, Nonce, SnapshotName},
    request::{Command, Idle, Persistence, Request, SandboxConfig},
};

pub async fn create(server: &Server) -> Sandbox {
    soon(Sandbox::create(&server.url(), Options::default())).await.unwrap()
}

async fn attach(server: &Server, connection: Connection) -> Result<Sandbox, Error> {
    soon(Sandbox::attach_with(&server.url(), sandbox_id(), token(), connection)).await
}

#[tokio::test]
async fn a_sandbox_is_created_with_what_was_asked_for() {
    let server = Server::start().await;
    let limits = Limits {
        memory: Some(512 << 20),
        cpus: Some(Cpus(1500)),
        pids: Some(64),
        disk: Some(1 << 30),
        files: Some(256),
        ..Limits::default()
    };
    let config = SandboxConfig {
        enable_checkpoint: true,
        idle_timeout: Some(Idle::Never),
        ttl: Some(Duration::from_secs(3600)),
        labels: [("team".into(), "blue".into())].into(),
        env: [("LANG".into(), "C".into())].into(),
        cwd: Some("/srv".into()),
        limits,
        ..SandboxConfig::default()
    };
    let plain =
        Options { config: SandboxConfig { enable_checkpoint: true, ..SandboxConfig::default() }, ..Options::default() };
    let options = plain.idle_timeout(Idle::Never).ttl(Duration::from_secs(3600)).label("team", "blue").env("LANG", "C");
    let options = options.cwd("/srv").memory(512 << 20).cpus(1.5).pids(64).disk(1 << 30).files(256);
    let connection = Connection {
        api_key: Some("k3y".into()),
        headers: vec![("X-Proxy".into(), "yes".into())],
        ..Connection::default()
    };
    let url = server.url();
    let asking = Sandbox::create(&url, Options { connection, ..options });
    let (sandbox, ()) = tokio::join!(asking, async {
        let mut peer = server.accept().await;
        assert_eq!(peer.path, "/create");
        assert_eq!(peer.headers["x-api-key"], "k3y");
        assert_eq!(peer.headers["x-proxy"], "yes");
        assert_eq!(peer.headers["sec-websocket-protocol"], "baton.v1");
        assert!(!peer.headers.contains_key("x-sandbox-token"));
        assert!(peer.request().await == Request::Config(Box::new(config)));
        peer.hello().await;
        peer.text(r#"{"event":"news","of":"a newer server"}"#.into()).await;
        peer.status(Status::Creating).await;
        peer.say(&Event::SandboxId { sandbox_id: sandbox_id(), sandbox_token: token(), persistent: Some(true) }).await;
        peer.status(Status::Running).await;
    });
    let sandbox = sandbox.unwrap();
    assert_eq!((sandbox.id(), sandbox.token()), (&sandbox_id(), &token()));
    assert!(sandbox.instance().is_some());
}

#[tokio::test]
async fn a_sandbox_is_persistent_where_it_can_be_unless_the_caller_says_otherwise() {
    let server = Server::start().await;
    let url = server.url();
    let handoff = SandboxConfig { enable_sandbox_handoff: Some(false), ..SandboxConfig::default() };
    for (options, expected) in [
        (Options::default(), Some(Persistence::Auto)),
        (Options::default().persistent(true), Some(Persistence::Yes)),
        (Options::default().persistent(false), Some(Persistence::No)),
        (Options { config: handoff, ..Options::default() }, None),
    ] {
        let asking = Sandbox::create(&url, options);
        let (sandbox, ()) = tokio::join!(asking, async {
            let mut peer = server.accept().await;
            let Request::Config(config) = peer.request().await else { panic!() };
            assert_eq!(config.persistent, expected);
            peer.hello().await;
            let is_stored = Some(expected != Some(Persistence::No));
            let event = Event::SandboxId { sandbox_id: sandbox_id(), sandbox_token: token(), persistent: is_stored };
            peer.say(&event).await;
            peer.status(Status::Running).await;
        });
        assert_eq!(sandbox.unwrap().is_persistent(), Some(expected != Some(Persistence::No)));
    }
}

#[tokio::test]
async fn output_arrives_in_order_and_the_end_with_its_code() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let exec = Exec::argv(["sh", "-c", "…"]).env("A", "b").cwd("/src").user("nobody").timeout(Duration::from_secs(3));
    let (running, id) = tokio::join!(sandbox.exec(exec), async {
        let Request::Exec(exec) = peer.request().await else { panic!() };
        assert_eq!(exec.command, Command::Argv(vec!["sh".into(), "-c".into(), "…".into()]));
        assert_eq!((exec.cwd.as_deref(), exec.user.as_deref()), (Some("/src"), Some("nobody")));
        assert_eq!((exec.env["A"].as_str(), exec.timeout, exec.stdin), ("b", Some(Duration::from_secs(3)), false));
        let id = exec.exec_id.unwrap();
        peer.started(&id, 4).await;
        id
    });
    let mut running = running.unwrap();
    peer.output(Stream::Stdout, 4, 0, b"one").await;
    peer.output(Stream::Stderr, 4, 0, b"\xff\0").await;
    peer.output(Stream::Stdout, 4, 3, b"two").await;
    peer.output(Stream::Stdout, 9, 0, b"of nobody").await;
    peer.done(&id, 7).await;
    let mut heard = Vec::new();
    while let Some((output, Chunk::Data(bytes))) = soon(running.next()).await {
        heard.push((output, bytes.to_vec()));
    }
    let expected: [(StdStream, &[u8]); 3] =
        [(StdStream::Stdout, b"one"), (StdStream::Stderr, b"\xff\0"), (StdStream::Stdout, b"two")];
    assert_eq!(heard, expected.map(|(output, bytes)| (output, bytes.to_vec())));
    let outcome = soon(running.wait()).await.unwrap();
    assert_eq!((outcome.exit_code, outcome.duration), (Some(7), Some(Duration::from_millis(12))));
    let Request::Ack { exec_id, offsets } = peer.request().await else { panic!() };
    assert_eq!((exec_id, offsets.stdout, offsets.stderr), (id, 6, 2));
}

#[tokio::test]
async fn several_commands_run_side_by_side() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (one, two, ()) = tokio::join!(
        sandbox.exec(Exec::code(Language::Python, "1").id(exec_id("one"))),
        sandbox.exec(Exec::code(Language::Bash, "2").id(exec_id("two"))),
        async {
            let (first, second) = (peer.exec().await, peer.exec().await);
            peer.started(&second, 2).await;
            peer.output(Stream::Stdout, 2, 0, second.as_str().as_bytes()).await;
            peer.started(&first, 1).await;
            peer.output(Stream::Stdout, 1, 0, first.as_str().as_bytes()).await;
            peer.done(&first, 1).await;
            peer.done(&second, 2).await;
        }
    );
    for (running, name, code) in [(one, "one", 1), (two, "two", 2)] {
        let collected = soon(running.unwrap().collect()).await.unwrap();
        assert_eq!((collected.stdout, collected.outcome.exit_code), (name.as_bytes().to_vec(), Some(code)));
    }
}

#[tokio::test]
async fn a_refused_command_is_an_error_and_the_others_go_on() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (good, refused, ()) = tokio::join!(
        sandbox.exec(Exec::argv(["good"]).id(exec_id("good"))),
        sandbox.exec(Exec::argv(["bad"]).id(exec_id("bad"))),
        async {
            peer.exec().await;
            peer.exec().await;
            // A refusal that does not say of what: the client asks.
            peer.refuse(Status::ExecutionError, "no such directory").await;
            let Request::Reconnect { offsets, .. } = peer.request().await else { panic!() };
            assert_eq!(offsets.into_keys().collect::<Vec<_>>(), [exec_id("bad"), exec_id("good")]);
            peer.gone(&exec_id("bad"), "not known").await;
            peer.started(&exec_id("good"), 1).await;
        }
    );
    let message = "no such directory".to_owned();
    assert_eq!(refused.unwrap_err(), Error::Refused { status: Status::ExecutionError, message });
    peer.done(&exec_id("good"), 0).await;
    assert!(soon(good.unwrap().wait()).await.unwrap().is_success());
    let (alone, ()) = tokio::join!(sandbox.exec(Exec::argv(["bad"])), async {
        assert!(matches!(peer.request_but_ack().await, Request::Exec(_)));
        peer.refuse(Status::ExecutionUnsupportedLanguageError, "no").await;
    });
    assert!(matches!(alone, Err(Error::Refused { status: Status::ExecutionUnsupportedLanguageError, .. })));
}

#[tokio::test]
async fn a_command_that_is_gone_ends_with_the_reason() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (running, id) = tokio::join!(sandbox.exec(Exec::argv(["x"])), async {
        let id = peer.exec().await;
        peer.started(&id, 1).await;
        id
    });
    peer.gone(&id, "started anew").await;
    let outcome = soon(running.unwrap().wait()).await.unwrap();
    assert_eq!((outcome.error.as_deref(), outcome.exit_code), (Some("started anew"), None));
}

#[tokio::test]
async fn signals_sizes_and_kills_name_their_command() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (running, id) = tokio::join!(sandbox.exec(Exec::argv(["top"]).pty(80, 24)), async {
        let Request::Exec(exec) = peer.request().await else { panic!() };
        assert!(exec.stdin && exec.pty.is_some_and(|pty| (pty.cols, pty.rows) == (80, 24)));
        let id = exec.exec_id.unwrap();
        peer.started(&id, 1).await;
        id
    });
    let mut running = running.unwrap();
    running.signal("INT").await.unwrap();
    running.resize(120, 40).await.unwrap();
    running.kill().await.unwrap();
    assert!(peer.request().await == Request::Signal { exec_id: id.clone(), signal: "INT".into() });
    assert!(peer.request().await == Request::Resize { exec_id: id.clone(), cols: 120, rows: 40 });
    assert!(peer.request().await == Request::KillProcess { exec_id: Some(id.clone()) });
    peer.status(Status::ExecutionForceKilled).await;
    peer.update(Update { exec_id: Some(id), signal: Some(9), ..Update::new(Status::ExecutionDone) }).await;
    assert_eq!(soon(running.wait()).await.unwrap().signal, Some(9));
    // To a command that is over nothing is said.
    running.signal("INT").await.unwrap();
}

#[tokio::test]
async fn a_checkpoint_ends_the_session_and_gives_its_id() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let made = CheckpointId::new(&sandbox_id(), 1, 2, &Nonce::from_bits([1; 16]));
    let (id, ()) = tokio::join!(sandbox.checkpoint(), async {
        assert!(peer.request().await == Request::Checkpoint { live: false, keep_running: false });
        for status in [Status::Checkpointing, Status::Deleting, Status::Deleted] {
            peer.status(status).await;
        }
        peer.update(Update { checkpoint_id: Some(made.clone()), ..Update::new(Status::Checkpointed) }).await;
        peer.close(1000).await;
    });
    assert_eq!(id.unwrap(), made);
    let after = soon(sandbox.exec(Exec::argv(["true"]))).await.unwrap_err();
    assert_eq!(after, Error::Ended("the sandbox was checkpointed".into()));
}

#[tokio::test]
async fn a_refused_checkpoint_leaves_the_session_as_it_was() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let how = CheckpointOptions { live: true, keep_running: true };
    let (refused, ()) = tokio::join!(sandbox.checkpoint_with(how), async {
        assert!(peer.request().await == Request::Checkpoint { live: true, keep_running: true });
        peer.status(Status::Checkpointing).await;
        peer.refuse(Status::ExecutionInProgressError, "busy").await;
    });
    assert_eq!(refused.unwrap_err(), Error::Checkpoint("busy".into()));
    let name = SnapshotName::parse("mine").unwrap();
    let (made, ()) = tokio::join!(sandbox.snapshot(&name), async {
        assert!(peer.request().await == Request::Snapshot { name: name.clone(), full: false });
        peer.status(Status::FilesystemSnapshotCreating).await;
        peer.update(Update { snapshot: Some(name.clone()), ..Update::new(Status::FilesystemSnapshotCreated) }).await;
    });
    made.unwrap();
}

#[tokio::test]
async fn a_failed_checkpoint_closes_the_session_and_the_client_comes_back() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (refused, ()) = tokio::join!(sandbox.checkpoint(), async {
        peer.request().await;
        peer.status(Status::Checkpointing).await;
        peer.refuse(Status::CheckpointError, "no room").await;
        peer.close(4000).await;
    });
    assert_eq!(refused.unwrap_err(), Error::Checkpoint("no room".into()));
    let mut peer = server.attach(Vec::new()).await;
    let (running, ()) = tokio::join!(sandbox.exec(Exec::argv(["true"])), async {
        let id = peer.exec().await;
        peer.started(&id, 1).await;
    });
    running.unwrap();
}

#[tokio::test]
async fn a_fork_tells_where_the_copies_are() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (places, ()) = tokio::join!(sandbox.fork(1), async {
        assert!(peer.request().await == Request::Fork { count: 1 });
        let copy = Copied { sandbox_id: sandbox_id(), sandbox_token: token() };
        peer.say(&Event::Forked { sandboxes: vec![copy] }).await;
    });
    assert_eq!(places.unwrap()[0].token, token());
    let (refused, ()) = tokio::join!(sandbox.fork(2), async {
        peer.request().await;
        peer.refuse(Status::Error, "not here").await;
    });
    assert!(matches!(refused, Err(Error::Refused { .. })));
}

#[tokio::test]
async fn a_handoff_is_done_when_the_sandbox_runs_again() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (moved, ()) = tokio::join!(sandbox.handoff(), async {
        assert!(peer.request().await == Request::Handoff);
        peer.status(Status::Checkpointing).await;
        peer.status(Status::Checkpointed).await;
        peer.close(1012).await;
        server.attach(Vec::new()).await;
    });
    moved.unwrap();
}

#[tokio::test]
async fn a_kill_is_asked_for_again_when_its_connection_breaks() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (killed, ()) = tokio::join!(sandbox.kill(), async {
        assert!(peer.request().await == Request::KillSandbox);
        peer.cut();
        let mut peer = server.attach(Vec::new()).await;
        assert!(peer.request().await == Request::KillSandbox);
        peer.killed().await;
    });
    killed.unwrap();
    sandbox.kill().await.unwrap();
}

#[tokio::test]
async fn what_a_first_attach_is_refused_for_is_told_at_once() {
    for (status, message, code, error) in [
        (Status::NotFound, None, 1011, Error::NotFound),
        (Status::InUse, None, 1011, Error::InUse),
        (Status::PermissionDenialError, Some("no"), 4000, Error::Permission("no".into())),
        (Status::RestoreError, Some("rotten"), 4000, Error::Restore("rotten".into())),
    ] {
        let server = Server::start().await;
        let (refused, ()) = tokio::join!(attach(&server, Connection::default()), async {
            let mut peer = server.accept().await;
            peer.hello().await;
            match message {
                Some(message) => peer.refuse(status, message).await,
                None => peer.status(status).await,
            }
            peer.close(code).await;
        });
        assert_eq!(refused.unwrap_err(), error);
    }
}

#[tokio::test]
async fn a_refused_creation_says_why() {
    let server = Server::start().await;
    let url = server.url();
    let (refused, ()) = tokio::join!(Sandbox::create(&url, Options::default()), async {
        let mut peer = server.accept().await;
        peer.status(Status::Creating).await;
        peer.refuse(Status::CreationError, "Checkpointing is not enabled on the server.").await;
        peer.close(4000).await;
    });
    assert_eq!(refused.unwrap_err(), Error::Creation("Checkpointing is not enabled on the server.".into()));
}

#[tokio::test]
async fn no_server_is_said_at_once() {
    let server = Server::start().await;
    let url = server.url();
    drop(server);
    let refused = soon(Sandbox::create(&url, Options::default())).await;
    assert!(matches!(refused, Err(Error::Connection(_))), "{refused:?}");
}

#[tokio::test]
async fn a_start_that_takes_too_long_is_given_up() {
    let server = Server::start().await;
    let connection = Connection { start_within: Duration::from_millis(200), ..Connection::default() };
    let (refused, mut peer) = tokio::join!(attach(&server, connection), async {
        let mut peer = server.accept().await;
        peer.status(Status::Restoring).await;
        peer
    });
    assert_eq!(refused.unwrap_err(), Error::Timeout(Duration::from_millis(200)));
    assert!(matches!(peer.heard().await, Heard::Gone));
}

#[tokio::test]
async fn a_dropped_handle_ends_its_commands_and_its_connection() {
    let server = Server::start().await;
    let (sandbox, mut peer) = tokio::join!(create(&server), server.create());
    let (running, ()) = tokio::join!(sandbox.exec(Exec::argv(["cat"]).stdin()), async {
        let id = peer.exec().await;
        peer.started(&id, 1).await;
    });
    let mut running = running.unwrap();
    drop(sandbox);
    assert!(matches!(soon(running.wait()).await, Err(Error::Ended(_))));
    assert!(running.write_stdin("x").await.is_err());
    assert!(matches!(peer.heard().await, Heard::Gone));
}
