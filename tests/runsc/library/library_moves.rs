//! Restarts, handoffs, checkpoints, copies, and ends: what goes on and what does not.

use std::sync::{Arc, Mutex};

use baton_client::{
    CheckpointOptions, Connection, EndReason, Error, Exec, ExecId, Offsets, Options, Sandbox, SandboxConfig, SandboxId,
    SnapshotName, Status, Token, Update,
};
use serde_json::json;

use super::{Scene, bash, persistent, rest, taken, text, tick, ticks, until};

fn named(exec: Exec, id: &str) -> Exec {
    exec.id(ExecId::parse(id).unwrap())
}

/// A command that leaves a note before it ticks.
fn noted(count: u32) -> Exec {
    let code = format!("echo kept > /tmp/note; for i in $(seq 1 {count}); do echo line $i; sleep 0.05; done; exit 7");
    named(bash(&code), "tick")
}

async fn followed(sandbox: &Sandbox) -> (String, Option<i32>) {
    let running = sandbox.follow(&ExecId::parse("tick").unwrap(), Offsets::default()).await.unwrap();
    let ended = running.collect().await.unwrap();
    (String::from_utf8(ended.stdout).unwrap(), ended.outcome.exit_code)
}

pub async fn a_command_outlives_sigterm_of_its_server() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let kept = heard.clone();
    let on_status = Arc::new(move |update: &Update| kept.lock().unwrap().push(update.status));
    let connection = Connection { on_status: Some(on_status), ..Connection::default() };
    let mut scene = Scene::with(Options { connection, ..persistent() }).await;
    scene.testbed.server("new").await;
    let mut running = scene.sandbox.exec(tick(40)).await.unwrap();
    let mut stdout = taken(&mut running);
    let before = scene.sandbox.instance();
    let first = until(&mut stdout, "line 5\n").await;
    scene.testbed.network(&scene.proxy, json!({"to": "new"})).await;
    scene.testbed.terminate("a").await;
    assert_eq!(first + &rest(&mut stdout).await, ticks(40));
    assert_eq!(running.wait().await.unwrap().exit_code, Some(7));
    assert_ne!(scene.sandbox.instance(), before);
    assert!(heard.lock().unwrap().contains(&Status::Checkpointed));
    scene.end().await;
}

pub async fn a_command_outlives_a_handoff() {
    let mut scene = Scene::with(persistent()).await;
    scene.testbed.server("other").await;
    let running = scene.sandbox.exec(tick(40)).await.unwrap();
    let before = scene.sandbox.instance();
    scene.testbed.network(&scene.proxy, json!({"to": "other"})).await;
    let (moved, ended) = tokio::join!(scene.sandbox.handoff(), running.collect());
    moved.unwrap();
    let ended = ended.unwrap();
    assert_eq!((text(&ended.stdout), ended.outcome.exit_code), (ticks(40).as_str(), Some(7)));
    assert_ne!(scene.sandbox.instance(), before);
    scene.end().await;
}

pub async fn a_checkpoint_is_attached_again_with_its_running_command() {
    let scene = Scene::with(persistent()).await;
    let (id, token) = (scene.sandbox.id().clone(), scene.sandbox.token().clone());
    let mut running = scene.sandbox.exec(noted(20)).await.unwrap();
    until(&mut taken(&mut running), "line 1\n").await;
    let checkpoint =
        scene.sandbox.checkpoint_with(CheckpointOptions { live: true, keep_running: false }).await.unwrap();
    assert_eq!(checkpoint.sandbox(), id);
    assert!(matches!(running.wait().await, Err(Error::Ended(_))));
    let again = Sandbox::attach(&scene.proxy.url, id, token).await.unwrap();
    let known: Vec<_> = again.execs().into_iter().map(|view| view.exec_id.as_str().to_owned()).collect();
    assert_eq!(known, ["tick"]);
    assert_eq!(followed(&again).await, (ticks(20), Some(7)));
    assert_eq!(again.read_file("/tmp/note").await.unwrap(), b"kept\n");
    let another = again.checkpoint_with(CheckpointOptions { live: false, keep_running: true }).await.unwrap();
    assert_ne!(another, checkpoint);
    assert!(again.run(bash("echo on")).await.unwrap().outcome.is_success());
    again.kill().await.unwrap();
    scene.testbed.end().await;
}

pub async fn a_checkpoint_that_is_refused_leaves_the_command_running() {
    let scene = Scene::with(persistent()).await;
    let running = scene.sandbox.exec(tick(10)).await.unwrap();
    let refused = scene.sandbox.checkpoint().await;
    assert!(matches!(&refused, Err(Error::Checkpoint(why)) if why.contains("in progress")), "{refused:?}");
    assert_eq!(text(&running.collect().await.unwrap().stdout), ticks(10));
    scene.end().await;
}

pub async fn errors_have_their_types() {
    let scene = Scene::with(Options::default().persistent(false)).await;
    let (url, id, token) = (&scene.proxy.url, scene.sandbox.id().clone(), scene.sandbox.token().clone());
    let nobody = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
    let attached = async |id, token| Sandbox::attach(url, id, token).await.map(drop).unwrap_err();
    assert_eq!(attached(nobody, token.clone()).await, Error::NotFound);
    assert!(matches!(attached(id.clone(), Token("wrong".into())).await, Error::Permission(_)));
    assert_eq!(attached(id, token).await, Error::InUse);
    let config = SandboxConfig { cwd: Some("relative".into()), ..SandboxConfig::default() };
    let refused = Sandbox::create(url, Options { config, ..Options::default() }).await.map(drop);
    assert!(matches!(&refused, Err(Error::Creation(why)) if why.contains("cwd")), "{refused:?}");
    for nowhere in ["ws://127.0.0.1:1", "ftp://example"] {
        let refused = Sandbox::create(nowhere, Options::default()).await.map(drop);
        assert!(matches!(refused, Err(Error::Connection(_))), "{refused:?}");
    }
    assert!(matches!(scene.sandbox.checkpoint().await, Err(Error::Checkpoint(_))));
    // Only the session was closed: the sandbox is there, and the client is back with it.
    assert_eq!(scene.sandbox.run(bash("echo back")).await.unwrap().stdout, b"back\n");
    scene.end().await;
}

pub async fn the_end_of_the_sandbox_ends_what_waits_on_it() {
    let scene = Scene::new().await;
    let mut running = scene.sandbox.exec(bash("sleep 60")).await.unwrap();
    let (killed, ended) = tokio::join!(scene.sandbox.kill(), running.wait());
    killed.unwrap();
    assert!(matches!(&ended, Err(Error::Ended(end)) if end.reason == Some(EndReason::Kill)), "{ended:?}");
    assert!(matches!(scene.sandbox.run(bash("echo late")).await, Err(Error::Ended(_))));
    // Also of one that is gone already.
    scene.end().await;
}

pub async fn a_snapshot_starts_another_sandbox() {
    let scene = Scene::new().await;
    let name: SnapshotName = "suite-rust".parse().unwrap();
    scene.sandbox.write_file("/opt/tool.py", "print('from the snapshot')").await.unwrap();
    let running = scene.sandbox.exec(tick(10)).await.unwrap();
    scene.sandbox.snapshot(&name).await.unwrap();
    assert_eq!(text(&running.collect().await.unwrap().stdout), ticks(10));
    let again = scene.sandbox.snapshot(&name).await;
    assert!(matches!(again, Err(Error::Refused { status: Status::FilesystemSnapshotError, .. })), "{again:?}");
    let with = |name: SnapshotName| {
        let config = SandboxConfig { filesystem_snapshot_name: Some(name), ..SandboxConfig::default() };
        Sandbox::create(&scene.proxy.url, Options { config, ..Options::default() })
    };
    let other = with(name).await.unwrap();
    assert_eq!(other.run(bash("python3 /opt/tool.py")).await.unwrap().stdout, b"from the snapshot\n");
    other.kill().await.unwrap();
    let missing = with("suite-none".parse().unwrap()).await.map(drop);
    assert!(matches!(missing, Err(Error::Creation(_))), "{missing:?}");
    scene.end().await;
}

pub async fn a_fork_goes_on_where_its_source_was() {
    let scene = Scene::with(persistent()).await;
    let mut running = scene.sandbox.exec(noted(30)).await.unwrap();
    until(&mut taken(&mut running), "line 1\n").await;
    let places = scene.sandbox.fork(2).await.unwrap();
    assert!(places.len() == 2 && places[0].id != places[1].id);
    for (number, place) in places.into_iter().enumerate() {
        let copy = Sandbox::attach(&scene.proxy.url, place.id, place.token).await.unwrap();
        assert_eq!(followed(&copy).await.0, ticks(30));
        copy.run(bash(&format!("echo copy {number} >> /tmp/note"))).await.unwrap().check().unwrap();
        assert_eq!(copy.read_file("/tmp/note").await.unwrap(), format!("kept\ncopy {number}\n").as_bytes());
        copy.kill().await.unwrap();
    }
    assert_eq!(running.wait().await.unwrap().exit_code, Some(7));
    assert_eq!(scene.sandbox.read_file("/tmp/note").await.unwrap(), b"kept\n");
    scene.end().await;
}
