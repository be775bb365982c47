//! Copies of a running sandbox: memory, files and commands go on in each, and none knows of the other.

use serde_json::{Value, json};

use crate::{
    fixture::eventually,
    servers::{Machine, Server, files_under, is_proof},
    websocket_client::{Dialect, Heard, Key, Socket},
};

/// Counts, and mixes in what it is told.
const COUNTER: &str = r#"
import os, random, sys, threading, time
seed = [random.random()]
def hear():
    for line in sys.stdin: seed[0] = line.strip()
threading.Thread(target=hear, daemon=True).start()
n = 0
while True:
    n += 1
    open("/srv/next", "w").write(f"{n} {seed[0]}")
    os.rename("/srv/next", "/srv/state")
    time.sleep(0.02)
"#;

fn movable() -> Value {
    json!({"enable_checkpoint": true, "enable_sandbox_handoff": true, "idle_timeout": null})
}

async fn counting(server: &Server) -> (Socket, Key) {
    let (mut socket, key) = Socket::create(server, Dialect::V1, movable()).await;
    let argv = ["python3", "-c", COUNTER];
    socket.send(json!({"action": "exec", "exec_id": "count", "argv": argv, "stdin": true})).await;
    socket.status("EXECUTION_RUNNING").await;
    while state(&mut socket).await.0 < 5 {}
    (socket, key)
}

/// How far it has counted, and what else there is to know inside.
async fn state(socket: &mut Socket) -> (u64, String) {
    let look = "cat /srv/state; echo; echo $BATON_FORKED_FROM; head -c 8 /dev/urandom | od -An -tx1";
    socket.send(json!({"action": "exec", "argv": ["sh", "-c", look]})).await;
    let mut written = Vec::new();
    let mut number = None;
    loop {
        match socket.next().await {
            Heard::Bytes(bytes) => {
                let chunk = baton_protocol::binary::BinaryChunk::decode(&bytes).unwrap();
                if Some(chunk.exec) == number {
                    written.extend_from_slice(chunk.payload);
                }
            }
            Heard::Event(event) if event["status"] == "SANDBOX_EXECUTION_RUNNING" => {
                number = event["exec"].as_u64().and_then(|number| u32::try_from(number).ok());
            }
            Heard::Event(event) if event["status"] == "SANDBOX_EXECUTION_DONE" => break,
            Heard::Event(_) => {}
            Heard::End(code) => panic!("closed with {code:?}"),
        }
    }
    let text = String::from_utf8(written).unwrap();
    (text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0), text)
}

fn key_of(copy: &Value) -> Key {
    let text = |field: &str| copy[field].as_str().unwrap().to_owned();
    Key { id: text("sandbox_id"), token: text("sandbox_token") }
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_of_a_running_counter_go_on_and_diverge() {
    let count = if is_proof() { 10 } else { 3 };
    let machine = Machine::with_a_directory().await;
    let (one, two) = tokio::join!(machine.server("a"), machine.server("b"));
    let (mut socket, key) = counting(&one).await;
    let (before, _) = state(&mut socket).await;
    socket.send(json!({"action": "fork", "count": count})).await;
    let forked = socket.until("copies", |event| event["event"] == "forked" || event["event"] == "error").await;
    let copies: Vec<_> = forked["sandboxes"].as_array().expect("copies").iter().map(key_of).collect();
    assert_eq!(copies.len(), count);
    while state(&mut socket).await.0 < before + 5 {}

    let mut seen = Vec::new();
    for (n, copy) in copies.iter().enumerate() {
        let server = if n % 2 == 0 { &two } else { &one };
        let mut attached = Socket::attach(server, Dialect::V1, copy).await;
        attached.status("RUNNING").await;
        let (first, _) = state(&mut attached).await;
        assert!(first >= before, "it goes on from where it was copied: {first}, {before}");
        // Told to mix in something of its own, it does, and the others do not.
        attached.send(json!({"event": "stdin", "exec_id": "count", "data": format!("copy-{n}\n")})).await;
        let wanted = format!("copy-{n}");
        let told = loop {
            let (at, told) = state(&mut attached).await;
            if at > first && told.contains(&wanted) {
                break told;
            }
        };
        assert!(told.contains(&format!("{}-", key.id)), "it knows what it is a copy of: {told}");
        seen.push(told.lines().last().unwrap().to_owned());
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), count, "the kernel's randomness is fresh in each");
    drop(socket);
    let mut socket = Socket::attach(&one, Dialect::V1, &key).await;
    socket.status("RUNNING").await;
    assert!(!state(&mut socket).await.1.contains("copy-"), "the source heard nothing of it");

    // Only its own token opens a copy, and the source's opens none.
    let stranger = Key { id: copies[0].id.clone(), token: key.token.clone() };
    let mut denied = Socket::attach(&one, Dialect::Plain, &stranger).await;
    denied.status("PERMISSION_DENIAL_ERROR").await;

    let checkpoint = machine.lock(&copies[0].id)["forked_from"].as_str().unwrap().to_owned();
    let folder = machine.data().join("sandbox_checkpoints").join(&checkpoint);
    assert_eq!(files_under(&folder.join("pins")), count);
    socket.kill().await;
    assert!(folder.join("manifest.json").exists(), "what a copy needs outlives its source");
    for (n, copy) in copies.iter().enumerate() {
        let server = if n % 2 == 0 { &two } else { &one };
        let mut attached = Socket::attach(server, Dialect::V1, copy).await;
        attached.status("RUNNING").await;
        attached.kill().await;
    }
    eventually("with the last copy it goes", || files_under(&folder) == 0).await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_begins_with_a_checkpoint_of_another_whose_token_is_known() {
    let machine = Machine::with_a_bucket().await;
    let server = machine.server("a").await;
    let (mut socket, key) = Socket::create(&server, Dialect::Plain, movable()).await;
    socket.run("bash", "echo kept >/srv/kept").await;
    socket.send(json!({"action": "checkpoint", "keep_running": true})).await;
    let saved = socket.status("CHECKPOINTED").await;
    let checkpoint = saved["checkpoint_id"].as_str().unwrap().to_owned();
    for (token, status) in [("wrong", "PERMISSION_DENIAL_ERROR"), (key.token.as_str(), "RUNNING")] {
        let mut copy = Socket::open(&server, "/create", Dialect::Plain).await;
        copy.send(json!({"from_checkpoint": checkpoint, "source_token": token})).await;
        copy.status(status).await;
        if status == "RUNNING" {
            assert_eq!(copy.run("bash", "cat /srv/kept").await.0, "kept\n");
            copy.kill().await;
        }
    }
    let (all_but_one, last) = checkpoint.split_at(checkpoint.len() - 1);
    let missing = format!("{all_but_one}{}", if last == "0" { "1" } else { "0" });
    let mut copy = Socket::open(&server, "/create", Dialect::Plain).await;
    copy.send(json!({"from_checkpoint": missing, "source_token": key.token})).await;
    copy.status("CREATION_ERROR").await;
    assert!(machine.object(&format!("sandbox_checkpoints/{checkpoint}/manifest.json")).is_some());
    socket.kill().await;
    server.stop().await;
}
