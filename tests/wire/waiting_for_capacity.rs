//! A full server: the place of a sandbox that nobody uses, who gets it, and who is refused.

use std::time::Duration;

use baton::{api::ApiSettings, bus::ROOM_WITHIN};

use crate::{
    plain_dialect::http,
    test_server::{Plan, World, until},
    wire_client::{Client, V1, connect},
};

const KEPT: &str = r#"{"enable_checkpoint":true}"#;

/// With places for so many sandboxes.
async fn with_room_for_one() -> World {
    let change = |settings: &mut ApiSettings| settings.max_sandboxes = 1;
    World::with(Plan { has_storage: true, can_snapshot: false, change }).await
}

/// The client goes, and the server has seen it.
async fn leave(world: &World, mut client: Client) -> Client {
    client.socket.close(None).await.unwrap();
    until(async || world.bus.counts().sessions == 0).await;
    client
}

/// A sandbox that is stored and nowhere.
async fn stored(world: &World) -> Client {
    let mut client = Client::running(world, KEPT).await;
    client.says(r#"{"action":"checkpoint"}"#).await;
    client.hears("CHECKPOINTING CHECKPOINTED close:1000").await;
    client
}

#[tokio::test]
async fn whoever_comes_gets_the_place_of_a_sandbox_that_nobody_uses_and_that_one_comes_back_whole() {
    let world = with_room_for_one().await;
    let mut first = Client::running(&world, KEPT).await;
    first.exec("out \"kept\"").await;
    first.hears("EXECUTION_RUNNING out:kept EXECUTION_DONE").await;
    let first = leave(&world, first).await;

    let mut second = Client::create(&world).await;
    second.says(KEPT).await;
    second.hears("CREATING sandbox_id RUNNING").await;
    assert_eq!(world.count(), 1, "the first has gone");
    let mut again = first.again(&world, &[]).await;
    again.hears("RESTORING RESTORE_ERROR E close:4000").await;
    assert_eq!(again.message(), "The server has no room for another sandbox.");

    leave(&world, second).await;
    let mut again = first.again(&world, &[]).await;
    again.hears("RESTORING RUNNING").await;
    again.exec("out \"on\"").await;
    again.hears("EXECUTION_RUNNING out:on EXECUTION_DONE").await;
}

#[tokio::test]
async fn the_words_of_a_handoff_and_of_v1_are_those_of_any_other_create_and_attach() {
    let world = with_room_for_one().await;
    let config = r#"{"enable_checkpoint":true,"enable_sandbox_handoff":true}"#;
    let first = Client::running(&world, KEPT).await;
    leave(&world, first).await;
    let mut second = Client::new(connect(&world, "/create", &V1).await.unwrap());
    second.says(config).await;
    second.hears("hello CREATING sandbox_id LOCK_ACQUIRING LOCK_ACQUIRED RUNNING").await;
    let second = leave(&world, second).await;
    let third = Client::running(&world, KEPT).await;
    leave(&world, third).await;
    let mut again = second.again(&world, &V1).await;
    again.hears("hello RESTORING LOCK_ACQUIRING LOCK_ACQUIRED RUNNING").await;
}

#[tokio::test]
async fn an_execute_finds_room_too() {
    let world = with_room_for_one().await;
    let first = Client::running(&world, KEPT).await;
    let first = leave(&world, first).await;
    let (status, body) = http(&world, "POST /execute?language=bash", &[], "out \"x\"").await;
    assert_eq!((status, body.as_str()), (200, "x"));
    until(async || world.count() == 0).await;
    first.again(&world, &[]).await.hears("RESTORING RUNNING").await;
}

#[tokio::test]
async fn who_comes_back_while_its_sandbox_is_about_to_go_has_it_and_the_newcomer_is_refused() {
    let world = with_room_for_one().await;
    world.set(|script| script.checkpoint_waits = true);
    let first = Client::running(&world, KEPT).await;
    let first = leave(&world, first).await;
    let mut second = Client::create(&world).await;
    second.says("{}").await;
    second.hears("CREATING").await;
    until(async || world.bus.is_wanted(first.id())).await;
    first.again(&world, &[]).await.hears("RUNNING").await;
    second.hears("CREATION_ERROR E close:4000").await;
    assert_eq!(second.message(), "The server has no room for another sandbox.");
    assert_eq!(world.count(), 1);
}

#[tokio::test]
async fn a_checkpoint_that_fails_leaves_everything_as_it_was() {
    let world = with_room_for_one().await;
    let first = Client::running(&world, KEPT).await;
    let first = leave(&world, first).await;
    world.set(|script| script.checkpoint_fails = true);
    let writes = world.writes();
    let mut second = Client::create(&world).await;
    second.says("{}").await;
    second.hears("CREATING CREATION_ERROR E close:4000").await;
    assert_eq!(http(&world, "POST /execute?language=bash", &[], "exit 0").await.0, 503);
    assert_eq!(world.writes(), writes, "nothing of the newcomers was written");
    first.again(&world, &[]).await.hears("RUNNING").await;
}

#[tokio::test]
async fn the_eviction_request_ends_with_the_client_that_made_it() {
    let world = with_room_for_one().await;
    world.set(|script| script.room_waits = true);
    let away = stored(&world).await;
    let first = Client::running(&world, KEPT).await;
    let first = leave(&world, first).await;
    let wanted = async || world.bus.is_wanted(first.id());
    let mut creates = Client::create(&world).await;
    creates.says("{}").await;
    creates.hears("CREATING").await;
    until(wanted).await;
    creates.socket.close(None).await.unwrap();
    until(async || !wanted().await).await;

    let mut attaches = away.again(&world, &[]).await;
    attaches.hears("RESTORING").await;
    until(wanted).await;
    attaches.cut();
    until(async || !wanted().await).await;

    let executes = tokio::spawn({
        let address = world.address;
        async move {
            use tokio::io::AsyncWriteExt;
            let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let request = "POST /execute?language=bash HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\nexit 0";
            stream.write_all(request.as_bytes()).await.unwrap();
            stream
        }
    });
    let stream = executes.await.unwrap();
    until(wanted).await;
    stream.set_zero_linger().unwrap();
    drop(stream);
    until(async || !wanted().await).await;
    assert_eq!(world.count(), 1, "nobody had to go");
    first.again(&world, &[]).await.hears("RUNNING").await;
}

#[tokio::test]
async fn what_is_asked_while_waiting_for_room_is_done_once_it_runs() {
    let world = with_room_for_one().await;
    world.set(|script| script.room_waits = true);
    let first = Client::running(&world, KEPT).await;
    let first = leave(&world, first).await;
    let mut second = Client::create(&world).await;
    second.says("{}").await;
    second.hears("CREATING").await;
    until(async || world.bus.is_wanted(first.id())).await;
    second.says("no message").await;
    second.hears("ERROR E").await;
    second.exec("out \"early\"").await;
    world.set(|script| script.room_waits = false);
    world.bus.wake(first.id());
    second.hears("sandbox_id RUNNING EXECUTION_RUNNING out:early EXECUTION_DONE").await;
}

#[tokio::test]
async fn a_client_that_waits_for_capacity_keeps_its_slot_while_it_is_connected() {
    let world = with_room_for_one().await;
    world.set(|script| script.room_waits = true);
    let away = stored(&world).await;
    let first = Client::running(&world, KEPT).await;
    let first = leave(&world, first).await;
    let mut waits = away.again(&world, &[]).await;
    waits.hears("RESTORING").await;
    until(async || world.bus.is_wanted(first.id())).await;
    let mut other = away.again(&world, &[]).await;
    tokio::select! {
        () = other.hears("IN_USE close:1011") => {}
        word = waits.word() => panic!("it only waits: {word}"),
    }
    // One that does not answer loses it.
    let mut third = away.again(&world, &[]).await;
    third.hears("RESTORING").await;
    waits.hears("close:1011").await;
    world.set(|script| script.room_waits = false);
    world.bus.wake(first.id());
    third.hears("RUNNING").await;
}

#[tokio::test]
async fn nobody_waits_for_room_longer_than_was_promised_or_on_a_server_that_drains() {
    let world = with_room_for_one().await;
    world.set(|script| script.room_waits = true);
    let away = stored(&world).await;
    let first = Client::running(&world, KEPT).await;
    let first = leave(&world, first).await;
    let wanted = async || world.bus.is_wanted(first.id());
    let mut late = Client::create(&world).await;
    late.says("{}").await;
    late.hears("CREATING").await;
    until(wanted).await;
    world.clock.skip(ROOM_WITHIN - Duration::from_secs(1));
    assert!(wanted().await);
    world.clock.skip(Duration::from_secs(1));
    late.hears("CREATION_ERROR E close:4000").await;
    until(async || !wanted().await).await;

    let mut creates = Client::create(&world).await;
    creates.says("{}").await;
    creates.hears("CREATING").await;
    until(wanted).await;
    let mut attaches = away.again(&world, &[]).await;
    attaches.hears("RESTORING RESTORE_ERROR E close:4000").await;
    world.drain.send_replace(true);
    creates.hears("CREATION_ERROR E close:4000").await;
    assert_eq!(creates.message(), "The server is shutting down.");
    until(async || !wanted().await).await;
    world.drain.send_replace(false);
    let mut attaches = away.again(&world, &[]).await;
    attaches.hears("RESTORING").await;
    until(wanted).await;
    world.drain.send_replace(true);
    attaches.hears("close:1012").await;
}
