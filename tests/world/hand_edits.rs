//! A sandbox restored by hand: a checkpoint and the few keys of the source document, put into the store by an operator.

use std::sync::Arc;

use baton::{
    bus::{LifecycleEvent, StartKind},
    cli::{get, global_options::OutputFormat, list, repair},
    storage::{
        checkpoints::Checkpoints,
        layout,
        records::Error,
        store::{PollResult, Precondition, Store},
    },
};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    metadata::{DesiredState, Phase},
};
use serde_json::{Value, json};

use crate::{
    instances::{Instance, World, movable},
    verbs::{admin, done, refused},
};

/// Word for word the example of the source document.
const EXAMPLE: &str = r#"{
  "sandbox_id": "sandbox-abc-123",
  "created_timestamp": "2025-10-08T10:00:00Z",
  "idle_timeout": 300,
  "latest_sandbox_checkpoint": {
    "bucket": "company-sandbox-checkpoints",
    "path": "sandbox_checkpoints/checkpoint-xyz/"
  }
}"#;

fn id() -> SandboxId {
    SandboxId::parse("sandbox-abc-123").unwrap()
}

fn args() -> repair::RepairArgs {
    repair::RepairArgs { nobody_runs_it: true, ..repair::RepairArgs::default() }
}

async fn bytes(store: &dyn Store, key: &str) -> bytes::Bytes {
    match store.get_if_changed(key, None).await.unwrap() {
        PollResult::Changed(bytes, _) => bytes,
        PollResult::Unchanged | PollResult::Missing => panic!("there is no {key}"),
    }
}

/// The committed checkpoint of a sandbox of this name, made in another store.
async fn elsewhere(name: Option<&SandboxId>) -> (Arc<dyn Store>, CheckpointId) {
    let there = World::new();
    let one = there.instance();
    let stored = one.stored(|spec| {
        movable(spec);
        if let Some(name) = name {
            spec.sandbox_id = name.clone();
        }
    });
    let stored = stored.await;
    let head = there.lock(&stored).await.unwrap().head.unwrap().checkpoint_id;
    one.stop().await;
    (there.store(), head)
}

/// Puts its files into a folder of this name, and metadata that name it beside them.
async fn put(world: &World, from: (&dyn Store, &CheckpointId), folder: &str) {
    let (prefix, store) = (layout::checkpoint_prefix(from.1), world.store());
    for entry in from.0.list(&prefix, None).await.unwrap().entries {
        let name = entry.key.strip_prefix(&prefix).unwrap();
        let key = format!("sandbox_checkpoints/{folder}/{name}");
        store.put(&key, bytes(from.0, &entry.key).await, Precondition::Absent).await.unwrap();
    }
    world.put(&metadata_key(), &EXAMPLE.replace("checkpoint-xyz", folder)).await;
}

fn metadata_key() -> String {
    format!("sandboxes/{}/metadata.json", id())
}

async fn metadata(world: &World) -> Value {
    serde_json::from_str(&world.text(&metadata_key()).await.unwrap()).unwrap()
}

async fn restored(one: &Instance) -> (CheckpointId, bool) {
    let told = one.attach(&id()).await.until_running().await;
    match told.last() {
        Some(LifecycleEvent::Running { boot: StartKind::Restored { checkpoint_id, rolled_back, .. } }) => {
            (checkpoint_id.clone(), *rolled_back)
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn the_example_of_the_source_document_with_a_copied_checkpoint_becomes_a_sandbox() {
    let (store, checkpoint) = elsewhere(Some(&id())).await;
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    put(&world, (&*store, &checkpoint), checkpoint.as_str()).await;
    world.edit(&id(), |record| record["theirs"] = json!({"kept": true})).await;

    // Before the repair everybody hears what is missing, and nothing is written.
    assert!(matches!(one.tools.records.find(&id()).await, Err(Error::TokenMissing)));
    let before = world.keys().await;
    let careful = repair::RepairArgs { nobody_runs_it: false, ..args() };
    assert!(refused(repair::repair_sandbox(&admin, &id(), &careful)).await.contains("--nobody-runs-it"));
    let mut out = Vec::new();
    list::write_list(&admin, &Default::default(), OutputFormat::Table, &mut out).await.unwrap();
    let listed = String::from_utf8(out).unwrap();
    assert!(listed.contains("sandbox-abc-123") && listed.contains("checkpointed"), "{listed}");
    let got = get::describe(&admin, &id(), OutputFormat::Table).await.unwrap();
    assert!(got.contains("LockMissing") && got.contains("baton repair"), "{got}");
    assert_eq!(world.keys().await, before);

    let line = done(repair::repair_sandbox(&admin, &id(), &args())).await;
    let token = line.rsplit(' ').next().unwrap();
    let record = metadata(&world).await;
    assert_eq!(record["token_sha256"], json!(baton::api::token::sha256(token)));
    assert_eq!((&record["theirs"], &record["idle_timeout"]), (&json!({"kept": true}), &json!(300)));
    assert_eq!(
        (&record["desired_state"], &record["status"]["phase"]),
        (&json!("checkpointed"), &json!("checkpointed"))
    );
    assert_eq!(record["created_timestamp"], json!("2025-10-08T10:00:00Z"));
    let manifest: Value =
        serde_json::from_slice(&bytes(&*store, &format!("sandbox_checkpoints/{checkpoint}/manifest.json")).await)
            .unwrap();
    assert_eq!(record["last_checkpointed"], manifest["created"]);
    let lock = world.lock(&id()).await.unwrap();
    assert!(lock.epoch > checkpoint.epoch() && lock.lease.is_none() && lock.forked_from.is_none());
    assert!(done(repair::repair_sandbox(&admin, &id(), &args())).await.contains("needs no repair"));
    // Whether it ran on elsewhere nobody knows.
    assert_eq!(restored(&one).await, (checkpoint, true));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_of_another_sandbox_under_a_strange_name_is_copied_to_its_own_and_started_as_a_copy() {
    let (store, checkpoint) = elsewhere(None).await;
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    put(&world, (&*store, &checkpoint), "checkpoint-xyz").await;
    let strange = world.keys().await.into_iter().filter(|key| key.contains("checkpoint-xyz")).collect::<Vec<_>>();
    done(repair::repair_sandbox(&admin, &id(), &args())).await;
    let keys = world.keys().await;
    assert!(strange.iter().all(|key| keys.contains(key)), "what the operator put there stays: {keys:?}");
    let prefix = layout::checkpoint_prefix(&checkpoint);
    assert!(keys.contains(&format!("{prefix}pins/{}", id())), "{keys:?}");
    assert_eq!(metadata(&world).await["latest_sandbox_checkpoint"]["path"], json!(prefix));
    assert_eq!(world.lock(&id()).await.unwrap().forked_from, Some(checkpoint.clone()));
    assert_eq!(restored(&one).await, (checkpoint.clone(), false));
    // Its next checkpoint is its own.
    one.edit(&id(), |spec| spec.desired_state = DesiredState::Checkpointed).await;
    while world.lock(&id()).await.unwrap().lease.is_some() {
        world.after(1).await;
    }
    let head = world.lock(&id()).await.unwrap().head.unwrap().checkpoint_id;
    assert_eq!((head.sandbox(), head.seq()), (id(), checkpoint.seq() + 1));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_restored_is_refused_with_its_reason_and_nothing_is_written() {
    type Mischief = fn(&str) -> Option<String>;
    let manifest = |key: &str| key.ends_with("manifest.json");
    let without: [(Mischief, &str, &str); 4] = [
        (|key| key.ends_with("manifest.json").then(String::new), "CheckpointMissing", "manifest.json"),
        (|key| key.ends_with("pages.img").then(String::new), "CheckpointMissing", "pages.img"),
        (|key| key.ends_with("manifest.json").then(|| "{".to_owned()), "Damaged", "cannot be used"),
        (|key| key.contains("/checkpoint-xyz/").then(String::new), "CheckpointMissing", "checkpoint.img"),
    ];
    for folder in ["checkpoint-xyz", "its own"] {
        let (store, checkpoint) = elsewhere(Some(&id())).await;
        for (mischief, reason, named) in without {
            let world = World::new();
            let admin = admin(&world);
            let folder = if folder == "its own" { checkpoint.as_str() } else { folder };
            put(&world, (&*store, &checkpoint), folder).await;
            let mut harmed = false;
            for key in world.keys().await.into_iter().filter(|key| key.starts_with("sandbox_checkpoints/")) {
                match mischief(&key) {
                    Some(text) if text.is_empty() => world.remove(&key).await,
                    Some(text) => world.put(&key, &text).await,
                    None => continue,
                }
                harmed = true;
            }
            if !harmed {
                continue;
            }
            let before = (world.keys().await, metadata(&world).await);
            let line = refused(repair::repair_sandbox(&admin, &id(), &args())).await;
            assert!(line.starts_with(reason) && line.contains(named), "{line}");
            assert_eq!((world.keys().await, metadata(&world).await), before);
        }
        // The same length and other bytes: found on the way, before anything counts.
        let world = World::new();
        put(&world, (&*store, &checkpoint), "checkpoint-xyz").await;
        let key = world.keys().await.into_iter().find(|key| key.ends_with("xyz/pages.img") && !manifest(key)).unwrap();
        let mut content = bytes(&*world.store(), &key).await.to_vec();
        content[0] ^= 1;
        world.store().put(&key, content.into(), Precondition::Any).await.unwrap();
        let line = refused(repair::repair_sandbox(&admin(&world), &id(), &args())).await;
        assert!(line.starts_with("Damaged"), "{line}");
        assert_eq!(world.lock(&id()).await, None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_in_another_bucket_and_a_path_that_leads_elsewhere_are_refused() {
    let (store, checkpoint) = elsewhere(Some(&id())).await;
    let world = World::new();
    put(&world, (&*store, &checkpoint), checkpoint.as_str()).await;
    let mut admin = admin(&world);
    let here = Checkpoints::new(world.store(), Some("ours".to_owned()), world.clock.clone());
    admin.upkeep.checkpoints = Some(here);
    let line = refused(repair::repair_sandbox(&admin, &id(), &args())).await;
    assert!(line.starts_with("OtherStore") && line.contains("company-sandbox-checkpoints"), "{line}");
    for path in ["sandboxes/sandbox-abc-123/", "sandbox_checkpoints/../sandboxes/x/", ""] {
        let latest = json!({"bucket": "ours", "path": path});
        world.edit(&id(), |record| record["latest_sandbox_checkpoint"] = latest.clone()).await;
        let line = refused(repair::repair_sandbox(&admin, &id(), &args())).await;
        assert!(line.starts_with("InvalidSpec"), "{line}");
    }
    let latest = json!({"bucket": "ours", "path": layout::checkpoint_prefix(&checkpoint)});
    world.edit(&id(), |record| record["latest_sandbox_checkpoint"] = latest.clone()).await;
    done(repair::repair_sandbox(&admin, &id(), &args())).await;
    assert_eq!(world.lock(&id()).await.unwrap().head.unwrap().bucket.as_deref(), Some("ours"));
}

#[tokio::test(start_paused = true)]
async fn a_repair_that_was_broken_off_after_the_lock_goes_on_with_the_token() {
    let (store, checkpoint) = elsewhere(Some(&id())).await;
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    put(&world, (&*store, &checkpoint), checkpoint.as_str()).await;
    let by_hand = world.text(&metadata_key()).await.unwrap();
    done(repair::repair_sandbox(&admin, &id(), &args())).await;
    world.put(&metadata_key(), &by_hand).await;
    let line =
        done(repair::repair_sandbox(&admin, &id(), &repair::RepairArgs { nobody_runs_it: false, ..args() })).await;
    assert!(line.contains("its new token is"), "{line}");
    let found = one.metadata(&id()).await.unwrap();
    assert_eq!((found.status.phase, found.spec.desired_state), (Phase::Checkpointed, DesiredState::Checkpointed));
    assert_eq!(restored(&one).await.0, checkpoint);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_record_with_a_token_of_the_operators_own_needs_a_lock_only_and_keeps_it() {
    let (store, checkpoint) = elsewhere(Some(&id())).await;
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    put(&world, (&*store, &checkpoint), checkpoint.as_str()).await;
    let hash = baton::api::token::sha256("mine");
    world.edit(&id(), |record| record["token_sha256"] = json!(hash)).await;
    // Whoever attaches now is told that the lock is missing.
    let told = one.attach(&id()).await.until(|told| matches!(told, LifecycleEvent::Failed { .. })).await;
    assert!(format!("{told:?}").contains("LockMissing"), "{told:?}");
    let line = done(repair::repair_sandbox(&admin, &id(), &args())).await;
    assert!(!line.contains("token"), "{line}");
    assert_eq!(metadata(&world).await["token_sha256"], json!(hash));
    assert_eq!(restored(&one).await.0, checkpoint);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_record_by_hand_put_over_that_of_a_running_sandbox_stops_nothing() {
    let world = World::new().sweeping();
    let one = world.instance();
    let mut visit = one
        .create(|spec| {
            movable(spec);
            (spec.sandbox_id, spec.idle_timeout) = (id(), None);
        })
        .await;
    visit.until_running().await;
    world.after(1).await;
    world.put(&metadata_key(), EXAMPLE).await;
    world.after(300).await;
    assert_eq!(one.container(&id()), baton::runtime::Container::Running);
    let shown = metadata(&world).await;
    assert_eq!(shown["status"]["reason"], json!("TokenMissing"));
    assert_eq!(shown["latest_sandbox_checkpoint"]["path"], json!("sandbox_checkpoints/checkpoint-xyz/"));
    one.stop().await;
}
