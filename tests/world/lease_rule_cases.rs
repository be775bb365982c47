//! The rules of the lease (`docs/lease.md`) as instances live by them, each under its number. What one writer
//! of a lock does by itself is in `lease.rs`, also by number.

use std::time::Duration;

use baton::{
    bus::{LeaveReason, LifecycleEvent, StartKind},
    config::LeaseTimes,
    runtime::Container,
    storage::store::{PollResult, Precondition, Store},
};
use baton_protocol::{
    id::SandboxId,
    lock::{Claim, Lock, Waiter},
    metadata::{DesiredState, Latest, Spec},
    reason::Reason,
};
use baton_testkit::ActionFault as Broken;

use crate::{
    faulty_store::Fault,
    instances::{Instance, World, movable, persistent},
};

fn is_failed(passing: &LifecycleEvent, with: Reason) -> bool {
    matches!(passing, LifecycleEvent::Failed { reason, .. } if *reason == with)
}

/// Changes a free lock behind everybody's back.
async fn change_lock(instance: &Instance, id: &SandboxId, change: impl Fn(&mut Lock)) {
    let key = format!("sandboxes/{id}/lock.json");
    let PollResult::Changed(bytes, version) = instance.store.get_if_changed(&key, None).await.unwrap() else {
        panic!("no lock")
    };
    let mut lock = serde_json::from_slice(&bytes).unwrap();
    change(&mut lock);
    instance.store.put(&key, serde_json::to_vec(&lock).unwrap().into(), Precondition::Is(version)).await.unwrap();
}

/// A movable sandbox that has a head and rests.
async fn stored(instance: &Instance) -> SandboxId {
    let mut visit = instance.create(movable).await;
    visit.until_running().await;
    instance.edit(&visit.id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    visit.until_left().await;
    visit.id.clone()
}

#[tokio::test(start_paused = true)]
async fn rule_04_what_was_stopped_goes_on_only_after_a_write_of_its_own() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    one.store.cut(true);
    visit.until(|passing| matches!(passing, LifecycleEvent::Fenced { .. })).await;
    let renewals = world.lock(&visit.id).await.unwrap().lease.unwrap().renew;
    // Reads alone prove nothing.
    for _ in 0..30 {
        one.store.next_lock_put(Fault::Refused);
    }
    one.store.cut(false);
    world.after(10).await;
    assert_eq!(one.container(&visit.id), Container::Fenced);
    visit.until(|passing| *passing == LifecycleEvent::Unfenced).await;
    assert!(world.lock(&visit.id).await.unwrap().lease.unwrap().renew > renewals);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_04_after_a_release_was_sent_nothing_runs_under_its_epoch() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let id = visit.id.clone();
    for _ in 0..8 {
        one.store.next_lock_put(Fault::Refused);
    }
    one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    assert_eq!(visit.next().await, LifecycleEvent::Checkpointing { why: LeaveReason::Checkpointed });
    world.after(2).await;
    assert!(world.lock(&id).await.unwrap().lease.is_some(), "it was sent and not applied");
    // Asked to run again meanwhile, it does not go on, although every read shows our own lease.
    one.edit(&id, |spec| spec.desired_state = DesiredState::Running).await;
    loop {
        let lock = world.lock(&id).await.unwrap();
        if lock.epoch > 1 || lock.lease.is_none() {
            break;
        }
        assert_ne!(one.container(&id), Container::Running);
        world.clock.sleep(Duration::from_millis(50)).await;
    }
    visit.until_running().await;
    assert_eq!(world.lock(&id).await.unwrap().epoch, 2, "only under the next one");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_05_at_the_deadline_it_is_stopped_and_kept_however_long_and_the_first_write_lets_it_go_on() {
    for seconds in [20, 60, 600] {
        let world = World::new();
        let one = world.instance();
        let mut visit = one.create(persistent).await;
        visit.until_running().await;
        one.store.cut(true);
        let told = visit.until(|passing| matches!(passing, LifecycleEvent::Fenced { .. })).await;
        assert_eq!(told.len(), 1, "{told:?}");
        assert_eq!(one.container(&visit.id), Container::Fenced);
        world.after(seconds - 15).await;
        assert_eq!(one.container(&visit.id), Container::Fenced, "it is kept");
        one.store.cut(false);
        let back = world.clock.now();
        assert_eq!(visit.next().await, LifecycleEvent::Unfenced);
        assert!(world.clock.now() - back < Duration::from_secs(4), "{:?}", world.clock.now() - back);
        assert_eq!(one.container(&visit.id), Container::Running);
        one.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn rule_06_an_heir_on_the_same_state_directory_does_not_wait() {
    let world = World::new();
    let one = world.instance();
    let id = one.stored(movable).await;
    one.attach(&id).await.until_running().await;
    let one = one.die().await;
    let heir = world.heir_of(Some(&one));
    let mut visit = heir.attach(&id).await;
    visit.until_running().await;
    assert!(world.clock.now() - visit.began < Duration::from_secs(2));
    heir.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_07_taken_over_while_it_could_not_renew_it_is_killed_and_told() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut first = one.create(movable).await;
    first.until_running().await;
    let id = first.id.clone();
    one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    first.until_left().await;
    drop(first);
    let mut first = one.attach(&id).await;
    first.until_running().await;
    one.store.cut(true);
    let mut second = two.attach(&id).await;
    second.until_running().await;
    assert_eq!(one.container(&id), Container::Fenced);
    one.store.cut(false);
    first.until(|passing| matches!(passing, LifecycleEvent::LeaseLost { .. })).await;
    assert_eq!((one.container(&id), two.container(&id)), (Container::Absent, Container::Running));
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_09_free_with_anothers_fresh_waiter_is_not_taken_until_that_is_stale() {
    let world = World::new();
    let (one, two, three) = (world.instance(), world.instance(), world.instance());
    let id = stored(&one).await;
    let waiter = three.tools.who.me.clone();
    let op = world.clock.nonce();
    change_lock(&one, &id, |lock| {
        let waiter = Waiter {
            instance: waiter.clone(),
            op: op.clone(),
            beat: 0,
            ttl_ms: 60_000,
            claim: Claim::Preempt,
            declined: false,
        };
        lock.waiter = Some(waiter);
    })
    .await;
    let mut visit = two.attach(&id).await;
    visit.until_running().await;
    let waited = world.clock.now() - visit.began;
    assert!((60..64).contains(&waited.as_secs()), "{waited:?}");
    assert_eq!(world.lock(&id).await.unwrap().epoch, 2);
    for instance in [one, two, three] {
        instance.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn rule_10_what_the_lock_names_is_restored_whatever_the_metadata_say() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let id = stored(&one).await;
    let head = world.lock(&id).await.unwrap().head.unwrap();
    let lie = Latest { bucket: None, path: "sandbox_checkpoints/another/".to_owned() };
    let told = one.tools.records.report(&id, 99, &|_, shown| shown.latest = Some(lie.clone())).await;
    told.unwrap();
    let mut visit = two.attach(&id).await;
    let told = visit.until_running().await;
    let Some(LifecycleEvent::Running { boot: StartKind::Restored { checkpoint_id, .. } }) = told.last() else {
        panic!("{told:?}")
    };
    assert_eq!(*checkpoint_id, head.checkpoint_id);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_12_the_last_attach_wins_while_two_wait() {
    let world = World::new();
    let (one, two, three) = (world.instance(), world.instance(), world.instance());
    let mut first = one.create(movable).await;
    first.until_running().await;
    let id = first.id.clone();
    one.containers.inject("checkpoint", Broken::Delay(Duration::from_secs(8)));
    let mut second = two.attach(&id).await;
    world.after(2).await;
    let mut third = three.attach(&id).await;
    let told =
        second.until(|passing| matches!(passing, LifecycleEvent::Failed { .. } | LifecycleEvent::Running { .. })).await;
    assert!(
        matches!(told.last(), Some(LifecycleEvent::Failed { reason, .. }) if *reason == Reason::Superseded),
        "{told:?}"
    );
    third.until_running().await;
    assert_eq!(three.container(&id), Container::Running);
    assert_eq!(two.container(&id), Container::Absent);
    for instance in [one, two, three] {
        instance.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn rule_12_a_waiter_whose_client_has_left_withdraws() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut first = one.create(movable).await;
    first.until_running().await;
    let id = first.id.clone();
    for _ in 0..20 {
        one.containers.inject("checkpoint", Broken::Fail);
    }
    let second = two.attach(&id).await;
    while world.lock(&id).await.unwrap().waiter.is_none() {
        world.clock.sleep(Duration::from_millis(10)).await;
    }
    drop(second);
    two.edit(&id, |spec| spec.desired_state = DesiredState::Running).await;
    world.after(2).await;
    assert_eq!(world.lock(&id).await.unwrap().waiter, None);
    assert_eq!(one.container(&id), Container::Running);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_13_after_many_moves_only_the_head_and_the_one_before_it_are_stored() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(movable).await;
    visit.until_running().await;
    let id = visit.id.clone();
    for turn in 0..8 {
        drop(visit);
        let next = if turn % 2 == 0 { &two } else { &one };
        visit = next.attach(&id).await;
        visit.until_running().await;
    }
    world.after(10).await;
    let lock = world.lock(&id).await.unwrap();
    let stored = one.tools.checkpoints.as_ref().unwrap().list(&id).await.unwrap();
    let named: std::collections::BTreeSet<_> =
        [lock.head, lock.prev_head].into_iter().flatten().map(|head| head.checkpoint_id).collect();
    assert_eq!(stored, named);
    assert_eq!(one.store.list("sandbox_checkpoints/", None).await.unwrap().entries.len(), 2 * 4);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_13_whoever_acquires_a_lock_that_is_marked_for_a_purge_finishes_it() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let id = stored(&one).await;
    one.stop().await;
    change_lock(&two, &id, |lock| lock.purging = true).await;
    let mut visit = two.attach(&id).await;
    visit.until(|passing| is_failed(passing, Reason::Deleted) || matches!(passing, LifecycleEvent::Left { .. })).await;
    world.after(5).await;
    let lock = world.lock(&id).await.unwrap();
    assert!(lock.purged && lock.head.is_none() && lock.lease.is_none(), "{lock:?}");
    assert!(two.metadata(&id).await.is_none());
    assert!(two.store.list("sandbox_checkpoints/", None).await.unwrap().entries.is_empty());
    assert_eq!(two.container(&id), Container::Absent);
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_14_a_missing_lock_is_nobodys_and_nobody_makes_it_up() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(movable).await;
    visit.until_running().await;
    let id = visit.id.clone();
    one.store.delete(&format!("sandboxes/{id}/lock.json"), Precondition::Any).await.unwrap();
    let mut elsewhere = two.attach(&id).await;
    elsewhere.until(|passing| is_failed(passing, Reason::LockMissing)).await;
    world.after(120).await;
    assert_eq!(one.container(&id), Container::Fenced, "its holder stops it and keeps it");
    assert_eq!(two.container(&id), Container::Absent);
    assert!(world.lock(&id).await.is_none());
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_15_a_lock_or_a_head_in_another_bucket_is_refused() {
    let mut world = World::new();
    world.bucket = Some("here".to_owned());
    let (one, two) = (world.instance(), world.instance());
    let id = stored(&one).await;
    assert_eq!(world.lock(&id).await.unwrap().head.unwrap().bucket, world.bucket);
    change_lock(&one, &id, |lock| lock.head.as_mut().unwrap().bucket = Some("elsewhere".to_owned())).await;
    let mut visit = two.attach(&id).await;
    visit.until(|passing| is_failed(passing, Reason::OtherStore)).await;
    world.after(1).await;
    let lock = world.lock(&id).await.unwrap();
    assert!(lock.lease.is_none() && lock.head.is_some(), "it is left for an instance that can");

    let moved = |spec: &mut Spec| {
        spec.lock_bucket = Some("elsewhere".to_owned());
        true
    };
    one.tools.records.edit(&id, &moved).await.unwrap();
    let refused = two.tools.records.find(&id).await.unwrap_err();
    assert!(refused.to_string().contains("OtherStore"), "{refused}");
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_15_where_either_bucket_has_no_name_what_is_found_decides() {
    for names in [[None, Some("b")], [Some("b"), None], [None, None], [Some("b"), Some("b")]] {
        let [stored_in, restored_in] = names.map(|name| name.map(str::to_owned));
        let mut world = World::new();
        world.bucket = stored_in;
        let one = world.instance();
        world.bucket = restored_in;
        let two = world.instance();
        let id = stored(&one).await;
        let mut visit = two.attach(&id).await;
        visit.until_running().await;
        assert_eq!(two.container(&id), Container::Running, "{names:?}");
        one.stop().await;
        two.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn rule_15_a_checkpoint_that_is_not_found_is_refused_by_a_reason_and_left_alone() {
    for (names, reason) in [
        ([None, Some("b")], Reason::OtherStore),
        ([Some("b"), None], Reason::OtherStore),
        ([None, None], Reason::CheckpointMissing),
        ([Some("b"), Some("b")], Reason::CheckpointMissing),
    ] {
        let [stored_in, restored_in] = names.map(|name| name.map(str::to_owned));
        let mut world = World::new();
        world.bucket = stored_in;
        let one = world.instance();
        world.bucket = restored_in;
        let two = world.instance();
        let id = stored(&one).await;
        let lock = world.lock(&id).await.unwrap();
        let manifest = format!("sandbox_checkpoints/{}/manifest.json", lock.head.as_ref().unwrap().checkpoint_id);
        one.store.delete(&manifest, Precondition::Any).await.unwrap();
        let before = world.keys().await;
        let mut visit = two.attach(&id).await;
        visit.until(|passing| is_failed(passing, reason)).await;
        world.after(1).await;
        let left = world.lock(&id).await.unwrap();
        assert!(left.lease.is_none() && left.head == lock.head, "{names:?}: it is left for an instance that can");
        assert_eq!(world.keys().await, before, "{names:?}: nothing is erased because something else failed");
        one.stop().await;
        two.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn rule_09_a_new_sandbox_runs_under_the_very_write_that_made_its_lock() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    let made = world.lock(&visit.id).await.unwrap();
    let told = visit.until_running().await;
    assert_eq!(told[..2], [LifecycleEvent::Acquiring, LifecycleEvent::Acquired]);
    assert_eq!(world.lock(&visit.id).await, Some(made.clone()), "nothing has written it since");
    assert_eq!((made.epoch, made.ran, made.lease.map(|lease| lease.owner)), (1, true, Some(one.tools.who.me.clone())));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_03_the_deadline_of_a_create_counts_from_before_its_lock_was_sent() {
    let world = World::new();
    let one = world.instance();
    // The write takes longer than the hold time, or the reconciler hears of it that late.
    one.store.next_lock_put(Fault::AnswerLost);
    let (id, tools) = (world.clock.sandbox_id(), &one.tools);
    let mut spec = Spec::new(id.clone(), String::new(), tools.clock.timestamp(), tools.who.me.clone());
    persistent(&mut spec);
    let lease = one.bus.lease(&id);
    world.after(20).await;
    tools.records.create(&spec, &tools.who.me, &lease).await.unwrap();
    let mut visit = one.attach(&id).await;
    visit.until_running().await;
    let lock = world.lock(&id).await.unwrap();
    assert_eq!(lock.epoch, 1);
    assert!(lock.lease.unwrap().renew > 0, "it was late, and was proven anew before anything was started");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn rule_09_a_create_whose_instance_died_before_it_started_is_taken_over_and_said_to_be_lost() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let visit = one.create(movable).await;
    let id = visit.id.clone();
    drop(one.die().await);
    let mut other = two.attach(&id).await;
    let told = other.until(|passing| matches!(passing, LifecycleEvent::Failed { .. })).await;
    assert!(matches!(told.last(), Some(LifecycleEvent::Failed { reason: Reason::Lost, .. })), "{told:?}");
    let since = world.clock.now() - other.began;
    assert!(since >= LeaseTimes::DEFAULT.takeover, "{since:?}");
    two.stop().await;
}
