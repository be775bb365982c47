//! A commit in the metadata: which checkpoint, when it was taken, and that whoever hears of it finds it there.

use std::time::Duration;

use baton::{
    bus::LifecycleEvent,
    cli::{checkpoint, rollback},
    config::LeaseTimes,
    storage::layout,
};
use baton_protocol::{id::SandboxId, metadata::DesiredState};
use serde_json::{Value, json};

use crate::{
    faulty_store::Fault,
    instances::{Instance, Visit, World, movable},
    verbs::{WAIT, admin, done, running},
};
use baton_testkit::ActionFault as Broken;

const CALL: Duration = LeaseTimes::DEFAULT.call;

async fn record(world: &World, id: &SandboxId) -> Value {
    serde_json::from_str(&world.text(&format!("sandboxes/{id}/metadata.json")).await.unwrap()).unwrap()
}

/// The metadata name the head of the lock, and when its manifest says that it was taken.
async fn assert_named(world: &World, id: &SandboxId) -> String {
    let head = world.lock(id).await.unwrap().head.unwrap();
    let prefix = layout::checkpoint_prefix(&head.checkpoint_id);
    let shown = record(world, id).await;
    assert_eq!(shown["latest_sandbox_checkpoint"]["path"], json!(prefix));
    let manifest: Value = serde_json::from_str(&world.text(&format!("{prefix}manifest.json")).await.unwrap()).unwrap();
    assert_eq!(shown["last_checkpointed"], manifest["created"]);
    let taken = shown["last_checkpointed"].as_str().unwrap().to_owned();
    humantime::parse_rfc3339(&taken).unwrap();
    taken
}

async fn visited(world: &World, one: &Instance, idle: Option<u64>) -> Visit {
    let mut visit = one
        .create(|spec| {
            movable(spec);
            spec.idle_timeout = idle;
            spec.enable_idle_timeout_auto_checkpoint = true;
        })
        .await;
    visit.until_running().await;
    world.after(1).await;
    visit
}

#[tokio::test(start_paused = true)]
async fn who_hears_of_a_checkpoint_finds_it_in_the_metadata_whoever_asked_for_it() {
    for idle in [None, Some(20)] {
        let world = World::new();
        let one = world.instance();
        let mut visit = visited(&world, &one, idle).await;
        if idle.is_none() {
            one.edit(&visit.id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
        }
        // The first answer of the store is lost, and the client waits for the second.
        visit.until(|told| matches!(told, LifecycleEvent::Checkpointing { .. })).await;
        one.store.next_put_of("metadata.json", Fault::Hangs);
        visit.until_left().await;
        assert_named(&world, &visit.id).await;
        assert_eq!(record(&world, &visit.id).await["status"]["phase"], json!("checkpointed"));
        one.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_of_what_runs_on_is_named_when_it_is_answered() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let id = running(&world, &one).await;
    assert_eq!(record(&world, &id).await.get("last_checkpointed"), None);
    done(checkpoint::checkpoint_running(&admin, &id, WAIT)).await;
    let first = assert_named(&world, &id).await;
    world.after(60).await;
    done(checkpoint::checkpoint_running(&admin, &id, WAIT)).await;
    let second = assert_named(&world, &id).await;
    assert!(first < second, "{first} {second}");
    done(checkpoint::release(&admin, &id, DesiredState::Checkpointed, WAIT)).await;
    done(rollback::roll_back(&admin, &id, None, WAIT)).await;
    assert_eq!(assert_named(&world, &id).await, second, "the one before it counts again");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_slow_with_the_metadata_delays_the_word_but_for_a_moment_and_they_are_mended() {
    let world = World::new().sweeping();
    let one = world.instance();
    let mut visit = visited(&world, &one, None).await;
    let id = visit.id.clone();
    one.containers.inject("checkpoint", Broken::Delay(Duration::from_secs(5)));
    one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    visit.until(|told| matches!(told, LifecycleEvent::Checkpointing { .. })).await;
    one.store.hang("metadata.json");
    while world.lock(&id).await.unwrap().lease.is_some() {
        world.clock.sleep(Duration::from_millis(10)).await;
    }
    let committed = world.clock.now();
    visit.until_left().await;
    let waited = world.clock.now() - committed;
    assert!(waited <= CALL * 2, "the commit was durable for {waited:?}");
    assert_eq!(record(&world, &id).await["status"]["phase"], json!("running"), "nothing could be written yet");
    drop(visit);
    one.store.hang("nothing");
    world.after(200).await;
    assert_named(&world, &id).await;
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_does_not_wait_for_the_metadata_and_names_what_it_started_from() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = visited(&world, &one, None).await;
    let id = visit.id.clone();
    one.store.hang("metadata.json");
    let mut newer = two.attach(&id).await;
    newer.until_running().await;
    let head = world.lock(&id).await.unwrap();
    assert_eq!(head.epoch, 2);
    let moved = world.clock.now();
    // It runs there before the old session hears the last of it.
    visit.until_left().await;
    assert!(world.clock.now() > moved, "the new one waited for the old one's report");
    world.after(1).await;
    assert_named(&world, &id).await;
    let shown = record(&world, &id).await;
    assert_eq!(shown["status"]["instance"], json!(two.tools.who.me));
    // Nor is it said otherwise when the old one can write again.
    one.store.hang("nothing");
    world.after(60).await;
    let later = record(&world, &id).await;
    assert_eq!(
        (&later["status"]["phase"], &later["status"]["instance"]),
        (&json!("running"), &shown["status"]["instance"])
    );
    one.stop().await;
    two.stop().await;
}
