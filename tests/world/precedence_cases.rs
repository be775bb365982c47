//! Which attach wins when a sandbox runs on one instance and a client comes to another: the table of
//! `docs/protocol.md` with two instances, and what both sides hear.

use std::time::Duration;

use baton::{
    bus::{LeaveReason, LifecycleEvent},
    runtime::Container,
};
use baton_protocol::{
    id::SandboxId,
    lock::Claim,
    metadata::{DesiredState, Spec},
    reason::Reason,
};
use baton_testkit::ActionFault as Broken;

use crate::{
    faulty_store::Fault,
    instances::{Instance, Visit, World, movable},
};

fn lasting(spec: &mut Spec) {
    movable(spec);
    spec.idle_timeout = None;
}

async fn running(world: &World) -> (Instance, Instance, Visit, SandboxId) {
    let (one, two) = (world.instance(), world.instance());
    let mut first = one.create(lasting).await;
    first.until_running().await;
    let id = first.id.clone();
    world.after(1).await;
    (one, two, first, id)
}

/// The client of this visit gives a sign of life when it is next asked for one.
async fn answers(visit: &mut Visit, at: &Instance) {
    let told = visit.until(|passing| matches!(passing, LifecycleEvent::Probe { .. })).await;
    let Some(LifecycleEvent::Probe { number }) = told.last() else { unreachable!() };
    at.bus.alive(&visit.id, *number);
}

fn is_in_use(passing: &LifecycleEvent) -> bool {
    matches!(passing, LifecycleEvent::Failed { reason: Reason::InUse, .. })
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_alive_keeps_its_sandbox_and_the_newcomer_hears_so() {
    let world = World::new().sweeping();
    let (one, two, mut first, id) = running(&world).await;
    let before = world.lock(&id).await.unwrap();
    let mut second = two.ask_for(&id).await;
    answers(&mut first, &one).await;
    let told = second.until(is_in_use).await;
    assert_eq!(told[0], LifecycleEvent::Acquiring);
    let waited = world.clock.now() - second.began;
    assert!(waited < Duration::from_secs(3), "{waited:?}");
    drop(second);
    world.after(1).await;
    let lock = world.lock(&id).await.unwrap();
    assert_eq!((lock.waiter, lock.epoch, lock.head), (None, before.epoch, before.head), "nothing was moved or saved");
    // Whatever this instance once asked for, no later pass moves the sandbox.
    world.after(600).await;
    assert_eq!((one.container(&id), two.container(&id)), (Container::Running, Container::Absent));
    assert_eq!(world.lock(&id).await.unwrap().epoch, before.epoch);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_answer_within_a_second_loses_it() {
    let world = World::new();
    let (one, two, mut first, id) = running(&world).await;
    let mut second = two.ask_for(&id).await;
    second.until_running().await;
    let waited = world.clock.now() - second.began;
    assert!((1..4).contains(&waited.as_secs()), "{waited:?}");
    let told = first.until_left().await;
    assert!(matches!(told[0], LifecycleEvent::Probe { .. }), "{told:?}");
    let by = two.tools.who.me.clone();
    assert_eq!(
        told[1..3],
        [
            LifecycleEvent::ReleaseRequested { by, claim: Claim::Ask },
            LifecycleEvent::Checkpointing { why: LeaveReason::Waiter }
        ]
    );
    assert_eq!((one.container(&id), two.container(&id)), (Container::Absent, Container::Running));
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn where_nobody_is_attached_it_moves_without_a_question() {
    let world = World::new();
    let (one, two, first, id) = running(&world).await;
    drop(first);
    let mut second = two.ask_for(&id).await;
    second.until_running().await;
    let waited = world.clock.now() - second.began;
    assert!(waited < Duration::from_secs(1), "{waited:?}");
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn who_preempts_gets_it_at_once_and_nobody_is_asked() {
    let world = World::new();
    let (one, two, mut first, id) = running(&world).await;
    let mut second = two.attach(&id).await;
    assert!(!first.until_left().await.iter().any(|passing| matches!(passing, LifecycleEvent::Probe { .. })));
    second.until_running().await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_sign_of_life_that_comes_late_counts_as_long_as_the_sandbox_is_here() {
    let world = World::new();
    let (one, two, mut first, id) = running(&world).await;
    for _ in 0..50 {
        one.containers.inject("checkpoint", Broken::Fail);
    }
    let mut second = two.ask_for(&id).await;
    let told = first.until(|passing| matches!(passing, LifecycleEvent::CheckpointFailed { .. })).await;
    let LifecycleEvent::Probe { number } = told[0] else { panic!("{told:?}") };
    one.bus.alive(&id, number);
    second.until(is_in_use).await;
    assert_eq!(one.container(&id), Container::Running);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_comes_back_to_the_holder_is_asked_itself() {
    let world = World::new();
    let (one, two, first, id) = running(&world).await;
    for _ in 0..50 {
        one.containers.inject("checkpoint", Broken::Fail);
    }
    let mut second = two.ask_for(&id).await;
    drop(first);
    while world.lock(&id).await.unwrap().waiter.is_none() {
        world.clock.sleep(Duration::from_millis(10)).await;
    }
    let mut back = one.visit(&id);
    answers(&mut back, &one).await;
    second.until(is_in_use).await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_next_waiter_is_judged_again() {
    let world = World::new();
    let (one, two, mut first, id) = running(&world).await;
    let mut second = two.ask_for(&id).await;
    while world.lock(&id).await.unwrap().waiter.is_none() {
        world.clock.sleep(Duration::from_millis(10)).await;
    }
    // The withdrawal of the first newcomer does not get through: its entry stays.
    for _ in 0..100 {
        two.store.next_lock_put(Fault::Refused);
    }
    answers(&mut first, &one).await;
    second.until(is_in_use).await;
    drop(second);
    world.after(2).await;
    assert!(world.lock(&id).await.unwrap().waiter.is_some_and(|waiter| waiter.declined));
    two.store.clear();
    let mut third = two.ask_for(&id).await;
    third.until_running().await;
    assert_eq!(two.container(&id), Container::Running, "its client had died meanwhile");
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn one_who_may_preempt_says_so_also_after_one_who_only_asked() {
    let world = World::new();
    let (one, two, mut first, id) = running(&world).await;
    let plain = two.ask_for(&id).await;
    first.until(|passing| matches!(passing, LifecycleEvent::Probe { .. })).await;
    assert_eq!(world.lock(&id).await.unwrap().waiter.unwrap().claim, Claim::Ask);
    drop(plain);
    let mut second = two.attach(&id).await;
    second.until_running().await;
    let waited = world.clock.now() - second.began;
    assert!(waited < Duration::from_secs(2), "{waited:?}");
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_leaves_anyway_is_not_declined_and_the_newcomer_gets_it() {
    let world = World::new();
    let (one, two, mut first, id) = running(&world).await;
    one.containers.inject("checkpoint", Broken::Delay(Duration::from_secs(5)));
    one.edit(&id, |spec| spec.desired_state = DesiredState::HandedOff).await;
    first.until(|passing| matches!(passing, LifecycleEvent::Checkpointing { .. })).await;
    let mut second = two.ask_for(&id).await;
    second.until_running().await;
    one.stop().await;
    two.stop().await;
}
