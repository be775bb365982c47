//! Snapshots and forks without runsc: names, nonces, crashes, pins.

use baton::{
    bus::{LifecycleEvent, StartKind},
    config::Quotas,
    runtime::Container,
    storage::{
        snapshot_users,
        snapshots::{NameClaim, NamedSnapshot},
        store::{PollResult, Precondition, Store},
    },
};
use baton_protocol::{
    id::{CheckpointId, Nonce, SandboxId, SnapshotName},
    metadata::{Answer, DesiredState, Spec, SpecRequest},
    snapshot_key::SnapshotKey,
};
use baton_testkit::ActionFault as Broken;
use bytes::Bytes;

use crate::{
    faulty_store::Fault,
    instances::{Instance, Visit, World, movable, persistent},
};

fn name(text: &str) -> SnapshotName {
    text.parse().unwrap()
}

/// As it is stored.
fn key(text: &str) -> SnapshotKey {
    SnapshotKey::parse(text).unwrap()
}

async fn answer(instance: &Instance, id: &SandboxId, nonce: &Nonce) -> Answer {
    loop {
        instance.tools.clock.sleep(std::time::Duration::from_millis(100)).await;
        let found = instance.metadata(id).await.expect("it is there");
        if let Some(answer) = found.status.answers.get(nonce) {
            return answer.clone();
        }
    }
}

async fn ask(instance: &Instance, id: &SandboxId, request: SpecRequest) -> Answer {
    let nonce = instance.tools.clock.nonce();
    let asked = nonce.clone();
    instance.edit(id, move |spec| drop(spec.requests.insert(asked.clone(), request.clone()))).await;
    answer(instance, id, &nonce).await
}

async fn take(instance: &Instance, visit: &Visit, text: &str) -> Answer {
    ask(instance, &visit.id, SpecRequest::Snapshot { name: name(text), full: false }).await
}

fn reason(answer: &Answer) -> &str {
    match answer {
        Answer::Error { reason, .. } => reason,
        Answer::Ok(_) => "none",
    }
}

#[tokio::test(start_paused = true)]
async fn a_name_is_given_once_and_a_failure_gives_it_back() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    one.containers.inject("snapshot", Broken::Fail);
    assert_eq!(reason(&take(&one, &visit, "a").await), "SnapshotFailed");
    let snapshots = one.tools.snapshots.clone().unwrap();
    assert_eq!(snapshots.find(&key("a")).await.unwrap(), NamedSnapshot::Nothing, "nothing is left of it");
    let Answer::Ok(done) = take(&one, &visit, "a").await else { panic!("refused") };
    assert_eq!((done.snapshot, done.paused_ms), (Some(name("a")), Some(1)));
    let NamedSnapshot::Ours(made) = snapshots.find(&key("a")).await.unwrap() else { panic!("not there") };
    assert_eq!(reason(&take(&one, &visit, "a").await), "SnapshotExists");
    assert_eq!(snapshots.find(&key("a")).await.unwrap(), NamedSnapshot::Ours(made));
    assert_eq!(one.container(&visit.id), Container::Running);
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn word_of_an_answer_comes_once_it_is_there() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    for (fault, expected) in [(None, "none"), (Some(Broken::Fail), "SnapshotFailed")] {
        if let Some(fault) = fault {
            one.containers.inject("snapshot", fault);
        }
        let nonce = one.tools.clock.nonce();
        let asked = nonce.clone();
        let request = SpecRequest::Snapshot { name: name(&expected.to_lowercase()), full: false };
        one.edit(&visit.id, move |spec| drop(spec.requests.insert(asked.clone(), request.clone()))).await;
        visit.until(|passing| *passing == LifecycleEvent::Answered).await;
        let found = one.metadata(&visit.id).await.expect("it is there");
        assert_eq!(reason(&found.status.answers[&nonce]), expected);
    }
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_somebody_else_put_there_is_never_overwritten() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    let key = "filesystem_snapshots/foreign/foreign.tar.gz";
    one.store.put(key, Bytes::from_static(b"theirs"), Precondition::Absent).await.unwrap();
    assert_eq!(reason(&take(&one, &visit, "foreign").await), "SnapshotExists");
    let PollResult::Changed(bytes, _) = one.store.get_if_changed(key, None).await.unwrap() else { panic!("gone") };
    assert_eq!(bytes, "theirs");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_request_that_began_a_snapshot_goes_on_with_it_after_a_crash() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(movable).await;
    visit.until_running().await;
    let id = visit.id.clone();
    let nonce = one.tools.clock.nonce();
    // As an instance left it that died between the archive and the manifest.
    let snapshots = one.tools.snapshots.clone().unwrap();
    assert_eq!(snapshots.claim(&key("s"), &nonce).await.unwrap(), NameClaim::Ours);
    one.store.put("filesystem_snapshots/s/s.tar", Bytes::from_static(b"half"), Precondition::Absent).await.unwrap();
    assert_eq!(snapshots.find(&key("s")).await.unwrap(), NamedSnapshot::Unfinished);
    assert_eq!(snapshots.claim(&key("s"), &one.tools.clock.nonce()).await.unwrap(), NameClaim::Taken);
    drop(visit);
    let mut visit = two.attach(&id).await;
    visit.until_running().await;
    let asked = nonce.clone();
    two.edit(&id, move |spec| {
        spec.requests.insert(asked.clone(), SpecRequest::Snapshot { name: name("s"), full: false });
    })
    .await;
    assert!(matches!(answer(&two, &id, &nonce).await, Answer::Ok(_)));
    let NamedSnapshot::Ours(made) = snapshots.find(&key("s")).await.unwrap() else { panic!("unfinished") };
    assert_eq!((made.nonce.clone(), made.size), (nonce.clone(), 1024));
    assert_eq!(
        snapshots.claim(&key("s"), &nonce).await.unwrap(),
        NameClaim::Finished(made),
        "asked again it is answered"
    );
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_starts_from_a_snapshot_and_moves_to_where_that_was_never_seen() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut source = one.create(persistent).await;
    source.until_running().await;
    assert!(matches!(take(&one, &source, "base").await, Answer::Ok(_)));
    let from = |spec: &mut Spec| {
        movable(spec);
        spec.filesystem_snapshot_name = Some(name("base"));
    };
    let mut visit = two.create(from).await;
    visit.until_running().await;
    let id = visit.id.clone();
    drop(visit);
    let three = world.instance();
    let mut visit = three.attach(&id).await;
    let told = visit.until_running().await;
    assert!(matches!(told.last(), Some(LifecycleEvent::Running { boot: StartKind::Restored { .. } })), "{told:?}");
    let head = world.lock(&id).await.unwrap().head.unwrap();
    let image = ["checkpoint.img", "pages.img", "pages_meta.img"];
    let mut once = image.map(|file| format!("sandbox_checkpoints/{}/{file}", head.checkpoint_id)).to_vec();
    once.insert(0, "filesystem_snapshots/base/base.tar".to_owned());
    assert_eq!(three.store.brought(), once, "what the head needs besides comes beside its image");
    let checkpoints = three.tools.checkpoints.clone().unwrap();
    let rootfs = checkpoints.manifest(&head).await.unwrap().rootfs;
    assert_eq!(rootfs.archive.unwrap().path.to_string(), "filesystem_snapshots/base/base.tar");
    assert_eq!(
        snapshot_users::users_of(&three.tools.records, &checkpoints, &key("base")).await.unwrap().first,
        Some(id.clone())
    );
    assert_eq!(snapshot_users::users_of(&three.tools.records, &checkpoints, &key("other")).await.unwrap().first, None);
    // Also when an operator took the name out of the metadata: the head still names it.
    three.edit(&id, |spec| spec.filesystem_snapshot_name = None).await;
    assert_eq!(
        snapshot_users::users_of(&three.tools.records, &checkpoints, &key("base")).await.unwrap().first,
        Some(id)
    );
    for instance in [one, two, three] {
        instance.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_is_missing_or_cannot_be_extracted_is_said_once_by_name() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(|spec| spec.filesystem_snapshot_name = Some(name("nowhere"))).await;
    let told = visit.until(|passing| matches!(passing, LifecycleEvent::Failed { .. })).await;
    let Some(LifecycleEvent::Failed { message, .. }) = told.last() else { panic!("{told:?}") };
    assert!(message.contains("`nowhere` does not exist"), "{message}");
    let mut source = one.create(persistent).await;
    source.until_running().await;
    assert!(matches!(take(&one, &source, "bad").await, Answer::Ok(_)));
    one.containers.inject("extract", Broken::Refuse);
    let mut visit = one.create(|spec| spec.filesystem_snapshot_name = Some(name("bad"))).await;
    visit.until(|passing| matches!(passing, LifecycleEvent::Failed { .. })).await;
    assert_eq!(one.container(&visit.id), Container::Absent);
    one.stop().await;
}

async fn fork(instance: &Instance, source: &CheckpointId) -> SandboxId {
    let clock = &instance.tools.clock;
    let id = clock.sandbox_id();
    let mut spec = Spec::new(id.clone(), String::new(), clock.timestamp(), instance.tools.who.me.clone());
    movable(&mut spec);
    spec.desired_state = DesiredState::Checkpointed;
    spec.from_checkpoint = Some(source.clone());
    let records = instance.tools.records.clone().forking_from(instance.tools.checkpoints.clone().unwrap());
    records.fork(source, &spec).await.unwrap();
    id
}

#[tokio::test(start_paused = true)]
async fn a_pinned_checkpoint_outlives_its_source_until_the_copy_has_two_of_its_own() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut visit = one.create(movable).await;
    visit.until_running().await;
    let Answer::Ok(done) = ask(&one, &visit.id, SpecRequest::Checkpoint {}).await else { panic!("refused") };
    let source = done.checkpoint_id.unwrap();
    let copy = fork(&one, &source).await;
    one.edit(&visit.id, |spec| spec.desired_state = DesiredState::Deleted).await;
    visit.until_left().await;
    world.after(10).await;
    let stored = async |id: &CheckpointId| {
        !one.store.list(&format!("sandbox_checkpoints/{id}/"), None).await.unwrap().entries.is_empty()
    };
    assert!(world.lock(&visit.id).await.unwrap().purged && stored(&source).await);
    for (turn, kept) in [(0, true), (1, true), (2, false)] {
        let here = if turn % 2 == 0 { &one } else { &two };
        let mut visit = here.attach(&copy).await;
        let told = visit.until_running().await;
        assert!(matches!(
            told.last(),
            Some(LifecycleEvent::Running { boot: StartKind::Restored { rolled_back: false, .. } })
        ));
        world.after(10).await;
        assert_eq!(stored(&source).await, kept, "after {turn} commits of its own");
        drop(visit);
        here.edit(&copy, |spec| spec.desired_state = DesiredState::HandedOff).await;
        world.after(10).await;
    }
    one.stop().await;
    two.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_copy_lets_go_of_stays_while_its_source_can_be_mended() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(movable).await;
    visit.until_running().await;
    let Answer::Ok(done) = ask(&one, &visit.id, SpecRequest::Checkpoint {}).await else { panic!("refused") };
    let source = done.checkpoint_id.unwrap();
    let copy = fork(&one, &source).await;
    one.store.delete(&format!("sandboxes/{}/lock.json", visit.id), Precondition::Any).await.unwrap();
    for _ in 0..3 {
        let mut visit = one.attach(&copy).await;
        visit.until_running().await;
        world.after(10).await;
        drop(visit);
        one.edit(&copy, |spec| spec.desired_state = DesiredState::HandedOff).await;
        world.after(10).await;
    }
    let at = format!("sandbox_checkpoints/{source}/");
    let left = one.store.list(&at, None).await.unwrap().entries;
    assert!(left.iter().any(|entry| entry.key.ends_with("manifest.json")), "{left:?}");
    assert!(!left.iter().any(|entry| entry.key.contains("/pins/")), "the copy has let go of it: {left:?}");
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn only_one_of_the_last_two_checkpoints_can_be_copied() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(movable).await;
    visit.until_running().await;
    let never = CheckpointId::new(&visit.id, 1, 7, &one.tools.clock.nonce());
    let mut spec = Spec::new(one.tools.clock.sandbox_id(), String::new(), String::new(), one.tools.who.me.clone());
    movable(&mut spec);
    let records = one.tools.records.clone().forking_from(one.tools.checkpoints.clone().unwrap());
    assert!(records.fork(&never, &spec).await.is_err());
    assert!(world.lock(&spec.sandbox_id).await.is_none(), "nothing was written");
    assert!(one.store.list("sandbox_checkpoints/", None).await.unwrap().entries.is_empty(), "and no pin is left");
    one.stop().await;
}

/// One that can be kept, of this tenant, and from the snapshot of this name.
fn of_tenant(tenant: Option<&'static str>, from: Option<&'static str>) -> impl Fn(&mut Spec) {
    move |spec| {
        persistent(spec);
        spec.tenant = tenant.map(|tenant| tenant.parse().unwrap());
        spec.filesystem_snapshot_name = from.map(name);
    }
}

async fn running(instance: &Instance, tenant: Option<&'static str>) -> Visit {
    let mut visit = instance.create(of_tenant(tenant, None)).await;
    visit.until_running().await;
    visit
}

async fn listed(instance: &Instance) -> Vec<String> {
    let listed = instance.tools.snapshots.as_ref().unwrap().list(None).await.unwrap();
    listed.iter().map(|listed| listed.snapshot.to_string()).collect()
}

#[tokio::test(start_paused = true)]
async fn each_tenant_has_names_of_its_own_and_may_start_from_the_public_ones() {
    let world = World::new();
    let one = world.instance();
    for tenant in [Some("team-a"), Some("team-b"), None] {
        let visit = running(&one, tenant).await;
        let Answer::Ok(done) = take(&one, &visit, "base").await else { panic!("another's name is in the way") };
        assert_eq!(done.snapshot, Some(name("base")), "clients know no tenants");
        assert_eq!(reason(&take(&one, &visit, "base").await), "SnapshotExists", "its own name is given once");
    }
    let visit = running(&one, Some("team-a")).await;
    assert!(matches!(take(&one, &visit, "secret").await, Answer::Ok(_)));
    assert_eq!(listed(&one).await, ["base", "team-a~base", "team-a~secret", "team-b~base"]);
    for (tenant, from, meant) in [
        (Some("team-a"), "base", Some("team-a~base")),
        (Some("team-b"), "base", Some("team-b~base")),
        (Some("team-c"), "base", Some("base")),
        (None, "base", Some("base")),
        (Some("team-a"), "secret", Some("team-a~secret")),
        (Some("team-b"), "secret", None),
        (None, "secret", None),
    ] {
        let fresh = world.instance();
        let mut visit = fresh.create(of_tenant(tenant, Some(from))).await;
        match meant {
            Some(meant) => {
                visit.until_running().await;
                assert_eq!(fresh.store.brought(), [format!("filesystem_snapshots/{meant}/{meant}.tar")], "{tenant:?}");
            }
            None => {
                let told = visit.until(|passing| matches!(passing, LifecycleEvent::Failed { .. })).await;
                let Some(LifecycleEvent::Failed { message, .. }) = told.last() else { panic!("{told:?}") };
                // The same words as of a name that nobody has.
                assert_eq!(message, "Filesystem snapshot not found: `secret` does not exist.");
            }
        }
        fresh.stop().await;
    }
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_stays_as_long_as_a_sandbox_of_a_tenant_that_may_mean_it() {
    let world = World::new();
    let one = world.instance();
    let source = running(&one, Some("team-a")).await;
    assert!(matches!(take(&one, &source, "base").await, Answer::Ok(_)));
    let mut visit = one.create(of_tenant(Some("team-a"), Some("base"))).await;
    visit.until_running().await;
    let checkpoints = one.tools.checkpoints.clone().unwrap();
    for (snapshot, user) in [("team-a~base", Some(&visit.id)), ("base", Some(&visit.id)), ("team-b~base", None)] {
        let found = snapshot_users::users_of(&one.tools.records, &checkpoints, &key(snapshot)).await.unwrap().first;
        assert_eq!(found.as_ref(), user, "{snapshot}");
    }
    one.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_tenant_stores_no_more_snapshots_than_its_quota_also_when_it_asks_on_two_instances_at_once() {
    let mut world = World::new();
    world.quotas = Quotas::parse("snapshots=2;team-b:snapshots=off").unwrap();
    let (one, two) = (world.instance(), world.instance());
    let (here, there) = (running(&one, Some("team-a")).await, running(&two, Some("team-a")).await);
    assert!(matches!(take(&one, &here, "first").await, Answer::Ok(_)));
    // There is room for one more. The first has counted and takes long to claim its name; meanwhile the other is stored.
    one.store.next_put_of("team-a~second/making.json", Fault::Refused);
    let (late, quick) = tokio::join!(take(&one, &here, "second"), take(&two, &there, "third"));
    assert_eq!((reason(&late), reason(&quick)), ("QuotaExceeded", "none"), "{late:?} {quick:?}");
    assert_eq!(listed(&one).await, ["team-a~first", "team-a~third"], "what is refused leaves nothing");
    let Answer::Error { message, .. } = take(&one, &here, "fourth").await else { panic!("a fourth") };
    assert!(message.contains("2 snapshots stored at once (`snapshots` in BATON_QUOTAS)"), "{message}");
    // Others have theirs, and who has no tenant has no quota.
    for tenant in [Some("team-b"), None] {
        let visit = running(&one, tenant).await;
        for text in ["first", "second", "third"] {
            assert!(matches!(take(&one, &visit, text).await, Answer::Ok(_)), "{tenant:?}");
        }
    }
    one.stop().await;
    two.stop().await;
}
