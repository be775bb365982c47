//! The verbs of an operator, on the storage alone: beside instances, and without any.

use std::{future::Future, time::Duration};

use baton::{
    bus::{LifecycleEvent, StartKind},
    cli::{
        checkpoint, delete, edit, gc, get,
        global_options::{ContextOption, OutputFormat},
        handoff, list, list_checkpoints, repair, rollback,
        rows::{Filter, ShownPhase},
        storage_admin::{AdminResult, StorageAdmin, WaitArgs},
        watch,
    },
    config::LeaseTimes,
    runtime::Container,
    storage::{
        checkpoints::Checkpoints,
        memory::Memory,
        records::{Durable, Records},
    },
};
use baton_protocol::{
    id::SandboxId,
    metadata::{DesiredState, Phase},
};
use serde_json::{Value, json};

use crate::instances::{Instance, World, movable};

pub const WAIT: WaitArgs = WaitArgs { no_wait: false, timeout: Duration::from_secs(120) };

/// Another machine with access to the same store.
pub fn admin(world: &World) -> StorageAdmin {
    let (clock, store) = (world.clock.clone(), world.store());
    let durable = Durable { locks: store.clone(), metadata: store.clone(), lock_bucket: None };
    let records = Records::new(
        clock.clone(),
        std::sync::Arc::new(Memory::new(clock.clone())),
        Some(durable),
        true,
        LeaseTimes::DEFAULT,
    );
    let checkpoints = Checkpoints::new(store, None, clock.clone());
    StorageAdmin { is_quiet: true, ..StorageAdmin::new(clock, records, Some(checkpoints), LeaseTimes::DEFAULT, 2) }
}

pub async fn running(world: &World, one: &Instance) -> SandboxId {
    let mut visit = one
        .create(|spec| {
            movable(spec);
            spec.idle_timeout = None;
        })
        .await;
    visit.until_running().await;
    world.after(1).await;
    visit.id.clone()
}

/// Checkpointed so many times, and free.
async fn stored(world: &World, one: &Instance, times: usize) -> SandboxId {
    let id = running(world, one).await;
    for turn in 0..times {
        if turn > 0 {
            one.attach(&id).await.until_running().await;
        }
        one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
        while world.lock(&id).await.unwrap().lease.is_some() {
            world.after(1).await;
        }
        world.after(2).await;
    }
    id
}

pub async fn done(verdict: impl Future<Output = anyhow::Result<AdminResult>>) -> String {
    let verdict = verdict.await.unwrap();
    assert_eq!(verdict.exit(), 0, "{verdict:?}");
    verdict.line().to_owned()
}

pub async fn refused(verdict: impl Future<Output = anyhow::Result<AdminResult>>) -> String {
    let verdict = verdict.await.unwrap();
    assert_eq!(verdict.exit(), 3, "{verdict:?}");
    verdict.line().to_owned()
}

#[tokio::test(start_paused = true)]
async fn checkpoint_and_handoff_wait_until_the_holder_has_let_go() {
    for state in [DesiredState::Checkpointed, DesiredState::HandedOff] {
        let world = World::new();
        let (one, admin) = (world.instance(), admin(&world));
        let id = running(&world, &one).await;
        let line = done(checkpoint::release(&admin, &id, state, WAIT)).await;
        let lock = world.lock(&id).await.unwrap();
        let head = lock.head.unwrap().checkpoint_id;
        assert!(lock.lease.is_none() && line.contains(head.as_str()), "{line}");
        // Again it is so already.
        done(checkpoint::release(&admin, &id, state, WAIT)).await;
        one.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_handoff_to_an_instance_ends_when_the_sandbox_runs_there() {
    let world = World::new().sweeping();
    let (one, two, admin) = (world.instance(), world.instance(), admin(&world));
    let id = running(&world, &one).await;
    let other = running(&world, &two).await;
    let to = two.tools.who.me.clone();
    let unknown = world.clock.instance_id();
    let line = refused(handoff::move_to(&admin, &id, unknown.as_str(), false, WAIT)).await;
    assert!(line.contains("--force"), "{line}");
    assert_eq!(one.metadata(&id).await.unwrap().spec.placement, Some(one.tools.who.me.clone()), "nothing was written");
    // By a beginning of its id, which another sandbox there makes known.
    let line = done(handoff::move_to(&admin, &id, &to.as_str()[..12], false, WAIT)).await;
    assert!(line.ends_with(&format!("runs on {to}")), "{line}");
    assert_eq!((one.container(&id), two.container(&id)), (Container::Absent, Container::Running));
    assert!(done(handoff::move_to(&admin, &other, to.as_str(), false, WAIT)).await.contains("already"));
    // What lies in the store is started there.
    let stored = stored(&world, &one, 1).await;
    done(handoff::move_to(&admin, &stored, to.as_str(), false, WAIT)).await;
    assert_eq!(two.container(&stored), Container::Running);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_handoff_to_nobody_says_what_it_waits_for_and_to_elsewhere_who_was_faster() {
    let world = World::new().sweeping();
    let (one, two, admin) = (world.instance(), world.instance(), admin(&world));
    let id = running(&world, &one).await;
    let nobody = world.clock.instance_id();
    let verdict = handoff::move_to(&admin, &id, nobody.as_str(), true, WAIT).await.unwrap();
    assert_eq!(verdict.exit(), 4, "{verdict:?}");
    assert!(verdict.line().contains("PlacementPending"), "{verdict:?}");
    assert_eq!(one.container(&id), Container::Running);
    let (moved, _visit) = tokio::join!(handoff::move_to(&admin, &id, nobody.as_str(), true, WAIT), async {
        world.after(3).await;
        two.attach(&id).await
    });
    let moved = moved.unwrap();
    assert_eq!(moved.exit(), 3);
    assert!(moved.line().contains(two.tools.who.me.as_str()), "{moved:?}");
    let gone = world.clock.sandbox_id();
    assert!(handoff::move_to(&admin, &gone, nobody.as_str(), true, WAIT).await.is_err());
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_that_keeps_it_running_is_asked_for_and_answered() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let id = running(&world, &one).await;
    let line = done(checkpoint::checkpoint_running(&admin, &id, WAIT)).await;
    assert!(line.contains("paused for"), "{line}");
    assert_eq!(one.container(&id), Container::Running);
    let spec = one.metadata(&id).await.unwrap().spec;
    assert!(spec.requests.is_empty(), "the request is settled");
    done(checkpoint::release(&admin, &id, DesiredState::Checkpointed, WAIT)).await;
    refused(checkpoint::checkpoint_running(&admin, &id, WAIT)).await;
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_let_go_is_refused_with_its_reason_and_what_takes_too_long_is_late() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let id = running(&world, &one).await;
    world.edit(&id, |record| record["enable_sandbox_checkpoint"] = json!(false)).await;
    let line = refused(checkpoint::release(&admin, &id, DesiredState::Checkpointed, WAIT)).await;
    assert!(line.contains("NotCheckpointable"), "{line}");
    assert_eq!(one.container(&id), Container::Running);

    let id = running(&world, &one).await;
    one.containers.inject("checkpoint", baton_testkit::ActionFault::Delay(Duration::from_secs(60)));
    let short = WaitArgs { timeout: Duration::from_secs(10), ..WAIT };
    let verdict = checkpoint::release(&admin, &id, DesiredState::Checkpointed, short).await.unwrap();
    assert!(matches!(verdict, AdminResult::Late(_)), "{verdict:?}");
    let asked = WaitArgs { no_wait: true, ..WAIT };
    done(checkpoint::release(&admin, &id, DesiredState::Checkpointed, asked)).await;
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_dead_holder_is_taken_after_the_takeover_time() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let id = running(&world, &one).await;
    done(checkpoint::checkpoint_running(&admin, &id, WAIT)).await;
    let one = one.die().await;
    let began = world.clock.now();
    let line = done(checkpoint::release(&admin, &id, DesiredState::HandedOff, WAIT)).await;
    assert!(line.contains("is lost"), "{line}");
    assert!(world.clock.now() - began >= Duration::from_secs(30));
    let found = one.metadata(&id).await.unwrap();
    assert_eq!(found.status.phase, Phase::Checkpointed);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn delete_has_the_holder_do_it_and_does_it_where_there_is_none() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let held = running(&world, &one).await;
    done(delete::delete_sandbox(&admin, &held, WAIT)).await;
    assert_eq!(one.container(&held), Container::Absent);
    let free = stored(&world, &one, 2).await;
    let orphan = stored(&world, &one, 1).await;
    world.remove(&format!("sandboxes/{orphan}/metadata.json")).await;
    one.stop().await;
    done(delete::delete_sandbox(&admin, &free, WAIT)).await;
    done(delete::delete_sandbox(&admin, &orphan, WAIT)).await;
    let mut left: Vec<_> = [&held, &free, &orphan].map(|id| format!("sandboxes/{id}/lock.json")).into();
    left.sort();
    assert_eq!(world.keys().await, left);
    assert!(done(delete::delete_sandbox(&admin, &free, WAIT)).await.contains("before"));
    assert!(delete::delete_sandbox(&admin, &world.clock.sandbox_id(), WAIT).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_rollback_makes_an_older_checkpoint_count_and_can_be_taken_back() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let id = stored(&world, &one, 2).await;
    let before = world.lock(&id).await.unwrap();
    let (head, previous) = (before.head.unwrap(), before.prev_head.unwrap());
    done(rollback::roll_back(&admin, &id, None, WAIT)).await;
    let lock = world.lock(&id).await.unwrap();
    let now = lock.head.unwrap();
    assert_eq!((&now.checkpoint_id, now.seq), (&previous.checkpoint_id, head.seq + 1));
    assert_eq!((lock.epoch, lock.lease, lock.prev_head.as_ref()), (before.epoch + 1, None, Some(&head)));
    let mut visit = one.attach(&id).await;
    let told = visit.until_running().await;
    assert!(
        matches!(told.last(), Some(LifecycleEvent::Running { boot: StartKind::Restored { checkpoint_id, .. } }) if *checkpoint_id == previous.checkpoint_id),
        "{told:?}"
    );
    // What runs is not rolled back.
    let line = refused(rollback::roll_back(&admin, &id, Some(&head.checkpoint_id), WAIT)).await;
    assert!(line.contains("stop it first"), "{line}");
    one.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    visit.until_left().await;
    assert!(rollback::roll_back(&admin, &world.clock.sandbox_id(), None, WAIT).await.is_err());
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn deleted_metadata_is_recreated_with_a_new_token() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let id = stored(&world, &one, 1).await;
    let args = repair::RepairArgs::default();
    assert!(done(repair::repair_sandbox(&admin, &id, &args)).await.contains("needs no repair"));
    world.remove(&format!("sandboxes/{id}/metadata.json")).await;
    let line = done(repair::repair_sandbox(&admin, &id, &args)).await;
    let token = line.rsplit(' ').next().unwrap();
    let spec = one.metadata(&id).await.unwrap().spec;
    assert_eq!(spec.token_sha256, baton::api::token::sha256(token));
    one.attach(&id).await.until_running().await;
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_deleted_lock_is_recreated_only_if_no_instance_runs_it_and_above_every_epoch() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let id = stored(&world, &one, 3).await;
    let before = world.lock(&id).await.unwrap();
    world.remove(&format!("sandboxes/{id}/lock.json")).await;
    let mut args = repair::RepairArgs::default();
    refused(repair::repair_sandbox(&admin, &id, &args)).await;
    assert!(world.lock(&id).await.is_none());
    args.nobody_runs_it = true;
    done(repair::repair_sandbox(&admin, &id, &args)).await;
    let lock = world.lock(&id).await.unwrap();
    assert!(lock.epoch > before.epoch && lock.behind);
    assert_eq!(lock.head, before.head);
    one.attach(&id).await.until_running().await;
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_edit_is_checked_written_over_what_was_seen_and_its_outcome_said() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let id = running(&world, &one).await;
    let set = |fields: &[(&str, Value)]| edit::EditArgs {
        sandbox: id.to_string(),
        set: fields.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
        force: false,
        wait: WAIT,
        context: ContextOption::default(),
    };
    let line = done(edit::edit_metadata(&admin, &id, &set(&[("labels.team", json!("blue"))]), "false")).await;
    assert!(line.ends_with("is running"), "{line}");
    assert_eq!(one.metadata(&id).await.unwrap().spec.labels["team"], "blue");
    assert!(
        done(edit::edit_metadata(&admin, &id, &set(&[("labels.team", json!("blue"))]), "false"))
            .await
            .contains("nothing")
    );
    let before = world.text(&format!("sandboxes/{id}/metadata.json")).await;
    for (name, value) in [("desired_state", json!("dancing")), ("sandbox_id", json!("x")), ("status", json!({}))] {
        assert!(edit::edit_metadata(&admin, &id, &set(&[(name, value)]), "false").await.is_err(), "{name}");
    }
    assert_eq!(world.text(&format!("sandboxes/{id}/metadata.json")).await, before);
    let line = done(edit::edit_metadata(&admin, &id, &set(&[("desired_state", json!("checkpointed"))]), "false")).await;
    assert!(line.contains("is checkpointed"), "{line}");
    let line = done(edit::edit_metadata(&admin, &id, &set(&[("ttl", json!(60))]), "false")).await;
    assert!(line.contains("next sweep"), "{line}");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn gc_is_one_sweep_without_a_server() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let (gone, kept) = (stored(&world, &one, 1).await, stored(&world, &one, 4).await);
    let dead = running(&world, &one).await;
    one.die().await.stop().await;
    world.edit(&gone, |record| record["desired_state"] = json!("deleted")).await;
    world.edit(&dead, |record| record["desired_state"] = json!("deleted")).await;
    let mut args = gc::GcArgs { dry_run: true, ..gc::GcArgs::default() };
    let before = world.keys().await;
    assert_eq!(done(gc::sweep_once(&admin, &args)).await, "tasks to do: 2");
    assert_eq!(world.keys().await, before);
    args.dry_run = false;
    done(gc::sweep_once(&admin, &args)).await;
    assert!(world.lock(&gone).await.unwrap().purged && !world.lock(&dead).await.unwrap().purged);
    assert_eq!(admin.upkeep.checkpoints.as_ref().unwrap().list(&kept).await.unwrap().len(), 2);
    args.dead = true;
    done(gc::sweep_once(&admin, &args)).await;
    assert!(world.lock(&dead).await.unwrap().purged);
    args.tombstones_after = Some(Duration::ZERO);
    done(gc::sweep_once(&admin, &args)).await;
    assert!(world.lock(&gone).await.is_none() && world.lock(&dead).await.is_none());
    assert!(world.lock(&kept).await.unwrap().head.is_some());
}

#[tokio::test(start_paused = true)]
async fn what_there_is_is_listed_filtered_shown_and_watched() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let (awake, asleep) = (running(&world, &one).await, stored(&world, &one, 1).await);
    let (orphan, lockless) = (stored(&world, &one, 1).await, stored(&world, &one, 1).await);
    world.edit(&asleep, |record| record["labels"] = json!({"team": "blue"})).await;
    world.remove(&format!("sandboxes/{orphan}/metadata.json")).await;
    world.remove(&format!("sandboxes/{lockless}/lock.json")).await;
    let listed = async |filter: Filter, output: OutputFormat| {
        let mut out = Vec::new();
        list::write_list(&admin, &filter, output, &mut out).await.unwrap();
        String::from_utf8(out).unwrap()
    };
    let all = listed(Filter::default(), OutputFormat::Table).await;
    assert_eq!(all.lines().count(), 4, "{all}");
    assert!(all.lines().any(|line| line.contains(lockless.as_str()) && line.contains("LockMissing")), "{all}");
    let blue = Filter { labels: vec![("team".to_owned(), "blue".to_owned())], ..Filter::default() };
    let blue: Value = serde_json::from_str(&listed(blue, OutputFormat::Json).await).unwrap();
    assert_eq!((blue.as_array().unwrap().len(), &blue[0]["sandbox_id"]), (1, &json!(asleep)));
    let running =
        listed(Filter { phase: Some(ShownPhase::Reported(Phase::Running)), ..Filter::default() }, OutputFormat::Table)
            .await;
    assert!(running.contains(awake.as_str()) && !running.contains(asleep.as_str()), "{running}");
    let left = listed(Filter { orphans: true, ..Filter::default() }, OutputFormat::Table).await;
    assert!(left.contains(orphan.as_str()) && left.contains(lockless.as_str()) && !left.contains(awake.as_str()));
    let none =
        listed(Filter { phase: Some(ShownPhase::Reported(Phase::Failed)), ..Filter::default() }, OutputFormat::Json)
            .await;
    assert_eq!(none, "[]\n");

    let shown = async |id: &SandboxId, output| get::describe(&admin, id, output).await;
    let text = shown(&awake, OutputFormat::Table).await.unwrap();
    assert!(text.contains(one.tools.who.me.as_str()) && text.contains("running"), "{text}");
    assert!(shown(&orphan, OutputFormat::Table).await.unwrap().contains("baton repair"));
    let json: Value = serde_json::from_str(&shown(&asleep, OutputFormat::Json).await.unwrap()).unwrap();
    assert_eq!(json["metadata"]["labels"]["team"], "blue");
    assert!(shown(&world.clock.sandbox_id(), OutputFormat::Table).await.is_err());
    let text = list_checkpoints::describe(&admin, &asleep, OutputFormat::Table).await.unwrap();
    assert!(text.lines().any(|line| line.starts_with("head") && line.contains(asleep.as_str())), "{text}");

    let mut seen = Vec::new();
    let watched = watch::Watched { id: Some(awake.clone()), filter: Filter::default(), every: Duration::from_secs(1) };
    let source = watch::RowSource::Storage(Box::new(admin.clone()));
    let mut out = |text: &str| {
        seen.push(text.to_owned());
        Ok(())
    };
    let watching = watch::watch_rows(&source, &watched, false, &mut out);
    let change = async {
        world.after(10).await;
        one.edit(&awake, |spec| spec.desired_state = DesiredState::Checkpointed).await;
        world.after(10).await;
    };
    tokio::select! {
        ended = watching => panic!("{ended:?}"),
        () = change => {}
    }
    assert!(
        seen.len() >= 2 && seen[0].contains("running") && seen.last().unwrap().contains("checkpointed"),
        "{seen:?}"
    );
    one.stop().await;
}
