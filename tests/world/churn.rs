//! A day of many sandboxes, made, moved, broken off and deleted: what is left is what should be.

use std::{collections::BTreeSet, time::Duration};

use baton::{runtime::Container, storage::layout};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::Lock,
    metadata::{DesiredState, SpecRequest},
};
use baton_testkit::ActionFault as Broken;

use crate::instances::{Instance, World, movable};

/// A number below `below`, from the world's own rng.
fn rng(world: &World, below: u64) -> u64 {
    u64::from_le_bytes(world.clock.bits()[..8].try_into().unwrap()) % below
}

/// Something that happens in such a day.
async fn happen(world: &World, instances: &mut Vec<Instance>, ids: &mut Vec<SandboxId>) {
    let at = rng(world, instances.len() as u64) as usize;
    let one = &instances[at];
    let some = (!ids.is_empty()).then(|| ids[rng(world, ids.len() as u64) as usize].clone());
    match (rng(world, 12), some) {
        (0..=2, _) | (_, None) => {
            let visit = one
                .create(|spec| {
                    movable(spec);
                    spec.idle_timeout = Some(300);
                    spec.enable_idle_timeout_auto_checkpoint = true;
                })
                .await;
            ids.push(visit.id.clone());
            world.after(5).await;
        }
        (3..=5, Some(id)) => {
            let here = one.metadata(&id).await.is_some_and(|found| found.spec.desired_state != DesiredState::Deleted);
            if here {
                drop(one.attach(&id).await);
                world.after(60).await;
            }
        }
        (6, Some(id)) => {
            let nonce = world.clock.nonce();
            if one.metadata(&id).await.is_some() {
                one.edit(&id, |spec| drop(spec.requests.insert(nonce.clone(), SpecRequest::Checkpoint {}))).await;
                one.containers.inject("checkpoint", Broken::Fail);
            }
        }
        (7, Some(id)) => {
            if one.metadata(&id).await.is_some() {
                one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
            }
        }
        (8, Some(id)) => {
            if one.metadata(&id).await.is_some() {
                one.edit(&id, |spec| spec.desired_state = DesiredState::Deleted).await;
            }
        }
        (9, Some(id)) => {
            // An upload that was never committed.
            let epoch = world.lock(&id).await.map_or(0, |lock| lock.epoch);
            if epoch > 0 && world.lock(&id).await.is_some_and(|lock| !lock.purged) {
                let orphan = CheckpointId::new(&id, epoch - 1, 99, &world.clock.nonce());
                world.put(&format!("sandbox_checkpoints/{orphan}/pages.img"), "x").await;
            }
        }
        (10, Some(_)) => {
            // An instance dies and another comes.
            let dead = instances.swap_remove(at).die().await;
            dead.stop().await;
            instances.push(world.instance());
        }
        (_, Some(_)) => {
            // A create that never got beyond its lock.
            let id = world.clock.sandbox_id();
            let lock = serde_json::to_string(&Lock::new(id.clone())).unwrap();
            world.put(&format!("sandboxes/{id}/lock.json"), &lock).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_day_the_bucket_holds_exactly_what_it_should() {
    let world = World::new().sweeping();
    let mut instances = vec![world.instance(), world.instance(), world.instance()];
    let mut ids = Vec::new();
    let end = world.clock.now() + Duration::from_secs(24 * 60 * 60);
    while world.clock.now() < end {
        happen(&world, &mut instances, &mut ids).await;
        world.after(300 + rng(&world, 600)).await;
    }
    // Everything comes to rest: idle sandboxes are checkpointed, and the sweeps go over what is left.
    world.after(3000).await;

    let mut expected = BTreeSet::new();
    let (mut alive, mut gone) = (0, 0);
    for key in world.keys().await {
        let Some(id) = layout::sandbox_of(&key).filter(|_| key.ends_with("lock.json")) else { continue };
        let lock = world.lock(&id).await.unwrap();
        expected.insert(key.clone());
        if lock.purged {
            gone += 1;
            continue;
        }
        alive += 1;
        assert!(ids.contains(&id), "a create that was given up is still there");
        expected.insert(format!("sandboxes/{id}/metadata.json"));
        for head in [&lock.head, &lock.prev_head].into_iter().flatten() {
            for file in ["checkpoint.img", "pages_meta.img", "pages.img", "manifest.json"] {
                expected.insert(format!("{}{file}", layout::checkpoint_prefix(&head.checkpoint_id)));
            }
        }
        let running = instances.iter().filter(|at| at.container(&id) == Container::Running).count();
        assert!(running <= 1);
    }
    let there: BTreeSet<_> = world.keys().await.into_iter().collect();
    let left: Vec<_> = there.difference(&expected).collect();
    let missing: Vec<_> = expected.difference(&there).collect();
    assert!(left.is_empty() && missing.is_empty(), "left over: {left:#?}\nmissing: {missing:#?}");
    assert!(alive >= 3 && gone >= 3, "too little happened: {alive} alive, {gone} gone");
    for instance in instances {
        instance.stop().await;
    }
}
