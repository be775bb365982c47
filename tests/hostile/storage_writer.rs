//! An attacker who can write every object and has no key: what restores, what is refused, and what stays possible.
//! Every attack is carried out with keys, where it is refused, and without, where it works.

mod with_runsc;

use std::time::Duration;

use baton::{
    bus::{LifecycleEvent, StartKind},
    cli::{
        get,
        global_options::OutputFormat,
        repair, rollback,
        storage_admin::{AdminResult, StorageAdmin, WaitArgs},
    },
    config::LeaseTimes,
    runtime::Container,
    storage::{
        checkpoints::Checkpoints,
        memory::Memory,
        records::{Durable, Records},
        signature::Seals,
    },
    telemetry::Redacted,
};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::Head,
    metadata::{DesiredState, Spec, SpecRequest},
    reason::Reason,
};
use serde_json::{Value, json};

use crate::simulated::instances::{Instance, Visit, World, movable};

fn keys(keys: &[&str]) -> Seals {
    Seals::new(keys.iter().map(|key| Redacted::new((*key).to_owned())).collect())
}

fn world(seals: Seals) -> World {
    let mut world = World::new();
    world.seals = seals;
    world
}

fn lasting(spec: &mut Spec) {
    movable(spec);
    spec.idle_timeout = None;
}

fn lock_key(id: &SandboxId) -> String {
    format!("sandboxes/{id}/lock.json")
}

async fn stored_lock(world: &World, id: &SandboxId) -> Value {
    serde_json::from_str(&world.text(&lock_key(id)).await.unwrap()).unwrap()
}

/// Runs it once more and leaves it stored; the checkpoint that came of it.
async fn run_once_more(world: &World, one: &Instance, id: &SandboxId) -> Head {
    let mut visit = one.attach(id).await;
    visit.until_running().await;
    one.edit(id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    visit.until_left().await;
    world.lock(id).await.unwrap().head.unwrap()
}

/// Has a running sandbox commit a checkpoint and go on.
async fn ask_for_a_checkpoint(world: &World, one: &Instance, id: &SandboxId) {
    let nonce = world.clock.nonce();
    one.edit(id, |spec| drop(spec.requests.insert(nonce.clone(), SpecRequest::Checkpoint {}))).await;
    while world.lock(id).await.unwrap().head.is_none() {
        world.after(1).await;
    }
}

/// The reason for which an attach is refused, and the checkpoint it is restored from if it is not.
async fn attached(one: &Instance, id: &SandboxId) -> Result<CheckpointId, Reason> {
    let mut visit = one.attach(id).await;
    let is_over =
        |passing: &LifecycleEvent| matches!(passing, LifecycleEvent::Failed { .. } | LifecycleEvent::Running { .. });
    match visit.until(is_over).await.pop() {
        Some(LifecycleEvent::Running { boot: StartKind::Restored { checkpoint_id, .. } }) => Ok(checkpoint_id),
        Some(LifecycleEvent::Failed { reason, .. }) => Err(reason),
        other => panic!("{other:?}"),
    }
}

/// Every object but the metadata, in which an attach leaves its request.
async fn objects(world: &World) -> Vec<(String, Option<String>)> {
    let mut found = Vec::new();
    for key in world.keys().await.into_iter().filter(|key| !key.ends_with("metadata.json")) {
        let text = if key.ends_with(".json") { world.text(&key).await } else { None };
        found.push((key, text));
    }
    found
}

/// A desk with these keys, as an operator has it.
fn admin(world: &World, seals: Seals) -> StorageAdmin {
    let (clock, store) = (world.clock.clone(), world.store());
    let durable = Durable { locks: store.clone(), metadata: store.clone(), lock_bucket: None };
    let memory = std::sync::Arc::new(Memory::new(clock.clone()));
    let checkpoints = Checkpoints::new(store, None, clock.clone()).sealed_by(seals.clone());
    let records = Records::new(clock.clone(), memory, Some(durable), true, LeaseTimes::DEFAULT).sealed_by(seals);
    StorageAdmin { is_quiet: true, ..StorageAdmin::new(clock, records, Some(checkpoints), LeaseTimes::DEFAULT, 2) }
}

async fn repaired(admin: &StorageAdmin, id: &SandboxId, change: impl FnOnce(&mut repair::RepairArgs)) -> AdminResult {
    let mut args = repair::RepairArgs::default();
    change(&mut args);
    repair::repair_sandbox(admin, id, &args).await.unwrap()
}

async fn shown(admin: &StorageAdmin, id: &SandboxId) -> String {
    get::describe(admin, id, OutputFormat::Table).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_of_another_sandbox_is_no_head_where_locks_are_signed() {
    for (seals, is_signed) in [(keys(&["key"]), true), (Seals::default(), false)] {
        let world = world(seals);
        let one = world.instance();
        let (victim, own) = (one.stored(lasting).await, one.stored(lasting).await);
        let theirs = world.lock(&victim).await.unwrap().head.unwrap();
        let mut forged = stored_lock(&world, &own).await;
        forged["head"] = json!(theirs);
        // A sandbox that was not forked from it does not start from it, with keys or without.
        world.put(&lock_key(&own), &forged.to_string()).await;
        let before = objects(&world).await;
        let refusal = if is_signed { Reason::Unsigned } else { Reason::Damaged };
        assert_eq!(attached(&one, &own).await, Err(refusal));
        if is_signed {
            assert_eq!(objects(&world).await, before, "nothing was written over it");
        }
        forged["forked_from"] = json!(theirs.checkpoint_id);
        world.put(&lock_key(&own), &forged.to_string()).await;
        let restored = if is_signed { Err(Reason::Unsigned) } else { Ok(theirs.checkpoint_id) };
        assert_eq!(attached(&one, &own).await, restored);
        one.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_head_cannot_be_set_back_where_locks_are_signed() {
    for (seals, is_signed) in [(keys(&["key"]), true), (Seals::default(), false)] {
        let world = world(seals);
        let one = world.instance();
        let id = one.stored(lasting).await;
        run_once_more(&world, &one, &id).await;
        let mut forged = stored_lock(&world, &id).await;
        let older = world.lock(&id).await.unwrap().prev_head.unwrap();
        forged["head"] = json!(older);
        world.put(&lock_key(&id), &forged.to_string()).await;
        let before = objects(&world).await;
        let restored = if is_signed { Err(Reason::Unsigned) } else { Ok(older.checkpoint_id) };
        assert_eq!(attached(&one, &id).await, restored);
        if is_signed {
            assert_eq!(objects(&world).await, before, "nothing was written over it");
        }
        one.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn no_edit_of_a_signed_lock_is_believed() {
    type Edit = fn(&mut Value, &Value);
    let edits: [(&str, Edit); 8] = [
        ("no signature", |lock, _| drop(lock.as_object_mut().unwrap().remove("seal"))),
        ("another signature", |lock, other| lock["seal"] = other["seal"].clone()),
        ("another lock", |lock, other| *lock = other.clone()),
        ("no head", |lock, _| (lock["head"], lock["ran"]) = (json!(null), json!(false))),
        ("a later epoch", |lock, _| lock["epoch"] = json!(1000)),
        ("held by somebody", |lock, _| {
            let nonce = "0".repeat(32);
            lock["lease"] = json!({"owner": format!("inst-{nonce}"), "renew": 0, "op": nonce, "hold_ms": 1, "takeover_ms": u64::MAX});
        }),
        ("to be purged", |lock, _| lock["purging"] = json!(true)),
        ("purged", |lock, _| lock["purged"] = json!(true)),
    ];
    for (name, edit) in edits {
        let world = world(keys(&["key"])).sweeping();
        let one = world.instance();
        let (id, other) = (one.stored(lasting).await, one.stored(lasting).await);
        let good = world.text(&lock_key(&id)).await.unwrap();
        let mut forged = stored_lock(&world, &id).await;
        edit(&mut forged, &stored_lock(&world, &other).await);
        world.put(&lock_key(&id), &forged.to_string()).await;
        let before = objects(&world).await;
        assert_eq!(attached(&one, &id).await, Err(Reason::Unsigned), "{name}");
        // Neither the loop nor the sweep writes or erases anything.
        world.after(600).await;
        assert_eq!(objects(&world).await, before, "{name}");
        world.put(&lock_key(&id), &good).await;
        attached(&one, &id).await.unwrap();
        one.stop().await;
    }
    // Without keys one such edit has the sandbox erased.
    let world = world(Seals::default()).sweeping();
    let one = world.instance();
    let id = one.stored(lasting).await;
    let mut forged = stored_lock(&world, &id).await;
    forged["purging"] = json!(true);
    world.put(&lock_key(&id), &forged.to_string()).await;
    world.after(600).await;
    assert!(world.lock(&id).await.is_none_or(|lock| lock.purged && lock.head.is_none()));
    assert!(!world.keys().await.iter().any(|key| key.ends_with(".img")));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_runs_under_a_lock_that_was_forged_stands_still_and_goes_on_with_the_good_one() {
    let world = world(keys(&["key"]));
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(lasting).await;
    visit.until_running().await;
    let good = world.text(&lock_key(&visit.id)).await.unwrap();
    let mut forged: Value = serde_json::from_str(&good).unwrap();
    forged["lease"] = json!(null);
    world.put(&lock_key(&visit.id), &forged.to_string()).await;
    assert_eq!(attached(&two, &visit.id).await, Err(Reason::Unsigned), "no second copy is started");
    world.after(30).await;
    assert_eq!((one.container(&visit.id), two.container(&visit.id)), (Container::Fenced, Container::Absent));
    assert_eq!(world.text(&lock_key(&visit.id)).await, Some(forged.to_string()));
    world.put(&lock_key(&visit.id), &good).await;
    one.attach(&visit.id).await;
    world.after(5).await;
    assert_eq!(one.container(&visit.id), Container::Running);
    one.stop().await;
    two.stop().await;

    // Without keys the second copy is started.
    let open = self::world(Seals::default());
    let (one, two) = (open.instance(), open.instance());
    let mut visit = one.create(lasting).await;
    visit.until_running().await;
    ask_for_a_checkpoint(&open, &one, &visit.id).await;
    let mut forged = stored_lock(&open, &visit.id).await;
    forged["lease"] = json!(null);
    open.put(&lock_key(&visit.id), &forged.to_string()).await;
    attached(&two, &visit.id).await.unwrap();
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn signed_locks_move_and_their_keys_can_be_changed() {
    let mut world = world(keys(&["old"]));
    let old = world.instance();
    let mut visit = old.create(lasting).await;
    visit.until_running().await;
    let id = visit.id.clone();
    // A waiter and a holder write the same lock: each signs it.
    let elsewhere = world.instance();
    elsewhere.attach(&id).await.until_running().await;
    assert_eq!(elsewhere.container(&id), Container::Running);
    elsewhere.edit(&id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    while world.lock(&id).await.unwrap().lease.is_some() {
        world.after(1).await;
    }
    world.seals = keys(&["new"]);
    let new = world.instance();
    assert_eq!(attached(&new, &id).await, Err(Reason::Unsigned));
    world.seals = keys(&["new", "old"]);
    let both = world.instance();
    run_once_more(&world, &both, &id).await;
    run_once_more(&world, &new, &id).await;
    assert_eq!(attached(&old, &id).await, Err(Reason::Unsigned));
    for instance in [old, elsewhere, new, both] {
        instance.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_operator_signs_what_was_stored_before_there_was_a_key() {
    let mut world = world(Seals::default());
    let before = world.instance();
    let id = before.stored(lasting).await;
    run_once_more(&world, &before, &id).await;
    before.stop().await;
    world.seals = keys(&["key"]);
    let (one, with_key, without) = (world.instance(), admin(&world, keys(&["key"])), admin(&world, Seals::default()));
    assert_eq!(attached(&one, &id).await, Err(Reason::Unsigned));
    let text = shown(&with_key, &id).await;
    assert!(text.contains("Unsigned") && text.contains(&format!("baton repair {id} --sign")), "{text}");
    let refused = repaired(&with_key, &id, |_| {}).await;
    assert!(refused.exit() == 3 && refused.line().contains("--sign"), "{refused:?}");
    let args = repair::RepairArgs { sign: true, ..repair::RepairArgs::default() };
    assert!(
        repair::repair_sandbox(&without, &id, &args)
            .await
            .is_err_and(|error| error.to_string().contains("BATON_HMAC_KEY"))
    );
    let signed = repaired(&with_key, &id, |args| args.sign = true).await;
    assert_eq!(signed.exit(), 0, "{signed:?}");
    let head = world.lock(&id).await.unwrap().head.unwrap();
    assert_eq!(attached(&one, &id).await, Ok(head.checkpoint_id));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_command_without_the_key_leaves_a_signed_lock_alone() {
    let world = world(keys(&["key"]));
    let one = world.instance();
    let id = one.stored(lasting).await;
    run_once_more(&world, &one, &id).await;
    let before = world.text(&lock_key(&id)).await;
    let waiting = WaitArgs { no_wait: false, timeout: Duration::from_secs(60) };
    let without = admin(&world, Seals::of_command(Vec::new()));
    let error = rollback::roll_back(&without, &id, None, waiting).await.unwrap_err();
    assert!(error.to_string().contains("BATON_HMAC_KEY"), "{error:#}");
    assert_eq!(world.text(&lock_key(&id)).await, before);
    let older = world.lock(&id).await.unwrap().prev_head.unwrap().checkpoint_id;
    let with_key = admin(&world, keys(&["key"]));
    assert_eq!(rollback::roll_back(&with_key, &id, None, waiting).await.unwrap().exit(), 0);
    assert_eq!(attached(&one, &id).await, Ok(older));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_fork_does_not_copy_what_a_stranger_wrote_into_a_lock() {
    for (seals, is_signed) in [(keys(&["key"]), true), (Seals::default(), false)] {
        let world = world(seals);
        let one = world.instance();
        let source = one.stored(lasting).await;
        run_once_more(&world, &one, &source).await;
        let mut forged = stored_lock(&world, &source).await;
        let older = world.lock(&source).await.unwrap().prev_head.unwrap();
        forged["head"] = json!(older);
        world.put(&lock_key(&source), &forged.to_string()).await;
        let tools = &one.tools;
        let id = tools.clock.sandbox_id();
        let mut spec = Spec::new(id.clone(), String::new(), tools.clock.timestamp(), tools.who.me.clone());
        lasting(&mut spec);
        let forked = tools.records.fork(&older.checkpoint_id, &spec).await;
        assert_eq!(forked.is_err(), is_signed, "{forked:?}");
        if is_signed {
            assert!(world.keys().await.iter().all(|key| !key.contains(id.as_str())), "nothing is left of it");
        }
        one.stop().await;
    }
}

/// What stays possible, as `docs/storage.md` says: a whole lock that was once good, with the checkpoint it names.
#[tokio::test(start_paused = true)]
async fn a_whole_older_lock_is_believed_by_an_instance_that_has_not_seen_a_later_one() {
    let world = world(keys(&["key"]));
    let one = world.instance();
    let id = one.stored(lasting).await;
    let older = world.text(&lock_key(&id)).await.unwrap();
    let head = world.lock(&id).await.unwrap().head.unwrap();
    run_once_more(&world, &one, &id).await;
    one.stop().await;
    world.put(&lock_key(&id), &older).await;
    let another = world.instance();
    assert_eq!(attached(&another, &id).await, Ok(head.checkpoint_id));
    another.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_has_written_a_later_lock_does_not_believe_an_older_one() {
    let world = world(keys(&["key"]));
    let one = world.instance();
    let mut visit = one.create(lasting).await;
    visit.until_running().await;
    let id = visit.id.clone();
    let older = world.text(&lock_key(&id)).await.unwrap();
    ask_for_a_checkpoint(&world, &one, &id).await;
    let (later, head) = (world.text(&lock_key(&id)).await.unwrap(), world.lock(&id).await.unwrap().head);
    world.put(&lock_key(&id), &older).await;
    world.after(30).await;
    // The holder has not renewed the lease in it, which would have made the loss of the checkpoint its own word.
    assert_eq!(world.text(&lock_key(&id)).await, Some(older));
    assert_eq!(one.container(&id), Container::Fenced);
    world.put(&lock_key(&id), &later).await;
    one.attach(&id).await;
    world.after(30).await;
    assert_eq!((one.container(&id), world.lock(&id).await.unwrap().head), (Container::Running, head));
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_lock_answers_an_attach_at_once_and_stays_as_it_is() {
    let world = world(Seals::default()).sweeping();
    let (one, operator) = (world.instance(), admin(&world, Seals::default()));
    let id = one.stored(lasting).await;
    let good = world.text(&lock_key(&id)).await.unwrap();
    let other = one.stored(lasting).await;
    let others = world.text(&lock_key(&other)).await.unwrap();
    for garbage in ["", "not json", "[]", "{}", &good[..good.len() / 2], &others] {
        world.put(&lock_key(&id), garbage).await;
        let before = objects(&world).await;
        let mut visit: Visit = one.attach(&id).await;
        visit.until(|passing| matches!(passing, LifecycleEvent::Failed { reason: Reason::InvalidLock, .. })).await;
        let waited = world.clock.now() - visit.began;
        assert!(waited < Duration::from_secs(1), "{garbage:?}: {waited:?}");
        drop(visit);
        world.after(600).await;
        assert_eq!(objects(&world).await, before, "{garbage:?}");
        let text = shown(&operator, &id).await;
        assert!(
            text.contains("InvalidLock") && text.contains(&format!("baton repair {id} --nobody-runs-it")),
            "{text}"
        );
    }
    let refused = repaired(&operator, &id, |_| {}).await;
    assert!(refused.exit() == 3 && refused.line().contains("--nobody-runs-it"), "{refused:?}");
    let done = repaired(&operator, &id, |args| args.nobody_runs_it = true).await;
    assert_eq!(done.exit(), 0, "{done:?}");
    attached(&one, &id).await.unwrap();
    one.stop().await;
}
