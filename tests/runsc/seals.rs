//! Signed checkpoints and snapshots: who has the key starts from what he signed, and from nothing else.

use std::{collections::BTreeMap, path::Path, time::Duration};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    filesystem_snapshots::{self, snapshot},
    fixture::{clock, eventually},
    live_handoff::movable,
    servers::{Machine, Server},
    websocket_client::{Dialect, Key, Socket},
};

const OLD: [(&str, &str); 1] = [("BATON_HMAC_KEY", "the-old-key-which-has-32-bytes-or-more")];
const NEW: [(&str, &str); 1] = [("BATON_HMAC_KEY", "the-new-key-which-has-32-bytes-or-more")];
const BOTH: [(&str, &str); 1] =
    [("BATON_HMAC_KEY", "the-new-key-which-has-32-bytes-or-more,the-old-key-which-has-32-bytes-or-more")];

/// Every object below, with what is in it.
fn objects(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        if entry.path().is_dir() {
            found.append(&mut objects(&entry.path()));
        } else {
            found.insert(entry.path().display().to_string(), std::fs::read(entry.path()).unwrap());
        }
    }
    found
}

/// What an operator's command with these settings prints.
async fn baton(machine: &Machine, arguments: &[&str], settings: &[(&str, &str)]) -> String {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(arguments).env_clear().envs(machine.place()).envs(settings.iter().copied()).kill_on_drop(true);
    let done = clock().timeout(Duration::from_secs(60), command.output()).await.expect("it ends").unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

async fn refused(machine: &Machine, server: &Server, key: &Key, keys: &[(&str, &str)]) {
    let stored = machine.data().join("sandbox_checkpoints");
    let (before, head) = (objects(&stored), machine.lock(&key.id)["head"].clone());
    let mut socket = Socket::attach(server, Dialect::Plain, key).await;
    let answer = socket.status("RESTORE_ERROR").await;
    assert!(answer["message"].as_str().is_some_and(|text| text.contains("not signed")), "{answer}");
    socket.end().await;
    let shown = baton(machine, &["get", &key.id], keys).await;
    assert!(shown.contains("Unsigned") && shown.contains(&format!("baton repair {} --sign", key.id)), "{shown}");
    assert_eq!((objects(&stored), &machine.lock(&key.id)["head"]), (before, &head), "it stays as it is");
}

/// Attaches, and leaves it checkpointed again.
async fn goes_on(machine: &Machine, server: &Server, key: &Key) {
    let mut socket = Socket::attach(server, Dialect::Plain, key).await;
    socket.status("RUNNING").await;
    assert_eq!(socket.run("bash", "cat /srv/file").await.0, "kept\n");
    socket.send(json!({"action": "checkpoint"})).await;
    socket.status("CHECKPOINTED").await;
    socket.end().await;
    eventually("it is let go", || machine.lock(&key.id)["lease"].is_null()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_without_a_good_signature_is_refused_and_keys_can_be_changed() {
    let machine = Machine::with_a_directory().await;
    let (old, new) = tokio::join!(machine.server_with("old", &OLD), machine.server_with("new", &NEW));
    let (mut socket, key) = Socket::create(&old, Dialect::Plain, movable()).await;
    socket.run("bash", "echo kept >/srv/file").await;
    socket.send(json!({"action": "checkpoint"})).await;
    socket.status("CHECKPOINTED").await;
    socket.end().await;
    eventually("it is let go", || machine.lock(&key.id)["lease"].is_null()).await;
    refused(&machine, &new, &key, &NEW).await;

    // The way from one key to the next.
    let both = machine.server_with("both", &BOTH).await;
    goes_on(&machine, &both, &key).await;
    goes_on(&machine, &new, &key).await;
    refused(&machine, &old, &key, &OLD).await;

    // Somebody who can write the bucket and has no key: manifest and lock agree with each other.
    let lock = format!("sandboxes/{}/lock.json", key.id);
    let mut changed = machine.lock(&key.id);
    let manifest = format!("sandbox_checkpoints/{}/manifest.json", changed["head"]["checkpoint_id"].as_str().unwrap());
    let mut text = machine.object(&manifest).unwrap();
    text.push(b'\n');
    let digest: String = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
    changed["head"]["manifest_sha256"] = Value::from(digest);
    machine.replace(&manifest, text);
    machine.replace(&lock, serde_json::to_vec(&changed).unwrap());
    refused(&machine, &both, &key, &BOTH).await;

    // Who has no key is taken in, so it was the signature.
    let open = machine.server("open").await;
    goes_on(&machine, &open, &key).await;
    refused(&machine, &new, &key, &NEW).await;

    // An operator who knows that it is his signs it.
    baton(&machine, &["repair", &key.id, "--sign"], &NEW).await;
    goes_on(&machine, &new, &key).await;
    for server in [old, new, both, open] {
        server.stop().await;
    }
}

/// What starting from a snapshot there is.
async fn kept(server: &Server, name: &str) -> String {
    let (mut socket, _) = Socket::create(server, Dialect::Plain, json!({"filesystem_snapshot_name": name})).await;
    let (kept, _) = socket.run("bash", "cat /srv/file").await;
    socket.kill().await;
    kept
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_without_a_good_signature_is_refused() {
    let machine = Machine::with_a_directory().await;
    let (old, new) = tokio::join!(machine.server_with("old", &OLD), machine.server_with("new", &NEW));
    let both = machine.server_with("both", &BOTH).await;
    let (mut socket, _) = Socket::create(&old, Dialect::Plain, json!({})).await;
    socket.run("bash", "echo kept >/srv/file").await;
    assert_eq!(snapshot(&mut socket, "mine", true).await["snapshot"], json!("mine"));
    socket.kill().await;
    let named = |name: &str| json!({"filesystem_snapshot_name": name});
    let message = filesystem_snapshots::refused(&new, named("mine")).await;
    assert!(message.contains("not signed"), "{message}");
    assert_eq!(kept(&both, "mine").await, "kept\n");

    // An archive that somebody put there, and one that an operator with the key imported.
    let folder = machine.data().join("filesystem_snapshots");
    std::fs::create_dir(folder.join("found")).unwrap();
    std::fs::copy(folder.join("mine/mine.tar"), folder.join("found/found.tar")).unwrap();
    let message = filesystem_snapshots::refused(&new, named("found")).await;
    assert!(message.contains("not signed"), "{message}");
    let archive = folder.join("mine/mine.tar");
    baton(&machine, &["snapshot", "import", "--name", "brought", archive.to_str().unwrap()], &NEW).await;
    assert_eq!(kept(&new, "brought").await, "kept\n");
    let message = filesystem_snapshots::refused(&old, named("brought")).await;
    assert!(message.contains("not signed"), "{message}");
    for server in [old, new, both] {
        server.stop().await;
    }
}
