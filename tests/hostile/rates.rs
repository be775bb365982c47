//! Failures are limited per address; what is right is never counted, and no one can shut another out.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::Ordering,
};

use baton::api::{ApiSettings, rate_limit::FailureRate};
use futures::StreamExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpSocket,
};

use crate::scripted::{
    test_server::{Plan, World},
    wire_client::{Client, connect},
};

const BURST: u32 = 5;
const STRANGERS_ID: &str = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
const NONE: fn(&mut ApiSettings) = |_| {};

/// So slow that no failure is forgiven while a test runs.
fn limited(settings: &mut ApiSettings) {
    settings.rate_limit = Some(FailureRate { burst: BURST, per_second: 1e-6 });
}

fn stored(change: fn(&mut ApiSettings)) -> Plan {
    Plan { has_storage: true, can_snapshot: false, change }
}

/// One attempt to attach from 127.0.0.`last`, to its end: the status that refused it, or 101.
async fn attach_from(world: &World, last: u8, path: &str, headers: &[(&str, &str)]) -> u16 {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0))).unwrap();
    let mut stream = socket.connect(world.address).await.unwrap();
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let request = format!(
        "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n{headers}\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut heard = Vec::new();
    while !heard.windows(4).any(|window| window == b"\r\n\r\n") {
        assert_ne!(stream.read_buf(&mut heard).await.unwrap(), 0);
    }
    let status = String::from_utf8_lossy(&heard).split(' ').nth(1).unwrap().parse().unwrap();
    if status == 101 {
        // Until the close frame: what failed is counted by then. A masked close answers it.
        while !heard.windows(2).any(|window| window == b"\x88\x02") {
            assert_ne!(stream.read_buf(&mut heard).await.unwrap(), 0);
        }
        let _ = stream.write_all(b"\x88\x80\x00\x00\x00\x00").await;
    }
    status
}

async fn guesses(world: &World, last: u8, count: u32, path: &str) -> Vec<u16> {
    let mut statuses = Vec::new();
    for number in 0..count {
        statuses.push(attach_from(world, last, &format!("{path}?sandbox_token=guess-{number}"), &[]).await);
    }
    statuses
}

/// The client whose token is right is let in.
async fn gets_in(world: &World, client: &Client) {
    let mut again = client.again(world, &[]).await;
    again.hears("RUNNING").await;
    again.socket.close(None).await.unwrap();
    while again.socket.next().await.is_some() {}
}

/// A client that made a sandbox and left it.
async fn owner(world: &World) -> Client {
    let mut client = Client::running(world, r#"{"enable_checkpoint":true}"#).await;
    client.socket.close(None).await.unwrap();
    while client.socket.next().await.is_some() {}
    client
}

#[tokio::test]
async fn a_stranger_who_knows_an_id_cannot_shut_its_owner_out() {
    let world = World::with(stored(limited)).await;
    let owner = owner(&world).await;
    let path = format!("/attach/{}", owner.id());
    let (writes, reads) = (world.writes(), world.reads.load(Ordering::SeqCst));
    let answered = guesses(&world, 2, 40, &path).await;
    assert_eq!(answered.iter().filter(|status| **status == 101).count(), BURST as usize, "{answered:?}");
    assert!(answered[BURST as usize..].iter().all(|status| *status == 429), "{answered:?}");
    assert_eq!(world.writes(), writes);
    let read = world.reads.load(Ordering::SeqCst) - reads;
    assert!(read <= 4 * u64::from(BURST), "{read} reads for wrong tokens");
    gets_in(&world, &owner).await;
    // The stranger may even share the owner's address.
    let answered = guesses(&world, 1, 40, &path).await;
    assert!(answered[BURST as usize..].iter().all(|status| *status == 429), "{answered:?}");
    for _ in 0..2 * BURST {
        gets_in(&world, &owner).await;
    }
    assert_eq!(attach_from(&world, 1, &path, &[]).await, 429, "only the right token passes");
}

#[tokio::test]
async fn without_a_limit_every_guess_is_answered_from_storage() {
    let world = World::with(stored(NONE)).await;
    let owner = owner(&world).await;
    let reads = world.reads.load(Ordering::SeqCst);
    let answered = guesses(&world, 2, 40, &format!("/attach/{}", owner.id())).await;
    assert_eq!(answered, [101; 40]);
    assert!(world.reads.load(Ordering::SeqCst) - reads >= 40);
}

#[tokio::test]
async fn unknown_ids_are_limited_like_wrong_tokens() {
    let world = World::with(stored(limited)).await;
    for path in [format!("/attach/{STRANGERS_ID}"), "/attach/no-id-at-all".to_owned()] {
        let world = if path.contains("no-id") { &World::with(stored(limited)).await } else { &world };
        let answered = guesses(world, 2, 10, &path).await;
        assert_eq!(answered.iter().filter(|status| **status == 101).count(), BURST as usize, "{answered:?}");
    }
}

#[tokio::test]
async fn what_is_right_is_never_counted() {
    let change = |settings: &mut ApiSettings| {
        limited(settings);
        settings.api_keys = baton::config::api_keys("alpha").unwrap();
        settings.admin_key = Some("root".into());
    };
    let world = World::with(stored(change)).await;
    let key = [("x-api-key", "alpha")];
    for _ in 0..4 * BURST {
        let mut client = Client::new(connect(&world, "/create", &key).await.unwrap());
        client.hears("CREATING").await;
        assert_eq!(http(&world, "GET /sandboxes", &[("x-api-key", "root")]).await, 200);
    }
}

#[tokio::test]
async fn wrong_keys_are_limited_and_right_ones_pass_at_the_same_address() {
    let change = |settings: &mut ApiSettings| {
        limited(settings);
        settings.api_keys = baton::config::api_keys("alpha").unwrap();
        settings.admin_key = Some("root".into());
    };
    let requests = ["GET /sandboxes", "POST /execute?language=bash"];
    for (request, right) in requests.into_iter().zip(["root", "alpha"]) {
        let world = World::with(stored(change)).await;
        let mut answered = Vec::new();
        for number in 0..4 * BURST {
            answered.push(http(&world, request, &[("x-api-key", &format!("guess-{number}"))]).await);
        }
        assert!(answered[..BURST as usize].iter().all(|status| *status == 401), "{answered:?}");
        assert!(answered[BURST as usize..].iter().all(|status| *status == 429), "{answered:?}");
        assert_eq!(http(&world, request, &[("x-api-key", right)]).await, 200);
        let mut client = Client::new(connect(&world, "/create", &[("x-api-key", "alpha")]).await.unwrap());
        client.hears("CREATING").await;
        assert_eq!(connect(&world, "/create", &[("x-api-key", "guess")]).await.err(), Some(429));
    }
}

#[tokio::test]
async fn without_a_limit_every_wrong_key_is_answered() {
    let world = World::with(stored(|settings| settings.admin_key = Some("root".into()))).await;
    for number in 0..40 {
        assert_eq!(http(&world, "GET /sandboxes", &[("x-api-key", &format!("guess-{number}"))]).await, 401);
    }
}

/// Each guess names another address in front of the one that the proxy adds.
async fn disguised(world: &World) -> usize {
    let mut answered = 0;
    for number in 0..20 {
        let (made_up, seen) = (format!("10.0.0.{number}"), "203.0.113.7".to_owned());
        for lines in [vec![made_up.clone(), seen.clone()], vec![format!("{made_up}, {seen}")]] {
            let headers: Vec<_> = lines.iter().map(|line| ("x-forwarded-for", line.as_str())).collect();
            let status = attach_from(world, 1, &format!("/attach/{STRANGERS_ID}"), &headers).await;
            answered += usize::from(status == 101);
        }
    }
    answered
}

#[tokio::test]
async fn made_up_addresses_do_not_hide_the_one_that_the_proxy_saw() {
    let change = |settings: &mut ApiSettings| {
        limited(settings);
        settings.proxies = 1;
    };
    let world = World::with(stored(change)).await;
    assert_eq!(disguised(&world).await, BURST as usize);
    // Another client of the same proxy is not meant.
    let other = [("x-forwarded-for", "203.0.113.8")];
    assert_eq!(attach_from(&world, 1, &format!("/attach/{STRANGERS_ID}"), &other).await, 101);
}

#[tokio::test]
async fn with_more_proxies_trusted_than_there_are_they_hide_it() {
    let change = |settings: &mut ApiSettings| {
        limited(settings);
        settings.proxies = 2;
    };
    let world = World::with(stored(change)).await;
    assert_eq!(disguised(&world).await, 40);
}

async fn http(world: &World, request: &str, headers: &[(&str, &str)]) -> u16 {
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let mut stream = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let text = format!(
        "{request} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 6\r\n{headers}\r\nexit 0"
    );
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard).await;
    String::from_utf8_lossy(&heard).split(' ').nth(1).unwrap().parse().unwrap()
}
