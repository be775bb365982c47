//! Exactly-once output under cuts, and clients that do not read.

use std::time::Duration;

use baton_protocol::event::{Event, Status};

use crate::{
    scripted_agent::pattern,
    test_server::{World, until},
    wire_client::{Client, Said, V1},
};

const SIZE: u64 = 50_000_000;
const CUTS: u64 = 50;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_cuts_in_fifty_megabytes_lose_and_double_nothing_in_v1() {
    let world = World::new().await;
    let mut client = Client::running_v1(&world, "{}").await;
    let start = serde_json::json!({"action": "exec", "exec_id": "a", "argv": ["run", format!("flood {SIZE}")]});
    client.says(&start.to_string()).await;
    let (mut next, mut acked, mut cuts) = (0, 0, 0);
    loop {
        match client.next().await {
            Said::Bytes { offset, payload, .. } => {
                assert_eq!(offset, next, "every byte once");
                assert!(payload.iter().zip(offset..).all(|(byte, at)| *byte == pattern(at)));
                next += payload.len() as u64;
                if next - acked >= 256 << 10 {
                    acked = next;
                    client.says(&serde_json::json!({"action":"ack","exec_id":"a","stdout":next}).to_string()).await;
                }
            }
            Said::Event(Event::StatusUpdate(update)) => match update.status {
                Status::ExecutionDone => break,
                Status::ExecutionRunning | Status::Running => {}
                other => panic!("{other:?}"),
            },
            Said::Event(Event::Hello { .. }) => {}
            other => panic!("{other:?} at {next}"),
        }
        if next > cuts * (SIZE / CUTS) && cuts < CUTS {
            cuts += 1;
            let again = client.again(&world, &V1).await;
            std::mem::replace(&mut client, again).cut();
            let offsets = serde_json::json!({"a": {"stdout": next, "stderr": 0}});
            client.says(&serde_json::json!({"action": "reconnect", "offsets": offsets}).to_string()).await;
            acked = next;
        }
    }
    assert_eq!((next, cuts), (SIZE, CUTS));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_cuts_in_fifty_megabytes_lose_nothing_in_plain() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec(&format!("flood {SIZE}")).await;
    // Where this session's text begins is known from the text alone: the pattern does not repeat.
    let (mut next, mut cuts, mut repeated, mut fresh) = (0u64, 0, 0u64, false);
    loop {
        match client.next().await {
            Said::Event(Event::Stdout { data }) => {
                let bytes = data.as_bytes();
                if std::mem::take(&mut fresh) {
                    let start = (0..=next)
                        .rev()
                        .take((2 << 20) + 1)
                        .find(|start| bytes.iter().take(64).zip(*start..).all(|(byte, at)| *byte == pattern(at)));
                    let start = start.expect("nothing is missing, and no more than a window is repeated");
                    repeated = repeated.max(next - start);
                    next = start;
                }
                assert!(bytes.iter().zip(next..).all(|(byte, at)| *byte == pattern(at)), "at {next}");
                next += bytes.len() as u64;
            }
            Said::Event(Event::StatusUpdate(update)) => match update.status {
                Status::ExecutionDone => break,
                Status::ExecutionRunning | Status::Running => {}
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?} at {next}"),
        }
        if next > cuts * (SIZE / CUTS) && cuts < CUTS {
            cuts += 1;
            let again = client.again(&world, &[]).await;
            std::mem::replace(&mut client, again).cut();
            client.says(r#"{"action":"reconnect"}"#).await;
            fresh = true;
        }
    }
    assert_eq!((next, cuts), (SIZE, CUTS));
    assert!(repeated <= 1 << 20, "{repeated} bytes were repeated");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_holds_the_command_back_and_is_gone_after_a_while() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec(&format!("flood {}", u64::MAX / 2)).await;
    client.hears("EXECUTION_RUNNING").await;
    // No pong confirms anything: a window of a mebibyte, and the command stands still.
    until(async || world.agent().lock().unwrap().sent(1) >= 1 << 20).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(world.agent().lock().unwrap().sent(1), 1 << 20);
    until(async || {
        world.clock.skip(Duration::from_secs(5));
        !world.bus.presence(client.id()).attached
    })
    .await;
    // It comes back in time and misses nothing.
    let mut again = client.again(&world, &[]).await;
    drop(client);
    again.says(r#"{"action":"reconnect"}"#).await;
    again.hears("RUNNING EXECUTION_RUNNING").await;
    let Said::Event(Event::Stdout { data }) = again.next().await else { panic!() };
    assert!(data.bytes().zip(0..).all(|(byte, at)| byte == pattern(at)));
}

#[tokio::test]
async fn a_slow_reader_gets_everything() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("flood 6000000").await;
    let mut next = 0;
    loop {
        match client.next().await {
            Said::Event(Event::Stdout { data }) => {
                assert!(data.bytes().zip(next..).all(|(byte, at)| byte == pattern(at)));
                next += data.len() as u64;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            Said::Event(Event::StatusUpdate(update)) if update.status == Status::ExecutionDone => break,
            _ => {}
        }
    }
    assert_eq!(next, 6_000_000);
}
