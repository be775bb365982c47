//! `/metrics` of real servers: what moves the figures, what may never stand there, and what a held sandbox costs.

use std::{collections::BTreeSet, time::Duration};

use serde_json::json;

use crate::{
    fixture::clock,
    live_handoff::ticking,
    server_crash::SCALED,
    servers::{Machine, Server},
    websocket_client::{Dialect, Socket},
};

/// The sum of all lines that begin so.
fn value(page: &str, name: &str) -> f64 {
    let lines = page.lines().filter(|line| !line.starts_with('#') && line.starts_with(name));
    lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

/// The page, once everything on it that is named has moved.
async fn moved(server: &mut Server, names: &[&str]) -> String {
    let mut page = server.figures().await;
    for _ in 0..200 {
        if names.iter().all(|name| value(&page, name) > 0.0) {
            return page;
        }
        clock().sleep(Duration::from_millis(50)).await;
        page = server.figures().await;
    }
    let missing: Vec<_> = names.iter().filter(|name| value(&page, name) == 0.0).collect();
    panic!("{missing:?} never moved:\n{page}");
}

/// Every label has one of these names, and for a value a word that somebody wrote in an enum.
fn check_labels(page: &str) {
    let mut names = BTreeSet::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let Some((_, rest)) = line.split_once('{') else { continue };
        let (labels, _) = rest.rsplit_once('}').unwrap();
        for label in labels.split(',') {
            let (name, value) = label.split_once('=').unwrap_or_else(|| panic!("{line}"));
            let value = value.trim_matches('"');
            let fits = match name {
                "le" => value == "+Inf" || value.parse::<f64>().is_ok(),
                "version" => value == env!("CARGO_PKG_VERSION"),
                _ => !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'),
            };
            assert!(fits, "{value} is no word: {line}");
            names.insert(name.to_owned());
        }
    }
    let expected = ["action", "answer", "direction", "le", "outcome", "phase", "stream", "verb", "version", "why"];
    assert_eq!(names.iter().map(String::as_str).collect::<Vec<_>>(), expected);
}

async fn every_figure_moves(machine: Machine) {
    let (mut one, mut two) = tokio::join!(machine.server_with("a", &SCALED), machine.server_with("b", &SCALED));
    let (socket, key, mut mind) = ticking(&one).await;
    drop(socket);
    let socket = mind.come_back(&two, &key).await;
    let (mut other, fleeting) = Socket::create(&two, Dialect::Plain, json!({})).await;
    other.run("bash", "echo out; echo err >&2; exit 3").await;
    let shown = [
        "baton_build_info",
        "baton_sandboxes{phase=\"running\"}",
        "baton_sessions",
        "baton_action_seconds_count{action=\"create\",outcome=\"done\"}",
        "baton_action_seconds_count{action=\"restore\",outcome=\"done\"}",
        "baton_lease_renewal_lag_seconds_count",
        "baton_handoff_blackout_seconds_count",
        "baton_store_calls_total{verb=\"put\",answer=\"good\"}",
        "baton_store_calls_total{verb=\"poll\",answer=\"unchanged\"}",
        "baton_store_seconds_count{verb=\"download\"}",
        "baton_store_bytes_total{direction=\"in\"}",
        "baton_store_bytes_total{direction=\"out\"}",
        "baton_execs_started_total",
        "baton_execs_ended_total{outcome=\"nonzero\"}",
        "baton_exec_bytes_total{stream=\"stdout\"}",
        "baton_exec_bytes_total{stream=\"stderr\"}",
    ];
    // A client hears that it runs a moment before the action has ended, and a lease is renewed a while after.
    let page = moved(&mut two, &shown).await;
    assert!(page.lines().any(|line| line.starts_with("baton_nudges_waiting ")), "{page}");
    assert_eq!(value(&page, "baton_sandboxes{phase=\"running\"}"), 2.0, "{page}");
    let blackout = value(&page, "baton_handoff_blackout_seconds_sum");
    assert!(blackout > 0.01 && blackout < 60.0, "{blackout} s");
    let gone = [
        "baton_action_seconds_count{action=\"checkpoint\",outcome=\"done\"}",
        "baton_sandboxes_left_total{why=\"waiter\"}",
    ];
    let before = moved(&mut one, &gone).await;
    let page = before + &page;
    check_labels(&page);
    let (_, status) = one.get("/status").await;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let uuid = |id: &str| id.trim_start_matches("sandbox-").to_owned();
    for name in [&uuid(&key.id), &uuid(&fleeting.id), &key.token, status["instance"].as_str().unwrap()] {
        assert!(!page.contains(name), "{name} stands on the page");
    }
    socket.kill().await;
    other.kill().await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_figure_of_a_server_moves_and_no_name_stands_on_its_page() {
    every_figure_moves(Machine::with_a_bucket().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_figure_of_two_halves_moves_and_no_name_stands_on_their_pages() {
    every_figure_moves(Machine::with_a_bucket().await.in_halves()).await;
}

/// docs/deploy.md counts 655 writes and 4,320 reads an hour; `tests/repo/manifests.rs` computes both from the times of
/// the lease. Here they are seen, ten times as fast.
#[tokio::test(flavor = "multi_thread")]
async fn a_held_sandbox_costs_what_the_page_counts() {
    const SCALE: f64 = 0.1;
    // A bucket takes one write a second of an object, and here they come twice as fast.
    let machine = Machine::with_a_directory().await;
    let settings = [("BATON_TIME_SCALE", "0.1"), ("BATON_SWEEP", "off")];
    let mut server = machine.server_with("a", &settings).await;
    let (socket, ..) = ticking(&server).await;
    moved(&mut server, &["baton_lease_renewal_lag_seconds_count"]).await;
    let count = |page: &str| {
        let of = |verb: &str| value(page, &format!("baton_store_calls_total{{verb=\"{verb}\""));
        (of("put"), of("poll"), of("list") + of("delete") + of("upload") + of("download"))
    };
    let (began, before) = (clock().now(), count(&server.figures().await));
    clock().sleep(Duration::from_secs(6)).await;
    let (after, took) = (count(&server.figures().await), (clock().now() - began).as_secs_f64());
    let hours = took / SCALE / 3600.0;
    let (writes, reads) = ((after.0 - before.0) / hours, (after.1 - before.1) / hours);
    println!("{writes:.0} writes and {reads:.0} reads an hour");
    // The answers of the store take their time too, and a busy machine only makes it less.
    assert!((0.3..=1.2).contains(&(writes / 655.0)), "{writes:.0} writes an hour");
    // A directory tells of every change, of our own too, and is read then.
    assert!((0.3..=1.1).contains(&(reads / (4320.0 + 655.0))), "{reads:.0} reads an hour");
    assert_eq!(after.2, before.2, "and nothing else");
    socket.kill().await;
    server.stop().await;
}
