//! An operator's slips: shown in the status with their reason, and nothing comes to harm.

use std::time::Duration;

use baton::runtime::Container;
use baton_protocol::{metadata::Phase, sandbox_network::Egress};
use baton_testkit::ActionFault as Broken;
use serde_json::{Value, json};

use crate::instances::{Instance, Visit, World, movable, persistent};

async fn running(world: &World) -> (Instance, Visit) {
    let one = world.instance();
    let mut visit = one
        .create(|spec| {
            movable(spec);
            spec.idle_timeout = None;
        })
        .await;
    visit.until_running().await;
    world.after(1).await;
    (one, visit)
}

async fn status(world: &World, visit: &Visit) -> Value {
    let text = world.text(&format!("sandboxes/{}/metadata.json", visit.id)).await.unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["status"].clone()
}

#[tokio::test(start_paused = true)]
async fn nonsense_is_shown_with_its_reason_and_the_last_good_spec_stays_in_force() {
    type Slip = fn(&mut Value);
    let slips: [(Slip, &str); 7] = [
        (|record| record["desired_state"] = json!("dancing"), "InvalidSpec"),
        (|record| record["sandbox_id"] = json!("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab"), "InvalidSpec"),
        (|record| record["labels"] = json!(7), "InvalidSpec"),
        (|record| record["ttl"] = json!("soon"), "InvalidSpec"),
        (|record| drop(record.as_object_mut().unwrap().remove("desired_state")), "InvalidSpec"),
        (|record| record["network"] = json!({"egress": ["https://example.org"]}), "InvalidSpec"),
        (|record| record["lock_bucket"] = json!("elsewhere"), "OtherStore"),
    ];
    for (slip, reason) in slips {
        let world = World::new().sweeping();
        let (one, visit) = running(&world).await;
        let before = world.text(&format!("sandboxes/{}/metadata.json", visit.id)).await.unwrap();
        world.edit(&visit.id, slip).await;
        world.after(6).await;
        let shown = status(&world, &visit).await;
        assert_eq!((&shown["reason"], &shown["phase"]), (&json!(reason), &json!("running")), "{shown}");
        assert!(!shown["message"].as_str().unwrap().is_empty());
        world.after(300).await;
        assert_eq!(one.container(&visit.id), Container::Running);
        assert!(world.lock(&visit.id).await.unwrap().lease.is_some());
        // An old copy put over it is good again, and loses nothing.
        world.put(&format!("sandboxes/{}/metadata.json", visit.id), &before).await;
        world.after(10).await;
        assert_eq!(status(&world, &visit).await["reason"], json!(""));
        one.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_no_json_at_all_is_not_touched() {
    let world = World::new().sweeping();
    let (one, visit) = running(&world).await;
    let key = format!("sandboxes/{}/metadata.json", visit.id);
    let large = format!("{{\"x\":\"{}\"}}", "x".repeat(70 << 10));
    for text in ["", "not json", "[1]", &large] {
        world.put(&key, text).await;
        world.after(130).await;
        assert_eq!(world.text(&key).await.unwrap(), text);
        assert_eq!(one.container(&visit.id), Container::Running);
    }
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_checkpointed_runs_on_and_says_why() {
    let world = World::new().sweeping();
    let (one, visit) = running(&world).await;
    world
        .edit(&visit.id, |record| {
            record["enable_sandbox_checkpoint"] = json!(false);
            record["desired_state"] = json!("checkpointed");
        })
        .await;
    world.after(6).await;
    assert_eq!(status(&world, &visit).await["reason"], json!("NotCheckpointable"));
    assert_eq!(one.container(&visit.id), Container::Running);
    let before = world.text(&format!("sandboxes/{}/metadata.json", visit.id)).await;
    world.after(600).await;
    assert_eq!(world.text(&format!("sandboxes/{}/metadata.json", visit.id)).await, before, "it rests");
    world.edit(&visit.id, |record| record["desired_state"] = json!("running")).await;
    world.after(6).await;
    assert_eq!(status(&world, &visit).await["reason"], json!(""));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_missing_lock_is_said_and_the_container_is_kept() {
    let world = World::new().sweeping();
    let (one, visit) = running(&world).await;
    world.remove(&format!("sandboxes/{}/lock.json", visit.id)).await;
    world.after(30).await;
    let shown = status(&world, &visit).await;
    assert_eq!((&shown["phase"], &shown["reason"]), (&json!("failed"), &json!("LockMissing")));
    assert_eq!(one.container(&visit.id), Container::Fenced);
    world.after(600).await;
    assert!(world.lock(&visit.id).await.is_none(), "nobody makes one up");
    assert_eq!(one.container(&visit.id), Container::Fenced);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_checkpoint_is_reported_until_the_request_is_withdrawn() {
    let world = World::new();
    let (one, visit) = running(&world).await;
    for _ in 0..30 {
        one.containers.inject("checkpoint", Broken::NoSpace);
    }
    world.edit(&visit.id, |record| record["desired_state"] = json!("checkpointed")).await;
    world.after(8).await;
    assert_eq!(status(&world, &visit).await["reason"], json!("NoSpace"));
    world.edit(&visit.id, |record| record["desired_state"] = json!("running")).await;
    world.after(8).await;
    assert_eq!(status(&world, &visit).await["reason"], json!(""));
    assert_eq!(one.container(&visit.id), Container::Running);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_edit_of_labels_is_seen_by_the_holder_within_five_seconds() {
    let world = World::new();
    let (one, visit) = running(&world).await;
    let before = status(&world, &visit).await["observed_spec_sha256"].clone();
    world.edit(&visit.id, |record| record["labels"] = json!({"team": "blue"})).await;
    world.after(6).await;
    let after = status(&world, &visit).await["observed_spec_sha256"].clone();
    assert_ne!(before, after);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn running_sandboxes_are_checkpointed_every_so_often_and_a_crash_loses_no_more_than_that() {
    let mut world = World::new();
    world.housekeeping.checkpoint_every = Some(Duration::from_secs(60));
    let one = world.instance();
    let mut visit = one
        .create(|spec| {
            persistent(spec);
            spec.idle_timeout = None;
        })
        .await;
    visit.until_running().await;
    world.after(600).await;
    let lock = world.lock(&visit.id).await.unwrap();
    let head = lock.head.clone().expect("it is committed");
    assert!((8..=10).contains(&head.seq), "{}", head.seq);
    assert_eq!((lock.epoch, one.container(&visit.id)), (1, Container::Running));
    let manifest = one.tools.checkpoints.as_ref().unwrap().manifest(&head).await.unwrap();
    let age = world.clock.wall().duration_since(humantime::parse_rfc3339(&manifest.created).unwrap()).unwrap();
    assert!(age <= Duration::from_secs(73), "{age:?}");
    // Old ones of the same epoch do not pile up.
    assert!(one.tools.checkpoints.as_ref().unwrap().list(&visit.id).await.unwrap().len() <= 2);
    let latest = one.metadata(&visit.id).await.unwrap();
    assert!(latest.latest_sandbox_checkpoint.unwrap().path.contains(head.checkpoint_id.as_str()));
    assert_eq!(latest.status.phase, Phase::Running);

    one.containers.inject("checkpoint", Broken::Fail);
    world.after(300).await;
    assert_eq!(one.container(&visit.id), Container::Running);
    assert!(world.lock(&visit.id).await.unwrap().head.unwrap().seq >= head.seq + 3, "one failure ends nothing");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_edit_of_the_network_reaches_the_running_container_and_outlives_failures() {
    let world = World::new();
    let (one, visit) = running(&world).await;
    assert_eq!(one.containers.egress(&visit.id), Egress::None);
    one.containers.inject("set_egress", Broken::Fail);
    world.edit(&visit.id, |record| record["network"] = json!({"egress": ["example.org:443"]})).await;
    world.after(10).await;
    assert_eq!(one.containers.egress(&visit.id).to_string(), "example.org:443");
    assert_eq!(one.container(&visit.id), Container::Running);
    world.edit(&visit.id, |record| drop(record.as_object_mut().unwrap().remove("network"))).await;
    world.after(10).await;
    assert_eq!(one.containers.egress(&visit.id), Egress::None, "the operator's default");
    one.stop().await;
}
