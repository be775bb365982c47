//! Whole servers with warm containers: their end, and sandboxes that move.

use super::*;
use crate::{
    live_handoff::{movable, ticking},
    servers::Machine,
    websocket_client::{Dialect, Socket},
};
use rustix::process::Signal;

const WARM: (&str, &str) = ("BATON_WARM", "2");
const READY: &str = "the warm pool is ready";

#[tokio::test(flavor = "multi_thread")]
async fn they_die_with_a_server_that_is_killed_and_the_next_one_wipes_what_is_left() {
    let machine = Machine::with_a_directory().await;
    let mut server = machine.server_with("a", &[WARM]).await;
    server.said(READY).await;
    let (dead, found) = (names(&server.state), processes(&server.state));
    assert_eq!((dead.len(), found.len()), (2, 4), "two, of a sentry and a gofer each");
    // It cannot see that its server is gone.
    sentry(&server.state, dead.first().unwrap()).signal(Signal::STOP).unwrap();
    server.die().await;
    eventually("they are dead", || found.iter().all(ProcessHandle::has_ended)).await;
    drop(server);
    let mut server = machine.server_with("a", &[WARM]).await;
    server.said(READY).await;
    assert!(names(&server.state).is_disjoint(&dead), "{dead:?}");
    assert_eq!(std::fs::read_dir(server.state.join("bundles")).unwrap().count(), 2);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_sigterm_nothing_of_them_is_left() {
    let machine = Machine::with_a_directory().await;
    // Limits, so that there are cgroups where there can be some.
    let mut server = machine.server_with("a", &[WARM, ("BATON_LIMITS", "memory=256MiB,cpus=1")]).await;
    server.said(READY).await;
    let names = names(&server.state);
    let groups = || {
        let find = std::process::Command::new("find").args(["/sys/fs/cgroup", "-type", "d"]).output().unwrap();
        let found = String::from_utf8_lossy(&find.stdout).into_owned();
        found.lines().filter(|line| names.iter().any(|name| line.ends_with(name))).count()
    };
    println!("cgroups: {}", groups());
    let state = server.state.clone();
    let (socket, _) = Socket::create(&server, Dialect::V1, movable()).await;
    assert!(server.figures().await.contains("baton_warm_taken_total 1"));
    server.stop().await;
    drop(socket);
    for empty in ["bundles", "logs", "overlay", "runsc"] {
        assert_eq!(std::fs::read_dir(state.join(empty)).unwrap().count(), 0, "{empty} is empty");
    }
    assert_eq!(groups(), 0);
}

/// Limits that every sandbox gets by default cost no start.
#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_with_the_limits_of_the_manifest_begins_warm_and_has_them() {
    let manifest = include_str!("../../../manifests/cloud-run.yaml");
    let limits = manifest.split("name: BATON_LIMITS").nth(1).and_then(|rest| rest.split("value: ").nth(1));
    let limits = limits.unwrap().lines().next().unwrap();
    let machine = Machine::with_a_directory().await;
    let mut server = machine.server_with("a", &[WARM, ("BATON_LIMITS", limits)]).await;
    server.said(READY).await;
    let (mut socket, _) = Socket::create(&server, Dialect::Plain, serde_json::json!({})).await;
    assert!(server.figures().await.contains("baton_warm_taken_total 1"));
    assert_eq!(socket.run("bash", "ulimit -n").await.0, "4096\n", "of {limits}");
    socket.kill().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_began_warm_moves_to_another_server_and_back() {
    let machine = Machine::with_a_bucket().await;
    let (mut one, two) = tokio::join!(machine.server_with("a", &[WARM]), machine.server("b"));
    one.said(READY).await;
    let (socket, key, mut mind) = ticking(&one).await;
    assert!(one.figures().await.contains("baton_warm_taken_total 1"));
    drop(socket);
    for server in [&two, &one] {
        let lines = mind.commands["tick"].stdout.lines();
        let mut socket = mind.come_back(server, &key).await;
        mind.until(&mut socket, "it goes on", |mind| mind.commands["tick"].stdout.lines() > lines + 5).await;
    }
    Socket::attach(&one, Dialect::Plain, &key).await.kill().await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_began_warm_stands_still_when_its_lease_cannot_be_renewed() {
    let machine = Machine::with_a_bucket().await;
    let mut server = machine.server_with("a", &[WARM, crate::server_crash::SCALED[0]]).await;
    server.said(READY).await;
    let (mut socket, key, mut mind) = ticking(&server).await;
    let (fault, hang) = (baton_fake_gcs::Op::Any, baton_fake_gcs::FaultKind::Hang);
    machine.bucket().add_fault(baton_fake_gcs::InjectedFault::new(fault, hang).on(&key.id).times(0));
    while !socket.statuses.iter().any(|status| status == "PAUSED") {
        assert_eq!(mind.step(&mut socket).await, None);
    }
    let waiting = processes(&server.state).into_iter().filter(|process| !process.is_stopped()).count();
    assert!(waiting >= 4, "those that wait have no lease and no deadline");
    machine.bucket().clear_faults();
    let before = mind.commands["tick"].stdout.lines();
    mind.until(&mut socket, "it goes on", |mind| mind.commands["tick"].stdout.lines() > before + 5).await;
    socket.kill().await;
    server.stop().await;
}
