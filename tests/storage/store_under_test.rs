//! What an instance can do under each configuration, asked when it is needed and not before.

use std::{path::PathBuf, sync::Arc, time::Duration};

use baton::{
    config::StorageSettings,
    storage::{
        layout::Artifact,
        memory::Memory,
        store::{PollResult, Precondition, Store},
        stores::{Need, StorageRefusal, Stores},
    },
};

use crate::store_suite::{BUCKET, clock, fake_gcs};

/// A directory that is on no local file system, on every machine.
const NOT_LOCAL: &str = "/proc/self";

fn settings(change: impl FnOnce(&mut StorageSettings)) -> StorageSettings {
    let mut settings = StorageSettings::default();
    change(&mut settings);
    settings
}

async fn answer(settings: &StorageSettings, need: Need) -> String {
    match Stores::open(settings, &clock()).check(need).await {
        Ok(()) => "yes".to_owned(),
        Err(refusal) => refusal.to_string(),
    }
}

#[tokio::test]
async fn what_a_request_needs_is_there_or_refused_with_the_documented_text() {
    let root = tempfile::tempdir().unwrap();
    let local = |name: &str| Some(root.path().join(name));
    let (no_checkpoints, no_snapshots) =
        ("Checkpointing is not enabled on the server.", "Filesystem snapshot is not enabled on the server.");
    let text = |text: &str| Some(text.to_owned());
    let table = [
        ("nothing", settings(|_| {}), no_checkpoints, no_snapshots),
        ("one directory", settings(|s| s.all_mount = local("all")), "yes", "yes"),
        ("metadata alone", settings(|s| s.metadata_bucket = text("m")), no_checkpoints, no_snapshots),
        ("checkpoints alone", settings(|s| s.checkpoint_bucket = text("c")), no_checkpoints, no_snapshots),
        ("snapshots alone", settings(|s| s.snapshot_mount = local("s")), no_checkpoints, "yes"),
        (
            "buckets",
            settings(|s| (s.metadata_bucket, s.checkpoint_bucket) = (text("m"), text("c"))),
            "yes",
            no_snapshots,
        ),
        (
            "a lock bucket gives metadata no home",
            settings(|s| (s.lock_bucket, s.checkpoint_bucket) = (text("l"), text("c"))),
            no_checkpoints,
            no_snapshots,
        ),
        (
            "artifacts on a mounted bucket",
            settings(|s| {
                s.metadata_bucket = text("m");
                s.checkpoint_mount = Some(PathBuf::from(NOT_LOCAL));
            }),
            "yes",
            no_snapshots,
        ),
    ];
    for (name, settings, checkpoint, snapshot) in table {
        assert_eq!(answer(&settings, Need::Checkpoint).await, checkpoint, "{name}");
        assert_eq!(answer(&settings, Need::Snapshot).await, snapshot, "{name}");
    }
}

#[tokio::test]
async fn metadata_on_anything_but_a_local_file_system_is_refused_with_advice() {
    for settings in [
        settings(|s| s.all_mount = Some(NOT_LOCAL.into())),
        settings(|s| {
            s.metadata_mount = Some(PathBuf::from(NOT_LOCAL).join("not/there/yet"));
            s.checkpoint_bucket = Some("c".to_owned());
        }),
        settings(|s| {
            // Metadata needs compare-and-set, wherever the lock lies.
            s.lock_bucket = Some("l".to_owned());
            s.metadata_mount = Some(NOT_LOCAL.into());
            s.checkpoint_bucket = Some("c".to_owned());
        }),
    ] {
        let refusal = Stores::open(&settings, &clock()).check(Need::Checkpoint).await.unwrap_err();
        assert!(matches!(refusal, StorageRefusal::NotLocal), "{refusal}");
        assert!(refusal.to_string().contains("Set SANDBOX_METADATA_BUCKET."), "{refusal}");
    }
}

#[tokio::test]
async fn a_lock_bucket_moves_the_lock_alone() {
    let (fake, root) = (fake_gcs().await, tempfile::tempdir().unwrap());
    let settings = settings(|s| {
        s.gcs_endpoint = Some(fake.url().to_owned());
        s.lock_bucket = Some(BUCKET.to_owned());
        s.all_mount = Some(root.path().to_owned());
        s.call_timeout = Duration::from_secs(20);
    });
    let stores = Stores::open(&settings, &clock());
    let (lock, metadata) = (stores.lock.unwrap(), stores.metadata.unwrap());
    assert_eq!((lock.bucket.as_deref(), metadata.bucket), (Some(BUCKET), None));
    lock.store.put("sandboxes/x/lock.json", "{}".into(), Precondition::Absent).await.unwrap();
    metadata.store.put("sandboxes/x/metadata.json", "{}".into(), Precondition::Absent).await.unwrap();
    assert!(fake.content(BUCKET, "sandboxes/x/lock.json").is_some());
    assert!(fake.content(BUCKET, "sandboxes/x/metadata.json").is_none());
    assert!(root.path().join("sandboxes/x/metadata.json").exists());
    assert!(!root.path().join("sandboxes/x/lock.json").exists());
}

#[tokio::test]
async fn a_directory_that_does_not_exist_is_made_at_the_first_write_and_not_before() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("not/there/yet");
    let stores = Stores::open(&settings(|s| s.all_mount = Some(path.clone())), &clock());
    stores.check(Need::Checkpoint).await.unwrap();
    let checkpoints = stores.checkpoints.unwrap().store;
    assert_eq!(checkpoints.get_if_changed("a", None).await.unwrap(), PollResult::Missing);
    assert!(!path.exists());
    checkpoints.put("a", "1".into(), Precondition::Absent).await.unwrap();
    assert!(path.join("a").exists());
}

#[tokio::test]
async fn a_probe_says_of_each_store_whether_it_works_and_leaves_nothing() {
    let (fake, root) = (fake_gcs().await, tempfile::tempdir().unwrap());
    let settings = settings(|s| {
        s.gcs_endpoint = Some(fake.url().to_owned());
        s.metadata_bucket = Some(BUCKET.to_owned());
        s.checkpoint_bucket = Some("not-there".to_owned());
        s.snapshot_mount = Some(root.path().to_owned());
        s.call_timeout = Duration::from_secs(20);
    });
    let probes = Stores::open(&settings, &clock()).probe().await;
    let worked: Vec<_> = probes.iter().map(|probe| (probe.artifact, probe.result.is_ok())).collect();
    let expected = [true, true, false, true];
    assert_eq!(worked, Artifact::ALL.into_iter().zip(expected).collect::<Vec<_>>());
    let said = probes[2].result.as_ref().unwrap_err().to_string();
    assert!(said.contains("bucket does not exist"), "{said}");
    let store = Stores::open(&settings, &clock()).metadata.unwrap().store;
    assert!(store.list("", None).await.unwrap().entries.is_empty());
    assert!(!root.path().join("probes").exists());
}

#[tokio::test]
async fn one_store_can_be_all_of_them() {
    let store: Arc<dyn Store> = Arc::new(Memory::new(clock()));
    let stores = Stores::of(&store, &clock());
    stores.check(Need::Checkpoint).await.unwrap();
    stores.check(Need::Snapshot).await.unwrap();
}

#[tokio::test]
async fn locks_and_metadata_in_one_bucket_are_one_store_also_when_it_is_counted() {
    use baton::metrics::Metrics;
    let one = settings(|s| s.metadata_bucket = Some(BUCKET.to_owned()));
    let two = settings(|s| {
        s.metadata_bucket = Some(BUCKET.to_owned());
        s.lock_bucket = Some("locks".to_owned());
    });
    for (settings, is_one) in [(one, true), (two, false)] {
        let stores = Stores::open(&settings, &clock()).counted(&Metrics::default());
        let (locks, metadata) = (stores.lock.unwrap().store, stores.metadata.unwrap().store);
        assert_eq!(Arc::ptr_eq(&locks, &metadata), is_one, "a sweep lists each store once");
    }
}
