//! Authentication and rate limits: keys, origins, rates, and the list that only an admin sees.

use std::sync::atomic::Ordering;

use baton::api::rate_limit::FailureRate;

use crate::{
    plain_dialect::http,
    test_server::{Plan, World},
    wire_client::{Client, connect},
};

fn plan(change: fn(&mut baton::api::ApiSettings)) -> Plan {
    Plan { has_storage: false, can_snapshot: false, change }
}

#[tokio::test]
async fn a_key_is_needed_where_keys_are_set() {
    let world = World::with(plan(|settings| settings.api_keys = baton::config::api_keys("alpha,beta").unwrap())).await;
    for headers in [&[][..], &[("x-api-key", "gamma")], &[("sec-websocket-protocol", "baton.v1, baton.key.gamma")]] {
        assert_eq!(connect(&world, "/create", headers).await.err(), Some(401));
    }
    assert_eq!(http(&world, "POST /execute?language=bash", &[], "exit 0").await.0, 401);
    for headers in [&[("x-api-key", "beta")], &[("sec-websocket-protocol", "baton.plain, baton.key.alpha")]] {
        let mut client = Client::new(connect(&world, "/create", headers).await.unwrap());
        client.hears("CREATING").await;
    }
    assert_eq!(http(&world, "POST /execute?language=bash", &[("x-api-key", "beta")], "exit 0").await.0, 200);
    // An attach has its own token.
    let path = "/attach/sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
    assert!(connect(&world, path, &[]).await.is_ok());
}

#[tokio::test]
async fn a_page_that_is_not_listed_cannot_connect() {
    let world = World::with(plan(|settings| settings.origins = vec!["https://app.example".into()])).await;
    for path in ["/create", "/attach/sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab"] {
        assert_eq!(connect(&world, path, &[("origin", "https://evil.example")]).await.err(), Some(403));
        assert!(connect(&world, path, &[("origin", "https://app.example")]).await.is_ok());
        assert!(connect(&world, path, &[]).await.is_ok());
    }
    for evil in [
        "null",
        "",
        "http://app.example",
        "https://app.example:8443",
        "https://app.example.evil.example",
        "https://sub.app.example",
        "https://app.example/",
        "https://app.example@evil.example",
        "https://evil.example https://app.example",
        "*",
    ] {
        assert_eq!(connect(&world, "/create", &[("origin", evil)]).await.err(), Some(403), "{evil:?}");
    }
    let evil = [("origin", "null")];
    assert_eq!(http(&world, "POST /execute?language=bash", &evil, "exit 0").await.0, 403);
    let (status, body) = http(&world, "GET /sandboxes", &evil, "").await;
    assert!(status == 403 && body.contains("`null`") && body.contains("BATON_ORIGINS"), "{body}");
}

#[tokio::test]
async fn who_fails_too_often_is_refused_before_the_upgrade() {
    let world =
        World::with(plan(|settings| settings.rate_limit = Some(FailureRate { burst: 5, per_second: 0.001 }))).await;
    let mut refused = 0;
    for _ in 0..10 {
        let path = "/attach/sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab?sandbox_token=guess";
        match connect(&world, path, &[]).await {
            Ok(socket) => Client::new(socket).hears("RESTORING NOT_FOUND close:1011").await,
            Err(status) => {
                assert_eq!(status, 429);
                refused += 1;
            }
        }
    }
    assert_eq!(refused, 5);
    assert_eq!(world.writes(), 0);
    let reads = world.reads.load(Ordering::SeqCst);
    assert!(reads <= 10, "{reads} reads for five answers");
}

#[tokio::test]
async fn a_stored_sandbox_finds_no_room_on_a_full_server_and_nothing_is_written() {
    let change = |settings: &mut baton::api::ApiSettings| settings.max_sandboxes = 1;
    let world = World::with(Plan { has_storage: true, can_snapshot: false, change }).await;
    let mut stored = Client::running(&world, r#"{"enable_checkpoint":true}"#).await;
    stored.says(r#"{"action":"checkpoint"}"#).await;
    stored.hears("CHECKPOINTING CHECKPOINTED close:1000").await;
    let mut other = Client::running(&world, "{}").await;
    let writes = world.writes();
    let mut again = stored.again(&world, &[]).await;
    again.hears("RESTORING RESTORE_ERROR E close:4000").await;
    assert_eq!(world.writes(), writes);
    // It is as it was, and comes back when there is room.
    other.says(r#"{"action":"kill_sandbox"}"#).await;
    other.hears("KILLING DELETING DELETED KILLED close:1000").await;
    let mut again = stored.again(&world, &[]).await;
    again.hears("RESTORING RUNNING").await;
}

#[tokio::test]
async fn a_newcomer_takes_the_place_of_the_connection_that_has_been_idle_longest() {
    use tokio::io::AsyncReadExt;
    let world = World::with(plan(|settings| settings.connections.connections = 8)).await;
    let mut client = Client::running(&world, "{}").await;
    let mut silent = Vec::new();
    for _ in 0..7 {
        silent.push(tokio::net::TcpStream::connect(world.address).await.unwrap());
    }
    assert_eq!(http(&world, "GET /status", &[], "").await.0, 200);
    let closed = silent[0].read(&mut [0; 1]).await;
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    client.says(r#"{"language":"bash","code":"out \"x\""}"#).await;
    client.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
}

#[tokio::test]
async fn compression_is_not_offered_so_that_no_message_unfolds() {
    let world = World::new().await;
    let offer = [("sec-websocket-extensions", "permessage-deflate; client_max_window_bits")];
    // The library of the test knows no extensions and would refuse an answer that names one.
    let mut client = Client::new(connect(&world, "/create", &offer).await.unwrap());
    client.hears("CREATING").await;
    let (status, head) = upgrade(&world, "sec-websocket-extensions: permessage-deflate\r\n").await;
    assert_eq!((status, head.to_lowercase().contains("permessage-deflate")), (101, false), "{head}");
}

/// The answer to an upgrade, before anything else.
async fn upgrade(world: &World, header: &str) -> (u16, String) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let request = format!(
        "GET /create HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n{header}\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut heard = Vec::new();
    while !heard.windows(4).any(|window| window == b"\r\n\r\n") {
        assert_ne!(stream.read_buf(&mut heard).await.unwrap(), 0);
    }
    let text = String::from_utf8_lossy(&heard).into_owned();
    (text.split(' ').nth(1).unwrap().parse().unwrap(), text)
}

#[tokio::test]
async fn only_an_admin_sees_the_list() {
    let world = World::with(plan(|settings| settings.admin_key = Some("root".into()))).await;
    let blue = Client::running(&world, r#"{"labels":{"team":"blue"}}"#).await;
    let _red = Client::running(&world, r#"{"labels":{"team":"red"}}"#).await;
    let key = [("x-api-key", "root")];
    for headers in [&[][..], &[("x-api-key", "guess")]] {
        assert_eq!(http(&world, "GET /sandboxes", headers, "").await.0, 401);
        assert_eq!(http(&world, &format!("GET /sandboxes/{}", blue.id()), headers, "").await.0, 401);
    }
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let (status, body) = http(&world, "GET /sandboxes", &key, "").await;
    assert_eq!((status, json(&body)["sandboxes"].as_array().unwrap().len()), (200, 2));
    let (_, body) = http(&world, "GET /sandboxes?label=team=blue", &key, "").await;
    assert_eq!(json(&body)["sandboxes"][0]["sandbox_id"], blue.id().as_str());
    assert!(!body.contains("token"));
    let (status, body) = http(&world, &format!("GET /sandboxes/{}", blue.id()), &key, "").await;
    assert_eq!((status, &json(&body)["labels"]["team"]), (200, &serde_json::json!("blue")));
    assert_eq!(http(&world, "GET /sandboxes/..%2fx", &key, "").await.0, 404);
    assert_eq!(http(&world, "GET /sandboxes?after=x", &key, "").await.0, 400);
    let world = World::new().await;
    assert_eq!(http(&world, "GET /sandboxes", &key, "").await.0, 403);
    assert_eq!(http(&world, "GET /", &[], "").await, (200, r#"{"message":"Server is running"}"#.into()));
}
