//! The sweep: what nobody looks after is looked after, and nothing else is touched.

use std::time::Duration;

use baton::{
    config::LeaseTimes,
    runtime::Container,
    storage::lease::lease_rules::{self, InitialLease},
};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::{Lock, Waiter},
    metadata::{DesiredState, Phase},
};
use serde_json::json;

use crate::{
    faulty_store::Fault,
    instances::{Instance, World, movable, persistent},
};

const DAY: u64 = 24 * 60 * 60;

fn asleep(spec: &mut baton_protocol::metadata::Spec) {
    movable(spec);
    spec.idle_timeout = None;
}

/// A sandbox that is checkpointed and that nobody holds.
async fn stored(world: &World, instance: &Instance) -> SandboxId {
    let mut visit = instance.create(asleep).await;
    visit.until_running().await;
    instance.edit(&visit.id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    visit.until_left().await;
    let id = visit.id.clone();
    drop(visit);
    world.after(2).await;
    id
}

async fn checkpoints(instance: &Instance, id: &SandboxId) -> usize {
    instance.tools.checkpoints.as_ref().unwrap().list(id).await.unwrap().len()
}

#[tokio::test(start_paused = true)]
async fn a_create_that_was_given_up_is_erased_after_ten_minutes_and_not_before() {
    let world = World::new().sweeping();
    let one = world.instance();
    // Held by an instance that died between the two objects, and free, as a fork's lock is.
    let (held, free) = (world.clock.sandbox_id(), world.clock.sandbox_id());
    let lease = InitialLease { op: world.clock.nonce(), sent: world.clock.now() };
    let locks = [lease_rules::initial(held, &world.clock.instance_id(), &lease, &LeaseTimes::DEFAULT), Lock::new(free)];
    for lock in &locks {
        world.put(&format!("sandboxes/{}/lock.json", lock.sandbox_id), &serde_json::to_string(lock).unwrap()).await;
    }
    world.after(9 * 60).await;
    for lock in &locks {
        assert_eq!(world.lock(&lock.sandbox_id).await.as_ref(), Some(lock));
    }
    world.after(4 * 60).await;
    for lock in &locks {
        assert!(world.lock(&lock.sandbox_id).await.unwrap().purged, "{lock:?}");
    }
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_was_renewed_is_not_a_create_that_was_given_up() {
    let world = World::new().sweeping();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    world.after(10).await;
    let id = visit.id.clone();
    drop(one.die().await);
    world.remove(&format!("sandboxes/{id}/metadata.json")).await;
    world.after(30 * 60).await;
    assert!(!world.lock(&id).await.unwrap().purged, "somebody may want to know what became of it");
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_whose_metadata_somebody_deleted_is_kept() {
    let world = World::new().sweeping();
    let one = world.instance();
    let id = stored(&world, &one).await;
    world.remove(&format!("sandboxes/{id}/metadata.json")).await;
    let before = world.keys().await;
    world.after(DAY).await;
    assert_eq!(world.keys().await, before);
    assert!(world.lock(&id).await.unwrap().head.is_some());
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_purge_that_was_broken_off_is_finished() {
    let world = World::new().sweeping();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(asleep).await;
    visit.until_running().await;
    let id = visit.id.clone();
    // The mark is written; the erasing never answers, and then the instance is gone.
    one.store.next_lock_put(Fault::AnswerLost);
    one.store.next_lock_put(Fault::Hangs);
    one.edit(&id, |spec| spec.desired_state = DesiredState::Deleted).await;
    while !world.lock(&id).await.unwrap().purging {
        world.after(1).await;
    }
    let one = one.die().await;
    world.after(300).await;
    assert_eq!(world.keys().await, [format!("sandboxes/{id}/lock.json")]);
    assert!(world.lock(&id).await.unwrap().purged);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_has_the_entry_of_a_waiter_that_died_is_purged_all_the_same() {
    let world = World::new().sweeping();
    let one = world.instance();
    let id = stored(&world, &one).await;
    let mut lock = world.lock(&id).await.unwrap();
    let (instance, op) = (world.clock.instance_id(), world.clock.nonce());
    lock.waiter = Some(Waiter { instance, op, beat: 0, ttl_ms: 60_000, claim: Default::default(), declined: false });
    world.put(&format!("sandboxes/{id}/lock.json"), &serde_json::to_string(&lock).unwrap()).await;
    world.edit(&id, |record| record["desired_state"] = json!("deleted")).await;
    world.after(50).await;
    assert!(!world.lock(&id).await.unwrap().purged, "the waiter may live");
    world.after(300).await;
    assert!(world.lock(&id).await.unwrap().purged);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_tombstone_is_forgotten_after_a_week_and_metadata_put_over_it_is_erased() {
    let world = World::new().sweeping();
    let one = world.instance();
    let id = stored(&world, &one).await;
    let key = format!("sandboxes/{id}/metadata.json");
    let copy = world.text(&key).await.unwrap();
    world.edit(&id, |record| record["desired_state"] = json!("deleted")).await;
    world.after(200).await;
    assert!(world.lock(&id).await.unwrap().purged);
    world.put(&key, &copy).await;
    world.after(200).await;
    assert_eq!(world.keys().await, [format!("sandboxes/{id}/lock.json")]);
    world.after(6 * DAY).await;
    assert!(world.lock(&id).await.is_some());
    world.after(DAY + 200).await;
    assert_eq!(world.keys().await, [""; 0]);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn one_instance_of_several_starts_what_is_wanted_anywhere() {
    let world = World::new().sweeping();
    let instances = [world.instance(), world.instance(), world.instance()];
    let id = stored(&world, &instances[0]).await;
    world.after(130).await;
    world
        .edit(&id, |record| {
            record["desired_state"] = json!("running");
            record["placement"] = json!(null);
        })
        .await;
    world.after(80).await;
    let running: Vec<_> = instances.iter().filter(|at| at.container(&id) == Container::Running).collect();
    assert_eq!(running.len(), 1);
    let found = instances[0].metadata(&id).await.unwrap();
    assert_eq!(found.spec.placement.as_ref(), Some(&running[0].tools.who.me));
    // Nobody came, and it runs on until it is idle: the idle time is its own.
    world.after(600).await;
    assert_eq!(running[0].container(&id), Container::Running);
    for instance in instances {
        instance.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_wanted_anywhere_waits_for_room() {
    let mut world = World::new().sweeping();
    world.housekeeping.room = 1;
    let one = world.instance();
    let ids = [stored(&world, &one).await, stored(&world, &one).await];
    for id in &ids {
        world
            .edit(id, |record| {
                record["desired_state"] = json!("running");
                record["placement"] = json!(null);
            })
            .await;
    }
    world.after(300).await;
    let runs = |id: &SandboxId| one.container(id) == Container::Running;
    assert_eq!(ids.iter().filter(|id| runs(id)).count(), 1);
    let (first, second) = if runs(&ids[0]) { (&ids[0], &ids[1]) } else { (&ids[1], &ids[0]) };
    assert_eq!(one.metadata(second).await.unwrap().spec.placement, None, "it was promised a place that is not there");
    one.edit(first, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    world.after(150).await;
    assert!(runs(second) && !runs(first));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn one_broken_sandbox_keeps_nothing_from_the_others() {
    let world = World::new().sweeping();
    let one = world.instance();
    let (garbled, invalid, fine) = (stored(&world, &one).await, stored(&world, &one).await, stored(&world, &one).await);
    world.put(&format!("sandboxes/{garbled}/lock.json"), "{ not json").await;
    world.put(&format!("sandboxes/{invalid}/metadata.json"), r#"{"desired_state":"deleted"}"#).await;
    world.put("sandboxes/not-an-id/lock.json", "{}").await;
    for id in [&garbled, &fine] {
        world.edit(id, |record| record["desired_state"] = json!("deleted")).await;
    }
    world.after(300).await;
    assert!(world.lock(&fine).await.unwrap().purged);
    assert_eq!((checkpoints(&one, &garbled).await, checkpoints(&one, &invalid).await), (1, 1));
    assert!(world.lock(&invalid).await.unwrap().head.is_some());
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn checkpoints_that_nothing_needs_are_erased_also_where_nobody_holds_the_sandbox() {
    let world = World::new().sweeping();
    let one = world.instance();
    let id = stored(&world, &one).await;
    for _ in 0..3 {
        let mut visit = one.attach(&id).await;
        visit.until_running().await;
        one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
        visit.until_left().await;
    }
    let lock = world.lock(&id).await.unwrap();
    let orphan = CheckpointId::new(&id, lock.epoch, 9, &world.clock.nonce());
    let pinned = CheckpointId::new(&id, 1, 1, &world.clock.nonce());
    world.put(&format!("sandbox_checkpoints/{orphan}/pages.img"), "x").await;
    world.put(&format!("sandbox_checkpoints/{pinned}/manifest.json"), "{}").await;
    world.put(&format!("sandbox_checkpoints/{pinned}/pins/{}", world.clock.sandbox_id()), "").await;
    world.after(250).await;
    let now = world.lock(&id).await.unwrap();
    assert_eq!((&now.head, &now.prev_head, &now.lease), (&lock.head, &lock.prev_head, &None));
    let stored = one.tools.checkpoints.as_ref().unwrap().list(&id).await.unwrap();
    let named = [now.head, now.prev_head].into_iter().flatten().map(|head| head.checkpoint_id);
    assert_eq!(stored, named.chain([pinned]).collect());
    // … and a deletion leaves what a fork needs.
    one.edit(&id, |spec| spec.desired_state = DesiredState::Deleted).await;
    world.after(250).await;
    assert_eq!(checkpoints(&one, &id).await, 1);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn more_checkpoints_are_kept_where_the_operator_wants_it() {
    let mut world = World::new().sweeping();
    world.housekeeping.keep_checkpoints = 4;
    let one = world.instance();
    let id = stored(&world, &one).await;
    for _ in 0..6 {
        let mut visit = one.attach(&id).await;
        visit.until_running().await;
        one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
        visit.until_left().await;
    }
    world.after(250).await;
    let stored = one.tools.checkpoints.as_ref().unwrap().list(&id).await.unwrap();
    let newest: Vec<_> = stored.iter().map(CheckpointId::seq).collect();
    assert_eq!(newest, [4, 5, 6, 7]);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_ttl_ends_a_sandbox_held_or_not_and_retention_only_what_nobody_holds() {
    let mut world = World::new().sweeping();
    world.housekeeping.retention = Some(Duration::from_secs(3600));
    let one = world.instance();
    let (free, kept) = (stored(&world, &one).await, stored(&world, &one).await);
    let mut held = one.create(asleep).await;
    held.until_running().await;
    let mut short = one.create(asleep).await;
    short.until_running().await;
    world.edit(&kept, |record| record["ttl"] = json!(30 * DAY)).await;
    world.edit(&short.id, |record| record["ttl"] = json!(600)).await;
    world.after(500).await;
    assert_eq!(one.container(&short.id), Container::Running);
    short.until_left().await;
    world.after(10).await;
    assert!(world.lock(&short.id).await.unwrap().purged, "it outlived its ttl");
    world.after(3600).await;
    assert!(world.lock(&free).await.unwrap().purged, "the retention is over");
    assert!(!world.lock(&kept).await.unwrap().purged, "its own ttl counts");
    assert_eq!(one.container(&held.id), Container::Running, "it is held");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_status_that_says_it_runs_is_corrected_where_nobody_runs_it() {
    let world = World::new().sweeping();
    let one = world.instance();
    let id = stored(&world, &one).await;
    world.edit(&id, |record| record["status"]["phase"] = json!("running")).await;
    world.after(200).await;
    assert_eq!(one.metadata(&id).await.unwrap().status.phase, Phase::Checkpointed);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_is_only_cut_off_keeps_its_work() {
    let world = World::new().sweeping();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one
        .create(|spec| {
            persistent(spec);
            spec.idle_timeout = None;
        })
        .await;
    visit.until_running().await;
    one.store.cut(true);
    world.after(600).await;
    assert_eq!(one.container(&visit.id), Container::Fenced);
    one.store.cut(false);
    world.after(30).await;
    assert_eq!(one.container(&visit.id), Container::Running);
    assert_eq!(world.lock(&visit.id).await.unwrap().epoch, 1);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_be_listed_proves_nobody_dead() {
    let world = World::new().sweeping();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(asleep).await;
    visit.until_running().await;
    world.after(100).await;
    // Neither reaches the store; then the other one comes back first.
    one.store.cut(true);
    two.store.cut(true);
    world.after(100).await;
    world.edit(&visit.id, |record| record["desired_state"] = json!("checkpointed")).await;
    two.store.cut(false);
    one.store.cut(false);
    world.after(30).await;
    let lock = world.lock(&visit.id).await.unwrap();
    assert_eq!((lock.epoch, lock.lease, lock.behind), (1, None, false), "its own holder let it go");
    one.stop().await;
    two.stop().await;
}
