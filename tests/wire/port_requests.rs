//! Ports of a sandbox from outside: who may reach them, what goes through and when the sandbox comes for it.

use std::time::Duration;

use baton::{
    api::rate_limit::FailureRate,
    bus::{LeaveReason, LifecycleEvent},
};
use baton_protocol::{metadata::DesiredState, reason::Reason};
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_tungstenite::tungstenite::Message;

use crate::{
    inner_server::{RawHttp, ask, header, listen, mirror, port_of, status, within},
    test_server::{Plan, World, until},
    wire_client::{Client, connect},
};

const MOVABLE: &str = r#"{"enable_checkpoint": true, "enable_sandbox_handoff": true}"#;

async fn running() -> (World, Client) {
    let world = World::new().await;
    let client = Client::running(&world, "{}").await;
    (world, client)
}

#[tokio::test]
async fn a_request_reaches_the_server_inside_without_anything_of_ours() {
    let (world, client) = running().await;
    mirror(&world, client.id(), 8000).await;
    let (path, token) = port_of(&client, 8000);
    let (head, body) = ask(&world, "GET", &format!("{path}/a%2Fb/../c?x=1"), &token).await;
    assert_eq!(status(&head), 200, "{head}{body}");
    assert!(body.starts_with("get /a%2fb/../c?x=1 http/1.1\r\n"), "{body}");
    assert!(!body.contains("token") && header(&body, "host") == Some("localhost:8000"), "{body}");
    assert_eq!(header(&body, "x-forwarded-prefix"), Some(path.as_str()));
    assert!(header(&head, "content-security-policy").is_some_and(|policy| policy.starts_with("sandbox ")), "{head}");
    let (head, _) = ask(&world, "GET", &path, &token).await;
    assert_eq!((status(&head), header(&head, "location")), (308, Some(format!("{path}/").as_str())));
    for method in ["HEAD", "OPTIONS", "DELETE"] {
        let (head, body) = ask(&world, method, &format!("{path}/"), &token).await;
        assert_eq!(status(&head), 200, "{method}");
        assert_eq!(body.is_empty(), method == "HEAD", "{method} {body}");
    }
}

#[tokio::test]
async fn a_link_with_the_token_becomes_a_cookie_for_this_port_alone() {
    let (world, client) = running().await;
    mirror(&world, client.id(), 8000).await;
    let (path, _) = port_of(&client, 8000);
    let token = client.token();
    let (head, _) = ask(&world, "GET", &format!("{path}/a?x=1&sandbox_token={token}&y=2"), "").await;
    assert_eq!((status(&head), header(&head, "location")), (303, Some(format!("{path}/a?x=1&y=2").as_str())), "{head}");
    let cookie = header(&head, "set-cookie").unwrap();
    assert_eq!(cookie, format!("baton_token={token}; path={path}/; httponly; samesite=lax"));
    let cookies = format!("cookie: a=1; baton_token={token}\r\n");
    let (head, body) = ask(&world, "GET", &format!("{path}/"), &cookies).await;
    assert_eq!(status(&head), 200);
    assert_eq!(header(&body, "cookie"), Some("a=1"), "{body}");
    // Another host may have added one.
    let tossed = format!("cookie: baton_token=wrong; baton_token={token}\r\n");
    assert_eq!(status(&ask(&world, "GET", &format!("{path}/"), &tossed).await.0), 200);
    // A cookie is no token for anything else.
    let (head, _) = ask(&world, "GET", &format!("/sandboxes/{}/ports", client.id()), &cookies).await;
    assert_eq!(status(&head), 401);
    // A link to a document goes to a host of its own.
    let page = format!("{path}/a?sandbox_token={token}");
    let (head, _) = ask(&world, "GET", &page, "host: api.example:8443\r\nsec-fetch-dest: document\r\n").await;
    let host = format!("8000-{}.preview.example", client.id());
    let location = format!("http://{host}:8443/a?sandbox_token={token}");
    assert_eq!((status(&head), header(&head, "location")), (303, Some(location.as_str())));
    let (head, _) = ask(&world, "GET", &format!("/a?sandbox_token={token}"), &format!("host: {host}:8443\r\n")).await;
    assert_eq!((status(&head), header(&head, "location")), (303, Some("/a")));
    assert_eq!(header(&head, "set-cookie").unwrap(), format!("baton_token={token}; path=/; httponly; samesite=lax"));
    // What cannot be redirected is answered.
    let (head, body) = ask(&world, "POST", &format!("{path}/a?sandbox_token={token}"), "content-length: 0\r\n").await;
    assert!(status(&head) == 200 && body.starts_with("post /a http"), "{head}{body}");
}

#[tokio::test]
async fn behind_https_the_cookie_is_for_https_and_for_one_host() {
    let change = |settings: &mut baton::api::ApiSettings| settings.proxies = 1;
    let world = World::with(Plan { has_storage: false, can_snapshot: false, change }).await;
    let client = Client::running(&world, "{}").await;
    let (path, _) = port_of(&client, 8000);
    let (token, https) = (client.token(), "x-forwarded-proto: https\r\nx-forwarded-for: 192.0.2.1\r\n");
    let (head, _) = ask(&world, "GET", &format!("{path}/?sandbox_token={token}"), https).await;
    assert!(header(&head, "set-cookie").unwrap().starts_with("__secure-baton_token="), "{head}");
    let host = format!("host: 8000-{}.preview.example\r\n{https}", client.id());
    let (head, _) = ask(&world, "GET", &format!("/?sandbox_token={token}"), &host).await;
    let cookie = header(&head, "set-cookie").unwrap();
    assert!(cookie.starts_with("__host-baton_token=") && cookie.ends_with("; secure"), "{cookie}");
}

#[tokio::test]
async fn a_host_name_is_an_origin_of_its_own_and_other_hosts_are_the_api() {
    let (world, client) = running().await;
    mirror(&world, client.id(), 8000).await;
    let token = format!("x-sandbox-token: {}\r\n", client.token());
    let host = format!("host: 8000-{}.Preview.example\r\n{token}", client.id());
    let (head, body) = ask(&world, "GET", "/status", &host).await;
    assert!(status(&head) == 200 && body.starts_with("get /status http"), "{body}");
    assert_eq!(header(&head, "content-security-policy"), None, "pages work as they are");
    let (head, body) = ask(&world, "GET", "/status", &format!("host: x.preview.example\r\n{token}")).await;
    assert!(status(&head) == 200 && body.contains("capabilities"), "{body}");
    let (head, _) = ask(&world, "GET", "/", &format!("host: 8000-{}.preview.example\r\n", client.id())).await;
    assert_eq!(status(&head), 401);
}

#[tokio::test]
async fn without_the_right_token_there_is_a_sentence_and_then_a_limit() {
    let change = |settings: &mut baton::api::ApiSettings| {
        settings.rate_limit = Some(FailureRate { burst: 4, per_second: 0.001 });
    };
    let world = World::with(Plan { has_storage: false, can_snapshot: false, change }).await;
    let client = Client::running(&world, "{}").await;
    mirror(&world, client.id(), 8000).await;
    let (path, token) = port_of(&client, 8000);
    let path = format!("{path}/");
    let writes = world.writes();
    for headers in ["", "x-sandbox-token: wrong\r\n", "cookie: baton_token=wrong\r\n"] {
        let (head, body) = ask(&world, "GET", &path, headers).await;
        assert_eq!((status(&head), body.as_str()), (401, "The sandbox token is missing or wrong.\n"));
    }
    let unknown = "/sandboxes/sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab/ports/8000/";
    assert_eq!(status(&ask(&world, "GET", unknown, &token).await.0), 404);
    assert_eq!(status(&ask(&world, "GET", &path, "").await.0), 429);
    assert_eq!(status(&ask(&world, "GET", &path, &token).await.0), 200, "who has the token passes");
    assert_eq!(world.writes(), writes);
}

#[tokio::test]
async fn a_port_without_a_server_is_a_bad_gateway_and_ports_are_listed() {
    let (world, client) = running().await;
    let (path, token) = port_of(&client, 8000);
    let (head, body) = ask(&world, "GET", &format!("{path}/"), &token).await;
    assert_eq!(status(&head), 502);
    assert_eq!(body, "Port 8000 of the sandbox cannot be reached: nothing listens on this port in the sandbox.\n");
    for bad in ["0", "65536", "x", "080"] {
        let path = format!("/sandboxes/{}/ports/{bad}/", client.id());
        assert_eq!(status(&ask(&world, "GET", &path, &token).await.0), 404, "{bad}");
    }
    mirror(&world, client.id(), 8000).await;
    let list = format!("/sandboxes/{}/ports", client.id());
    let (head, body) = ask(&world, "GET", &list, &token).await;
    assert_eq!(status(&head), 200);
    let listed: serde_json::Value = serde_json::from_str(&body).unwrap();
    let url = format!("http://8000-{}.preview.example/", client.id());
    let ports = serde_json::json!([{"port": 8000, "path": format!("{path}/"), "url": url}]);
    assert_eq!(listed["ports"], ports);
    assert_eq!(status(&ask(&world, "GET", &list, "").await.0), 401);
    world.leave(client.id(), LeaveReason::Room, false);
    until(async || !world.front_board.is_held(client.id())).await;
    let (_, body) = ask(&world, "GET", &list, &token).await;
    let listed: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert!(listed["ports"].is_null() && listed["message"].is_string(), "{body}");
}

#[tokio::test]
async fn a_request_wakes_a_sleeping_sandbox_and_its_body_waits() {
    let world = World::with_storage().await;
    let mut client = Client::running(&world, MOVABLE).await;
    let (id, (path, token)) = (client.id().clone(), port_of(&client, 80));
    listen(&world, &id, 80, |mut http| async move {
        http.head().await;
        let body = http.until(b"!").await;
        http.write("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n").await;
        http.stream.write_all(&body).await.unwrap();
    })
    .await;
    client.says(r#"{"action":"checkpoint"}"#).await;
    while client.word().await != "close:1000" {}
    assert_eq!(world.count(), 0);
    let (head, body) =
        ask(&world, "POST", &format!("{path}/"), &format!("{token}content-length: 6\r\n\r\nhello!")).await;
    assert_eq!((status(&head), body.as_str()), (200, "hello!"), "{head}");
    assert_eq!(world.count(), 1);
    let spec = world.records.find(&id).await.unwrap().unwrap().spec;
    assert_eq!((spec.desired_state, spec.placement.as_ref()), (DesiredState::Running, Some(&world.instance)));
    // Nobody is in the way of a client.
    let mut client = Client::attached(&world, &id, client.token.as_ref().unwrap()).await;
    client.hears("RUNNING").await;
}

#[tokio::test]
async fn a_page_is_one_session_while_something_passes_and_none_when_it_is_silent() {
    let world = World::new().await;
    let client = Client::running(&world, "{}").await;
    let (id, (path, token)) = (client.id().clone(), port_of(&client, 80));
    listen(&world, &id, 80, |mut http| async move {
        http.head().await;
        http.write("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n").await;
        let (mut reader, mut writer) = http.stream.split();
        let _ = tokio::io::copy(&mut reader, &mut writer).await;
    })
    .await;
    client.cut();
    until(async || !world.bus.presence(&id).attached).await;
    let before = world.bus.asked(&id);
    let mut pages = vec![];
    for _ in 0..10 {
        let mut http = RawHttp::connect(&world).await;
        let upgrade = "connection: upgrade\r\nupgrade: echo\r\n";
        http.write(&format!("GET {path}/ HTTP/1.1\r\nhost: a\r\n{token}{upgrade}\r\n")).await;
        assert_eq!(status(&http.head().await), 101);
        pages.push(http);
    }
    until(async || world.bus.presence(&id).attached).await;
    assert_eq!(world.bus.asked(&id), before + 1, "ten requests are one session");
    world.clock.skip(Duration::from_secs(31));
    until(async || !world.bus.presence(&id).attached).await;
    let active_at = world.bus.presence(&id).active_at;
    pages[3].write("x").await;
    pages[3].until(b"x").await;
    until(async || world.bus.presence(&id).attached && world.bus.presence(&id).active_at > active_at).await;
    // It leaves, and nothing that happens to the connections brings it back.
    world.leave(&id, LeaveReason::Idle, true);
    until(async || !world.bus.presence(&id).attached).await;
    for mut page in pages {
        assert_eq!(page.rest().await, b"");
    }
    assert!(!world.bus.presence(&id).attached);
}

#[tokio::test]
async fn a_live_client_elsewhere_keeps_its_sandbox() {
    let world = World::with_storage().await;
    let client = Client::running(&world, MOVABLE).await;
    let (id, (path, token)) = (client.id().clone(), port_of(&client, 80));
    client.cut();
    until(async || !world.bus.presence(&id).attached).await;
    world.leave(&id, LeaveReason::HandedOff, true);
    world.set(|script| script.start_waits = true);
    until(async || !world.front_board.is_held(&id)).await;
    let declined = async {
        until(async || world.bus.presence(&id).attached).await;
        until(async || {
            let spec = world.records.find(&id).await.unwrap().unwrap().spec;
            spec.placement.as_ref() == Some(&world.instance) && spec.desired_state == DesiredState::Running
        })
        .await;
        let message = "Another client is attached to the sandbox.".to_owned();
        world.bus.post(&id, LifecycleEvent::Failed { reason: Reason::InUse, message });
    };
    let path = format!("{path}/");
    let ((head, body), ()) = tokio::join!(ask(&world, "GET", &path, &token), declined);
    assert_eq!((status(&head), body.as_str()), (409, "Another client is attached to the sandbox.\n"));
    // The next one waits for as long as an attach does.
    let late = async {
        until(async || world.bus.presence(&id).attached).await;
        for _ in 0..100 {
            tokio::time::sleep(Duration::from_millis(10)).await;
            world.clock.skip(Duration::from_secs(10));
        }
    };
    let ((head, body), ()) = tokio::join!(ask(&world, "GET", &path, &token), late);
    assert_eq!((status(&head), header(&head, "retry-after")), (503, Some("2")), "{body}");
}

#[tokio::test]
async fn both_bodies_are_passed_on_as_they_come() {
    let (world, client) = running().await;
    let (path, token) = port_of(&client, 80);
    // Echoes each chunk, and ends when the last one came.
    listen(&world, client.id(), 80, |mut http| async move {
        assert!(http.head().await.contains("transfer-encoding: chunked"));
        http.write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n").await;
        loop {
            let size = http.until(b"\r\n").await;
            let chunk = http.until(b"\r\n").await;
            http.stream.write_all(&[&size[..], &chunk[..]].concat()).await.unwrap();
            if size == b"0\r\n" {
                return;
            }
        }
    })
    .await;
    let mut http = RawHttp::connect(&world).await;
    http.write(&format!("POST {path}/ HTTP/1.1\r\nhost: a\r\n{token}transfer-encoding: chunked\r\n\r\n")).await;
    assert_eq!(status(&http.head().await), 200);
    for number in 0..50 {
        let event = format!("data: {number:06}\n\n");
        http.write(&format!("{:x}\r\n{event}\r\n", event.len())).await;
        // The answer to this event comes before the next one is sent.
        let heard = http.until(event.as_bytes()).await;
        assert!(heard.len() < event.len() + 12, "{}", String::from_utf8_lossy(&heard));
    }
    http.write("0\r\n\r\n").await;
    http.until(b"0\r\n\r\n").await;
}

#[tokio::test]
async fn a_websocket_goes_through_and_a_page_of_another_origin_opens_none() {
    let (world, client) = running().await;
    let (path, _) = port_of(&client, 80);
    listen(&world, client.id(), 80, |http| async move {
        let mut socket = tokio_tungstenite::accept_async(http.stream).await.unwrap();
        while let Some(Ok(message)) = socket.next().await {
            if message.is_binary() || message.is_text() {
                socket.send(message).await.unwrap();
            }
        }
    })
    .await;
    let token = client.token();
    let own = [("x-sandbox-token", token.as_str()), ("origin", &format!("http://{}", world.address))];
    let mut socket = connect(&world, &format!("{path}/ws"), &own.map(|(name, value)| (name, value))).await.unwrap();
    let long: Vec<u8> = (0..1 << 20).map(|number: u32| (number % 251) as u8).collect();
    for message in [Message::text("hello"), Message::binary(long)] {
        socket.send(message.clone()).await.unwrap();
        assert_eq!(within(socket.next()).await.unwrap().unwrap(), message);
    }
    socket.close(None).await.unwrap();
    for origin in ["http://evil.example", "null"] {
        let headers = [("x-sandbox-token", token.as_str()), ("origin", origin)];
        assert_eq!(connect(&world, &format!("{path}/ws"), &headers).await.unwrap_err(), 403, "{origin}");
    }
    let cookie = format!("cookie: baton_token={token}\r\nsec-fetch-site: same-site\r\nsec-fetch-mode: no-cors\r\n");
    assert_eq!(status(&ask(&world, "GET", &format!("{path}/"), &cookie).await.0), 403);
}

#[tokio::test]
async fn raw_connections_carry_bytes_ends_and_resets() {
    let (world, client) = running().await;
    listen(&world, client.id(), 5432, |http| async move {
        let mut stream = http.stream;
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).await.unwrap();
        stream.write_all(&heard).await.unwrap();
        if heard == b"reset" {
            stream.set_zero_linger().unwrap();
        }
    })
    .await;
    let path = format!("/sandboxes/{}/port-forward", client.id());
    let token = client.token();
    let headers = [("x-sandbox-token", token.as_str())];
    let mut socket = connect(&world, &format!("{path}/5432"), &headers).await.unwrap();
    let bytes: Vec<u8> = (0..300_000_u32).map(|number| (number % 251) as u8).collect();
    socket.send(Message::binary(bytes.clone())).await.unwrap();
    socket.send(Message::text("")).await.unwrap();
    let (mut heard, mut has_ended) = (Vec::new(), false);
    let code = loop {
        match within(socket.next()).await.unwrap().unwrap() {
            Message::Binary(piece) => heard.extend_from_slice(&piece),
            Message::Text(text) => has_ended = text.is_empty(),
            Message::Close(frame) => break frame.map(|frame| u16::from(frame.code)),
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
        }
    };
    assert!(heard == bytes && has_ended);
    assert_eq!(code, Some(1000));
    assert_eq!(connect(&world, &format!("{path}/5433"), &headers).await.unwrap_err(), 502);
    assert_eq!(connect(&world, &format!("{path}/5432"), &[]).await.unwrap_err(), 401);
    let of_page = [("cookie", format!("baton_token={token}"))];
    let of_page = of_page.each_ref().map(|(name, value)| (*name, value.as_str()));
    assert_eq!(connect(&world, &format!("{path}/5432"), &of_page).await.unwrap_err(), 401, "a cookie is for pages");
}

#[tokio::test]
async fn large_bodies_take_no_memory() {
    const SIZE: usize = 256 << 20;
    let (world, client) = running().await;
    let (path, token) = port_of(&client, 80);
    let piece: Vec<u8> = (0..1 << 20).map(|number: u32| (number % 251) as u8).collect();
    let sent = piece.clone();
    listen(&world, client.id(), 80, move |mut http| {
        let piece = sent.clone();
        async move {
            http.head().await;
            let mut left = SIZE - http.read.len();
            let mut buffer = vec![0; 64 << 10];
            while left > 0 {
                left -= http.stream.read(&mut buffer).await.unwrap();
            }
            http.write(&format!("HTTP/1.1 200 OK\r\ncontent-length: {SIZE}\r\n\r\n")).await;
            for _ in 0..SIZE / piece.len() {
                http.stream.write_all(&piece).await.unwrap();
            }
        }
    })
    .await;
    let before = resident();
    let mut http = RawHttp::connect(&world).await;
    http.write(&format!("POST {path}/ HTTP/1.1\r\nhost: a\r\n{token}content-length: {SIZE}\r\n\r\n")).await;
    for _ in 0..SIZE / piece.len() {
        http.stream.write_all(&piece).await.unwrap();
    }
    assert_eq!(status(&http.head().await), 200);
    // A client that does not read holds the sender back.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut most = resident();
    let (mut heard, mut buffer) = (0, vec![0; piece.len()]);
    let mut early = std::mem::take(&mut http.read);
    while heard < SIZE {
        let bytes = if early.is_empty() {
            let read = within(http.stream.read(&mut buffer)).await.unwrap();
            buffer[..read].to_vec()
        } else {
            std::mem::take(&mut early)
        };
        assert!(!bytes.is_empty(), "it ended after {heard}");
        for (at, byte) in bytes.iter().enumerate().step_by(4_093) {
            assert_eq!(*byte, piece[(heard + at) % piece.len()]);
        }
        heard += bytes.len();
        most = most.max(resident());
    }
    assert_eq!(heard, SIZE);
    let more = most.saturating_sub(before) >> 20;
    assert!(more < 32, "{more} MiB for {} MiB", SIZE >> 20);
}

/// Resident memory of this process in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}
