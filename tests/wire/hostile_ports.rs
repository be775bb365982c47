//! Servers in sandboxes, and clients of theirs, that do not keep to HTTP.

use std::time::Duration;

use tokio::io::AsyncReadExt;

use crate::{
    inner_server::{RawHttp, ask, listen, mirror, port_of, status, within},
    test_server::{World, until},
    wire_client::Client,
};

async fn running() -> (World, Client) {
    let world = World::new().await;
    let client = Client::running(&world, "{}").await;
    (world, client)
}

#[tokio::test]
async fn a_request_with_two_lengths_goes_nowhere() {
    let (world, client) = running().await;
    mirror(&world, client.id(), 80).await;
    let (path, token) = port_of(&client, 80);
    let smuggled = "0\r\n\r\nGET /admin HTTP/1.1\r\nhost: a\r\n\r\n";
    for lengths in [
        "content-length: 4\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 4\r\n",
        "content-length: 4\r\ncontent-length: 5\r\n",
        "transfer-encoding: xchunked\r\n",
        "transfer-encoding: chunked, identity\r\n",
    ] {
        let mut http = RawHttp::connect(&world).await;
        http.write(&format!("POST {path}/ HTTP/1.1\r\nhost: a\r\n{token}{lengths}\r\n{smuggled}")).await;
        let answer = String::from_utf8_lossy(&http.rest().await).into_owned();
        assert!(!answer.contains("/admin"), "{lengths}: {answer}");
        let is_refused = answer.starts_with("HTTP/1.1 400") || answer.is_empty();
        let is_framed_once =
            answer.matches("HTTP/1.1 200").count() <= 1 && !answer.to_lowercase().contains("content-length: 4\r\n");
        assert!(is_refused || is_framed_once, "{lengths}: {answer}");
    }
}

#[tokio::test]
async fn an_answer_that_is_not_http_is_a_bad_gateway() {
    let (world, client) = running().await;
    let (path, token) = port_of(&client, 80);
    let path = format!("{path}/");
    let long = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "x".repeat(200 << 10));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(50_000));
    for answer in [
        "",
        "SSH-2.0-OpenSSH\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
        "HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nx",
        &long,
        &many,
    ] {
        let answer = answer.to_owned();
        let start: String = answer.chars().take(60).collect();
        listen(&world, client.id(), 80, move |mut http| {
            let answer = answer.clone();
            async move {
                http.head().await;
                http.write(&answer).await;
            }
        })
        .await;
        let (head, body) = ask(&world, "GET", &path, &token).await;
        assert_eq!(status(&head), 502, "{start:?}: {head}{body}");
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_or_is_badly_framed_never_looks_whole() {
    let (world, client) = running().await;
    let (path, token) = port_of(&client, 80);
    for body in [
        "content-length: 100\r\n\r\nshort",
        "transfer-encoding: chunked\r\n\r\n5\r\nshort\r\n",
        "transfer-encoding: chunked\r\n\r\n5\r\nshort\r\nnonsense\r\n",
        "transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\nx",
    ] {
        listen(&world, client.id(), 80, move |mut http| async move {
            http.head().await;
            http.write(&format!("HTTP/1.1 200 OK\r\n{body}")).await;
        })
        .await;
        let mut http = RawHttp::connect(&world).await;
        http.write(&format!("GET {path}/ HTTP/1.1\r\nhost: a\r\n{token}\r\n")).await;
        let answer = String::from_utf8_lossy(&http.rest().await).into_owned();
        let is_whole = answer.ends_with("0\r\n\r\n") || answer.starts_with("HTTP/1.1 200") && answer.len() > 100 + 400;
        assert!(!is_whole, "{body}: {answer}");
    }
}

#[tokio::test]
async fn a_body_without_a_length_that_is_reset_never_looks_whole() {
    let (world, client) = running().await;
    let (path, token) = port_of(&client, 80);
    let headers = format!("GET {path}/ HTTP/1.1\r\nhost: a\r\n{token}\r\n");
    for is_reset in [false, true] {
        listen(&world, client.id(), 80, move |mut http| async move {
            http.head().await;
            http.write("HTTP/1.1 200 OK\r\n\r\nbody").await;
            // The last byte is on its way before the end is.
            tokio::time::sleep(Duration::from_millis(100)).await;
            if is_reset {
                http.stream.set_zero_linger().unwrap();
            }
        })
        .await;
        let mut http = RawHttp::connect(&world).await;
        http.write(&headers).await;
        http.until(b"\r\n\r\n4\r\nbody\r\n").await;
        let mut end = vec![0; 5];
        let read = within(http.stream.read_exact(&mut end)).await;
        let is_whole = read.is_ok() && end == b"0\r\n\r\n";
        assert_eq!(is_whole, !is_reset);
    }
}

#[tokio::test]
async fn a_server_that_never_answers_is_given_up() {
    let (world, client) = running().await;
    let (path, token) = port_of(&client, 80);
    listen(&world, client.id(), 80, |mut http| async move { drop(http.stream.read_to_end(&mut http.read).await) })
        .await;
    let mut http = RawHttp::connect(&world).await;
    http.write(&format!("GET {path}/ HTTP/1.1\r\nhost: a\r\n{token}\r\n")).await;
    until(async || world.bus.presence(client.id()).active_at > baton::clock::Moment(Duration::ZERO)).await;
    let skipping = async {
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            world.clock.skip(Duration::from_secs(5));
        }
    };
    tokio::select! {
        head = http.head() => assert_eq!(status(&head), 504),
        () = skipping => {}
    }
}

#[tokio::test]
async fn an_answer_before_the_body_was_read_arrives() {
    let (world, client) = running().await;
    let (path, token) = port_of(&client, 80);
    listen(&world, client.id(), 80, |mut http| async move {
        http.head().await;
        http.write("HTTP/1.1 413 Payload Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nno!").await;
        // Reads nothing, and stays for a while.
        tokio::time::sleep(Duration::from_secs(60)).await;
    })
    .await;
    let mut http = RawHttp::connect(&world).await;
    http.write(&format!("POST {path}/ HTTP/1.1\r\nhost: a\r\n{token}content-length: 1000000000\r\n\r\nstart")).await;
    assert_eq!(status(&http.head().await), 413);
    assert_eq!(within(http.until(b"no!")).await, b"no!");
}
