//! What a writer of the bucket can have an instance run as its runsc: nothing that the operator has not allowed.

use std::{os::unix::fs::PermissionsExt, path::Path};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    fixture::eventually,
    servers::{Machine, Server},
    upgrades::other_runsc,
    websocket_client::{Dialect, Key, Socket},
};

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn checkpointed(server: &Server) -> Key {
    let config = json!({"enable_checkpoint": true, "idle_timeout": null});
    let (mut socket, key) = Socket::create(server, Dialect::Plain, config).await;
    socket.send(json!({"action": "checkpoint"})).await;
    assert_eq!(socket.end().await, Some(1000));
    key
}

async fn is_refused(server: &Server, key: &Key, words: &str) {
    let mut socket = Socket::attach(server, Dialect::Plain, key).await;
    let refusal = socket.status("RESTORE_ERROR").await;
    assert!(refusal["message"].as_str().unwrap().contains(words), "{refusal}");
    assert_eq!(socket.end().await, Some(4000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runsc_that_lies_in_the_store_runs_only_if_the_operator_allows_it() {
    let machine = Machine::with_a_directory().await;
    let other = other_runsc(&machine);
    let digest = sha256(&std::fs::read(&other).unwrap());
    let settings = [("BATON_RUNSC", other.to_str().unwrap()), ("BATON_STORE_RUNTIME", "true")];
    let odd = machine.server_with("odd", &settings).await;
    let key = checkpointed(&odd).await;
    let stored = machine.data().join("runtimes").join(&digest);
    eventually("its runsc is stored", || stored.exists()).await;
    odd.stop().await;
    let usual = machine.server("usual").await;
    is_refused(&usual, &key, "BATON_RUNTIMES").await;
    usual.stop().await;
    // Allowed once, it is kept here; taken off the list, it does not run again.
    let allowing = machine.server_with("usual", &[("BATON_RUNTIMES", &digest)]).await;
    let mut socket = Socket::attach(&allowing, Dialect::Plain, &key).await;
    socket.status("RUNNING").await;
    socket.send(json!({"action": "checkpoint"})).await;
    assert_eq!(socket.end().await, Some(1000));
    allowing.stop().await;
    let usual = machine.server("usual").await;
    is_refused(&usual, &key, "BATON_RUNTIMES").await;
    usual.stop().await;
}

/// Puts another manifest under a head, as whoever can write objects could.
fn forge(machine: &Machine, id: &str, change: impl FnOnce(&mut Value)) {
    let mut lock = machine.lock(id);
    let checkpoint = lock["head"]["checkpoint_id"].as_str().unwrap().to_owned();
    let name = format!("sandbox_checkpoints/{checkpoint}/manifest.json");
    let mut manifest = machine.json(&name);
    change(&mut manifest);
    let bytes = manifest.to_string().into_bytes();
    lock["head"]["manifest_sha256"] = json!(sha256(&bytes));
    machine.replace(&name, bytes);
    machine.replace(&format!("sandboxes/{id}/lock.json"), lock.to_string().into_bytes());
}

fn program(at: &Path, leaves: &Path) {
    std::fs::write(at, format!("#!/bin/sh\ntouch {}\nexit 1\n", leaves.display())).unwrap();
    std::fs::set_permissions(at, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_cannot_name_a_program_by_its_path() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let key = checkpointed(&server).await;
    let (evil, trace) = (machine.directory.path().join("evil"), machine.directory.path().join("trace"));
    program(&evil, &trace);
    forge(&machine, &key.id, |manifest| {
        manifest["runsc"]["version"] = json!("another");
        manifest["runsc"]["sha256"] = json!(evil);
    });
    is_refused(&server, &key, "runsc.sha256").await;
    assert!(!trace.exists(), "it ran");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_cannot_name_a_root_file_system_by_its_path() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let key = checkpointed(&server).await;
    // What the cache takes for one of its own, if a path is followed.
    let tree = machine.directory.path().join("tree");
    std::fs::create_dir_all(tree.join("rootfs")).unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
    let about = json!({"digest": tree, "base_digest": tree, "is_base": true, "size": 1, "boot": boot});
    std::fs::write(tree.join("about"), about.to_string()).unwrap();
    forge(&machine, &key.id, |manifest| {
        manifest["rootfs"] = json!({"digest": tree, "base_digest": tree, "archive": null});
    });
    is_refused(&server, &key, "rootfs.base_digest").await;
    assert!(!machine.directory.path().join("tree.lock").exists(), "a path was followed");
    server.stop().await;
}
