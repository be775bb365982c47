//! "Stateful Sandbox Lifecycle & Handoff Protocol Specification".

use std::time::Duration;

use serde_json::json;

use super::*;
use crate::{fixture::clock, servers::Machine};

/// Nothing is sent before RUNNING: the defaults count, without the wait for a config.
#[tokio::test(flavor = "multi_thread")]
async fn create_and_execute() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let began = clock().now();
    create(&server, json!({})).await;
    let with_config = clock().now() - began;
    let began = clock().now();
    let mut socket = open(&server, "/create").await;
    is_created(&mut socket).await;
    let without = clock().now() - began;
    assert!(without < with_config + Duration::from_secs(2), "{without:?} without a config, {with_config:?} with one");
    runs(&mut socket, "python", "print('hello')", "hello\n").await;
    runs(&mut socket, "bash", "echo 'world'", "world\n").await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attach_and_execute() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let mut socket = open(&server, "/create").await;
    let key = is_created(&mut socket).await;
    drop(socket);
    let mut socket = attach(&server, &key).await;
    hears(&mut socket, &[status("RUNNING")]).await;
    runs(&mut socket, "python", "print('hello from attached client')", "hello from attached client\n").await;
    server.stop().await;
}

/// A config in the query is the config, and nothing else is awaited.
#[tokio::test(flavor = "multi_thread")]
async fn a_config_may_come_as_query_parameters() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let mut socket = open(&server, "/create?idle_timeout=300&enable_checkpoint=true&label=tier=free").await;
    let key = is_created(&mut socket).await;
    let metadata = machine.json(&format!("sandboxes/{}/metadata.json", key.id));
    assert_eq!(metadata["idle_timeout"], json!(300));
    assert_eq!(metadata["labels"], json!({"tier": "free"}));
    let mut socket = open(&server, "/create?enable_checkpoint=perhaps").await;
    hears(&mut socket, &[status("CREATING"), status("CREATION_ERROR")]).await;
    explains(&mut socket, "`enable_checkpoint` must be true or false.").await;
    closes(&mut socket, 4000).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_config_without_an_idle_timeout_gets_the_servers() {
    let machine = Machine::with_a_directory().await;
    for (name, setting, stored) in [("a", "7s", json!(7)), ("b", "off", json!(null))] {
        let server = machine.server_with(name, &[("BATON_IDLE_TIMEOUT", setting)]).await;
        let (_socket, key) = create(&server, json!({"enable_checkpoint": true})).await;
        let metadata = machine.json(&format!("sandboxes/{}/metadata.json", key.id));
        assert_eq!(metadata["idle_timeout"], stored, "{setting}");
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_execution_is_refused_and_the_first_goes_on() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (mut socket, _) = create(&server, json!({})).await;
    socket.send(json!({"language": "bash", "code": "read; echo first"})).await;
    hears(&mut socket, &[status("EXECUTION_RUNNING")]).await;
    socket.send(json!({"language": "bash", "code": "echo second"})).await;
    hears(&mut socket, &[status("EXECUTION_ERROR"), error("An execution is already in progress.")]).await;
    socket.send(json!({"event": "stdin", "data": "\n"})).await;
    hears(&mut socket, &[stdout("first\n"), status("EXECUTION_DONE")]).await;
    socket.send(json!({"language": "ruby", "code": "1"})).await;
    let text = "Unsupported language: 'ruby'. Supported languages are: python, bash";
    hears(&mut socket, &[status("EXECUTION_UNSUPPORTED_LANGUAGE_ERROR"), error(text)]).await;
    runs(&mut socket, "bash", "echo third", "third\n").await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_client_is_refused_and_the_first_notices_nothing() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (mut first, key) = create(&server, example()).await;
    // It answers pings only while it listens.
    let listens = tokio::spawn(async move {
        let heard = next(&mut first).await;
        (first, heard)
    });
    let mut second = attach(&server, &key).await;
    hears(&mut second, &[status("IN_USE")]).await;
    closes(&mut second, 1011).await;
    let mut third = attach(&server, &key).await;
    hears(&mut third, &[status("IN_USE")]).await;
    assert!(!listens.is_finished());
    listens.abort();
    server.stop().await;
}

/// The same on another instance: the holder asks its client for a sign of life before it lets go.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_client_elsewhere_is_refused_while_the_first_is_alive() {
    let machine = Machine::with_a_directory().await;
    let (one, two) = tokio::join!(machine.server("a"), machine.server("b"));
    let (mut first, key) = create(&one, example()).await;
    let listens = tokio::spawn(async move { (next(&mut first).await, first) });
    let mut second = attach(&two, &key).await;
    hears(&mut second, &[status("RESTORING"), status("IN_USE")]).await;
    closes(&mut second, 1011).await;
    assert!(!listens.is_finished());
    listens.abort();
    let _ = listens.await;
    // It has left now, and the next one gets it.
    let mut third = attach(&two, &key).await;
    hears(&mut third, &[status("RESTORING"), status("RUNNING")]).await;
    one.stop().await;
    two.stop().await;
}

/// The client's connection is lost and it lands on another instance, with a command that runs.
#[tokio::test(flavor = "multi_thread")]
async fn reconnecting_with_a_handoff() {
    let machine = Machine::with_a_directory().await;
    let (one, two) = tokio::join!(machine.server("a"), machine.server("b"));
    let (mut socket, key) = create(&one, example()).await;
    socket.send(json!({"language": "bash", "code": "echo begun; read; echo done"})).await;
    hears(&mut socket, &[status("EXECUTION_RUNNING"), stdout("begun\n")]).await;
    listen(&mut socket, Duration::from_millis(400)).await;
    drop(socket);
    let mut socket = attach(&two, &key).await;
    hears(&mut socket, &[status("RESTORING"), status("RUNNING")]).await;
    // In a quiet moment nothing is repeated.
    socket.send(json!({"action": "reconnect"})).await;
    hears(&mut socket, &[status("EXECUTION_RUNNING")]).await;
    socket.send(json!({"event": "stdin", "data": "\n"})).await;
    hears(&mut socket, &[stdout("done\n"), status("EXECUTION_DONE")]).await;
    drop(socket);
    // The affinity miss of a client that was not cut off but came back: where it is now, it only runs on.
    let mut socket = attach(&two, &key).await;
    hears(&mut socket, &[status("RUNNING")]).await;
    one.stop().await;
    two.stop().await;
}

/// Lets the client's library answer pings for a while; nothing else may come.
async fn listen(socket: &mut Socket, span: Duration) {
    let heard = clock().timeout(span, socket.next()).await;
    assert!(heard.is_err(), "{heard:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn details_come_to_those_who_ask() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (mut socket, key) = create(&server, json!({})).await;
    socket.send(json!({"language": "bash", "code": "exit 3", "details": true})).await;
    let running = next(&mut socket).await;
    assert_eq!((&running["exec"], running["exec_id"].is_string()), (&json!(1), true), "{running}");
    let done = next(&mut socket).await;
    assert_eq!((&done["exit_code"], done["duration_ms"].is_u64()), (&json!(3), true), "{done}");
    runs_silently(&mut socket, "true").await;
    drop(socket);
    let mut socket = open(&server, &format!("/attach/{}?sandbox_token={}&details=1", key.id, key.token)).await;
    hears(&mut socket, &[status("RUNNING")]).await;
    socket.send(json!({"language": "bash", "code": "exit 4"})).await;
    let done = socket.status("EXECUTION_DONE").await;
    assert_eq!(done["exit_code"], json!(4));
    let mut socket = open(&server, "/create").await;
    socket.send(json!({"details": true})).await;
    hears(&mut socket, &[status("CREATING")]).await;
    assert_eq!(next(&mut socket).await["persistent"], json!(false));
    hears(&mut socket, &[status("RUNNING")]).await;
    socket.send(json!({"language": "ruby", "code": "1"})).await;
    let refused = next(&mut socket).await;
    assert!(refused["message"].is_string(), "{refused}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_needed_unless_the_operator_says_otherwise() {
    let machine = Machine::with_a_directory().await;
    let (strict, lenient) =
        tokio::join!(machine.server("a"), machine.server_with("b", &[("BATON_ATTACH_TOKEN", "optional")]));
    let (mut socket, key) = create(&strict, example()).await;
    checkpoints(&mut socket).await;
    let mut denied = open(&strict, &format!("/attach/{}", key.id)).await;
    hears(&mut denied, &[status("PERMISSION_DENIAL_ERROR"), error("The sandbox token is missing or wrong.")]).await;
    closes(&mut denied, 4000).await;
    let mut wrong = open(&lenient, &format!("/attach/{}?sandbox_token=guessed", key.id)).await;
    hears(&mut wrong, &[status("PERMISSION_DENIAL_ERROR"), error("The sandbox token is missing or wrong.")]).await;
    let mut without = open(&lenient, &format!("/attach/{}", key.id)).await;
    hears(&mut without, &[status("RESTORING"), status("RUNNING")]).await;
    strict.stop().await;
    lenient.stop().await;
}
