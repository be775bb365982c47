//! Room on a full instance: whose place is wanted, who keeps it, and that nothing is lost.

use std::time::Duration;

use baton::{
    bus::{AttachGuard, LeaveReason, LifecycleEvent, ROOM_WITHIN, StartKind},
    runtime::Container,
};
use baton_protocol::{
    id::SandboxId,
    metadata::{DesiredState, Phase, Spec},
};
use baton_testkit::ActionFault as Broken;

use crate::{
    faulty_store::Fault,
    instances::{Instance, World, persistent},
    reconcile::start_a_command,
};

/// A sandbox that runs, and whose client has gone.
async fn left_alone(instance: &Instance, change: impl Fn(&mut Spec)) -> SandboxId {
    let mut visit = instance.create(change).await;
    visit.until_running().await;
    visit.id.clone()
}

/// Several, left one after the other.
async fn left_in_turn(world: &World, instance: &Instance, count: usize) -> Vec<SandboxId> {
    let mut ids = Vec::new();
    for _ in 0..count {
        ids.push(left_alone(instance, persistent).await);
        world.after(2).await;
    }
    ids
}

/// What a newcomer gets, and how long it waited.
async fn comes(world: &World, instance: &Instance, most: usize) -> (Option<AttachGuard>, Duration) {
    let began = world.clock.now();
    let admitted = instance.bus.make_room(&world.clock.sandbox_id(), most).await;
    (admitted, world.clock.now() - began)
}

async fn is_stored(world: &World, id: &SandboxId) -> bool {
    let lock = world.lock(id).await.unwrap();
    lock.lease.is_none() && lock.head.is_some() && !lock.behind
}

#[tokio::test(start_paused = true)]
async fn the_longest_unused_makes_room_and_comes_back_elsewhere_with_nothing_lost() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let ids = left_in_turn(&world, &one, 3).await;
    // The first was used again since.
    let mut again = one.attach(&ids[0]).await;
    while one.container(&ids[0]) != Container::Running {
        again.next().await;
    }
    drop(again);
    let (newcomer, _) = comes(&world, &one, 3).await;
    assert!(newcomer.is_some());
    assert_eq!(one.container(&ids[1]), Container::Absent);
    assert!(is_stored(&world, &ids[1]).await);
    for id in [&ids[0], &ids[2]] {
        assert_eq!(one.container(id), Container::Running);
        assert!(world.lock(id).await.unwrap().head.is_none(), "it was not disturbed");
    }
    world.after(1).await;
    let status = one.metadata(&ids[1]).await.unwrap().status;
    assert_eq!((status.phase, status.instance), (Phase::Checkpointed, None));
    let told = two.attach(&ids[1]).await.until_running().await;
    let restored = told.last().unwrap();
    assert!(
        matches!(restored, LifecycleEvent::Running { boot: StartKind::Restored { rolled_back: false, .. } }),
        "{told:?}"
    );
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_in_memory_only_in_use_or_busy_keeps_its_place_and_the_newcomer_hears_so_at_once() {
    let world = World::new();
    let one = world.instance();
    let fleeting = left_alone(&one, |_| {}).await;
    let busy = left_alone(&one, persistent).await;
    let link = start_a_command(&one, &busy, 100).await;
    let mut attached = one.create(persistent).await;
    attached.until_running().await;
    let (newcomer, waited) = comes(&world, &one, 3).await;
    assert!(newcomer.is_none() && waited < Duration::from_millis(100), "{waited:?}");
    for id in [&fleeting, &busy, &attached.id] {
        assert_eq!(one.container(id), Container::Running);
    }
    // Once the command has ended its sandbox can go.
    world.after(101).await;
    drop(link);
    assert!(comes(&world, &one, 3).await.0.is_some());
    assert!(is_stored(&world, &busy).await);
    assert_eq!(one.container(&fleeting), Container::Running);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn who_comes_back_before_the_commit_has_its_sandbox_and_another_one_goes() {
    for most in [2, 1] {
        let world = World::new();
        let one = world.instance();
        let ids = left_in_turn(&world, &one, most).await;
        one.containers.inject("checkpoint", Broken::Delay(Duration::from_secs(5)));
        let newcomer = comes(&world, &one, most);
        let returns = async {
            world.after(2).await;
            assert_eq!(one.container(&ids[0]), Container::Paused, "it is about to go");
            let visit = one.attach(&ids[0]).await;
            world.after(20).await;
            visit
        };
        let ((newcomer, waited), _visit) = tokio::join!(newcomer, returns);
        assert_eq!(newcomer.is_some(), most == 2, "there was another one to go, or none");
        assert!(waited < Duration::from_secs(8), "{waited:?}");
        assert_eq!(one.container(&ids[0]), Container::Running);
        let lock = world.lock(&ids[0]).await.unwrap();
        assert!(lock.lease.is_some() && lock.head.is_none() && lock.epoch == 1, "it never left");
        if most == 2 {
            assert!(is_stored(&world, &ids[1]).await);
        }
        one.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn who_comes_back_after_the_commit_has_its_sandbox_restored_in_its_own_place() {
    let world = World::new();
    let one = world.instance();
    let id = left_alone(&one, persistent).await;
    // The commit is applied, and its answer comes to nobody.
    one.store.next_lock_put(Fault::Silent);
    one.containers.inject("checkpoint", Broken::Delay(Duration::from_secs(1)));
    let newcomer = comes(&world, &one, 1);
    let returns = async {
        while world.lock(&id).await.unwrap().head.is_none() {
            world.clock.sleep(Duration::from_millis(100)).await;
        }
        let mut visit = one.attach(&id).await;
        assert!(matches!(visit.until_left().await.last(), Some(LifecycleEvent::Left { why: LeaveReason::Room, .. })));
        // What a session does then.
        let me = one.tools.who.me.clone();
        one.edit(&id, |spec| spec.placement = Some(me.clone())).await;
        visit.until_running().await
    };
    let ((newcomer, _), told) = tokio::join!(newcomer, returns);
    assert!(newcomer.is_none(), "its place is its own");
    let restored = told.last().unwrap();
    assert!(
        matches!(restored, LifecycleEvent::Running { boot: StartKind::Restored { rolled_back: false, .. } }),
        "{told:?}"
    );
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn when_a_checkpoint_fails_it_runs_on_and_the_next_one_goes() {
    let world = World::new();
    let one = world.instance();
    let ids = left_in_turn(&world, &one, 2).await;
    one.containers.inject("checkpoint", Broken::Fail);
    let (newcomer, waited) = comes(&world, &one, 2).await;
    assert!(newcomer.is_some() && waited < Duration::from_secs(5), "{waited:?}");
    assert_eq!(one.container(&ids[0]), Container::Running);
    assert!(is_stored(&world, &ids[1]).await);
    // Nobody is left but the one that failed. It fails again, and after a while it goes too.
    world.after(60).await;
    one.containers.inject("checkpoint", Broken::NoSpace);
    let (refused, waited) = comes(&world, &one, 2).await;
    assert!(refused.is_none() && waited < Duration::from_secs(5), "{waited:?}");
    assert_eq!(one.container(&ids[0]), Container::Running);
    world.after(60).await;
    assert!(comes(&world, &one, 2).await.0.is_some());
    assert!(is_stored(&world, &ids[0]).await);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn two_newcomers_take_two_places_and_no_more() {
    let world = World::new();
    let one = world.instance();
    let ids = left_in_turn(&world, &one, 3).await;
    let (first, second) = tokio::join!(comes(&world, &one, 3), comes(&world, &one, 3));
    assert!(first.0.is_some() && second.0.is_some());
    world.after(30).await;
    let here: Vec<_> = ids.iter().map(|id| one.container(id)).collect();
    assert_eq!(here, [Container::Absent, Container::Absent, Container::Running]);
    assert!(is_stored(&world, &ids[0]).await && is_stored(&world, &ids[1]).await);
    // For the third there is one more, for the fourth nothing is left.
    let (third, fourth) = tokio::join!(comes(&world, &one, 3), comes(&world, &one, 3));
    assert!(third.0.is_some() && fourth.0.is_none());
    assert!(fourth.1 < Duration::from_millis(100), "{:?}", fourth.1);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_applicant_that_leaves_withdraws_its_eviction_request() {
    let world = World::new();
    let one = world.instance();
    let ids = left_in_turn(&world, &one, 2).await;
    {
        let newcomer = std::pin::pin!(comes(&world, &one, 2));
        assert!(futures::poll!(newcomer).is_pending());
        assert!(one.bus.is_wanted(&ids[0]) && !one.bus.is_wanted(&ids[1]));
    }
    assert!(!one.bus.is_wanted(&ids[0]));
    world.after(30).await;
    for id in &ids {
        assert_eq!(one.container(id), Container::Running);
        assert!(world.lock(id).await.unwrap().head.is_none());
    }
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_longer_than_was_promised_and_the_next_one_finds_the_place() {
    let world = World::new();
    let one = world.instance();
    let id = left_alone(&one, persistent).await;
    one.containers.inject("checkpoint", Broken::Delay(Duration::from_secs(40)));
    let (refused, waited) = comes(&world, &one, 1).await;
    assert!(refused.is_none() && waited == ROOM_WITHIN, "{waited:?}");
    let (newcomer, waited) = comes(&world, &one, 1).await;
    assert!(newcomer.is_some() && waited < Duration::from_secs(12), "what was begun is not begun anew: {waited:?}");
    assert!(is_stored(&world, &id).await);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_place_that_is_about_to_be_free_is_waited_for_and_nobody_else_has_to_go() {
    let world = World::new();
    let one = world.instance();
    let ids = left_in_turn(&world, &one, 2).await;
    one.containers.inject("checkpoint", Broken::Delay(Duration::from_secs(5)));
    one.edit(&ids[1], |spec| spec.desired_state = DesiredState::Checkpointed).await;
    world.after(1).await;
    let (newcomer, waited) = comes(&world, &one, 2).await;
    assert!(newcomer.is_some() && waited < Duration::from_secs(6), "{waited:?}");
    assert!(is_stored(&world, &ids[1]).await);
    assert!(world.lock(&ids[0]).await.unwrap().head.is_none(), "the other one was not disturbed");
    one.stop().await;
}
