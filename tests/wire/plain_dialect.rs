//! Plain sessions: create, commands, stdin, kills, and the ends.

use std::time::Duration;

use baton::{api::ApiSettings, bus::LeaveReason};
use baton_protocol::{
    event::Event,
    metadata::{DesiredState, Metadata},
};

use crate::{
    test_server::{Plan, World, until},
    wire_client::{Client, Said, connect},
};

#[tokio::test]
async fn a_create_tells_the_id_before_running() {
    let world = World::new().await;
    let mut client = Client::create(&world).await;
    client.hears("CREATING").await;
    client.says("{}").await;
    client.hears("sandbox_id RUNNING").await;
    assert_eq!(client.token.as_ref().unwrap().len(), 64);
    let spec = world.records.find(client.id()).await.unwrap().unwrap().spec;
    assert_eq!((spec.idle_timeout, spec.placement), (Some(300), Some(world.instance.clone())));
    assert_ne!(spec.token_sha256, *client.token.as_ref().unwrap());
}

/// A library that answers pings by itself answers them when somebody reads.
#[tokio::test]
async fn a_client_that_answers_no_ping_has_three_seconds_for_its_config() {
    let world = World::new().await;
    let mut client = Client::create(&world).await;
    client.hears("CREATING").await;
    assert_eq!(world.count(), 0);
    // The timer starts when the server has begun to listen, which it has not necessarily yet.
    until(async || {
        world.clock.skip(Duration::from_secs(3));
        world.count() == 1
    })
    .await;
    client.hears("sandbox_id RUNNING").await;
}

#[tokio::test]
async fn a_client_that_answers_its_ping_and_says_nothing_gets_the_defaults() {
    let world = World::new().await;
    let mut client = Client::create(&world).await;
    client.hears("CREATING sandbox_id RUNNING").await;
    let spec = world.records.find(client.id()).await.unwrap().unwrap().spec;
    assert_eq!(spec.idle_timeout, Some(300));
}

#[tokio::test]
async fn the_server_decides_the_idle_timeout_only_if_the_client_names_none() {
    let changes: [(fn(&mut ApiSettings), _); 2] =
        [(|settings| settings.idle_timeout = Some(7), Some(7)), (|settings| settings.idle_timeout = None, None)];
    for (change, default) in changes {
        let world = World::with(Plan { has_storage: false, can_snapshot: false, change }).await;
        for (config, expected) in
            [("{}", default), (r#"{"idle_timeout":9}"#, Some(9)), (r#"{"idle_timeout":null}"#, None)]
        {
            let client = Client::running(&world, config).await;
            let spec = world.records.find(client.id()).await.unwrap().unwrap().spec;
            assert_eq!(spec.idle_timeout, expected, "{config}");
        }
    }
}

/// Whoever reads only now and then answers pings as late. What only confirms the last event must not end it.
#[tokio::test]
async fn a_client_that_does_not_read_for_a_while_is_still_there() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("out \"one\"").await;
    client.hears("EXECUTION_RUNNING out:one EXECUTION_DONE").await;
    // More than a ping may take that asks for a sign of life; those that only confirm went out before it.
    world.clock.skip(Duration::from_secs(12));
    // For the server to act on it, if it does.
    tokio::time::sleep(Duration::from_millis(100)).await;
    client.exec("out \"two\"").await;
    client.hears("EXECUTION_RUNNING out:two EXECUTION_DONE").await;
}

#[tokio::test]
async fn a_first_message_that_is_an_exec_creates_and_runs() {
    let world = World::new().await;
    let mut client = Client::create(&world).await;
    client.exec("out \"hi\\n\"").await;
    client.hears("CREATING sandbox_id RUNNING EXECUTION_RUNNING out:hi_ EXECUTION_DONE").await;
    let mut client = Client::create(&world).await;
    client.says(r#"{"language":"perl","code":"1"}"#).await;
    client.hears("CREATING sandbox_id RUNNING EXECUTION_UNSUPPORTED_LANGUAGE_ERROR E").await;
}

#[tokio::test]
async fn refused_creates_say_why_and_leave_nothing() {
    let world = World::new().await;
    for (config, text) in [
        (r#"{"enable_checkpoint":true}"#, "Checkpointing is not enabled on the server."),
        (r#"{"enable_sandbox_handoff":true}"#, "Sandbox handoff requires checkpointing to be enabled."),
        (
            r#"{"enable_idle_timeout_auto_checkpoint":true}"#,
            "Idle timeout auto checkpoint requires checkpointing to be enabled.",
        ),
        (r#"{"filesystem_snapshot_name":"x"}"#, "Filesystem snapshot is not enabled on the server."),
        (r#"{"idle_timeout":"soon"}"#, "`idle_timeout` must be"),
        (r#"{"labels":7}"#, "`labels` must be"),
    ] {
        let mut client = Client::create(&world).await;
        client.says(config).await;
        client.hears("CREATING CREATION_ERROR").await;
        assert!(client.message().starts_with(text), "{}", client.message());
        let Said::Event(Event::Error { message }) = client.next().await else { panic!() };
        assert_eq!(message, client.message());
        client.hears("close:4000").await;
    }
    assert_eq!(world.writes(), 0);
}

#[tokio::test]
async fn a_create_that_fails_is_deleted() {
    let world = World::new().await;
    world.set(|script| script.start_fails = Some("The container did not start."));
    let mut client = Client::create(&world).await;
    client.says("{}").await;
    client.hears("CREATING sandbox_id CREATION_ERROR E close:4000").await;
    assert_eq!(client.message(), "The container did not start.");
    until(async || world.records.list(None, 100).await.unwrap().0.is_empty()).await;
}

#[tokio::test]
async fn a_client_that_leaves_before_its_id_leaves_nothing() {
    let world = World::new().await;
    world.set(|script| script.start_waits = true);
    let mut client = Client::create(&world).await;
    // The predecessor's clients hear the id just before RUNNING.
    client.says(r#"{"enable_sandbox_handoff":false}"#).await;
    client.hears("CREATING").await;
    until(async || !world.records.list(None, 100).await.unwrap().0.is_empty()).await;
    let id = world.records.list(None, 100).await.unwrap().0.remove(0);
    client.cut();
    let is_deleted = |found: Metadata| found.spec.desired_state == DesiredState::Deleted;
    until(async || world.records.find(&id).await.unwrap().is_none_or(is_deleted)).await;
    assert_eq!(world.count(), 0);
}

#[tokio::test]
async fn the_end_of_a_command_comes_after_all_its_output() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("out \"one\\n\"\nwait 30\nerr \"two\\n\"\nexit 3").await;
    client.hears("EXECUTION_RUNNING out:one_ err:two_ EXECUTION_DONE").await;
    let done = client.last.clone().unwrap();
    assert_eq!((done.exit_code, done.duration_ms, done.exec), (Some(3), Some(7), Some(1)));
    assert!(done.exec_id.is_some());
    client.exec("flood 3000000").await;
    assert_eq!(client.stdout().await.len(), 3_000_000);
}

#[tokio::test]
async fn what_something_it_started_holds_open_does_not_hold_back_the_end() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("orphan\nflood 2000000\nexit 0").await;
    assert_eq!(client.stdout().await.len(), 2_000_000);
    client.exec("out \"next\"").await;
    client.hears("EXECUTION_RUNNING out:next EXECUTION_DONE").await;
}

#[tokio::test]
async fn one_print_is_one_event_and_two_with_time_between_are_two() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("out \"hello\"\nout \"\\n\"\nwait 60\nout \"world\"\nout \"\\n\"").await;
    client.hears("EXECUTION_RUNNING out:hello_ out:world_ EXECUTION_DONE").await;
}

#[tokio::test]
async fn characters_survive_any_cut_and_bad_bytes_are_replaced() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("bytes [195]\nwait 20\nbytes [169, 240, 159]\nwait 20\nbytes [146, 169]\nout \"!\"").await;
    assert_eq!(client.stdout().await, "é💩!");
    client.exec("bytes [97, 255, 98, 195]").await;
    assert_eq!(client.stdout().await, "a\u{fffd}b\u{fffd}");
}

#[tokio::test]
async fn a_second_command_is_refused_and_the_first_goes_on() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("cat").await;
    client.exec("out \"second\"").await;
    let mut words = vec![];
    for _ in 0..3 {
        words.push(client.word().await);
    }
    words.sort();
    assert_eq!(words, ["E", "EXECUTION_ERROR", "EXECUTION_RUNNING"]);
    client.says(r#"{"event":"stdin","data":"still here\n"}"#).await;
    client.hears("out:still_here_").await;
    client.says(r#"{"event":"stdin","eof":true}"#).await;
    client.hears("EXECUTION_DONE").await;
}

#[tokio::test]
async fn bad_commands_and_input_are_refused_by_name() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    for (message, words) in [
        (r#"{"language":"perl","code":"1"}"#, "EXECUTION_UNSUPPORTED_LANGUAGE_ERROR E"),
        (r#"{"language":"python"}"#, "EXECUTION_ERROR E"),
        (r#"{"language":"python","code":7}"#, "EXECUTION_ERROR E"),
        (r#"{"event":"stdin","data":"x"}"#, "EXECUTION_ERROR E"),
        (r#"{"event":"stdin"}"#, "STDIN_ERROR E"),
        (r#"{"language":"bash","code":"no such step"}"#, "EXECUTION_ERROR E"),
        (r#"{"action":"signal","exec_id":"a","signal":"INT"}"#, "ERROR E"),
        (r#"{"action":"dance"}"#, "ERROR E"),
        (r#"{"neither":1}"#, "ERROR E"),
    ] {
        client.says(message).await;
        client.hears(words).await;
    }
    client.exec("out \"fine\"").await;
    client.hears("EXECUTION_RUNNING out:fine EXECUTION_DONE").await;
}

#[tokio::test]
async fn stdin_arrives_whole_also_when_it_is_large() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("cat").await;
    client.hears("EXECUTION_RUNNING").await;
    let line = "0123456789abcdef".repeat(64 << 10);
    for _ in 0..4 {
        client.says(&serde_json::json!({"event": "stdin", "data": line}).to_string()).await;
    }
    client.says(r#"{"event":"stdin","data":"IQ==","encoding":"base64","eof":true}"#).await;
    let text = client.stdout().await;
    assert_eq!(text.len(), 4 * line.len() + 1);
    assert!(text.ends_with("cdef!"));
}

#[tokio::test]
async fn a_kill_is_told_before_the_end_and_reaches_the_whole_tree() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.says(r#"{"action":"kill_process"}"#).await;
    client.hears("EXECUTION_FORCE_KILLED").await;
    client.exec("sleep").await;
    client.hears("EXECUTION_RUNNING").await;
    client.says(r#"{"action":"kill_process"}"#).await;
    client.hears("EXECUTION_FORCE_KILLED EXECUTION_DONE").await;
    assert_eq!(client.last.as_ref().unwrap().signal, Some(9));
    let signals = world.agent().lock().unwrap().signals.clone();
    assert_eq!(signals, [(1, 9, baton_protocol::frame::Stream::Tree)]);
    client.exec("out \"x\"").await;
    client.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
}

#[tokio::test]
async fn a_killed_sandbox_is_gone() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("sleep").await;
    client.hears("EXECUTION_RUNNING").await;
    client.says(r#"{"action":"kill_sandbox"}"#).await;
    client.hears("KILLING DELETING DELETED KILLED close:1000").await;
    assert!(world.records.find(client.id()).await.unwrap().is_none());
    let mut again = client.again(&world, &[]).await;
    again.hears("RESTORING NOT_FOUND close:1011").await;
}

#[tokio::test]
async fn an_idle_end_closes_properly_and_activity_is_noticed() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    let before = world.bus.presence(client.id()).active_at;
    client.exec("out \"x\"").await;
    client.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
    assert!(world.bus.presence(client.id()).active_at > before);
    world.leave(client.id(), LeaveReason::Idle, false);
    client.hears("DELETING DELETED close:1000").await;
}

#[tokio::test]
async fn long_code_comes_by_stdin_and_leaves_the_rest_of_it() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    let code = format!("cat\n{}", "out \"\"\n".repeat(20_000));
    client.exec(&code).await;
    // The double runs the last argument, which is the length: no such command.
    client.hears("EXECUTION_ERROR E").await;
    client.exec("out \"x\"").await;
    client.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
}

#[tokio::test]
async fn at_the_end_of_the_server_every_session_hears_it() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    let stopped = tokio::spawn(world.stop());
    client.hears("close:1012").await;
    stopped.await.unwrap();
}

#[tokio::test]
async fn an_execute_streams_and_leaves_nothing() {
    let world = World::new().await;
    let (status, body) = http(&world, "POST /execute?language=bash", &[], "out \"a\"\nerr \"b\"\nflood 100000").await;
    assert_eq!((status, body.len()), (200, 100_002));
    let (status, body) = http(&world, "POST /execute?language=bash", &[], "no such step").await;
    assert_eq!((status, body.as_str()), (500, "There is no such command."));
    let json = [("accept", "application/json")];
    let code = "out \"a\"\nerr \"b\"\nexit 3";
    let (status, body) = http(&world, "POST /execute?language=bash", &json, code).await;
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (status, &body["exit_code"], &body["stdout"], &body["stderr"]),
        (200, &3.into(), &"a".into(), &"b".into())
    );
    assert_eq!((&body["signal"], &body["timed_out"], &body["truncated"]), (&().into(), &false.into(), &false.into()));
    assert!(body["duration_ms"].is_u64(), "{body}");
    let (status, body) = http(&world, "POST /execute?language=bash", &json, "flood 3000000").await;
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &body["truncated"]), (200, &true.into()));
    let (status, body) = http(&world, "POST /execute?language=bash", &json, "no such step").await;
    assert_eq!((status, body.as_str()), (500, r#"{"message":"There is no such command."}"#));
    for path in ["POST /execute", "POST /execute?language=perl"] {
        assert_eq!(http(&world, path, &[], "x").await.0, 422);
    }
    until(async || world.records.list(None, 100).await.unwrap().0.is_empty()).await;
}

#[tokio::test]
async fn a_full_or_draining_server_refuses_before_any_write() {
    let plan = Plan { has_storage: false, can_snapshot: false, change: |settings| settings.max_sandboxes = 1 };
    let world = World::with(plan).await;
    let first = Client::running(&world, "{}").await;
    let writes = world.writes();
    let mut second = Client::create(&world).await;
    second.says("{}").await;
    second.hears("CREATING CREATION_ERROR E close:4000").await;
    assert_eq!(http(&world, "POST /execute?language=bash", &[], "exit 0").await.0, 503);
    assert_eq!(http(&world, "GET /status", &[], "").await.0, 200);
    world.drain.send_replace(true);
    assert_eq!(http(&world, "GET /status", &[], "").await.0, 503);
    let begun = std::time::Instant::now();
    let mut again = first.again(&world, &[]).await;
    again.hears("close:1012").await;
    assert!(begun.elapsed() >= Duration::from_millis(500));
    assert_eq!(world.writes(), writes);
    assert!(connect(&world, "/nowhere", &[]).await.is_err());
}

/// One request over HTTP/1.1, as a program without a library would make it.
pub async fn http(world: &World, line: &str, headers: &[(&str, &str)], body: &str) -> (u16, String) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let length = body.len();
    let request =
        format!("{line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let (head, mut rest) = answer.split_once("\r\n\r\n").unwrap();
    let mut text = String::new();
    if !head.to_lowercase().contains("transfer-encoding: chunked") {
        return (status, rest.to_owned());
    }
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        text.push_str(&after[..size]);
        rest = &after[(size + 2).min(after.len())..];
    }
    (status, text)
}
