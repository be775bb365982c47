//! "Checkpoint and Restore".

use serde_json::json;

use super::*;
use crate::{fixture::eventually, servers::Machine};

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_ends_the_session_and_another_instance_restores_all_of_it() {
    let machine = Machine::with_a_directory().await;
    let (one, two) = tokio::join!(machine.server("a"), machine.server("b"));
    let (mut socket, key) = create(&one, example()).await;
    runs_silently(&mut socket, "echo kept > /file; (sleep 1000 & echo $! > /pid) >/dev/null 2>&1").await;
    checkpoints(&mut socket).await;
    let mut socket = attach(&two, &key).await;
    hears(&mut socket, &[status("RESTORING"), status("RUNNING")]).await;
    runs(&mut socket, "bash", "kill -0 $(cat /pid) && echo $(cat /file) alive", "kept alive\n").await;
    // Again, and to where it was before.
    checkpoints(&mut socket).await;
    let mut socket = attach(&one, &key).await;
    hears(&mut socket, &[status("RESTORING"), status("RUNNING")]).await;
    runs(&mut socket, "python", "print(open('/file').read(), end='')", "kept\n").await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_storage_refuses_to_enable_checkpoints() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server_with("a", &[("CHECKPOINT_AND_RESTORE_PATH", "")]).await;
    let mut socket = open(&server, "/create").await;
    socket.send(example()).await;
    let refused = [status("CREATING"), status("CREATION_ERROR"), error("Checkpointing is not enabled on the server.")];
    hears(&mut socket, &refused).await;
    closes(&mut socket, 4000).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_during_an_execution_is_refused_and_the_execution_goes_on() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (mut socket, _) = create(&server, example()).await;
    // It ends when it is told to, so that the refusal comes before its output.
    socket.send(json!({"language": "bash", "code": "read; echo done"})).await;
    hears(&mut socket, &[status("EXECUTION_RUNNING")]).await;
    socket.send(json!({"action": "checkpoint"})).await;
    let refused = [
        status("CHECKPOINTING"),
        status("EXECUTION_IN_PROGRESS_ERROR"),
        error("Cannot checkpoint while an execution is in progress."),
    ];
    hears(&mut socket, &refused).await;
    socket.send(json!({"event": "stdin", "data": "\n"})).await;
    hears(&mut socket, &[stdout("done\n"), status("EXECUTION_DONE")]).await;
    checkpoints(&mut socket).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_fails_closes_the_session_and_keeps_the_sandbox() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (mut socket, key) = create(&server, example()).await;
    runs_silently(&mut socket, "echo kept > /file").await;
    // Nothing can be stored below what is no directory.
    let checkpoints = machine.data().join("sandbox_checkpoints");
    let _ = std::fs::remove_dir_all(&checkpoints);
    std::fs::write(&checkpoints, "").unwrap();
    socket.send(json!({"action": "checkpoint"})).await;
    hears(&mut socket, &[status("CHECKPOINTING"), status("CHECKPOINT_ERROR")]).await;
    explains(&mut socket, "").await;
    closes(&mut socket, 4000).await;
    let mut socket = attach(&server, &key).await;
    hears(&mut socket, &[status("RUNNING")]).await;
    runs(&mut socket, "bash", "cat /file", "kept\n").await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_exist_is_not_found_whatever_it_is_called() {
    let machine = Machine::with_a_directory().await;
    let (stored, in_memory) =
        tokio::join!(machine.server("a"), machine.server_with("b", &[("CHECKPOINT_AND_RESTORE_PATH", "")]));
    for server in [&stored, &in_memory] {
        for id in ["sandbox-123", "exec-uuid-123", "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab"] {
            let mut socket = open(server, &format!("/attach/{id}")).await;
            hears(&mut socket, &[status("RESTORING"), status("NOT_FOUND")]).await;
            closes(&mut socket, 1011).await;
        }
    }
    stored.stop().await;
    in_memory.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_corrupted_checkpoint_is_a_restore_error() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (mut socket, key) = create(&server, example()).await;
    checkpoints(&mut socket).await;
    // The metadata name the checkpoint by the time the client hears of it.
    let metadata = machine.json(&format!("sandboxes/{}/metadata.json", key.id));
    let path = metadata["latest_sandbox_checkpoint"]["path"].as_str().unwrap().to_owned();
    assert!(metadata["last_checkpointed"].is_string(), "{metadata}");
    let pages = machine.data().join(path).join("pages.img");
    let mut bytes = std::fs::read(&pages).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&pages, bytes).unwrap();
    let mut socket = attach(&server, &key).await;
    hears(&mut socket, &[status("RESTORING"), status("RESTORE_ERROR")]).await;
    explains(&mut socket, "").await;
    closes(&mut socket, 4000).await;
    server.stop().await;
}

/// A client that leaves and does not come back leaves a checkpoint behind; so does one that stays and is idle.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_end_is_a_checkpoint_and_deletes_nothing() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let config = json!({"idle_timeout": 1, "enable_checkpoint": true});
    let ((mut stays, kept), (leaves, left)) = tokio::join!(create(&server, config.clone()), create(&server, config));
    drop(leaves);
    hears(&mut stays, &[status("CHECKPOINTING"), status("CHECKPOINTED")]).await;
    closes(&mut stays, 1000).await;
    eventually("it is let go", || machine.lock(&left.id)["lease"].is_null()).await;
    for key in [&kept, &left] {
        let mut socket = attach(&server, key).await;
        hears(&mut socket, &[status("RESTORING"), status("RUNNING")]).await;
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_idle_end_of_what_is_in_memory_only_is_told() {
    let machine = Machine::with_a_directory().await;
    let mut server = machine.server("a").await;
    let (mut socket, key) = create(&server, json!({"idle_timeout": 1})).await;
    hears(&mut socket, &[status("DELETING"), status("DELETED")]).await;
    explains(&mut socket, "The sandbox was idle for longer than its `idle_timeout` and is deleted").await;
    closes(&mut socket, 1000).await;
    assert_eq!(server.said("the sandbox ended without a checkpoint").await, format!("sandbox={}", key.id));
    let mut socket = attach(&server, &key).await;
    hears(&mut socket, &[status("RESTORING"), status("NOT_FOUND")]).await;
    closes(&mut socket, 1011).await;
    server.stop().await;
}
