//! A holder that died, as views show it: since when, and what comes of it; on every store that can lock.

use std::{sync::Arc, time::Duration};

use baton::{
    cli::{
        checkpoint, get,
        global_options::OutputFormat,
        list,
        rows::{Filter, ShownPhase},
        storage_admin::StorageAdmin,
        watch,
    },
    clock::{SharedClock, SystemClock},
    config::LeaseTimes,
    storage::{
        directory::Directory,
        gcs::{Gcs, GcsConnection},
        layout::Object,
        memory::Memory,
        records::{Durable, Records},
        store::{Precondition, Store},
    },
};
use baton_fake_gcs::{FakeGcs, FakeGcsOptions};
use baton_protocol::{
    id::{InstanceId, Nonce, SandboxId},
    lock::{Lease, Lock},
    metadata::{Metadata, Phase, SandboxStatus, Spec},
};
use serde_json::{Value, json};

use crate::{
    instances::World,
    verbs::{WAIT, admin, done, running},
};

async fn listed(admin: &StorageAdmin, phase: Option<ShownPhase>, output: OutputFormat) -> String {
    let mut out = Vec::new();
    list::write_list(admin, &Filter { phase, ..Filter::default() }, output, &mut out).await.unwrap();
    String::from_utf8(out).unwrap()
}

async fn phase(admin: &StorageAdmin) -> Value {
    let rows: Value = serde_json::from_str(&listed(admin, None, OutputFormat::Json).await).unwrap();
    rows[0]["phase"].clone()
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_died_is_shown_as_such_and_one_that_lives_never_is() {
    let world = World::new();
    let (one, admin) = (world.instance(), admin(&world));
    let id = running(&world, &one).await;
    done(checkpoint::checkpoint_running(&admin, &id, WAIT)).await;
    for _ in 0..120 {
        world.after(5).await;
        assert_eq!(phase(&admin).await, json!("running"));
    }
    let me = one.tools.who.me.clone();
    let one = one.die().await;
    world.after(20).await;
    assert_eq!(phase(&admin).await, json!("running"), "it may come back");
    world.after(15).await;

    let table = listed(&admin, None, OutputFormat::Table).await;
    let row = table.lines().nth(1).unwrap();
    let taken = one.metadata(&id).await.unwrap().last_checkpointed.unwrap();
    for part in [" unresponsive ", " Unresponsive ", me.as_str(), "has not renewed its lease since", &taken] {
        assert!(row.contains(part), "{part}: {row}");
    }
    assert!(row.contains("the next attach takes over and restores the checkpoint of"), "{row}");
    assert!(!row.replace("running ", "").contains("running"), "only what is wanted is called running: {row}");
    let json: Value = serde_json::from_str(&listed(&admin, None, OutputFormat::Json).await).unwrap();
    let silent = &json[0]["unresponsive"];
    assert_eq!((&json[0]["phase"], &silent["instance"]), (&json!("unresponsive"), &json!(me)));
    assert!((30..40).contains(&silent["seconds"].as_u64().unwrap()), "{silent}");
    assert!(humantime::parse_rfc3339(silent["since"].as_str().unwrap()).is_ok(), "{silent}");
    assert!(listed(&admin, Some(ShownPhase::Reported(Phase::Running)), OutputFormat::Table).await.is_empty());
    assert_eq!(listed(&admin, Some(ShownPhase::Unresponsive), OutputFormat::Table).await, table);

    let text = get::describe(&admin, &id, OutputFormat::Table).await.unwrap();
    for part in ["phase       unresponsive", "silent      for 3", "remedy", "restores the checkpoint of"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let view = get::describe(&admin, &id, OutputFormat::Json).await.unwrap();
    let view: Value = serde_json::from_str(&view).unwrap();
    assert_eq!((&view["phase"], &view["reason"]), (&json!("unresponsive"), &json!("Unresponsive")));

    // The line stays the same for as long as nothing happens; then it runs elsewhere.
    let two = world.instance();
    let mut said = Vec::new();
    let watched = watch::Watched { id: Some(id.clone()), filter: Filter::default(), every: Duration::from_secs(2) };
    let source = watch::RowSource::Storage(Box::new(admin.clone()));
    let mut out = |text: &str| {
        said.push(text.to_owned());
        Ok(())
    };
    let watching = watch::watch_rows(&source, &watched, false, &mut out);
    let moving = async {
        world.after(60).await;
        two.attach(&id).await.until_running().await;
        world.after(10).await;
    };
    tokio::select! {
        ended = watching => panic!("{ended:?}"),
        () = moving => {}
    }
    assert!(
        said[0].contains("unresponsive") && said.iter().filter(|line| line.contains("unresponsive")).count() <= 2,
        "{said:?}"
    );
    assert!(said.last().unwrap().contains(" running "), "{said:?}");
    assert_eq!(phase(&admin).await, json!("running"));
    two.stop().await;
    one.stop().await;
}

/// A sandbox that says it runs, and whose holder never renews.
async fn abandoned(store: &dyn Store, takeover: Duration) {
    let id = SandboxId::parse("sandbox-abc-123").unwrap();
    let owner = InstanceId::from_bits([7; 16]);
    let takeover_ms = u64::try_from(takeover.as_millis()).unwrap();
    let lease = Lease { owner: owner.clone(), renew: 1, op: Nonce::from_bits([1; 16]), hold_ms: 1, takeover_ms };
    let lock = Lock { epoch: 1, ran: true, lease: Some(lease), ..Lock::new(id.clone()) };
    let mut spec = Spec::new(id.clone(), String::new(), "2026-11-16T10:00:00Z".to_owned(), owner.clone());
    spec.enable_sandbox_checkpoint = true;
    let status = SandboxStatus { phase: Phase::Running, instance: Some(owner), epoch: 1, ..SandboxStatus::default() };
    let record = Metadata { spec, latest_sandbox_checkpoint: None, last_checkpointed: None, status };
    let text = |record: &Value| serde_json::to_vec(record).unwrap();
    store.put(&Object::Lock(&id).key(), text(&json!(lock)).into(), Precondition::Absent).await.unwrap();
    store.put(&Object::Metadata(&id).key(), text(&json!(record)).into(), Precondition::Absent).await.unwrap();
}

async fn shown_in_time(store: Arc<dyn Store>) {
    let clock: SharedClock = Arc::new(SystemClock);
    let admin = |takeover: Duration| {
        let durable = Durable { locks: store.clone(), metadata: store.clone(), lock_bucket: None };
        let times = LeaseTimes { takeover, call: Duration::from_secs(20), ..LeaseTimes::DEFAULT };
        let memory = Arc::new(Memory::new(clock.clone()));
        let records = Records::new(clock.clone(), memory, Some(durable), true, times);
        StorageAdmin { is_quiet: true, ..StorageAdmin::new(clock.clone(), records, None, times, 2) }
    };
    let takeover = Duration::from_millis(300);
    abandoned(&*store, takeover).await;
    // By the time of whoever looks it is not over yet.
    assert_eq!(phase(&admin(Duration::from_secs(3600))).await, json!("running"));
    let admin = admin(takeover);
    let shown = async {
        while phase(&admin).await != json!("unresponsive") {
            clock.sleep(Duration::from_millis(20)).await;
        }
    };
    clock.timeout(Duration::from_secs(60), shown).await.expect("it is shown");
    let row = listed(&admin, Some(ShownPhase::Unresponsive), OutputFormat::Table).await;
    assert!(row.contains("it has no checkpoint"), "{row}");
}

#[tokio::test]
async fn it_is_shown_in_memory() {
    shown_in_time(Arc::new(Memory::new(Arc::new(SystemClock)))).await;
}

#[tokio::test]
async fn it_is_shown_in_a_directory() {
    let root = tempfile::tempdir().unwrap();
    shown_in_time(Arc::new(Directory::new(root.path(), Arc::new(SystemClock)))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_shown_in_a_bucket() {
    let options = FakeGcsOptions { buckets: vec!["b".to_owned()], ..FakeGcsOptions::default() };
    let fake = FakeGcs::start(([127, 0, 0, 1], 0).into(), options).await.unwrap();
    let connection = Arc::new(GcsConnection::new(Some(fake.url().to_owned())));
    let patience = Duration::from_secs(20);
    shown_in_time(Arc::new(Gcs::new(connection, "b", Arc::new(SystemClock)).with_timeouts(patience, patience))).await;
}
