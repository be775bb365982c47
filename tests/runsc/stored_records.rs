//! What an operator finds in the store of real servers: a checkpoint that was told of, a holder that died, and a
//! sandbox that is restored by hand.

use std::path::Path;

use serde_json::{Value, json};

use crate::{
    commandline::Person,
    fixture::clock,
    live_handoff::movable,
    server_crash::SCALED,
    servers::{Machine, Server},
    websocket_client::{Dialect, Key, Socket},
};

/// A command on the storage alone.
async fn types(machine: &Machine, arguments: &[&str]) -> String {
    let mut command = Person::at(machine, "ws://127.0.0.1:1".to_owned()).types(arguments);
    command.env_remove("BATON_URL").envs(machine.place()).envs(SCALED);
    let output = clock().timeout(std::time::Duration::from_secs(60), command.output()).await.expect("it ends").unwrap();
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

async fn rows(machine: &Machine) -> Value {
    let text = types(machine, &["list", "-o", "json"]).await;
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// What a server answers to who has its admin key.
async fn asks(machine: &Machine, server: &Server, arguments: &[&str]) -> Value {
    let person = Person::at(machine, format!("ws://{}", server.address));
    let output = person.types(arguments).env("BATON_API_KEY", "admin").output().await.unwrap();
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_hears_checkpointed_finds_the_checkpoint_in_the_metadata() {
    let machine = Machine::with_a_bucket().await;
    let one = machine.server("a").await;
    let (mut socket, key) = Socket::create(&one, Dialect::V1, movable()).await;
    for keep_running in [true, false] {
        socket.send(json!({"action": "checkpoint", "keep_running": keep_running})).await;
        let told = socket.status("CHECKPOINTED").await;
        let metadata = machine.json(&format!("sandboxes/{}/metadata.json", key.id));
        let path = format!("sandbox_checkpoints/{}/", told["checkpoint_id"].as_str().unwrap());
        assert_eq!(metadata["latest_sandbox_checkpoint"], json!({"bucket": "b", "path": path}));
        let taken = metadata["last_checkpointed"].as_str().unwrap();
        assert_eq!(json!(taken), machine.json(&format!("{path}manifest.json"))["created"]);
    }
    one.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sandbox_of_a_killed_server_is_unresponsive_in_every_view_until_another_has_it() {
    let machine = Machine::with_a_bucket().await;
    let admin = [SCALED[0], ("BATON_ADMIN_KEY", "admin")];
    let (mut one, two) = tokio::join!(machine.server_with("a", &SCALED), machine.server_with("b", &admin));
    let (mut socket, key) = Socket::create(&one, Dialect::V1, movable()).await;
    socket.send(json!({"action": "checkpoint", "keep_running": true})).await;
    socket.status("CHECKPOINTED").await;
    let owner = machine.lock(&key.id)["lease"]["owner"].clone();
    assert_eq!(rows(&machine).await[0]["phase"], json!("running"));
    one.die().await;

    let shown = async {
        loop {
            let row = rows(&machine).await[0].clone();
            if row["phase"] == json!("unresponsive") {
                return row;
            }
            assert_eq!(row["phase"], json!("running"));
            clock().sleep(std::time::Duration::from_millis(200)).await;
        }
    };
    let row = clock().timeout(std::time::Duration::from_secs(60), shown).await.expect("it is shown");
    assert_eq!((&row["reason"], &row["unresponsive"]["instance"]), (&json!("Unresponsive"), &owner));
    // The takeover time is a fifth of thirty seconds.
    assert!(row["unresponsive"]["seconds"].as_u64().unwrap() >= 6, "{row}");
    let taken = machine.json(&format!("sandboxes/{}/metadata.json", key.id))["last_checkpointed"].clone();
    let next = format!("the next attach takes over and restores the checkpoint of {}", taken.as_str().unwrap());
    for arguments in [&["list"][..], &["get", &key.id], &["watch", &key.id, "--for", "1s"]] {
        let text = types(&machine, arguments).await;
        assert!(text.contains("unresponsive") && text.contains(&next), "{arguments:?}: {text}");
    }
    let shown = asks(&machine, &two, &["list", "-o", "json"]).await;
    assert_eq!((&shown[0]["phase"], &shown[0]["unresponsive"]["next"]), (&json!("unresponsive"), &json!(next)));
    let shown = asks(&machine, &two, &["get", &key.id, "-o", "json"]).await;
    assert_eq!((&shown["phase"], &shown["reason"]), (&json!("unresponsive"), &json!("Unresponsive")));

    let mut socket = Socket::attach(&two, Dialect::V1, &key).await;
    socket.status("RUNNING").await;
    assert_eq!(rows(&machine).await[0]["phase"], json!("running"));
    socket.kill().await;
    two.stop().await;
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_of_the_source_document_is_restored_by_hand_with_memory_and_files() {
    let machine = Machine::with_a_directory().await;
    let one = machine.server("a").await;
    let (mut socket, key) = Socket::create(&one, Dialect::Plain, movable()).await;
    socket.run("bash", "echo kept > /root/note").await;
    socket.send(json!({"action": "checkpoint"})).await;
    assert_eq!(socket.end().await, Some(1000));
    let checkpoint = machine.lock(&key.id)["head"]["checkpoint_id"].as_str().unwrap().to_owned();
    let checkpoints = machine.data().join("sandbox_checkpoints");
    copy(&checkpoints.join(&checkpoint), &checkpoints.join("checkpoint-xyz"));
    // The one it came from is gone, and everything of its own with it.
    let deleted = types(&machine, &["delete", &key.id]).await;
    assert!(!checkpoints.join(&checkpoint).join("manifest.json").exists(), "{deleted}");
    let folder = machine.data().join("sandboxes/sandbox-abc-123");
    std::fs::create_dir_all(&folder).unwrap();
    let example = r#"{"sandbox_id": "sandbox-abc-123", "created_timestamp": "2025-10-08T10:00:00Z", "idle_timeout": 300,
      "latest_sandbox_checkpoint": {"bucket": "company-sandbox-checkpoints", "path": "sandbox_checkpoints/checkpoint-xyz/"}}"#;
    std::fs::write(folder.join("metadata.json"), example).unwrap();

    let mut by_hand = Key { id: "sandbox-abc-123".to_owned(), token: "whatever".to_owned() };
    let mut early = Socket::attach(&one, Dialect::Plain, &by_hand).await;
    let refusal = early.status("RESTORE_ERROR").await;
    assert!(refusal["message"].as_str().unwrap().starts_with("TokenMissing"), "{refusal}");
    let line = types(&machine, &["repair", &by_hand.id, "--nobody-runs-it"]).await;
    by_hand.token = line.trim().rsplit(' ').next().unwrap().to_owned();
    let mut socket = Socket::attach(&one, Dialect::Plain, &by_hand).await;
    socket.status("RUNNING").await;
    assert_eq!(socket.run("bash", "cat /root/note").await.0, "kept\n", "{line}");
    socket.kill().await;
    one.stop().await;
}
