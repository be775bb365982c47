//! The same with real sandboxes: what a client of one sandbox gets to see of another.

use serde_json::json;

use crate::real::{
    fixture::eventually,
    servers::{Machine, Server},
    websocket_client::{Dialect, Key, Socket},
};

const KEY: [(&str, &str); 1] = [("BATON_HMAC_KEY", "a-key-of-the-tests-with-32-bytes-or-more")];

async fn stored(machine: &Machine, server: &Server, text: &str) -> Key {
    let config = json!({"enable_checkpoint": true, "idle_timeout": null});
    let (mut socket, key) = Socket::create(server, Dialect::Plain, config).await;
    socket.run("bash", &format!("echo {text} >/srv/file")).await;
    socket.send(json!({"action": "checkpoint"})).await;
    assert_eq!(socket.end().await, Some(1000));
    eventually("it is let go", || machine.lock(&key.id)["lease"].is_null()).await;
    key
}

async fn is_refused(machine: &Machine, server: &Server, key: &Key, words: &str) {
    let name = format!("sandboxes/{}/lock.json", key.id);
    let before = machine.object(&name);
    let mut socket = Socket::attach(server, Dialect::Plain, key).await;
    let refusal = socket.status("RESTORE_ERROR").await;
    assert!(refusal["message"].as_str().unwrap().contains(words), "{refusal}");
    assert_eq!(socket.end().await, Some(4000));
    assert_eq!(machine.object(&name), before, "it stays as it is");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_does_not_get_the_sandbox_of_another_by_a_forged_lock() {
    let machine = Machine::with_a_directory().await;
    let (keyed, open) = tokio::join!(machine.server_with("keyed", &KEY), machine.server("open"));
    let (victim, own) = (stored(&machine, &keyed, "secret").await, stored(&machine, &keyed, "own").await);
    let name = format!("sandboxes/{}/lock.json", own.id);
    let good = machine.object(&name).unwrap();

    machine.replace(&name, b"{\"v\": 1".to_vec());
    is_refused(&machine, &keyed, &own, "cannot be read").await;

    let mut forged = machine.lock(&victim.id);
    forged["sandbox_id"] = json!(own.id);
    forged["forked_from"] = forged["head"]["checkpoint_id"].clone();
    machine.replace(&name, forged.to_string().into_bytes());
    is_refused(&machine, &keyed, &own, "not signed").await;

    // Without the key the same lock shows the other's file.
    let mut socket = Socket::attach(&open, Dialect::Plain, &own).await;
    socket.status("RUNNING").await;
    assert_eq!(socket.run("bash", "cat /srv/file").await.0, "secret\n");
    socket.send(json!({"action": "checkpoint"})).await;
    assert_eq!(socket.end().await, Some(1000));
    eventually("it is let go", || machine.lock(&own.id)["lease"].is_null()).await;

    // And with the key the good one goes on.
    machine.replace(&name, good);
    let mut socket = Socket::attach(&keyed, Dialect::Plain, &own).await;
    socket.status("RUNNING").await;
    assert_eq!(socket.run("bash", "cat /srv/file").await.0, "own\n");
    socket.kill().await;
    keyed.stop().await;
    open.stop().await;
}
