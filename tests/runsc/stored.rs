//! Checkpoints that lie in the store: what comes back from one, what is refused, and what
//! happens to a sandbox whose checkpoint fails.

use std::{os::unix::fs::PermissionsExt, path::Path, process::Command};

use baton_fake_gcs::{FaultKind, InjectedFault, Op};
use serde_json::{Value, json};

use crate::{
    fixture::{Full, eventually, piece},
    live_handoff::ticking,
    servers::{Machine, Server, files_under},
    websocket_client::{Dialect, Key, Socket},
};

/// Leaves a file and a child that counts behind.
const LEAVE: &str =
    "echo kept >file; (n=0; while :; do n=$((n+1)); echo $n >/tmp/n; sleep 0.02; done) >/dev/null 2>&1 </dev/null &";
/// What is left of it, and whether the child still counts.
/// The child's file is empty for a moment at every write, so both looks wait for a number.
const LOOK: &str = "cat file; echo $COLOUR; pwd; until a=$(cat /tmp/n) && [ \"$a\" ]; do sleep 0.02; done; until b=$(cat /tmp/n) && [ \"$b\" ] && [ $b -gt $a ]; do sleep 0.02; done; echo counts";
const LEFT: &str = "kept\nblue\n/root\ncounts\n";

fn storable() -> Value {
    json!({"enable_checkpoint": true, "idle_timeout": null, "env": {"COLOUR": "blue"}, "cwd": "/root"})
}

async fn left_behind(server: &Server) -> (Socket, Key) {
    let (mut socket, key) = Socket::create(server, Dialect::Plain, storable()).await;
    let (_, done) = socket.run("bash", LEAVE).await;
    assert_eq!(done["exit_code"], json!(0));
    (socket, key)
}

async fn store(mut socket: Socket) {
    let from = socket.statuses.len();
    socket.send(json!({"action": "checkpoint"})).await;
    assert_eq!(socket.end().await, Some(1000));
    assert_eq!(socket.statuses[from..], ["CHECKPOINTING", "CHECKPOINTED"]);
}

/// Attaches, and finds everything as it was left.
async fn goes_on(server: &Server, key: &Key, statuses: &[&str]) -> Socket {
    let mut socket = Socket::attach(server, Dialect::Plain, key).await;
    socket.status("RUNNING").await;
    assert_eq!(socket.statuses, statuses);
    assert_eq!(socket.run("bash", LOOK).await.0, LEFT);
    socket
}

async fn is_refused(server: &Server, key: &Key) -> String {
    let mut socket = Socket::attach(server, Dialect::Plain, key).await;
    let refusal = socket.status("RESTORE_ERROR").await;
    assert_eq!(socket.end().await, Some(4000));
    assert_eq!(socket.statuses, ["RESTORING", "RESTORE_ERROR", "E"]);
    refusal["message"].as_str().unwrap().to_owned()
}

fn flip(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_sandbox_comes_back_whole_or_not_at_all() {
    let machine = Machine::with_a_directory().await;
    // Another name is another root file system, as far as anybody can know.
    let other = machine.directory.path().join("0".repeat(64));
    let copied = Command::new("cp").arg("-al").arg(piece("BATON_TEST_ROOTFS")).arg(&other).status().unwrap();
    assert!(copied.success());
    let strange = [("BATON_ROOTFS", other.to_str().unwrap())];
    let (one, two, three) = tokio::join!(machine.server("a"), machine.server("b"), machine.server_with("c", &strange));
    let (socket, key) = left_behind(&one).await;
    store(socket).await;
    let head = machine.lock(&key.id)["head"].clone();
    let folder = machine.data().join("sandbox_checkpoints").join(head["checkpoint_id"].as_str().unwrap());
    let stored = files_under(&folder);
    assert!(stored >= 4, "three files and the manifest");

    for name in ["checkpoint.img", "pages_meta.img", "pages.img", "manifest.json"] {
        flip(&folder.join(name));
        let message = is_refused(&two, &key).await;
        assert!(message.contains("cannot be used"), "{name}: {message}");
        assert!(!message.contains(machine.directory.path().to_str().unwrap()), "{message}");
        flip(&folder.join(name));
    }
    let message = is_refused(&three, &key).await;
    assert!(message.contains("a root file system that this instance does not have"), "{message}");
    assert_eq!(machine.lock(&key.id)["head"], head, "what cannot be restored here is not touched");
    eventually("the lease is free again", || machine.lock(&key.id)["lease"].is_null()).await;
    assert_eq!(files_under(&folder), stored);

    let socket = goes_on(&two, &key, &["RESTORING", "RUNNING"]).await;
    socket.kill().await;
    assert_eq!(files_under(&folder), 0, "a purge leaves nothing");
    for server in [one, two, three] {
        server.stop().await;
    }
}

/// A checkpoint fails, the one who asked is told and closed, and the sandbox goes on as it was.
async fn fails_and_goes_on(server: &Server, key: &Key, mut socket: Socket) -> Socket {
    let from = socket.statuses.len();
    socket.send(json!({"action": "checkpoint"})).await;
    let refusal = socket.status("CHECKPOINT_ERROR").await;
    let message = refusal["message"].as_str().unwrap();
    assert!(!message.contains(server.state.to_str().unwrap()), "{message}");
    println!("{message}");
    assert_eq!(socket.end().await, Some(4000));
    assert_eq!(socket.statuses[from..], ["CHECKPOINTING", "CHECKPOINT_ERROR", "E"]);
    goes_on(server, key, &["RUNNING"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_fails_leaves_the_sandbox_running() {
    let machine = Machine::with_a_directory().await;
    // A runsc that cannot make checkpoints while a certain file exists.
    let (broken, runsc) = (machine.directory.path().join("broken"), machine.directory.path().join("runsc"));
    let script = format!(
        "#!/bin/sh\nfor word; do if [ \"$word\" = checkpoint ] && [ -e {} ]; then exit 128; fi; done\nexec {} \"$@\"\n",
        broken.display(),
        piece("BATON_RUNSC").display()
    );
    std::fs::write(&runsc, script).unwrap();
    std::fs::set_permissions(&runsc, std::fs::Permissions::from_mode(0o755)).unwrap();
    let server = machine.server_with("a", &[("BATON_RUNSC", runsc.to_str().unwrap())]).await;
    let (mut socket, key) = left_behind(&server).await;

    std::fs::write(&broken, "").unwrap();
    socket = fails_and_goes_on(&server, &key, socket).await;
    std::fs::remove_file(&broken).unwrap();

    // The store's place for checkpoints is none.
    let place = machine.data().join("sandbox_checkpoints");
    std::fs::write(&place, "").unwrap();
    socket = fails_and_goes_on(&server, &key, socket).await;
    std::fs::remove_file(&place).unwrap();

    // No room on this machine.
    let full = Full::at(server.staging());
    socket = fails_and_goes_on(&server, &key, socket).await;
    drop(full);

    assert!(machine.lock(&key.id)["head"].is_null(), "nothing was committed");
    store(socket).await;
    eventually("nothing is left in the staging directory", || files_under(&server.staging()) == 0).await;
    goes_on(&server, &key, &["RESTORING", "RUNNING"]).await.kill().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_cannot_be_stored_is_tried_again_until_it_can() {
    let machine = Machine::with_a_bucket().await;
    let (one, two) = tokio::join!(machine.server("a"), machine.server("b"));
    let (mut socket, key, mut mind) = ticking(&one).await;
    machine.bucket().add_fault(InjectedFault::new(Op::Any, FaultKind::Status(403)).on("pages.img").times(0));
    let mut next = Socket::attach(&two, Dialect::V1, &key).await;
    while socket.statuses.last().map(String::as_str) != Some("E") {
        assert_eq!(mind.step(&mut socket).await, None);
    }
    assert!(
        socket.statuses.ends_with(&["CHECKPOINTING", "CHECKPOINT_ERROR", "E"].map(str::to_owned)),
        "{:?}",
        socket.statuses
    );
    let before = mind.commands["tick"].stdout.lines();
    mind.until(&mut socket, "it goes on", |mind| mind.commands["tick"].stdout.lines() > before + 3).await;
    assert_eq!(machine.lock(&key.id)["epoch"], json!(1), "it is still where it was");

    machine.bucket().clear_faults();
    let code = loop {
        if let Some(code) = mind.step(&mut socket).await {
            break code;
        }
    };
    assert_eq!(code, Some(1000), "heard {:?}", socket.statuses);
    assert_eq!(socket.statuses.iter().filter(|status| *status == "CHECKPOINT_ERROR").count(), 1, "said once per wish");
    mind.resume(&mut next).await;
    let before = mind.commands["tick"].stdout.lines();
    mind.until(&mut next, "it goes on", |mind| mind.commands["tick"].stdout.lines() > before).await;
    next.kill().await;
    one.stop().await;
    two.stop().await;
}
