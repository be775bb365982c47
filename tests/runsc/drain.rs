//! SIGTERM: a server lets its sandboxes go, with everything in them, and their clients follow.

use std::time::Duration;

use baton_fake_gcs::{FaultKind, InjectedFault, Op};
use futures::future::join_all;
use nix::sys::signal::Signal;
use serde_json::json;

use crate::{
    fixture::{clock, processes},
    live_handoff::ticking,
    servers::{Machine, Server},
    websocket_client::{Dialect, Mind, Socket},
};

/// Waits until the server says that it is on its way out.
async fn drains(server: &Server) {
    for _ in 0..1_000 {
        let (status, body) = server.get("/status").await;
        if status == 503 {
            assert!(body.contains("\"draining\""), "{body}");
            return;
        }
        clock().sleep(Duration::from_millis(10)).await;
    }
    panic!("it never drained");
}

async fn read_to_the_end(mind: &mut Mind, socket: &mut Socket) -> Option<u16> {
    loop {
        if let Some(code) = mind.step(socket).await {
            return code;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_sigterm_every_sandbox_goes_on_elsewhere() {
    everybody_goes_on_elsewhere(Machine::with_a_bucket().await).await;
}

pub async fn everybody_goes_on_elsewhere(machine: Machine) {
    let patient = [("BATON_DRAIN", "60s")];
    let (mut one, two) = tokio::join!(machine.server_with("a", &patient), machine.server("b"));
    let sandboxes = join_all((0..3).map(|_| ticking(&one))).await;
    let (mut fleeting, _) = Socket::create(&one, Dialect::Plain, json!({})).await;
    // Every manifest takes so long that the servers' ways can be watched.
    machine.bucket().add_fault(
        InjectedFault::new(Op::Write, FaultKind::Delay(Duration::from_secs(1))).on("manifest.json").times(3),
    );
    one.signal(Signal::SIGTERM);
    drains(&one).await;

    let mut late = Socket::attach(&one, Dialect::Plain, &sandboxes[0].1).await;
    assert_eq!(late.end().await, Some(1012), "who comes now is sent elsewhere");
    assert_eq!(fleeting.end().await, Some(1012));
    assert_eq!(fleeting.statuses.iter().rev().take(2).rev().collect::<Vec<_>>(), ["DELETING", "DELETED"]);

    let moved = sandboxes.into_iter().map(|(mut socket, key, mut mind)| {
        let (machine, two) = (&machine, &two);
        async move {
            let code = read_to_the_end(&mut mind, &mut socket).await;
            assert_eq!(code, Some(1012), "heard {:?}", socket.statuses);
            let said: Vec<_> = socket.statuses.iter().rev().take(2).rev().collect();
            assert_eq!(said, ["CHECKPOINTING", "CHECKPOINTED"], "no DELETED: clients shall follow");
            assert!(machine.lock(&key.id)["lease"].is_null());
            let mut socket = mind.come_back(two, &key).await;
            let lines = mind.commands["tick"].stdout.lines();
            mind.until(&mut socket, "it goes on", |mind| mind.commands["tick"].stdout.lines() > lines).await;
            socket
        }
    });
    let sockets = join_all(moved).await;
    assert!(one.ended().await.success());
    assert_eq!(processes(&one.state).len(), 0);
    join_all(sockets.into_iter().map(Socket::kill)).await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_into_the_drain_time_is_let_go_with_its_last_checkpoint() {
    let machine = Machine::with_a_bucket().await;
    let hasty = [("BATON_DRAIN", "2s")];
    let (one, mut two) = tokio::join!(machine.server("a"), machine.server_with("b", &hasty));
    let (socket, key, mut mind) = ticking(&one).await;
    drop(socket);
    let mut socket = mind.come_back(&two, &key).await;
    let lines = mind.commands["tick"].stdout.lines();
    mind.until(&mut socket, "it goes on", |mind| mind.commands["tick"].stdout.lines() > lines).await;
    let head = machine.lock(&key.id)["head"].clone();

    machine.bucket().add_fault(InjectedFault::new(Op::Any, FaultKind::Hang).on("manifest.json").times(0));
    two.signal(Signal::SIGTERM);
    assert_eq!(read_to_the_end(&mut mind, &mut socket).await, Some(1012), "heard {:?}", socket.statuses);
    assert!(two.ended().await.success());
    assert!(two.log().contains("the drain time is up"));
    let lock = machine.lock(&key.id);
    assert_eq!((&lock["lease"], &lock["head"]), (&json!(null), &head));

    machine.bucket().clear_faults();
    let mut socket = Socket::attach(&one, Dialect::V1, &key).await;
    socket.until("rolled_back", |event| event["event"] == "rolled_back").await;
    socket.status("RUNNING").await;
    socket.kill().await;
    one.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_sigterm_ends_at_once() {
    let machine = Machine::with_a_bucket().await;
    let mut one = machine.server_with("a", &[("BATON_DRAIN", "10m")]).await;
    let (mut socket, _, _) = ticking(&one).await;
    machine.bucket().add_fault(InjectedFault::new(Op::Any, FaultKind::Hang).on("manifest.json").times(0));
    one.signal(Signal::SIGTERM);
    drains(&one).await;
    socket.status("CHECKPOINTING").await;
    one.signal(Signal::SIGTERM);
    assert!(one.ended().await.success());
    assert_eq!(processes(&one.state).len(), 0);
}
