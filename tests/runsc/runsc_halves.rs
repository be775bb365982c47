//! A server as two processes: what the death of either half means, who may speak with whom, and
//! the walks of the whole server again.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use serde_json::json;

use crate::{
    drain::everybody_goes_on_elsewhere,
    fixture::{eventually, processes},
    live_handoff::{everything_moves, movable, ticking},
    server_crash::SCALED,
    servers::{Machine, NOBODY, capabilities, is_proof},
    websocket_client::{Dialect, Socket},
};

#[tokio::test(flavor = "multi_thread")]
async fn an_api_that_dies_takes_nothing_with_it() {
    let machine = Machine::with_a_bucket().await.in_halves();
    let mut server = machine.server("a").await;
    let (mut socket, key, mut mind) = ticking(&server).await;
    let (mut fleeting, other) = Socket::create(&server, Dialect::Plain, json!({})).await;
    fleeting.run("bash", "echo here >/srv/file").await;
    let pids = || processes(&server.state).iter().map(|process| process.pid()).collect::<Vec<_>>();
    let before = pids();
    assert_eq!(before.len(), 4, "two sandboxes");

    server.replace_api(async || {}).await;
    assert_eq!(socket.end().await, None, "nobody was left to say goodbye");
    let mut socket = mind.come_back(&server, &key).await;
    let lines = mind.commands["tick"].stdout.lines();
    mind.until(&mut socket, "it goes on", |mind| mind.commands["tick"].stdout.lines() > lines + 20).await;
    assert_eq!(machine.lock(&key.id)["epoch"], json!(1), "it never changed hands");
    let mut fleeting = Socket::attach(&server, Dialect::Plain, &other).await;
    fleeting.status("RUNNING").await;
    assert_eq!(fleeting.run("bash", "cat /srv/file").await.0, "here\n");
    let after: Vec<_> = processes(&server.state).iter().map(|process| process.pid()).collect();
    assert_eq!(after, before, "the very same containers");
    socket.kill().await;
    fleeting.kill().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reconciler_that_dies_takes_its_containers_and_the_lease_decides() {
    let machine = Machine::with_a_bucket().await.in_halves();
    let (one, mut two) = tokio::join!(machine.server_with("a", &SCALED), machine.server_with("b", &SCALED));
    let (socket, key, mut mind) = ticking(&one).await;
    drop(socket);
    // The move leaves a checkpoint behind.
    let mut socket = mind.come_back(&two, &key).await;
    let (mut fleeting, other) = Socket::create(&two, Dialect::Plain, json!({})).await;
    let state = two.state.clone();
    let address = two.address.clone();
    two.replace_reconciler(async || {
        eventually("its containers die with it", || processes(&state).is_empty()).await;
        assert_eq!(socket.end().await, Some(1012), "clients are told to come back");
        assert_eq!(fleeting.end().await, Some(1012));
    })
    .await;
    assert_eq!(two.address, address, "the API stayed where it was");
    let mut socket = Socket::attach(&two, Dialect::V1, &key).await;
    socket.until("rolled_back", |event| event["event"] == "rolled_back").await;
    socket.status("RUNNING").await;
    assert_eq!(machine.lock(&key.id)["epoch"], json!(3));
    let mut fleeting = Socket::attach(&two, Dialect::Plain, &other).await;
    fleeting.status("NOT_FOUND").await;
    socket.kill().await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_has_no_privilege_and_other_users_are_refused() {
    let machine = Machine::with_a_bucket().await.in_halves();
    let mut server = machine.server("a").await;
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let field =
        |status: &str, name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    for users in ["Uid:", "Gid:"] {
        assert!(field(&status, users).split_whitespace().all(|user| user == NOBODY.to_string()), "{status}");
    }
    // Not even what a program with the set-user-id bit could give back.
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(field(&status, set), "0".repeat(16), "{set}");
    }
    assert_eq!((field(&status, "NoNewPrivs:"), field(&status, "Groups:")), ("1".to_owned(), String::new()));
    let count = u64::from_str_radix(&field(&server.reconciler_status(), "CapEff:"), 16).unwrap().count_ones();
    assert_eq!(count as usize, capabilities().len(), "the other half has what its manifest gives it");

    let socket = std::fs::metadata(server.socket()).unwrap();
    assert_eq!((socket.mode() & 0o777, socket.uid()), (0o600, NOBODY));
    // Even who got past the file is asked who it is.
    std::fs::set_permissions(server.socket(), std::fs::Permissions::from_mode(0o666)).unwrap();
    let mut stranger = server.stranger(NOBODY - 1);
    server.said("no business here").await;
    stranger.kill().await.unwrap();
    let (client, _) = Socket::create(&server, Dialect::V1, movable()).await;
    client.kill().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_of_every_kind_move_live_between_halves() {
    let machine = Machine::with_a_bucket().await.in_halves();
    everything_moves(&machine, if is_proof() { 50 } else { 3 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_sigterm_every_sandbox_of_two_halves_goes_on_elsewhere() {
    everybody_goes_on_elsewhere(Machine::with_a_bucket().await.in_halves()).await;
}
