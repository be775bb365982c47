//! Coming back: tokens, places, and what goes on where it was left.

use std::time::Duration;

use baton::{
    bus::{LifecycleEvent, StartKind},
    clock::SharedClock,
    storage::{lease::lease_rules::Identity, records::StoreKind, store::Precondition},
};
use baton_protocol::{
    id::SandboxId,
    metadata::{Committed, Phase, SandboxStatus},
};

use crate::{
    plain_dialect::http,
    test_server::{World, until},
    wire_client::{Client, V1, connect},
};

#[tokio::test]
async fn an_attach_here_needs_only_the_token() {
    let world = World::new().await;
    let first = Client::running(&world, "{}").await;
    let (id, token) = (first.id().clone(), first.token.clone().unwrap());
    drop(first);
    let path = format!("/attach/{id}");
    let protocols = format!("baton.plain, baton.token.{token}");
    for headers in [[("x-sandbox-token", token.as_str())], [("sec-websocket-protocol", protocols.as_str())]] {
        let mut client = Client::new(connect(&world, &path, &headers).await.unwrap());
        client.hears("RUNNING").await;
        client.exec("out \"back\"").await;
        client.hears("EXECUTION_RUNNING out:back EXECUTION_DONE").await;
        client.socket.close(None).await.unwrap();
    }
}

#[tokio::test]
async fn a_sandbox_that_was_put_there_by_hand_says_that_it_has_no_token_yet_and_nothing_is_written() {
    let world = World::with_storage().await;
    let id = SandboxId::parse("sandbox-abc-123").unwrap();
    let record = r#"{"sandbox_id": "sandbox-abc-123", "created_timestamp": "2025-10-08T10:00:00Z", "idle_timeout": 300,
        "latest_sandbox_checkpoint": {"bucket": "b", "path": "sandbox_checkpoints/checkpoint-xyz/"}}"#;
    assert!(world.records.put_raw(&id, record.into(), Precondition::Absent).await.unwrap());
    let writes = world.writes();
    for query in ["", "&sandbox_token=", "&sandbox_token=guess"] {
        let path = format!("/attach/{id}?details=1{query}");
        let mut client = Client::new(connect(&world, &path, &[]).await.unwrap());
        client.hears("RESTORING RESTORE_ERROR E close:4000").await;
        assert!(client.message().starts_with("TokenMissing: "), "{}", client.message());
    }
    assert_eq!(world.writes(), writes);
}

#[tokio::test]
async fn a_wrong_or_missing_token_is_denied_before_anything_else() {
    let world = World::new().await;
    let mut owner = Client::running(&world, "{}").await;
    let path = format!("/attach/{}", owner.id());
    let writes = world.writes();
    let token = owner.token.clone().unwrap();
    for query in ["", "?sandbox_token=", "?sandbox_token=wrong", &format!("?sandbox_token={}", &token[..63])] {
        let mut client = Client::new(connect(&world, &format!("{path}{query}"), &[]).await.unwrap());
        client.hears("PERMISSION_DENIAL_ERROR E close:4000").await;
    }
    let mut client = Client::new(connect(&world, &path, &V1).await.unwrap());
    client.hears("hello PERMISSION_DENIAL_ERROR E close:4000").await;
    // The owner noticed nothing and still has the stream.
    owner.exec("out \"mine\"").await;
    owner.hears("EXECUTION_RUNNING out:mine EXECUTION_DONE").await;
    assert_eq!(world.writes(), writes);
}

#[tokio::test]
async fn ten_thousand_bad_tokens_write_nothing() {
    let world = World::new().await;
    let mut owner = Client::running(&world, "{}").await;
    let writes = world.writes();
    let path = format!("/attach/{}", owner.id());
    let guess = |number: u32| guess(&world, format!("{path}?sandbox_token={number:064x}"));
    for thousand in 0..10 {
        let numbers = futures::stream::iter(1_000 * thousand..1_000 * (thousand + 1));
        futures::StreamExt::for_each_concurrent(numbers, 32, guess).await;
        // Who says nothing for too long is taken for gone.
        owner.exec("out \"mine\"").await;
        owner.hears("EXECUTION_RUNNING out:mine EXECUTION_DONE").await;
    }
    assert_eq!(world.writes(), writes);
}

/// One try, as a program without a library would make it: so many of them are to be quick.
async fn guess(world: &World, path: String) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let request = format!(
        "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut heard = Vec::new();
    let denied = async {
        // A close frame of two bytes: 4000.
        while !heard.ends_with(&[0x88, 2, 0x0f, 0xa0]) {
            assert_ne!(stream.read_buf(&mut heard).await.unwrap(), 0, "{}", String::from_utf8_lossy(&heard));
        }
    };
    tokio::time::timeout(Duration::from_secs(20), denied).await.expect("the server is silent");
    let text = String::from_utf8_lossy(&heard);
    assert!(text.starts_with("HTTP/1.1 101") && text.contains("SANDBOX_PERMISSION_DENIAL_ERROR"), "{text}");
    // The masked answer, so that neither side has to wait.
    stream.write_all(&[0x88, 0x82, 0, 0, 0, 0, 0x0f, 0xa0]).await.unwrap();
    let _ = stream.read(&mut [0; 16]).await;
}

#[tokio::test]
async fn what_was_never_there_is_not_found() {
    let unknown = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";
    let world = World::new().await;
    let mut client = Client::new(connect(&world, &format!("/attach/{unknown}"), &[]).await.unwrap());
    client.hears("RESTORING NOT_FOUND close:1011").await;
    for bad in ["..%2f..%2fetc", "sandbox-x", "%00", "a%0Ab", "sandbox-0B9F5A52-6F0E-4B1C-9D3E-0123456789AB"] {
        let mut client = Client::new(connect(&world, &format!("/attach/{bad}"), &[]).await.unwrap());
        client.hears("RESTORING NOT_FOUND close:1011").await;
    }
    let long = "a".repeat(4096);
    let mut client = Client::new(connect(&world, &format!("/attach/{long}"), &[]).await.unwrap());
    client.hears("RESTORING NOT_FOUND close:1011").await;
    let world = World::with_storage().await;
    let mut client = Client::new(connect(&world, &format!("/attach/{unknown}"), &[]).await.unwrap());
    client.hears("RESTORING NOT_FOUND close:1011").await;
    assert_eq!(http(&world, "GET /attach/x", &[], "").await.0, 400);
}

#[tokio::test]
async fn what_runs_here_and_was_taken_over_is_not_opened() {
    let world = World::with_storage().await;
    let first = Client::running(&world, r#"{"enable_checkpoint": true}"#).await;
    let (id, token) = (first.id().clone(), first.token.clone().unwrap());
    drop(first);
    // Another instance has taken the lease, and here nobody has noticed.
    let clock: SharedClock = world.clock.clone();
    let other = clock.instance_id();
    let who = Identity { me: other.clone(), predecessor: None };
    let mut lock = world.records.lock_file(&id, StoreKind::Durable, &who).unwrap();
    lock.read().await.unwrap();
    lock.acquire(true).await.unwrap();
    let report = |status: &mut SandboxStatus, _: &mut Committed| {
        (status.phase, status.instance) = (Phase::Running, Some(other.clone()));
    };
    world.records.report(&id, 7, &report).await.unwrap();
    let path = format!("/attach/{id}?sandbox_token={token}");
    let mut client = Client::new(connect(&world, &path, &[]).await.unwrap());
    client.hears("RESTORING").await;
    // The old one goes, and the client gets the sandbox.
    world.bus.post(&id, LifecycleEvent::LeaseLost { message: "taken over".to_owned() });
    world.replace(&id).await;
    client.hears("RUNNING").await;
}

#[tokio::test]
async fn a_living_client_keeps_its_place() {
    let world = World::new().await;
    let mut first = Client::running(&world, "{}").await;
    let begun = std::time::Instant::now();
    let newcomer = first.again(&world, &[]).await;
    // The first client answers pings while it reads.
    first.exec("wait 1500\nout \"undisturbed\"").await;
    let (_, ()) = tokio::join!(
        async {
            let mut newcomer = newcomer;
            newcomer.hears("IN_USE close:1011").await;
            assert!(begun.elapsed() >= Duration::from_millis(500), "a refusal that clients answer at once comes late");
        },
        first.hears("EXECUTION_RUNNING out:undisturbed EXECUTION_DONE")
    );
}

#[tokio::test]
async fn a_dead_client_gives_way() {
    let world = World::new().await;
    // It does not read, so it answers no ping.
    let mut dead = Client::running(&world, "{}").await;
    let mut newcomer = dead.again(&world, &[]).await;
    newcomer.hears("RUNNING").await;
    newcomer.exec("out \"mine now\"").await;
    newcomer.hears("EXECUTION_RUNNING out:mine_now EXECUTION_DONE").await;
    dead.hears("close:1011").await;
}

#[tokio::test]
async fn a_client_that_answers_no_ping_counts_as_gone() {
    let world = World::new().await;
    let client = Client::running(&world, "{}").await;
    assert!(world.bus.presence(client.id()).attached);
    until(async || {
        world.clock.skip(Duration::from_secs(5));
        !world.bus.presence(client.id()).attached
    })
    .await;
}

#[tokio::test]
async fn nothing_of_an_earlier_command_is_sent_until_it_is_asked_for() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("out \"before\"\nwait 50\nout \" after\"\nwait 400\nout \" live\"").await;
    client.hears("EXECUTION_RUNNING out:before").await;
    let mut again = client.again(&world, &[]).await;
    client.cut();
    again.hears("RUNNING").await;
    again.says(r#"{"action":"reconnect"}"#).await;
    again.hears("EXECUTION_RUNNING").await;
    let text = again.stdout().await;
    // What was not confirmed may come twice; nothing may be missing.
    assert!(text.ends_with("before after live"), "{text}");
    again.says(r#"{"action":"reconnect"}"#).await;
    again.exec("out \"next\"").await;
    again.hears("EXECUTION_RUNNING out:next EXECUTION_DONE").await;
}

#[tokio::test]
async fn a_reconnect_with_nothing_to_resume_is_simply_open() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("out \"x\"").await;
    client.hears("EXECUTION_RUNNING out:x EXECUTION_DONE").await;
    // The end is confirmed by the pong of a ping that came with it.
    let reading = async { drop(client.next().await) };
    tokio::select! {
        () = until(async || world.agent().lock().unwrap().starts().is_empty()) => {}
        () = reading => panic!("nothing more is said"),
    }
    let mut again = client.again(&world, &[]).await;
    client.socket.close(None).await.unwrap();
    again.says(r#"{"action":"reconnect"}"#).await;
    again.hears("RUNNING").await;
    again.exec("out \"y\"").await;
    again.hears("EXECUTION_RUNNING out:y EXECUTION_DONE").await;
}

#[tokio::test]
async fn a_command_of_another_session_can_be_killed() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("sleep").await;
    client.hears("EXECUTION_RUNNING").await;
    let mut again = client.again(&world, &[]).await;
    client.cut();
    again.hears("RUNNING").await;
    again.exec("out \"x\"").await;
    again.hears("EXECUTION_ERROR E").await;
    again.says(r#"{"action":"kill_process"}"#).await;
    again.hears("EXECUTION_FORCE_KILLED EXECUTION_DONE").await;
}

#[tokio::test]
async fn a_replaced_container_is_linked_again() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("sleep").await;
    client.hears("EXECUTION_RUNNING").await;
    // Told twice: nothing new.
    world.bus.post(client.id(), LifecycleEvent::Running { boot: StartKind::Fresh });
    client.says(r#"{"action":"dance"}"#).await;
    client.hears("ERROR E").await;
    world.replace(client.id()).await;
    client.hears("EXECUTION_ERROR E RUNNING").await;
    client.exec("out \"anew\"").await;
    client.hears("EXECUTION_RUNNING out:anew EXECUTION_DONE").await;
}

#[tokio::test]
async fn a_session_that_does_not_resume_leaves_the_marks_where_they_were() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("out \"0123456789\"\nsleep").await;
    client.hears("EXECUTION_RUNNING").await;
    let (id, token) = (client.id().clone(), client.token());
    client.cut();
    until(async || !world.bus.presence(&id).attached).await;
    let mut looks = Client::attached(&world, &id, &token).await;
    looks.hears("RUNNING").await;
    looks.cut();
    until(async || !world.bus.presence(&id).attached).await;
    world.agent().lock().unwrap().drop_oldest(1, 4);
    let mut late = Client::attached(&world, &id, &token).await;
    late.says(r#"{"action":"reconnect"}"#).await;
    late.hears("RUNNING EXECUTION_RUNNING gap:0-4 out:456789").await;
}

#[tokio::test]
async fn bytes_that_were_dropped_meanwhile_are_named() {
    let world = World::new().await;
    let mut client = Client::running(&world, "{}").await;
    client.exec("out \"0123456789\"\nsleep").await;
    client.hears("EXECUTION_RUNNING").await;
    let mut again = client.again(&world, &[]).await;
    // Nothing of it is confirmed: the first client reads no more and answers no ping.
    again.hears("RUNNING").await;
    drop(again.socket);
    // Long after: nobody read, and the oldest went.
    world.agent().lock().unwrap().drop_oldest(1, 4);
    let mut late = client.again(&world, &[]).await;
    late.says(r#"{"action":"reconnect"}"#).await;
    late.hears("RUNNING EXECUTION_RUNNING gap:0-4 out:456789").await;
}
