//! Handed off to whom: an operator names an instance as `placement`, and the sandbox moves there, or its status says
//! why it has not.

use baton::{
    bus::{LeaveReason, LifecycleEvent},
    runtime::Container,
};
use baton_protocol::{
    id::{InstanceId, SandboxId},
    lock::Claim,
    metadata::{DesiredState, Metadata, Spec},
    reason::Reason,
};
use serde_json::json;

use crate::instances::{Instance, Visit, World, movable, persistent};

/// Two sweeps, with their jitter.
const TWO_SWEEPS: u64 = 150;

fn lasting(spec: &mut Spec) {
    movable(spec);
    spec.idle_timeout = None;
}

async fn running(world: &World, at: &Instance, change: impl Fn(&mut Spec)) -> (Visit, SandboxId) {
    let mut visit = at.create(change).await;
    visit.until_running().await;
    world.after(1).await;
    let id = visit.id.clone();
    (visit, id)
}

async fn order(world: &World, id: &SandboxId, state: &str, to: &InstanceId) {
    world
        .edit(id, |record| {
            record["desired_state"] = json!(state);
            record["placement"] = json!(to);
        })
        .await;
}

fn runs_at(found: &Metadata, at: &Instance) -> bool {
    found.status.instance.as_ref() == Some(&at.tools.who.me) && found.status.reason.is_empty()
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_runs_moves_to_the_instance_that_an_operator_names_within_two_sweeps() {
    // Also one that its clients cannot move.
    for change in [lasting as fn(&mut Spec), |spec| (persistent(spec), spec.idle_timeout = None).1] {
        let world = World::new().sweeping();
        let [one, two, three] = [(); 3].map(|()| world.instance());
        let (mut visit, id) = running(&world, &one, change).await;
        order(&world, &id, "running", &two.tools.who.me).await;
        let told = visit.until_left().await;
        let left =
            matches!(told.last(), Some(LifecycleEvent::Left { why: LeaveReason::HandedOff, checkpoint_id: Some(_) }));
        assert!(left, "its clients may follow: {told:?}");
        assert!(
            !told.iter().any(|passing| matches!(passing, LifecycleEvent::Probe { .. })),
            "nobody is asked: {told:?}"
        );
        world.after(5).await;
        assert!((world.clock.now() - visit.began).as_secs() < TWO_SWEEPS);
        assert_eq!(two.container(&id), Container::Running);
        assert_eq!((one.container(&id), three.container(&id)), (Container::Absent, Container::Absent));
        assert_eq!(world.lock(&id).await.unwrap().epoch, 2, "it went nowhere else on its way");
        assert!(runs_at(&two.metadata(&id).await.unwrap(), &two));
        for instance in [one, two, three] {
            instance.stop().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn until_the_named_instance_asks_the_sandbox_runs_on_and_its_status_says_why() {
    let world = World::new().sweeping();
    let one = world.instance();
    let (_visit, id) = running(&world, &one, lasting).await;
    let stranger = InstanceId::from_bits([9; 16]);
    order(&world, &id, "running", &stranger).await;
    world.after(6).await;
    let status = one.metadata(&id).await.unwrap().status;
    assert_eq!(status.reason, Reason::PlacementPending.name());
    assert!(status.message.contains(stranger.as_str()), "{}", status.message);
    world.after(600).await;
    assert_eq!(one.container(&id), Container::Running);
    assert_eq!(one.metadata(&id).await.unwrap().status.reason, Reason::PlacementPending.name());
    order(&world, &id, "running", &one.tools.who.me).await;
    world.after(6).await;
    assert!(runs_at(&one.metadata(&id).await.unwrap(), &one));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_instance_without_room_takes_what_was_ordered_when_it_has_some() {
    let mut world = World::new().sweeping();
    world.housekeeping.room = 1;
    let (one, two) = (world.instance(), world.instance());
    let (_visit, id) = running(&world, &one, lasting).await;
    let (other, resident) = running(&world, &two, lasting).await;
    order(&world, &id, "running", &two.tools.who.me).await;
    world.after(300).await;
    assert_eq!((one.container(&id), two.container(&id)), (Container::Running, Container::Absent));
    assert_eq!(one.metadata(&id).await.unwrap().status.reason, Reason::PlacementPending.name());
    drop(other);
    two.edit(&resident, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    world.after(TWO_SWEEPS).await;
    assert_eq!((one.container(&id), two.container(&id)), (Container::Absent, Container::Running));
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_handed_off_to_an_instance_leaves_at_once_and_that_one_alone_takes_it() {
    let world = World::new().sweeping();
    let [one, two, three] = [(); 3].map(|()| world.instance());
    let (visit, id) = running(&world, &one, lasting).await;
    drop(visit);
    order(&world, &id, "handed_off", &two.tools.who.me).await;
    world.after(6).await;
    assert!(world.lock(&id).await.unwrap().lease.is_none_or(|lease| lease.owner == two.tools.who.me));
    world.after(TWO_SWEEPS).await;
    assert_eq!(two.container(&id), Container::Running);
    assert_eq!(world.lock(&id).await.unwrap().epoch, 2);
    let spec = two.metadata(&id).await.unwrap().spec;
    assert_eq!((spec.desired_state, spec.claim.unwrap().kind), (DesiredState::Running, Claim::Order));
    for instance in [one, two, three] {
        instance.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_order_is_carried_out_once_and_what_ends_there_later_rests() {
    let world = World::new().sweeping();
    let (one, two) = (world.instance(), world.instance());
    let change = |spec: &mut Spec| {
        lasting(spec);
        spec.idle_timeout = Some(100);
        spec.enable_idle_timeout_auto_checkpoint = true;
    };
    let (_visit, id) = running(&world, &one, change).await;
    order(&world, &id, "running", &two.tools.who.me).await;
    world.after(80).await;
    assert_eq!(two.container(&id), Container::Running);
    world.after(600).await;
    let lock = world.lock(&id).await.unwrap();
    assert_eq!((lock.epoch, lock.lease), (2, None), "it was idle, and nobody asked for it since");
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_cannot_let_go_yet_is_asked_again_by_every_sweep() {
    let world = World::new().sweeping();
    let (one, two) = (world.instance(), world.instance());
    let (_visit, id) = running(&world, &one, lasting).await;
    for _ in 0..8 {
        one.containers.inject("checkpoint", baton_testkit::ActionFault::Fail);
    }
    order(&world, &id, "running", &two.tools.who.me).await;
    world.after(100).await;
    assert_eq!(one.container(&id), Container::Running);
    assert_eq!(one.metadata(&id).await.unwrap().status.reason, Reason::CheckpointFailed.name());
    world.after(600).await;
    assert_eq!((one.container(&id), two.container(&id)), (Container::Absent, Container::Running));
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_attaches_after_an_order_is_judged_like_any_other() {
    let world = World::new().sweeping();
    let [one, two, three] = [(); 3].map(|()| world.instance());
    let (_visit, id) = running(&world, &one, lasting).await;
    order(&world, &id, "running", &two.tools.who.me).await;
    let mut elsewhere = three.attach(&id).await;
    elsewhere.until_running().await;
    world.after(TWO_SWEEPS).await;
    assert_eq!((two.container(&id), three.container(&id)), (Container::Absent, Container::Running));
    for instance in [one, two, three] {
        instance.stop().await;
    }
}
