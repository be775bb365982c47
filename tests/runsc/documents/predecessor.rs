//! The words of the Python predecessor, for clients that were written for it.

use serde_json::json;

use super::*;
use crate::servers::{Machine, Server};

const LEFT: [&str; 3] = ["DELETING", "DELETED", "CHECKPOINTED"];

fn statuses(names: &[&str]) -> Vec<Value> {
    names.iter().map(|name| status(name)).collect()
}

async fn checkpoints_with(socket: &mut Socket, names: &[&str]) {
    socket.send(json!({"action": "checkpoint"})).await;
    hears(socket, &statuses(names)).await;
    closes(socket, 1000).await;
}

async fn restores_with(server: &Server, key: &Key, names: &[&str]) -> Socket {
    let mut socket = attach(server, key).await;
    hears(&mut socket, &statuses(names)).await;
    socket
}

/// `BATON_PLAIN=predecessor`: every message as its own tests expect it, whole.
#[tokio::test(flavor = "multi_thread")]
async fn all_plain_clients_hear_its_words_where_the_operator_says_so() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server_with("a", &[("BATON_PLAIN", "predecessor")]).await;
    let (mut socket, key) = create(&server, json!({"idle_timeout": 120, "enable_checkpoint": true})).await;
    runs_silently(&mut socket, "echo state1 > /data.txt").await;
    checkpoints_with(&mut socket, &[&["CHECKPOINTING"][..], &LEFT].concat()).await;
    let metadata = machine.json(&format!("sandboxes/{}/metadata.json", key.id));
    assert_eq!(metadata["enable_sandbox_handoff"], json!(false), "it does what it was told and no more");
    assert_eq!(metadata["enable_idle_timeout_auto_checkpoint"], json!(false));
    let mut socket = restores_with(&server, &key, &["RESTORING", "RUNNING"]).await;
    runs(&mut socket, "bash", "cat /data.txt", "state1\n").await;
    // Nobody else gets in while it is attached, and it does not notice.
    let listens = tokio::spawn(async move { (next(&mut socket).await, socket) });
    let mut second = attach(&server, &key).await;
    hears(&mut second, &statuses(&["IN_USE"])).await;
    closes(&mut second, 1011).await;
    assert!(!listens.is_finished());
    listens.abort();
    // A snapshot that is not there is told before there is an id.
    let mut socket = open(&server, "/create").await;
    socket.send(json!({"filesystem_snapshot_name": "non-existent-snapshot"})).await;
    hears(&mut socket, &statuses(&["CREATING", "CREATION_ERROR"])).await;
    explains(&mut socket, "Filesystem snapshot not found").await;
    closes(&mut socket, 4000).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_is_made_and_begun_from() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server_with("a", &[("BATON_PLAIN", "predecessor")]).await;
    let (mut socket, _) = create(&server, json!({"idle_timeout": 120})).await;
    runs_silently(&mut socket, "echo hello > /test.txt").await;
    socket.send(json!({"action": "snapshot_filesystem", "name": "my-snapshot"})).await;
    hears(&mut socket, &statuses(&["FILESYSTEM_SNAPSHOT_CREATING", "FILESYSTEM_SNAPSHOT_CREATED"])).await;
    let (mut socket, _) = create(&server, json!({"filesystem_snapshot_name": "my-snapshot"})).await;
    runs(&mut socket, "bash", "cat /test.txt", "hello\n").await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_was_deleted_is_a_restore_error() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server_with("a", &[("BATON_PLAIN", "predecessor")]).await;
    let (mut socket, key) = create(&server, json!({"idle_timeout": 120, "enable_checkpoint": true})).await;
    checkpoints_with(&mut socket, &[&["CHECKPOINTING"][..], &LEFT].concat()).await;
    let metadata = machine.json(&format!("sandboxes/{}/metadata.json", key.id));
    let path = metadata["latest_sandbox_checkpoint"]["path"].as_str().unwrap().to_owned();
    std::fs::remove_dir_all(machine.data().join(path)).unwrap();
    let mut socket = restores_with(&server, &key, &["RESTORING", "RESTORE_ERROR"]).await;
    explains(&mut socket, "").await;
    closes(&mut socket, 4000).await;
    server.stop().await;
}

/// Where it cannot restore anything it says so without RESTORING.
#[tokio::test(flavor = "multi_thread")]
async fn without_storage_what_is_not_there_is_not_found_at_once() {
    let machine = Machine::with_a_directory().await;
    let settings = [("BATON_PLAIN", "predecessor"), ("CHECKPOINT_AND_RESTORE_PATH", "")];
    let server = machine.server_with("a", &settings).await;
    let mut socket = open(&server, "/attach/non-existent-sandbox?sandbox_token=any-token").await;
    hears(&mut socket, &statuses(&["NOT_FOUND"])).await;
    closes(&mut socket, 1011).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flag_of_its_own_brings_its_words_and_tells_of_locks() {
    let machine = Machine::with_a_directory().await;
    let (one, two) = tokio::join!(machine.server("a"), machine.server("b"));
    let mut socket = open(&one, "/create").await;
    socket.send(json!({"idle_timeout": 300, "enable_checkpoint": true, "enable_sandbox_handoff": true})).await;
    hears(&mut socket, &statuses(&["CREATING", "LOCK_ACQUIRING", "LOCK_ACQUIRED"])).await;
    let key = hears_id(&mut socket).await;
    hears(&mut socket, &statuses(&["RUNNING"])).await;
    let released = ["DELETING", "LOCK_RELEASING", "LOCK_RELEASED", "DELETED", "CHECKPOINTED"];
    checkpoints_with(&mut socket, &[&["CHECKPOINTING"][..], &released].concat()).await;
    let acquired = ["RESTORING", "LOCK_ACQUIRING", "LOCK_ACQUIRED", "RUNNING"];
    let mut first = restores_with(&one, &key, &acquired).await;
    // Its handoff: the newcomer elsewhere wins at once, also from a client that is alive.
    let second = tokio::spawn(async move {
        let socket = restores_with(&two, &key, &acquired).await;
        (socket, two)
    });
    hears(&mut first, &statuses(&[&["LOCK_RELEASE_REQUESTED", "CHECKPOINTING"][..], &released].concat())).await;
    closes(&mut first, 1000).await;
    let (_socket, two) = second.await.unwrap();
    one.stop().await;
    two.stop().await;
}
