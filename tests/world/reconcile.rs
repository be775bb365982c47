//! What is wanted becomes so: one instance, then several, then with something broken.

use std::time::Duration;

use baton::{
    bus::{LeaveReason, LifecycleEvent, StartKind},
    reconciler::desired::Drain,
    runtime::{AgentLinks, Container},
    storage::records::{MetadataPoll, StoreKind},
};
use baton_protocol::{
    agent,
    frame::{Frame, FrameKind},
    id::{ExecId, SandboxId},
    lock::Claim,
    metadata::{DesiredState, Phase},
    reason::Reason,
};
use baton_testkit::ActionFault as Broken;

use crate::{
    faulty_store::Fault,
    instances::{Instance, World, movable, persistent},
};

/// Starts a command that runs for a long time.
pub async fn start_a_command(instance: &Instance, id: &SandboxId, seconds: u32) -> baton::runtime::FrameLink {
    let mut link = instance.containers.open(id).expect("it runs here");
    let exec = agent::AgentExec {
        exec_id: ExecId::parse("one").unwrap(),
        argv: vec!["sleep".to_owned(), seconds.to_string()],
        env: Default::default(),
        cwd: None,
        user: None,
        stdin: false,
        pty: None,
        timeout_ms: None,
        file: None,
    };
    let frame = Frame::new(FrameKind::Exec).exec(1).sequence(1).payload(serde_json::to_vec(&exec).unwrap());
    link.to_agent.send(frame).await.unwrap();
    while link.from_agent.recv().await.expect("it answers").kind != FrameKind::Started {}
    link
}

#[tokio::test(start_paused = true)]
async fn a_created_sandbox_runs_and_a_deleted_one_leaves_nothing() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(|_| {}).await;
    let told = visit.until_running().await;
    assert_eq!(
        told,
        [LifecycleEvent::Acquiring, LifecycleEvent::Acquired, LifecycleEvent::Running { boot: StartKind::Fresh }]
    );
    let id = visit.id.clone();
    assert_eq!(one.container(&id), Container::Running);

    one.edit(&id, |spec| spec.desired_state = DesiredState::Deleted).await;
    assert_eq!(visit.until_left().await, [LifecycleEvent::Left { why: LeaveReason::Deleted, checkpoint_id: None }]);
    assert_eq!(one.container(&id), Container::Absent);
    assert!(one.metadata(&id).await.is_none());
    assert!(one.tools.records.read_if_changed(&id, None).await.unwrap().is_none());
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_is_not_persistent_touches_no_shared_store() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(|_| {}).await;
    visit.until_running().await;
    assert!(world.lock(&visit.id).await.is_none());
    let looked = one.tools.records.read_if_changed(&visit.id, None).await.unwrap();
    assert!(matches!(looked, Some(MetadataPoll::Found(found)) if found.place == StoreKind::Memory));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_ends_after_its_idle_time_and_not_while_a_command_runs() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(|spec| spec.idle_timeout = Some(30)).await;
    visit.until_running().await;
    let _link = start_a_command(&one, &visit.id, 100).await;
    world.after(60).await;
    assert_eq!(one.container(&visit.id), Container::Running);
    let told = visit.until_left().await;
    assert_eq!(told, [LifecycleEvent::Left { why: LeaveReason::Idle, checkpoint_id: None }]);
    let lasted = world.clock.now() - visit.began;
    assert!(lasted >= Duration::from_secs(130) && lasted < Duration::from_secs(140), "{lasted:?}");
    assert!(one.metadata(&visit.id).await.is_none());
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn activity_restarts_the_idle_time() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(|spec| spec.idle_timeout = Some(30)).await;
    visit.until_running().await;
    for _ in 0..5 {
        world.after(20).await;
        one.bus.touch(&visit.id);
    }
    assert_eq!(one.container(&visit.id), Container::Running);
    visit.until_left().await;
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_create_that_fails_is_said_and_not_tried_again() {
    let world = World::new();
    let one = world.instance();
    one.containers.inject("create", Broken::Fail);
    let mut visit = one.create(|_| {}).await;
    let told = visit.until(|passing| matches!(passing, LifecycleEvent::Failed { .. })).await;
    assert!(matches!(told.last(), Some(LifecycleEvent::Failed { reason: Reason::CreateFailed, .. })));
    world.after(300).await;
    assert_eq!(one.container(&visit.id), Container::Absent);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_container_that_ends_by_itself_is_lost_and_said_so() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(|_| {}).await;
    visit.until_running().await;
    one.containers.end(&visit.id);
    let told = visit.until(|passing| matches!(passing, LifecycleEvent::Failed { .. })).await;
    assert!(matches!(told.last(), Some(LifecycleEvent::Failed { reason: Reason::Lost, .. })), "{told:?}");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_renewed_as_long_as_it_is_held() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let before = world.lock(&visit.id).await.unwrap().lease.unwrap().renew;
    world.after(60).await;
    let after = world.lock(&visit.id).await.unwrap().lease.unwrap().renew;
    assert!((9..=14).contains(&(after - before)), "{before} → {after}");
    assert_eq!(one.metadata(&visit.id).await.unwrap().status.phase, Phase::Running);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_checkpointed_sandbox_runs_again_on_another_instance() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let id = visit.id.clone();
    one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    let told = visit.until_left().await;
    assert_eq!(told[0], LifecycleEvent::Checkpointing { why: LeaveReason::Checkpointed });
    let lock = world.lock(&id).await.unwrap();
    let head = lock.head.clone().expect("it is committed");
    assert_eq!(
        told[1],
        LifecycleEvent::Left { why: LeaveReason::Checkpointed, checkpoint_id: Some(head.checkpoint_id.clone()) }
    );
    assert_eq!((lock.lease, lock.behind), (None, false));
    drop(visit);

    let mut visit = two.attach(&id).await;
    let told = visit.until_running().await;
    assert!(
        matches!(told.last(), Some(LifecycleEvent::Running { boot: StartKind::Restored { checkpoint_id, rolled_back: false, .. } }) if *checkpoint_id == head.checkpoint_id),
        "{told:?}"
    );
    assert_eq!((one.container(&id), two.container(&id)), (Container::Absent, Container::Running));
    assert_eq!(world.lock(&id).await.unwrap().epoch, 2);
    let status = two.metadata(&id).await.unwrap();
    assert_eq!(status.status.instance.as_ref(), Some(&two.tools.who.me));
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_attach_elsewhere_moves_a_running_sandbox_with_its_command() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut first = one.create(movable).await;
    first.until_running().await;
    let id = first.id.clone();
    let link = start_a_command(&one, &id, 600).await;
    drop(link);
    let mut second = two.attach(&id).await;
    let told = second.until_running().await;
    assert!(matches!(
        told.last(),
        Some(LifecycleEvent::Running { boot: StartKind::Restored { rolled_back: false, .. } })
    ));
    assert!(world.clock.now() - second.began < Duration::from_secs(3), "{:?}", world.clock.now() - second.began);
    let told = first.until_left().await;
    assert_eq!(told[0], LifecycleEvent::ReleaseRequested { by: two.tools.who.me.clone(), claim: Claim::Preempt });
    assert_eq!(told[1], LifecycleEvent::Checkpointing { why: LeaveReason::Waiter });
    assert_eq!(one.container(&id), Container::Absent);
    assert_eq!(two.containers.open(&id).map(drop), Some(()));
    let seen = *baton::runtime::Lifecycle::watch(&*two.containers, &id).borrow();
    assert_eq!((seen.container, seen.running_execs), (Container::Running, 1));
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_checkpoint_leaves_the_sandbox_running_and_says_why() {
    let faults = [Broken::Fail, Broken::NoSpace, Broken::Hang];
    for (broken, fault) in ["pause", "checkpoint"].into_iter().flat_map(|verb| faults.map(|fault| (verb, fault))) {
        let world = World::new();
        let one = world.instance();
        let mut visit = one.create(persistent).await;
        visit.until_running().await;
        one.containers.inject(broken, fault);
        one.edit(&visit.id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
        visit.until(|passing| matches!(passing, LifecycleEvent::CheckpointFailed { .. })).await;
        assert_eq!(one.container(&visit.id), Container::Running, "{broken} {fault:?}");
        assert!(world.lock(&visit.id).await.unwrap().lease.is_some());
        // A wish that still stands is tried again, after a while.
        visit.until_left().await;
        assert!(world.lock(&visit.id).await.unwrap().head.is_some());
        one.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_whose_answer_was_lost_is_settled_and_nothing_is_lost() {
    for fault in [Fault::AnswerLost, Fault::AnswerTwisted, Fault::Refused, Fault::Hangs] {
        let world = World::new();
        let (one, two) = (world.instance(), world.instance());
        let mut visit = one.create(persistent).await;
        visit.until_running().await;
        let id = visit.id.clone();
        one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
        assert_eq!(visit.next().await, LifecycleEvent::Checkpointing { why: LeaveReason::Checkpointed });
        one.store.next_lock_put(fault);
        visit.until_left().await;
        assert!(world.lock(&id).await.unwrap().head.is_some(), "{fault:?}");
        drop(visit);
        two.attach(&id).await.until_running().await;
        one.stop().await;
        two.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_death_a_waiting_instance_takes_over_in_time_and_says_what_was_lost() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let id = one.stored(movable).await;
    one.attach(&id).await.until_running().await;
    one.die().await;
    let mut visit = two.attach(&id).await;
    let told = visit.until_running().await;
    let waited = world.clock.now() - visit.began;
    assert!(waited >= Duration::from_secs(28) && waited <= Duration::from_secs(33), "{waited:?}");
    assert!(
        matches!(told.last(), Some(LifecycleEvent::Running { boot: StartKind::Restored { rolled_back: true, .. } })),
        "{told:?}"
    );
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_must_not_move_is_refused_while_its_owner_lives() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut first = one.create(persistent).await;
    first.until_running().await;
    let id = first.id.clone();
    let mut second = two.attach(&id).await;
    let told = second.until(|passing| matches!(passing, LifecycleEvent::Failed { .. })).await;
    assert!(matches!(told.last(), Some(LifecycleEvent::Failed { reason: Reason::RunningElsewhere, .. })), "{told:?}");
    assert!(world.clock.now() - second.began <= Duration::from_secs(7));
    assert_eq!(one.container(&id), Container::Running);
    let status = one.metadata(&id).await.unwrap().status;
    assert_eq!((status.phase, status.reason.as_str()), (Phase::Running, ""), "the status is the holder's to write");
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_drain_checkpoints_what_is_persistent_and_ends_the_rest() {
    let world = World::new();
    let mut one = world.instance();
    let mut kept = one.create(persistent).await;
    let mut ended = one.create(|_| {}).await;
    kept.until_running().await;
    ended.until_running().await;
    one.tools.drain.post(Drain::Draining);
    assert!(matches!(
        kept.until_left().await.last(),
        Some(LifecycleEvent::Left { why: LeaveReason::Drain, checkpoint_id: Some(_) })
    ));
    assert!(matches!(
        ended.until_left().await.last(),
        Some(LifecycleEvent::Left { why: LeaveReason::Drain, checkpoint_id: None })
    ));
    one.drained().await;
    assert!(world.lock(&kept.id).await.unwrap().head.is_some());
}

#[tokio::test(start_paused = true)]
async fn what_does_not_fit_into_the_drain_is_let_go_with_its_old_head() {
    let world = World::new();
    let mut one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    for _ in 0..20 {
        one.containers.inject("checkpoint", Broken::Fail);
    }
    one.tools.drain.post(Drain::Draining);
    world.after(8).await;
    one.tools.drain.post(Drain::Over);
    assert!(matches!(
        visit.until_left().await.last(),
        Some(LifecycleEvent::Left { why: LeaveReason::Drain, checkpoint_id: None })
    ));
    one.drained().await;
    let lock = world.lock(&visit.id).await.unwrap();
    assert!(lock.lease.is_none() && lock.head.is_none() && lock.ran);
    assert_eq!(one.metadata(&visit.id).await.unwrap().status.reason, "Lost");
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_that_hangs_when_the_drain_time_is_up_is_dropped_and_the_lease_freed() {
    let world = World::new();
    let mut one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    one.containers.inject("checkpoint", Broken::Delay(Duration::from_secs(3600)));
    one.tools.drain.post(Drain::Draining);
    world.after(8).await;
    one.tools.drain.post(Drain::Over);
    let began = world.clock.now();
    assert!(matches!(
        visit.until_left().await.last(),
        Some(LifecycleEvent::Left { why: LeaveReason::Drain, checkpoint_id: None })
    ));
    one.drained().await;
    assert!(world.clock.now() - began < Duration::from_secs(1));
    assert!(world.lock(&visit.id).await.unwrap().lease.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_deletion_cancels_a_checkpoint_that_is_under_way() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let id = visit.id.clone();
    one.containers.inject("checkpoint", Broken::Delay(Duration::from_secs(20)));
    one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    assert_eq!(visit.next().await, LifecycleEvent::Checkpointing { why: LeaveReason::Checkpointed });
    let began = world.clock.now();
    one.edit(&id, |spec| spec.desired_state = DesiredState::Deleted).await;
    assert_eq!(visit.until_left().await, [LifecycleEvent::Left { why: LeaveReason::Deleted, checkpoint_id: None }]);
    assert!(world.clock.now() - began < Duration::from_secs(15));
    assert!(one.metadata(&id).await.is_none());
    assert!(world.lock(&id).await.unwrap().purged);
    one.stop().await;
}
