//! `baton.v1`: many commands at once, offsets, binary frames, acknowledgements.

use std::collections::BTreeMap;

use baton::bus::LeaveReason;
use baton_protocol::{
    binary::BinaryChunk,
    event::{EndReason, Event, Status},
    frame::Stream,
};
use futures::SinkExt;
use tokio_tungstenite::tungstenite::Message;

use crate::{
    scripted_agent::pattern,
    test_server::{Plan, World},
    wire_client::{Client, Said, V1, connect},
};

fn exec(exec_id: &str, code: &str, stdin: bool) -> String {
    serde_json::json!({"action": "exec", "exec_id": exec_id, "argv": ["run", code], "stdin": stdin}).to_string()
}

#[tokio::test]
async fn a_session_begins_with_hello_and_output_is_binary() {
    let world = World::new().await;
    let mut client = Client::running_v1(&world, "{}").await;
    client.says(&exec("a", "bytes [255, 0, 104]\nerr \"oh\"\nexit 2", false)).await;
    client.hears("EXECUTION_RUNNING").await;
    let running = client.last.clone().unwrap();
    assert_eq!((running.exec_id.unwrap().as_str(), running.exec), ("a", Some(1)));
    let mut seen = BTreeMap::new();
    while let Said::Bytes { stream, exec, offset, payload } = client.next().await {
        assert_eq!((exec, offset), (1, 0));
        seen.insert(stream, payload);
    }
    assert_eq!(seen, BTreeMap::from([(1, vec![255, 0, 104]), (2, b"oh".to_vec())]));
    assert_eq!(client.last.as_ref().unwrap().exit_code, Some(2));
}

#[tokio::test]
async fn hello_says_what_there_is() {
    let world = World::new().await;
    let mut client = Client::new(connect(&world, "/create", &V1).await.unwrap());
    let Said::Event(Event::Hello { protocol, max_frame, max_execs, instance }) = client.next().await else { panic!() };
    assert_eq!((protocol, max_frame, max_execs, instance), (1, 1 << 20, 1024, world.instance.clone()));
}

#[tokio::test]
async fn two_hundred_commands_run_at_once() {
    let world = World::new().await;
    let mut client = Client::running_v1(&world, "{}").await;
    for number in 0..200 {
        client
            .says(&exec(&format!("e{number}"), &format!("wait 20\nout \"{number}\"\nexit {}", number % 100), false))
            .await;
    }
    let (mut done, mut texts) = (0, BTreeMap::<u32, Vec<u8>>::new());
    while done < 200 {
        match client.next().await {
            Said::Bytes { exec, payload, .. } => texts.entry(exec).or_default().extend(payload),
            Said::Event(Event::StatusUpdate(update)) if update.status == Status::ExecutionDone => {
                done += 1;
                let number = update.exec.unwrap() - 1;
                assert_eq!(update.exec_id.unwrap().as_str(), format!("e{number}"));
                assert_eq!(update.exit_code, Some(number as i32 % 100));
                assert_eq!(texts[&(number + 1)], number.to_string().into_bytes());
            }
            Said::Event(Event::StatusUpdate(update)) => assert_eq!(update.status, Status::ExecutionRunning),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_name_can_be_used_again_only_after_its_command() {
    let world = World::new().await;
    let mut client = Client::running_v1(&world, "{}").await;
    client.says(&exec("a", "cat", true)).await;
    client.hears("EXECUTION_RUNNING").await;
    client.says(&exec("a", "out \"x\"", false)).await;
    client.hears("EXECUTION_ERROR E").await;
    client.says(r#"{"event":"stdin","exec_id":"a","eof":true}"#).await;
    client.hears("EXECUTION_DONE").await;
    client.says(&exec("a", "out \"x\"", false)).await;
    client.hears("EXECUTION_RUNNING 1/2@0:x EXECUTION_DONE").await;
}

#[tokio::test]
async fn stdin_has_offsets_and_is_acknowledged() {
    let world = World::new().await;
    let mut client = Client::running_v1(&world, "{}").await;
    client.says(&exec("a", "cat", true)).await;
    client.hears("EXECUTION_RUNNING").await;
    let chunk = |offset, payload: &[u8]| {
        let chunk = BinaryChunk { stream: Stream::Stdin, exec: 1, offset, payload };
        Message::Binary(chunk.encode().into())
    };
    client.socket.send(chunk(0, b"abc")).await.unwrap();
    let mut words = [client.word().await, client.word().await];
    words.sort();
    assert_eq!(words, ["1/1@0:abc", "stdin_ack:3"]);
    // Sent again after a reconnect: what is known is dropped, what is missing is named.
    client.socket.send(chunk(1, b"bcd")).await.unwrap();
    let mut words = [client.word().await, client.word().await];
    words.sort();
    assert_eq!(words, ["1/1@3:d", "stdin_ack:4"]);
    client.socket.send(chunk(9, b"x")).await.unwrap();
    client.hears("STDIN_ERROR E").await;
    client.says(&exec("b", "sleep", false)).await;
    client.hears("EXECUTION_RUNNING").await;
    client.says(r#"{"event":"stdin","exec_id":"b","data":"x"}"#).await;
    client.hears("STDIN_ERROR E").await;
    client.says(r#"{"event":"stdin","data":"x"}"#).await;
    client.hears("EXECUTION_ERROR E").await;
}

#[tokio::test]
async fn signals_sizes_and_timeouts_reach_the_agent() {
    let world = World::new().await;
    let mut client = Client::running_v1(&world, "{}").await;
    let start = serde_json::json!({
        "action": "exec", "exec_id": "a", "argv": ["run", "sleep"], "pty": {"cols": 80, "rows": 24},
        "timeout": "30s", "env": {"A": "1"}, "cwd": "/tmp", "user": "nobody",
    });
    client.says(&start.to_string()).await;
    client.hears("EXECUTION_RUNNING").await;
    let started = world.agent().lock().unwrap().starts().remove(0);
    assert_eq!((started.pty.unwrap().cols, started.timeout_ms), (80, Some(30_000)));
    assert_eq!((started.user.as_deref(), started.cwd.as_deref()), (Some("nobody"), Some("/tmp")));
    client.says(r#"{"action":"resize","exec_id":"a","cols":120,"rows":40}"#).await;
    client.says(r#"{"action":"signal","exec_id":"a","signal":"DANCE"}"#).await;
    client.hears("ERROR E").await;
    client.says(r#"{"action":"signal","exec_id":"a","signal":"INT"}"#).await;
    client.hears("EXECUTION_DONE").await;
    assert_eq!(client.last.as_ref().unwrap().signal, Some(2));
    assert_eq!(world.agent().lock().unwrap().sizes, [120 | 40 << 32]);
    client.says(r#"{"action":"signal","exec_id":"a","signal":"INT"}"#).await;
    client.hears("EXECUTION_ERROR E").await;
}

#[tokio::test]
async fn what_is_not_acknowledged_holds_the_command_back() {
    let world = World::new().await;
    let mut client = Client::running_v1(&world, "{}").await;
    client.says(&exec("a", "flood 3000000", false)).await;
    client.hears("EXECUTION_RUNNING").await;
    let mut next = 0;
    let acknowledged = |next: u64| serde_json::json!({"action": "ack", "exec_id": "a", "stdout": next}).to_string();
    loop {
        let read = tokio::time::timeout(std::time::Duration::from_millis(200), client.next()).await;
        match read {
            Ok(Said::Bytes { offset, payload, .. }) => {
                assert_eq!(offset, next);
                assert!(payload.iter().zip(offset..).all(|(byte, at)| *byte == pattern(at)));
                next += payload.len() as u64;
            }
            Ok(Said::Event(Event::StatusUpdate(update))) if update.status == Status::ExecutionDone => break,
            Ok(other) => panic!("{other:?}"),
            // Silence: a window of a mebibyte is full.
            Err(_) => {
                assert!(next % (1 << 20) == 0, "{next}");
                client.says(&acknowledged(next)).await;
            }
        }
    }
    assert_eq!(next, 3_000_000);
}

#[tokio::test]
async fn an_attach_lists_the_commands_and_resumes_those_it_names() {
    let world = World::new().await;
    let mut client = Client::running_v1(&world, "{}").await;
    client.says(&exec("a", "out \"0123456789\"\nexit 4", false)).await;
    client.hears("EXECUTION_RUNNING 1/1@0:0123456789 EXECUTION_DONE").await;
    client.says(&exec("b", "out \"bb\"\nsleep", false)).await;
    client.hears("EXECUTION_RUNNING 1/2@0:bb").await;
    let mut again = client.again(&world, &V1).await;
    client.cut();
    again.hears("hello RUNNING").await;
    let execs = again.last.clone().unwrap().execs.unwrap();
    assert_eq!(execs.iter().map(|exec| exec.exec_id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!((execs[0].running, execs[0].stdout.to, execs[0].exit_code), (false, 10, Some(4)));
    assert!(execs[1].running);
    again.says(r#"{"action":"reconnect","offsets":{"a":{"stdout":6},"c":{}}}"#).await;
    let mut words = vec![];
    for _ in 0..5 {
        words.push(again.word().await);
    }
    words.sort();
    assert_eq!(words, ["1/1@6:6789", "E", "EXECUTION_DONE", "EXECUTION_ERROR", "EXECUTION_RUNNING"]);
    // A restore from an older checkpoint: the client has seen more than there is.
    again.says(r#"{"action":"reconnect","offsets":{"b":{"stdout":5}}}"#).await;
    again.hears("EXECUTION_RUNNING rewound:2").await;
}

#[tokio::test]
async fn a_gap_is_named_with_its_ends() {
    let world = World::new().await;
    let mut client = Client::running_v1(&world, "{}").await;
    client.says(&exec("a", "out \"0123456789\"\nsleep", false)).await;
    client.hears("EXECUTION_RUNNING 1/1@0:0123456789").await;
    world.agent().lock().unwrap().drop_oldest(1, 4);
    let mut again = client.again(&world, &V1).await;
    client.cut();
    again.says(r#"{"action":"reconnect","offsets":{"a":{"stdout":1}}}"#).await;
    again.hears("hello RUNNING EXECUTION_RUNNING gap:1-4 1/1@4:456789").await;
}

#[tokio::test]
async fn the_idle_timeout_is_changed_in_the_spec_and_counts_from_then() {
    let quota = |settings: &mut baton::api::ApiSettings| {
        settings.api_keys = baton::config::api_keys("team=key").unwrap();
        settings.quotas = baton::config::Quotas::parse("idle=1h").unwrap();
    };
    let world = World::with(Plan { has_storage: true, can_snapshot: true, change: quota }).await;
    let headers = [V1[0], ("x-api-key", "key")];
    let mut client = Client::new(connect(&world, "/create?persistent=auto", &headers).await.unwrap());
    client.hears("hello CREATING sandbox_id LOCK_ACQUIRING LOCK_ACQUIRED RUNNING").await;
    let before = world.bus.presence(client.id()).active_at;
    client.says(r#"{"action":"set_idle_timeout","idle_timeout":"10m"}"#).await;
    client.hears("idle_timeout:Some(600)").await;
    let spec = world.records.find(client.id()).await.unwrap().unwrap().spec;
    assert_eq!((spec.idle_timeout, spec.enable_sandbox_checkpoint), (Some(600), true));
    assert!(world.bus.presence(client.id()).active_at > before);
    for too_much in ["null", "3601"] {
        client.says(&format!(r#"{{"action":"set_idle_timeout","idle_timeout":{too_much}}}"#)).await;
        client.hears("ERROR E").await;
        assert!(client.last.as_ref().unwrap().message.as_ref().unwrap().contains("BATON_QUOTAS"));
    }
    let mut plain = Client::running(&World::new().await, "{}").await;
    plain.says(r#"{"action":"set_idle_timeout","idle_timeout":5}"#).await;
    plain.hears("ERROR E").await;
}

#[tokio::test]
async fn the_end_of_a_session_says_why() {
    let world = World::with_storage().await;
    let kept = r#"{"persistent":true}"#;
    let deleted = |client: &Client| client.last.as_ref().unwrap().reason;
    let mut client = Client::running_v1(&world, kept).await;
    client.says(r#"{"action":"checkpoint"}"#).await;
    client.hears("CHECKPOINTING DELETING LOCK_RELEASING LOCK_RELEASED DELETED CHECKPOINTED").await;
    assert_eq!(deleted(&client), Some(EndReason::Checkpoint));
    let mut client = Client::running_v1(&world, kept).await;
    world.leave(client.id(), LeaveReason::Idle, false);
    client.hears("DELETING LOCK_RELEASING LOCK_RELEASED DELETED").await;
    assert_eq!(deleted(&client), Some(EndReason::Idle));
    let mut client = Client::running_v1(&world, kept).await;
    client.says(r#"{"action":"handoff"}"#).await;
    client.hears("CHECKPOINTING CHECKPOINTED").await;
    assert_eq!(deleted(&client), Some(EndReason::Handoff));
    let mut client = Client::running_v1(&world, r#"{"persistent":true,"ttl":60}"#).await;
    world.clock.skip(std::time::Duration::from_secs(61));
    world.leave(client.id(), LeaveReason::Deleted, false);
    loop {
        if client.word().await == "DELETED" {
            break;
        }
    }
    assert_eq!(deleted(&client), Some(EndReason::Expired));
}
