//! What a server does that no operator has told anything: it answers no web page, and says when it is open to all.

use std::net::SocketAddr;

use baton::api::{ApiSettings, hosts::Hosts};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    real::servers::Machine,
    scripted::test_server::{Plan, World},
};

const OPEN_TO_ALL: &str = "everyone who reaches it may create sandboxes";

/// A browser sends the name in its address bar, whatever that resolves to.
async fn get(address: impl tokio::net::ToSocketAddrs, path: &str, host: &str) -> u16 {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nx-api-key: root\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard).await;
    String::from_utf8_lossy(&heard).split(' ').nth(1).unwrap().parse().unwrap()
}

fn world(change: fn(&mut ApiSettings)) -> Plan {
    Plan { has_storage: false, can_snapshot: false, change }
}

#[tokio::test]
async fn a_page_whose_name_was_made_to_resolve_to_loopback_reads_nothing() {
    let change = |settings: &mut ApiSettings| {
        settings.admin_key = Some("root".into());
        settings.hosts = Hosts::new(SocketAddr::from(([127, 0, 0, 1], 8080)), false, &[]);
    };
    let world = World::with(world(change)).await;
    for path in ["/status", "/sandboxes"] {
        assert_eq!(get(world.address, path, "rebound.example:8080").await, 403, "{path}");
        for host in ["localhost", "localhost:8080", "127.0.0.1:8080", "[::1]:8080"] {
            assert_eq!(get(world.address, path, host).await, 200, "{path} of {host}");
        }
    }
    // A probe knows the address alone, and the answer says nothing.
    assert_eq!(get(world.address, "/", "rebound.example").await, 200);
}

#[tokio::test]
async fn where_every_name_is_allowed_it_reads_the_status() {
    let world = World::with(world(|settings| settings.hosts = Hosts::Any)).await;
    assert_eq!(get(world.address, "/status", "rebound.example:8080").await, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_on_loopback_are_for_no_page_and_a_name_can_be_allowed() {
    let machine = Machine::with_a_directory().await;
    for (hosts, status) in [("", 403), ("rebound.example", 200)] {
        let mut server = machine.server_with(&format!("hosts-{status}"), &[("BATON_HOSTS", hosts)]).await;
        let admin = server.said("serving metrics address=").await;
        assert_eq!(get(&admin, "/metrics", "rebound.example:9464").await, status);
        assert_eq!(get(&admin, "/metrics", "localhost:9464").await, 200);
        assert_eq!(get(&server.address, "/status", "rebound.example").await, status);
        assert!(!server.log().contains(OPEN_TO_ALL), "it listens on loopback");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_others_can_reach_without_a_key_says_so_once() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server_with("open", &[("BATON_LISTEN", "0.0.0.0:0")]).await;
    let log = server.log();
    let said: Vec<_> = log.lines().filter(|line| line.contains(OPEN_TO_ALL)).collect();
    assert!(said.len() == 1 && said[0].contains("WARN"), "{log}");
    let keyed = machine.server_with("keyed", &[("BATON_LISTEN", "0.0.0.0:0"), ("BATON_API_KEYS", "alpha")]).await;
    assert!(!keyed.log().contains(OPEN_TO_ALL), "{}", keyed.log());
}

#[test]
fn the_check_of_the_configuration_says_it_too() {
    for (listen, keys, is_said) in
        [("0.0.0.0:8080", "", true), ("0.0.0.0:8080", "k", false), ("127.0.0.1:8080", "", false)]
    {
        let mut check = std::process::Command::new(env!("CARGO_BIN_EXE_baton"));
        check.args(["config", "--check"]).env_clear().env("BATON_LISTEN", listen).env("BATON_API_KEYS", keys);
        let text = String::from_utf8(check.output().unwrap().stdout).unwrap();
        assert_eq!(text.contains(OPEN_TO_ALL), is_said, "{listen} {keys:?}: {text}");
    }
}
