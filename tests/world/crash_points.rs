//! The crash table of `docs/handoff.md`, row by row; and every action of the reconciler, interrupted
//! after its effect and before its report: whoever comes next finds what it left and goes on.

use std::time::Duration;

use baton::{
    bus::{LifecycleEvent, StartKind},
    reconciler::desired::Drain,
    runtime::Container,
};
use baton_protocol::{
    id::SandboxId,
    metadata::{DesiredState, Phase, SpecRequest},
    reason::Reason,
};
use baton_testkit::ActionFault as Broken;

use crate::{
    faulty_store::Fault,
    instances::{Instance, Visit, World, movable},
};

/// Runs on `one`, over a head from before: what happens after this head can be lost.
async fn running_over_a_head(one: &Instance) -> Visit {
    let id = stored(one).await;
    let mut visit = one.attach(&id).await;
    visit.until_running().await;
    visit
}

async fn stored(one: &Instance) -> SandboxId {
    let mut visit = one.create(movable).await;
    visit.until_running().await;
    one.edit(&visit.id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    visit.until_left().await;
    visit.id.clone()
}

/// Until the checkpoint that was asked for has begun, and a little longer.
async fn begun(world: &World, visit: &mut Visit) {
    visit.until(|passing| matches!(passing, LifecycleEvent::Checkpointing { .. })).await;
    world.after(1).await;
}

/// Attaches and says from which checkpoint it runs, and whether it went back in time.
async fn restored(instance: &Instance, id: &SandboxId) -> (Visit, u64, bool) {
    let mut visit = instance.attach(id).await;
    let told = visit.until_running().await;
    let Some(LifecycleEvent::Running { boot: StartKind::Restored { checkpoint_id, rolled_back, .. } }) = told.last()
    else {
        panic!("{told:?}")
    };
    assert_eq!(instance.container(id), Container::Running);
    (visit, checkpoint_id.seq(), *rolled_back)
}

#[tokio::test(start_paused = true)]
async fn dead_before_the_commit_leaves_the_old_head() {
    for place in ["pause", "checkpoint", "pages.img", "manifest.json", "lock.json"] {
        let world = World::new();
        let (one, two) = (world.instance(), world.instance());
        let mut visit = running_over_a_head(&one).await;
        let id = visit.id.clone();
        one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
        match place {
            "pages.img" => one.store.hang(place),
            // It reached the store; its writer never heard of it.
            "manifest.json" => one.store.next_put_of(place, Fault::Silent),
            "lock.json" => one.store.next_put_of(place, Fault::Hangs),
            verb => one.containers.inject(verb, Broken::Delay(Duration::from_secs(3600))),
        }
        begun(&world, &mut visit).await;
        assert_eq!(world.lock(&id).await.unwrap().head.unwrap().seq, 1, "{place}");
        one.die().await;
        let (visit, seq, rolled_back) = restored(&two, &id).await;
        assert_eq!((seq, rolled_back), (1, true), "{place}");
        assert!(world.clock.now() - visit.began <= Duration::from_secs(33), "{place}");
        two.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn dead_after_the_commit_was_applied_loses_nothing() {
    for fault in [Fault::Silent, Fault::Late] {
        let world = World::new();
        let (one, two) = (world.instance(), world.instance());
        let mut visit = running_over_a_head(&one).await;
        let id = visit.id.clone();
        one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
        one.store.next_put_of("lock.json", fault);
        begun(&world, &mut visit).await;
        let one = one.die().await;
        // Under way when its sender died, it arrives all the same.
        one.store.deliver().await;
        let (visit, seq, rolled_back) = restored(&two, &id).await;
        assert_eq!((seq, rolled_back), (2, false), "{fault:?}");
        assert!(world.clock.now() - visit.began < Duration::from_secs(2), "the lease is free");
        two.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn dead_after_the_commit_and_before_the_status_is_repaired_by_the_next() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let visit = running_over_a_head(&one).await;
    let id = visit.id.clone();
    one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    one.store.next_put_of("metadata.json", Fault::Hangs);
    while world.lock(&id).await.unwrap().lease.is_some() {
        world.clock.sleep(Duration::from_millis(10)).await;
    }
    one.die().await;
    assert_eq!(two.metadata(&id).await.unwrap().status.phase, Phase::Running, "the view is old");
    let (_visit, seq, rolled_back) = restored(&two, &id).await;
    assert_eq!((seq, rolled_back), (2, false));
    world.after(1).await;
    let found = two.metadata(&id).await.unwrap();
    let status = found.status;
    assert_eq!((status.phase, status.instance.as_ref(), status.epoch), (Phase::Running, Some(&two.tools.who.me), 3));
    let head = world.lock(&id).await.unwrap().head.unwrap().checkpoint_id;
    assert!(found.latest_sandbox_checkpoint.unwrap().path.contains(head.as_str()), "it names what it started from");
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_dead_after_registering_is_passed_over_when_it_is_stale() {
    let world = World::new();
    let (one, two, three) = (world.instance(), world.instance(), world.instance());
    let visit = running_over_a_head(&one).await;
    let id = visit.id.clone();
    drop(visit);
    two.store.next_put_of("lock.json", Fault::Silent);
    let waiting = two.attach(&id).await;
    while world.lock(&id).await.unwrap().waiter.is_none() {
        world.clock.sleep(Duration::from_millis(10)).await;
    }
    drop(waiting);
    two.die().await;
    let (visit, seq, rolled_back) = restored(&three, &id).await;
    assert_eq!((seq, rolled_back), (2, false), "the owner let go for the waiter, and nothing is lost");
    let waited = world.clock.now() - visit.began;
    assert!(waited <= Duration::from_secs(65), "{waited:?}");
    one.stop().await;
    three.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_dead_after_acquiring_leaves_the_head_to_the_next() {
    let world = World::new();
    let (one, two, three) = (world.instance(), world.instance(), world.instance());
    let id = stored(&one).await;
    two.containers.inject("restore", Broken::Delay(Duration::from_secs(3600)));
    let mut visit = two.attach(&id).await;
    visit.until(|passing| *passing == LifecycleEvent::Acquired).await;
    world.after(1).await;
    two.die().await;
    let (visit, seq, _) = restored(&three, &id).await;
    assert_eq!(seq, 1);
    assert!(world.clock.now() - visit.began <= Duration::from_secs(33));
    one.stop().await;
    three.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_restore_that_fails_is_said_once_and_the_head_stays() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let id = stored(&one).await;
    two.containers.inject("restore", Broken::Fail);
    let mut visit = two.attach(&id).await;
    let told = visit.until(|passing| matches!(passing, LifecycleEvent::Failed { .. })).await;
    assert!(
        matches!(told.last(), Some(LifecycleEvent::Failed { reason, .. }) if *reason == Reason::RestoreFailed),
        "{told:?}"
    );
    world.after(300).await;
    let lock = world.lock(&id).await.unwrap();
    assert_eq!((lock.epoch, lock.lease.is_none(), lock.head.map(|head| head.seq)), (2, true, Some(1)));
    let status = two.metadata(&id).await.unwrap().status;
    assert_eq!((status.phase, status.reason.as_str()), (Phase::Failed, "RestoreFailed"));
    drop(visit);
    assert_eq!(restored(&two, &id).await.1, 1, "until somebody asks");
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn one_sandboxs_hanging_store_call_delays_no_other() {
    let world = World::new();
    let one = world.instance();
    let mut stuck = one.create(movable).await;
    stuck.until_running().await;
    let mut other = one.create(movable).await;
    other.until_running().await;
    one.store.hang(stuck.id.as_str());
    stuck.until(|passing| matches!(passing, LifecycleEvent::Fenced { .. })).await;
    let renewals = world.lock(&other.id).await.unwrap().lease.unwrap().renew;
    world.after(60).await;
    assert!(world.lock(&other.id).await.unwrap().lease.unwrap().renew >= renewals + 9);
    let began = world.clock.now();
    one.edit(&other.id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    other.until_left().await;
    assert!(world.clock.now() - began < Duration::from_secs(1));
    assert_eq!(one.container(&stuck.id), Container::Fenced);
    one.stop().await;
}

/// Brings an instance to the point where an action has had its effect and nobody was told.
type Scene = (&'static str, fn(Stuck<'_>) -> futures::future::BoxFuture<'_, SandboxId>);

struct Stuck<'a> {
    world: &'a World,
    one: &'a Instance,
    other: &'a Instance,
}

impl Stuck<'_> {
    async fn until_lock(&self, id: &SandboxId, is_so: impl Fn(&baton_protocol::lock::Lock) -> bool) {
        for _ in 0..10_000 {
            if is_so(&self.world.lock(id).await.unwrap()) {
                return;
            }
            self.world.clock.sleep(Duration::from_millis(10)).await;
        }
        panic!("the lock never was so: {:?}", self.world.lock(id).await);
    }
}

const SCENES: [Scene; 10] = [
    ("Wait", |at| {
        Box::pin(async move {
            let visit = running_over_a_head(at.other).await;
            at.one.store.next_put_of("lock.json", Fault::Silent);
            let _waiting = at.one.attach(&visit.id).await;
            at.until_lock(&visit.id, |lock| lock.waiter.is_some()).await;
            visit.id.clone()
        })
    }),
    ("Withdraw", |at| {
        Box::pin(async move {
            let visit = running_over_a_head(at.other).await;
            at.other.containers.inject("checkpoint", Broken::Fail);
            let waiting = at.one.attach(&visit.id).await;
            at.until_lock(&visit.id, |lock| lock.waiter.is_some()).await;
            at.one.store.next_put_of("lock.json", Fault::Silent);
            drop(waiting);
            at.until_lock(&visit.id, |lock| lock.waiter.is_none()).await;
            visit.id.clone()
        })
    }),
    ("Acquire", |at| {
        Box::pin(async move {
            let id = stored(at.other).await;
            at.one.store.next_put_of("lock.json", Fault::Silent);
            let _visit = at.one.attach(&id).await;
            at.until_lock(&id, |lock| lock.lease.is_some()).await;
            id
        })
    }),
    ("Renew", |at| {
        Box::pin(async move {
            let visit = running_over_a_head(at.one).await;
            let before = at.world.lock(&visit.id).await.unwrap().lease.unwrap().renew;
            at.one.store.next_put_of("lock.json", Fault::Silent);
            at.until_lock(&visit.id, |lock| lock.lease.as_ref().is_some_and(|lease| lease.renew > before)).await;
            visit.id.clone()
        })
    }),
    ("Restore", |at| {
        Box::pin(async move {
            let id = stored(at.other).await;
            let mut visit = at.one.attach(&id).await;
            at.one.store.next_put_of("metadata.json", Fault::Hangs);
            visit.until_running().await;
            id
        })
    }),
    ("Fence", |at| {
        Box::pin(async move {
            let mut visit = running_over_a_head(at.one).await;
            at.one.store.cut(true);
            visit.until(|passing| matches!(passing, LifecycleEvent::Fenced { .. })).await;
            visit.id.clone()
        })
    }),
    ("Resume", |at| {
        Box::pin(async move {
            let mut visit = running_over_a_head(at.one).await;
            at.one.store.cut(true);
            visit.until(|passing| matches!(passing, LifecycleEvent::Fenced { .. })).await;
            at.one.store.cut(false);
            visit.until(|passing| *passing == LifecycleEvent::Unfenced).await;
            visit.id.clone()
        })
    }),
    ("Save", |at| {
        Box::pin(async move {
            let visit = running_over_a_head(at.one).await;
            let nonce = at.world.clock.nonce();
            at.one
                .edit(&visit.id, |spec| {
                    spec.requests.insert(nonce.clone(), SpecRequest::Checkpoint {});
                })
                .await;
            at.one.store.next_put_of("lock.json", Fault::Silent);
            at.until_lock(&visit.id, |lock| lock.head.as_ref().is_some_and(|head| head.seq == 2)).await;
            visit.id.clone()
        })
    }),
    ("Checkpoint", |at| {
        Box::pin(async move {
            let mut visit = running_over_a_head(at.one).await;
            at.one.edit(&visit.id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
            at.one.store.next_put_of("lock.json", Fault::Silent);
            begun(at.world, &mut visit).await;
            visit.id.clone()
        })
    }),
    ("Remove, Release", |at| {
        Box::pin(async move {
            let visit = running_over_a_head(at.one).await;
            at.one.store.next_put_of("lock.json", Fault::Silent);
            at.one.tools.drain.post(Drain::Over);
            at.until_lock(&visit.id, |lock| lock.lease.is_none()).await;
            assert_eq!(at.one.container(&visit.id), Container::Absent);
            visit.id.clone()
        })
    }),
];

#[tokio::test(start_paused = true)]
async fn after_every_effect_that_nobody_was_told_of_the_next_instance_goes_on() {
    for (action, scene) in SCENES {
        let world = World::new();
        let (one, other, third) = (world.instance(), world.instance(), world.instance());
        let id = scene(Stuck { world: &world, one: &one, other: &other }).await;
        let epoch = world.lock(&id).await.unwrap().epoch;
        let one = one.die().await;
        let (visit, _, _) = restored(&third, &id).await;
        let waited = world.clock.now() - visit.began;
        assert!(waited <= Duration::from_secs(65), "{action}: {waited:?}");
        let lock = world.lock(&id).await.unwrap();
        assert!(lock.epoch > epoch && lock.lease.is_some_and(|lease| lease.owner == third.tools.who.me), "{action}");
        assert_eq!(other.container(&id), Container::Absent, "{action}");
        world.after(20).await;
        let metadata = third.metadata(&id).await.unwrap();
        assert_eq!(metadata.status.instance.as_ref(), Some(&third.tools.who.me), "{action}");
        let answered = metadata.spec.requests.keys().all(|nonce| metadata.status.answers.contains_key(nonce));
        assert!(answered, "{action}: every request has its answer");
        drop(one);
        other.stop().await;
        third.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn dead_after_the_first_start_and_before_any_report_is_lost_and_that_is_said() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(movable).await;
    let id = visit.id.clone();
    one.store.next_put_of("metadata.json", Fault::Hangs);
    visit.until_running().await;
    one.die().await;
    let mut visit = two.attach(&id).await;
    visit.until(|passing| matches!(passing, LifecycleEvent::Failed { reason, .. } if *reason == Reason::Lost)).await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn dead_in_the_middle_of_a_purge_is_finished_by_whoever_comes() {
    let world = World::new();
    let one = world.instance();
    let visit = running_over_a_head(&one).await;
    let id = visit.id.clone();
    one.store.next_put_of("lock.json", Fault::Silent);
    one.edit(&id, |spec| spec.desired_state = DesiredState::Deleted).await;
    world.after(1).await;
    assert!(world.lock(&id).await.unwrap().purging);
    let one = one.die().await;
    drop(visit);
    let heir = world.heir_of(Some(&one));
    let _visit = heir.attach(&id).await;
    world.after(5).await;
    let lock = world.lock(&id).await.unwrap();
    assert!(lock.purged && lock.lease.is_none(), "{lock:?}");
    assert!(heir.metadata(&id).await.is_none());
    heir.stop().await;
}

#[tokio::test(start_paused = true)]
async fn never_checkpointed_and_its_instance_died_is_an_honest_error() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(movable).await;
    visit.until_running().await;
    let id = visit.id.clone();
    one.die().await;
    let mut visit = two.attach(&id).await;
    let told = visit.until(|passing| matches!(passing, LifecycleEvent::Failed { .. })).await;
    assert!(matches!(told.last(), Some(LifecycleEvent::Failed { reason, .. }) if *reason == Reason::Lost), "{told:?}");
    world.after(5).await;
    let lock = world.lock(&id).await.unwrap();
    assert!(lock.lease.is_none() && !lock.purged);
    assert_eq!(two.metadata(&id).await.unwrap().status.reason, "Lost");
    two.stop().await;
}
