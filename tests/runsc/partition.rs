//! Servers that do not reach the store: a sandbox stands still when its lease is over, goes on
//! when it can be proven again, and ends when another server took it meanwhile.

use std::time::Duration;

use baton_fake_gcs::{FaultKind, InjectedFault, Op};
use serde_json::json;

use crate::{
    fixture::{clock, eventually, processes},
    gate::Gate,
    live_handoff::ticking,
    server_crash::SCALED,
    servers::{Machine, is_proof},
    websocket_client::{Dialect, Socket},
};

fn lines(mind: &crate::websocket_client::Mind) -> u64 {
    mind.commands["tick"].stdout.lines()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_whose_store_is_silent_stands_still_and_goes_on_without_loss() {
    let machine = Machine::with_a_bucket().await;
    let server = machine.server_with("a", &SCALED).await;
    let (mut cut, key, mut mind) = ticking(&server).await;
    let (mut other, other_key, mut other_mind) = ticking(&server).await;
    let renewals = machine.lock(&other_key.id)["lease"]["renew"].as_u64().unwrap();

    machine.bucket().add_fault(InjectedFault::new(Op::Any, FaultKind::Hang).on(&key.id).times(0));
    let paused = |cut: &Socket| cut.statuses.iter().any(|status| status == "PAUSED");
    while !paused(&cut) {
        assert_eq!(mind.step(&mut cut).await, None);
    }
    // What hangs for one sandbox holds up no other.
    let before = lines(&other_mind);
    other_mind.until(&mut other, "the other goes on", |mind| lines(mind) > before + 5).await;
    let renewed = || machine.lock(&other_key.id)["lease"]["renew"].as_u64().unwrap() > renewals;
    eventually("the other's lease is renewed", renewed).await;
    machine.bucket().clear_faults();
    let before = lines(&mind);
    mind.until(&mut cut, "it goes on", |mind| lines(mind) > before + 5).await;
    assert_eq!(cut.statuses.last().map(String::as_str), Some("RUNNING"));
    assert_eq!(machine.lock(&key.id)["epoch"], json!(1), "nobody took it");
    cut.kill().await;
    other.kill().await;
    server.stop().await;
}

/// Twenty seconds, a minute and ten minutes; but for a proof in a fifth of the time, and without the last.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_out_of_reach_for_longer_than_hold_costs_nothing_but_time() {
    let machine = Machine::with_a_bucket().await;
    let (settings, spans): (&[_], &[u64]) = if is_proof() { (&[], &[20, 60, 600]) } else { (&SCALED, &[4, 12]) };
    let server = machine.server_with("a", settings).await;
    let (mut socket, key, mut mind) = ticking(&server).await;
    for seconds in spans {
        socket.statuses.clear();
        let until = clock().now() + Duration::from_secs(*seconds);
        machine.bucket().add_fault(InjectedFault::new(Op::Any, FaultKind::Status(503)).times(0));
        while !socket.statuses.iter().any(|status| status == "PAUSED") {
            assert_eq!(mind.step(&mut socket).await, None);
        }
        mind.stdout_rests(&mut socket, until - clock().now()).await;
        assert!(!socket.statuses.iter().any(|status| status == "RUNNING"), "{seconds} s: {:?}", socket.statuses);
        machine.bucket().clear_faults();
        let before = lines(&mind);
        mind.until(&mut socket, "it goes on", |mind| lines(mind) > before + 5).await;
        assert_eq!(machine.lock(&key.id)["epoch"], json!(1), "nobody took it");
    }
    socket.kill().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_was_taken_over_meanwhile_ends_where_it_stood_still() {
    let machine = Machine::with_a_bucket().await;
    let gate = Gate::to(machine.bucket().url()).await;
    let gated = [SCALED[0], ("BATON_GCS_ENDPOINT", &gate.url)];
    let (one, two) = tokio::join!(machine.server_with("a", &gated), machine.server_with("b", &SCALED));
    let (socket, key, mut mind) = ticking(&two).await;
    drop(socket);
    let mut old = mind.come_back(&one, &key).await;
    let before = lines(&mind);
    mind.until(&mut old, "it goes on", |mind| lines(mind) > before).await;

    gate.close();
    let began = clock().now();
    let mut new = Socket::attach(&two, Dialect::V1, &key).await;
    new.until("rolled_back", |event| event["event"] == "rolled_back").await;
    new.status("RUNNING").await;
    println!("taken over after {:?}", clock().now() - began);
    while !old.statuses.iter().any(|status| status == "PAUSED") {
        assert_eq!(mind.step(&mut old).await, None, "it stood still before it was taken over");
    }
    gate.open();
    assert_eq!(old.end().await, Some(1012));
    assert!(old.statuses.ends_with(&["LOCK_RENEWAL_ERROR", "E"].map(str::to_owned)), "{:?}", old.statuses);
    let state = one.state.clone();
    eventually("the old copy is gone", || processes(&state).is_empty()).await;
    assert_eq!(machine.lock(&key.id)["epoch"], json!(3));
    new.kill().await;
    one.stop().await;
    two.stop().await;
}
