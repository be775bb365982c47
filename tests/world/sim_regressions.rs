//! What the simulation found, as stories: each failed before it was mended (`docs/proof.md`).

use std::time::Duration;

use baton::{
    bus::{LifecycleEvent, StartKind},
    runtime::Container,
    storage::store::{PollResult, Precondition, Store},
};
use baton_protocol::metadata::DesiredState;
use baton_testkit::ActionFault as Broken;

use crate::{
    faulty_store::Fault,
    instances::{World, movable, persistent},
};

fn is_failed(passing: &LifecycleEvent, with: &str) -> bool {
    matches!(passing, LifecycleEvent::Failed { reason, .. } if reason.name() == with)
}

#[tokio::test(start_paused = true)]
async fn metadata_put_back_after_a_purge_raises_nothing_from_the_tombstone() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let id = visit.id.clone();
    let key = format!("sandboxes/{id}/metadata.json");
    let PollResult::Changed(copy, _) = one.store.get_if_changed(&key, None).await.unwrap() else {
        panic!("it is there")
    };
    one.edit(&id, |spec| spec.desired_state = DesiredState::Deleted).await;
    visit.until_left().await;
    drop(visit);
    one.store.put(&key, copy, Precondition::Any).await.unwrap();
    let epoch = world.lock(&id).await.unwrap().epoch;
    let mut visit = one.attach(&id).await;
    visit.until(|passing| is_failed(passing, "Deleted")).await;
    one.edit(&id, |spec| spec.desired_state = DesiredState::Deleted).await;
    world.after(60).await;
    let lock = world.lock(&id).await.unwrap();
    assert_eq!((lock.epoch, lock.purged), (epoch, true));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_purge_whose_last_write_was_refused_is_finished_all_the_same() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let id = visit.id.clone();
    // The first is the mark that a purge has begun, the second the tombstone.
    one.store.next_lock_put(Fault::AnswerLost);
    one.store.next_lock_put(Fault::Refused);
    one.edit(&id, |spec| spec.desired_state = DesiredState::Deleted).await;
    visit.until_left().await;
    assert!(world.lock(&id).await.unwrap().purged);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_attach_to_a_fenced_sandbox_without_a_lock_is_answered_and_it_is_kept() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let id = visit.id.clone();
    one.store.delete(&format!("sandboxes/{id}/lock.json"), Precondition::Any).await.unwrap();
    visit.until(|passing| is_failed(passing, "LockMissing")).await;
    let mut again = one.attach(&id).await;
    again.until(|passing| is_failed(passing, "LockMissing")).await;
    assert_eq!(one.container(&id), Container::Fenced);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_restore_that_was_broken_off_late_still_makes_checkpoints_that_restore() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let id = one.stored(movable).await;
    // Its container starts while a renewal hangs over the deadline: the restore is broken off after that.
    two.containers.inject("restore", Broken::Delay(Duration::from_millis(14_500)));
    let mut visit = two.attach(&id).await;
    visit.until(|passing| matches!(passing, LifecycleEvent::Acquired)).await;
    for _ in 0..5 {
        two.store.next_lock_put(Fault::Hangs);
    }
    let told = visit.until_running().await;
    assert!(matches!(told.last(), Some(LifecycleEvent::Running { boot: StartKind::Restored { .. } })), "{told:?}");
    two.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    visit.until_left().await;
    drop(visit);
    one.attach(&id).await.until_running().await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn waiting_for_a_sandbox_is_not_idling() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one
        .create(|spec| {
            movable(spec);
            spec.idle_timeout = Some(20);
        })
        .await;
    visit.until_running().await;
    let id = visit.id.clone();
    one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    visit.until_left().await;
    drop(visit);
    one.attach(&id).await.until_running().await;
    one.die().await;
    let mut visit = two.attach(&id).await;
    visit.until_running().await;
    world.after(15).await;
    assert_eq!(two.container(&id), Container::Running, "the idle time begins when it runs");
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_attach_to_what_ended_without_a_lock_is_answered() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let id = visit.id.clone();
    one.store.delete(&format!("sandboxes/{id}/lock.json"), Precondition::Any).await.unwrap();
    visit.until(|passing| is_failed(passing, "LockMissing")).await;
    one.containers.end(&id);
    let mut again = one.attach(&id).await;
    again.until(|passing| is_failed(passing, "LockMissing")).await;
    assert_eq!(one.container(&id), Container::Stopped, "what is left of it is kept");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_ends_by_itself_and_starts_from_its_head_says_that_it_went_back_in_time() {
    let world = World::new();
    let one = world.instance();
    let id = one.stored(persistent).await;
    let mut visit = one.attach(&id).await;
    let told = visit.until_running().await;
    let went_back = |passing: Option<&LifecycleEvent>| match passing {
        Some(LifecycleEvent::Running { boot: StartKind::Restored { rolled_back, .. } }) => *rolled_back,
        other => panic!("{other:?}"),
    };
    assert!(!went_back(told.last()), "all of it was stored");
    one.containers.end(&id);
    let told = visit.until_running().await;
    assert!(went_back(told.last()), "it ran on after its head");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_session_that_watches_what_cannot_move_is_told_when_another_takes_precedence() {
    let world = World::new();
    let (one, two, three) = (world.instance(), world.instance(), world.instance());
    let mut first = one.create(persistent).await;
    first.until_running().await;
    let id = first.id.clone();
    // A holder that writes nothing: neither is refused because it lives.
    one.store.cut(true);
    let mut second = two.attach(&id).await;
    world.after(2).await;
    let _third = three.attach(&id).await;
    second.until(|passing| is_failed(passing, "Superseded")).await;
    assert!(world.clock.now() - second.began <= Duration::from_secs(10));
    for instance in [one, two, three] {
        instance.die().await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_takes_longer_to_start_than_a_lease_lasts_runs_when_it_has_started() {
    let world = World::new();
    let one = world.instance();
    one.containers.inject("create", Broken::Delay(Duration::from_secs(40)));
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    for _ in 0..40 {
        world.clock.sleep(Duration::from_millis(500)).await;
        assert_eq!(one.container(&visit.id), Container::Running, "its lease was renewed all the time");
    }
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_session_that_waits_is_told_also_when_the_purge_is_over_before_it_can_be_seen() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut first = one.create(persistent).await;
    first.until_running().await;
    let id = first.id.clone();
    let mut second = two.attach(&id).await;
    world.after(1).await;
    two.store.cut(true);
    one.edit(&id, |spec| spec.desired_state = DesiredState::Deleted).await;
    first.until_left().await;
    assert!(world.lock(&id).await.unwrap().purged);
    two.store.cut(false);
    // Lock and metadata are looked at together.
    two.bus.wake(&id);
    second.until(|passing| is_failed(passing, "Deleted")).await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_release_that_finds_no_lock_keeps_the_container_and_is_sent_when_the_lock_is_back() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let id = visit.id.clone();
    let key = format!("sandboxes/{id}/lock.json");
    // Shorter than a renewal takes to come: only the release meets the gap.
    one.containers.inject("checkpoint", Broken::Delay(Duration::from_secs(2)));
    one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    visit.until(|passing| matches!(passing, LifecycleEvent::Checkpointing { .. })).await;
    let lock = world.text(&key).await.unwrap();
    world.remove(&key).await;
    world.after(60).await;
    assert_eq!(one.container(&id), Container::Fenced, "it is kept");
    let mut late = one.attach(&id).await;
    late.until(|passing| is_failed(passing, "LockMissing")).await;
    drop(late);
    world.put(&key, &lock).await;
    visit.until_left().await;
    let head = world.lock(&id).await.unwrap().head.expect("a checkpoint is committed");
    one.attach(&id).await.until_running().await;
    assert_eq!(world.lock(&id).await.unwrap().head, Some(head));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_attach_whose_metadata_cannot_be_read_at_first_is_tried_again() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let id = one.stored(persistent).await;
    let mut visit = two.attach(&id).await;
    two.store.cut(true);
    world.after(10).await;
    two.store.cut(false);
    visit.until_running().await;
    assert!(world.clock.now() - visit.began <= Duration::from_secs(15));
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_metadata_disappears_withdraws_and_the_holder_keeps_the_sandbox() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut first = one.create(movable).await;
    first.until_running().await;
    let id = first.id.clone();
    // The holder sees neither the waiter nor what happens to the metadata; that takes less time than its lease lasts.
    one.store.cut(true);
    let mut second = two.attach(&id).await;
    world.after(1).await;
    assert!(world.lock(&id).await.unwrap().waiter.is_some(), "it waits");
    world.remove(&format!("sandboxes/{id}/metadata.json")).await;
    second.until(|passing| is_failed(passing, "Deleted")).await;
    drop(second);
    world.after(1).await;
    assert_eq!(world.lock(&id).await.unwrap().waiter, None, "no session waits any more");
    one.store.cut(false);
    world.after(30).await;
    assert_eq!(one.container(&id), Container::Running, "its client keeps it");
    assert_eq!(world.lock(&id).await.unwrap().epoch, 1);
    assert!(one.metadata(&id).await.is_some(), "the holder has recreated it");
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_withdrawal_without_metadata_is_repeated_until_the_store_takes_it() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut first = one.create(movable).await;
    first.until_running().await;
    let id = first.id.clone();
    one.store.cut(true);
    let mut second = two.attach(&id).await;
    world.after(1).await;
    world.remove(&format!("sandboxes/{id}/metadata.json")).await;
    two.store.next_lock_put(Fault::Refused);
    two.store.next_lock_put(Fault::Refused);
    second.until(|passing| is_failed(passing, "Deleted")).await;
    drop(second);
    world.after(1).await;
    assert!(world.lock(&id).await.unwrap().waiter.is_some(), "the withdrawal was refused");
    world.after(10).await;
    assert_eq!(world.lock(&id).await.unwrap().waiter, None);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_session_is_told_when_another_took_precedence_before_its_own_placement_was_seen() {
    let world = World::new();
    let (one, two, three) = (world.instance(), world.instance(), world.instance());
    let mut first = one.create(movable).await;
    first.until_running().await;
    let id = first.id.clone();
    // Attached and about to write, as a session is: its reconciler sees what was placed before.
    let mut second = two.visit(&id);
    world.after(1).await;
    let mut third = three.attach(&id).await;
    third.until_running().await;
    two.bus.placed(&id);
    let began = world.clock.now();
    second.until(|passing| is_failed(passing, "Superseded")).await;
    assert!(world.clock.now() - began <= Duration::from_secs(1));
    assert_eq!(three.container(&id), Container::Running);
    for instance in [one, two, three] {
        instance.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_that_has_not_placed_the_sandbox_yet_is_not_refused_because_another_has() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut first = one.create(movable).await;
    first.until_running().await;
    let id = first.id.clone();
    let mut moved = two.attach(&id).await;
    moved.until_running().await;
    drop(first);
    let mut back = one.attach(&id).await;
    back.until_running().await;
    drop(moved);
    // Its predecessor here has placed it and had it; this one has only come.
    let mut slow = two.visit(&id);
    world.after(20).await;
    two.edit(&id, |spec| spec.placement = Some(two.tools.who.me.clone())).await;
    two.bus.placed(&id);
    let told = slow.until_running().await;
    assert!(!told.iter().any(|passing| matches!(passing, LifecycleEvent::Failed { .. })), "{told:?}");
    one.stop().await;
    two.stop().await;
}
