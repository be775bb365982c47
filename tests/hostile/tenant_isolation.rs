//! One tenant against another: names, places and quotas.

use std::{sync::Arc, time::Duration};

use baton::{
    api::ApiSettings,
    clock::{SharedClock, SystemClock},
    config::{Quotas, api_keys},
};
use baton_protocol::id::Tenant;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    real::{
        servers::{Machine, Server},
        websocket_client::{Dialect, Socket as RealSocket},
    },
    scripted::{
        test_server::{Plan, World, checkpoint_id, until},
        wire_client::{Client, connect},
    },
};

const A: (&str, &str) = ("x-api-key", "alpha");
const B: (&str, &str) = ("x-api-key", "beta");
const KEPT: &str = r#"{"enable_checkpoint":true}"#;

fn two_keys(settings: &mut ApiSettings) {
    settings.api_keys = api_keys("team-a=alpha,team-b=beta").unwrap();
}

fn two_keys_with_quotas(settings: &mut ApiSettings) {
    two_keys(settings);
    settings.max_sandboxes = 4;
    settings.quotas = Quotas::parse("sandboxes=2,idle=1h").unwrap();
}

async fn world(change: fn(&mut ApiSettings)) -> World {
    World::with(Plan { has_storage: true, can_snapshot: true, change }).await
}

/// A create with this key and config, up to what it hears first after its config.
async fn asks(world: &World, key: (&'static str, &str), config: &str) -> (Client, String) {
    let mut client = Client::new(connect(world, "/create?details=1", &[key]).await.unwrap());
    client.hears("CREATING").await;
    client.says(config).await;
    let word = client.word().await;
    (client, word)
}

async fn running(world: &World, key: (&'static str, &str), config: &str) -> Client {
    let (mut client, word) = asks(world, key, config).await;
    assert_eq!(word, "sandbox_id", "{}", client.message());
    client.hears("RUNNING").await;
    client
}

async fn refused(world: &World, key: (&'static str, &str), config: &str, status: &str) -> String {
    let (mut client, word) = asks(world, key, config).await;
    assert_eq!(word, status);
    client.hears("E close:4000").await;
    client.message().to_owned()
}

/// The status of an answer and, if it came in one piece, its body.
async fn http(world: &World, line: &str, key: (&str, &str), body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let (name, value, length) = (key.0, key.1, body.len());
    let head = format!("host: x\r\nconnection: close\r\n{name}: {value}\r\ncontent-length: {length}");
    stream.write_all(format!("{line} HTTP/1.1\r\n{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[tokio::test]
async fn one_tenant_cannot_hold_every_place() {
    let world = world(two_keys_with_quotas).await;
    let first = running(&world, A, "{}").await;
    let mut second = running(&world, A, KEPT).await;
    let used_up = "The quota of this key is used up: 2 sandboxes at once on this server (`sandboxes` in BATON_QUOTAS).";
    for config in ["{}", KEPT] {
        assert_eq!(refused(&world, A, config, "CREATION_ERROR").await, used_up);
    }
    assert_eq!(http(&world, "POST /execute?language=bash", A, "exit 0").await, (429, used_up.to_owned()));
    let _other = running(&world, B, "{}").await;
    assert_eq!(http(&world, "POST /execute?language=bash", B, "exit 0").await.0, 200);
    until(async || world.count() == 3).await;

    // Whoever has room for one has it again as soon as the answer is there.
    let change = |settings: &mut ApiSettings| {
        two_keys(settings);
        settings.quotas = Quotas::parse("sandboxes=1").unwrap();
    };
    let one_place = self::world(change).await;
    for _ in 0..5 {
        assert_eq!(http(&one_place, "POST /execute?language=bash", A, "exit 0").await.0, 200);
    }

    // A place that is given back is there again; what is here has its place, and what comes back needs one.
    second.says(r#"{"action":"checkpoint"}"#).await;
    second.hears("CHECKPOINTING CHECKPOINTED close:1000").await;
    let third = running(&world, A, "{}").await;
    let mut again = second.again(&world, &[]).await;
    again.hears("RESTORING RESTORE_ERROR E close:4000").await;
    assert_eq!(again.message(), used_up);
    let mut again = first.again(&world, &[("sec-websocket-protocol", "baton.v1")]).await;
    again.hears("hello RUNNING").await;
    drop((first, third));
}

/// The control of the test above: without a quota the first tenant takes all, and the second finds no room.
#[tokio::test]
async fn without_quotas_one_tenant_holds_every_place() {
    let change = |settings: &mut ApiSettings| {
        two_keys(settings);
        settings.max_sandboxes = 4;
    };
    let world = world(change).await;
    let mut held = vec![];
    for _ in 0..4 {
        held.push(running(&world, A, "{}").await);
    }
    let message = refused(&world, B, "{}", "CREATION_ERROR").await;
    assert_eq!(message, "The server has no room for another sandbox.");
}

/// A sandbox that nobody's session brought here, as after a restart of the API's half, counts too.
#[tokio::test]
async fn what_is_held_here_counts_whoever_brought_it() {
    let world = world(two_keys_with_quotas).await;
    let clients = [running(&world, A, KEPT).await, running(&world, B, KEPT).await];
    for client in clients {
        let id = client.id().clone();
        let clock: SharedClock = Arc::new(SystemClock);
        // An order of an operator: the reconciler holds it, and this API has never heard of it.
        let copy = clock.sandbox_id();
        let mut spec = world.records.find(&id).await.unwrap().unwrap().spec;
        spec.sandbox_id = copy.clone();
        let lease = world.bus.lease(&copy);
        world.records.create(&spec, &world.instance, &lease).await.unwrap();
        world.bus.set_held(&copy, true);
        until(async || world.front_board.is_held(&copy)).await;
        client.cut();
    }
    for key in [A, B] {
        let message = refused(&world, key, "{}", "CREATION_ERROR").await;
        assert!(message.contains("used up: 2 sandboxes"), "{message}");
    }
}

#[tokio::test]
async fn no_tenant_keeps_its_place_for_longer_than_it_may() {
    let quotas = world(two_keys_with_quotas).await;
    for (config, asked) in [(r#"{"idle_timeout":null}"#, "never"), (r#"{"idle_timeout":3601}"#, "1h 1s")] {
        let message = refused(&quotas, A, config, "CREATION_ERROR").await;
        let expected =
            format!("`idle_timeout` is {asked}, and the quota of this key allows 1h at most (`idle` in BATON_QUOTAS).");
        assert_eq!(message, expected);
    }
    let within = running(&quotas, A, r#"{"idle_timeout":3600}"#).await;
    let stored = quotas.records.find(within.id()).await.unwrap().unwrap().spec;
    assert_eq!((stored.idle_timeout, stored.tenant), (Some(3600), Some(Tenant::parse("team-a").unwrap())));
    // Lowered where nothing is said.
    let change = |settings: &mut ApiSettings| {
        two_keys(settings);
        settings.quotas = Quotas::parse("idle=1m").unwrap();
    };
    let short = world(change).await;
    let silent = running(&short, A, "{}").await;
    assert_eq!(short.records.find(silent.id()).await.unwrap().unwrap().spec.idle_timeout, Some(60));
    // The control: without a quota it stays for ever.
    let free = world(two_keys).await;
    let forever = running(&free, A, r#"{"idle_timeout":null}"#).await;
    assert_eq!(free.records.find(forever.id()).await.unwrap().unwrap().spec.idle_timeout, None);
}

#[tokio::test]
async fn nobody_begins_from_anothers_checkpoint_without_its_token() {
    let world = world(two_keys).await;
    let mut source = running(&world, A, KEPT).await;
    source.says(r#"{"action":"checkpoint"}"#).await;
    source.hears("CHECKPOINTING CHECKPOINTED close:1000").await;
    let from = |token: Option<&str>| {
        let mut config = json!({"from_checkpoint": checkpoint_id(source.id())});
        if let Some(token) = token {
            config["source_token"] = json!(token);
        }
        config.to_string()
    };
    for key in [A, B] {
        for token in [None, Some("guess"), Some("")] {
            let message = refused(&world, key, &from(token), "PERMISSION_DENIAL_ERROR").await;
            assert_eq!(message, "`source_token` is missing or wrong.");
        }
    }
    // The control: with the token the checkpoint itself is looked for, which this store does not have.
    let message = refused(&world, B, &from(Some(&source.token())), "CREATION_ERROR").await;
    assert!(!message.contains("source_token"), "{message}");
}

#[tokio::test]
async fn a_tenant_sees_and_deletes_its_own_sandboxes_and_only_the_operator_all() {
    let change = |settings: &mut ApiSettings| {
        two_keys(settings);
        settings.admin_key = Some("admin".to_owned());
    };
    let world = world(change).await;
    let clients = [running(&world, A, "{}").await, running(&world, B, "{}").await];
    for (key, own, other) in [(A, &clients[0], &clients[1]), (B, &clients[1], &clients[0])] {
        let (status, text) = http(&world, "GET /sandboxes", key, "").await;
        let listed: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, listed["sandboxes"].as_array().unwrap().len(), &listed["next"]), (200, 1, &Value::Null));
        assert_eq!(listed["sandboxes"][0]["sandbox_id"], own.id().as_str());
        assert!(!text.contains(other.id().as_str()) && !text.contains("token"));
        assert_eq!(http(&world, &format!("GET /sandboxes/{}", own.id()), key, "").await.0, 200);
        for verb in ["GET", "DELETE"] {
            assert_eq!(http(&world, &format!("{verb} /sandboxes/{}", other.id()), key, "").await.0, 404);
            let nobody = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
            assert_eq!(http(&world, &format!("{verb} /sandboxes/{nobody}"), key, "").await.0, 404);
        }
        let guess = ("x-api-key", "guess");
        assert_eq!(http(&world, "GET /sandboxes", guess, "").await.0, 401);
        assert_eq!(http(&world, &format!("DELETE /sandboxes/{}", own.id()), guess, "").await.0, 401);
    }
    let (status, text) = http(&world, "GET /sandboxes", ("x-api-key", "admin"), "").await;
    let listed: Value = serde_json::from_str(&text).unwrap();
    let mut tenants: Vec<_> =
        listed["sandboxes"].as_array().unwrap().iter().map(|one| one["tenant"].as_str().unwrap()).collect();
    tenants.sort_unstable();
    assert_eq!((status, tenants), (200, vec!["team-a", "team-b"]));

    let [mut first, mut second] = clients;
    assert_eq!(world.count(), 2);
    assert_eq!(http(&world, &format!("DELETE /sandboxes/{}", first.id()), A, "").await.0, 202);
    first.hears("DELETING DELETED close:1000").await;
    let path = format!("DELETE /sandboxes/{}", second.id());
    assert_eq!(http(&world, &path, ("x-sandbox-token", "guess"), "").await.0, 403);
    assert_eq!(world.count(), 1);
    let path = format!("{path}?wait=20");
    assert_eq!(http(&world, &path, ("x-sandbox-token", &second.token()), "").await.0, 204);
    assert_eq!(world.count(), 0);
    second.hears("DELETING DELETED close:1000").await;
    assert_eq!(http(&world, &path, ("x-api-key", "admin"), "").await.0, 404);
}

/// A sandbox of this key's on a real server, if it runs; else what it is told.
async fn real(server: &Server, key: Option<(&'static str, &str)>, from: Option<&str>) -> Result<RealSocket, String> {
    let headers: Vec<_> = key.into_iter().collect();
    let mut socket = RealSocket::open_with(server, "/create?details=1", Dialect::Plain, &headers).await;
    socket.send(json!({"filesystem_snapshot_name": from})).await;
    let told = socket.until("an end", |event| {
        ["SANDBOX_RUNNING", "SANDBOX_CREATION_ERROR"].contains(&event["status"].as_str().unwrap_or_default())
    });
    let told = told.await;
    if told["status"] == "SANDBOX_RUNNING" { Ok(socket) } else { Err(told["message"].as_str().unwrap().to_owned()) }
}

/// What is said in the end about a snapshot of this name: nothing, or why not.
async fn snapshot(socket: &mut RealSocket, name: &str) -> Result<(), String> {
    socket.send(json!({"action": "snapshot_filesystem", "name": name})).await;
    let told = socket.until("an answer", |event| {
        let status = event["status"].as_str().unwrap_or_default();
        status.ends_with("SNAPSHOT_CREATED") || status.ends_with("SNAPSHOT_ERROR")
    });
    let told = told.await;
    if told["status"] == "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED" {
        Ok(())
    } else {
        Err(told["message"].as_str().unwrap().to_owned())
    }
}

async fn runs(socket: &mut RealSocket, code: &str) -> String {
    let (written, done) = tokio::time::timeout(Duration::from_secs(60), socket.run("bash", code)).await.unwrap();
    assert_eq!(done["exit_code"], json!(0), "{written}");
    written
}

/// One after the other, so that few containers run at once.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_reads_or_takes_another_tenants_snapshot() {
    let machine = Machine::with_a_directory().await;
    let settings = [("BATON_API_KEYS", "team-a=alpha,team-b=beta"), ("BATON_QUOTAS", "snapshots=1")];
    let (keyed, open) = tokio::join!(machine.server_with("keyed", &settings), machine.server("open"));

    let mut a = real(&keyed, Some(A), None).await.unwrap();
    runs(&mut a, "echo of-a >/root/secret").await;
    snapshot(&mut a, "mine").await.unwrap();
    let above = snapshot(&mut a, "second").await.unwrap_err();
    assert!(above.contains("1 snapshots stored at once (`snapshots` in BATON_QUOTAS)"), "{above}");
    a.kill().await;

    // What the other tenant has does not exist: not to start from, and not as a name that is taken.
    let missing = real(&keyed, Some(B), Some("mine")).await.unwrap_err();
    assert_eq!(missing, "Filesystem snapshot not found: `mine` does not exist.");
    let named = real(&keyed, Some(B), Some("team-a~mine")).await.unwrap_err();
    assert!(named.contains("not a valid snapshot name"), "{named}");
    let mut b = real(&keyed, Some(B), None).await.unwrap();
    runs(&mut b, "echo of-b >/root/secret").await;
    let named = snapshot(&mut b, "team-a~mine").await.unwrap_err();
    assert!(named.contains("not a valid snapshot name"), "{named}");
    snapshot(&mut b, "mine").await.unwrap();
    b.kill().await;
    for (key, secret) in [(A, "of-a\n"), (B, "of-b\n")] {
        let mut again = real(&keyed, Some(key), Some("mine")).await.unwrap();
        assert_eq!(runs(&mut again, "cat /root/secret").await, secret);
        again.kill().await;
    }

    // The control: without keys there are no tenants, and whoever knows a name has it, or finds it taken.
    let mut one = real(&open, None, None).await.unwrap();
    runs(&mut one, "echo of-one >/root/secret").await;
    snapshot(&mut one, "mine").await.unwrap();
    one.kill().await;
    let mut other = real(&open, None, Some("mine")).await.unwrap();
    assert_eq!(runs(&mut other, "cat /root/secret").await, "of-one\n");
    let taken = snapshot(&mut other, "mine").await.unwrap_err();
    assert!(taken.contains("exists already"), "{taken}");
    other.kill().await;
    let manifest = |name: &str| machine.object(&format!("filesystem_snapshots/{name}/manifest.json"));
    let [public, of_a, of_b] = ["mine", "team-a~mine", "team-b~mine"].map(manifest);
    assert!(public.is_some() && of_a.is_some() && of_b.is_some() && of_a != of_b && public != of_a);
    keyed.stop().await;
    open.stop().await;
}
