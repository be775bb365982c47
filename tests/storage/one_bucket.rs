//! One bucket, two ways: an instance that mounts it and one that does not use the same objects.

use std::{path::Path, sync::Arc, time::Duration};

use baton::{
    config::StorageSettings,
    storage::{
        checkpoint_io,
        checkpoints::Checkpoints,
        gcsfuse::Mounted,
        layout::Artifact,
        snapshots::{NameClaim, NamedSnapshot, Snapshots},
        store::{Digest, Error, PollResult, Precondition, Store},
        stores::Stores,
    },
};
use baton_fake_gcs::FakeGcs;
use baton_protocol::{
    manifest::{ArchivePath, CheckpointManifest},
    snapshot_key::SnapshotKey,
};

use crate::{
    artifacts::{image, manifest_of},
    gcsfuse_mount::Gcsfuse,
    store_suite::{BUCKET, clock, fake_gcs, gcs_on},
};

const NO_PROGRESS: &(dyn Fn(u64) + Send + Sync) = &|_| {};

/// One bucket, reached without a mount and through one.
struct OneBucket {
    direct: Arc<dyn Store>,
    mounted: Arc<dyn Store>,
    mount: Gcsfuse,
    fake: FakeGcs,
    place: tempfile::TempDir,
}

impl OneBucket {
    async fn new() -> Self {
        let (fake, place) = (fake_gcs().await, tempfile::tempdir().unwrap());
        let mount = Gcsfuse::mount(fake.url(), BUCKET, &place.path().join("mount"));
        let direct = Arc::new(gcs_on(&fake).with_write_rate(1e6, 1e6));
        let mounted = Arc::new(Mounted::new(mount.path(), clock()));
        Self { direct, mounted, mount, fake, place }
    }

    /// Writer and reader, in both orders.
    fn ways(&self) -> [(Arc<dyn Store>, Arc<dyn Store>); 2] {
        [(self.direct.clone(), self.mounted.clone()), (self.mounted.clone(), self.direct.clone())]
    }

    fn names(&self) -> Vec<String> {
        self.fake.names(BUCKET)
    }
}

async fn made_of(folder: &Path) -> CheckpointManifest {
    image(folder);
    manifest_of(checkpoint_io::hash(&clock(), folder).await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_stored_one_way_is_restored_and_erased_the_other() {
    let bucket = OneBucket::new().await;
    for (number, (writer, reader)) in bucket.ways().into_iter().enumerate() {
        let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut manifest = made_of(source.path()).await;
        manifest.created = number.to_string();
        let sha256 = checkpoint_io::upload(&*writer, &clock(), source.path(), &manifest, &|_, _| {}).await.unwrap();
        let id = &manifest.checkpoint_id;
        let found = checkpoint_io::manifest(&*reader, &clock(), id, &sha256).await.unwrap();
        checkpoint_io::download(&*reader, &clock(), &found, target.path(), &|_, _| {}).await.unwrap();
        for file in &manifest.files {
            let bytes = |folder: &Path| std::fs::read(folder.join(&file.name)).unwrap();
            assert_eq!(bytes(target.path()), bytes(source.path()), "{}", file.name);
        }
        let checkpoints = Checkpoints::new(reader.clone(), None, clock());
        let ids = checkpoints.list(&manifest.sandbox_id).await.unwrap();
        assert!(ids.len() == 1 && ids.contains(id), "{ids:?}");
        assert!(!checkpoints.is_pinned(id).await.unwrap());
        checkpoints.pin(id, &manifest.sandbox_id).await.unwrap();
        let other = Checkpoints::new(writer.clone(), None, clock());
        other.unpin(id, &manifest.sandbox_id).await.unwrap();
        assert!(!checkpoints.is_pinned(id).await.unwrap(), "an empty directory is no pin");
        checkpoints.erase(id).await.unwrap();
        let left: Vec<_> = bucket.names().into_iter().filter(|name| name.contains(id.as_str())).collect();
        assert_eq!(left, [""; 0], "no directory is left behind either");
        other.erase(id).await.expect("once more, by whom its caches still show it");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_made_one_way_is_found_taken_and_erased_the_other() {
    let bucket = OneBucket::new().await;
    for (name, (writer, reader)) in ["one", "team-a~two"].into_iter().zip(bucket.ways()) {
        let name = SnapshotKey::parse(name).unwrap();
        let archive = bucket.place.path().join("archive");
        std::fs::write(&archive, name.to_string()).unwrap();
        let (nonce, other) = (clock().nonce(), clock().nonce());
        let (made, seen) = (Snapshots::new(writer, None, clock()), Snapshots::new(reader, None, clock()));
        assert_eq!(made.claim(&name, &nonce).await.unwrap(), NameClaim::Ours);
        assert_eq!(seen.claim(&name, &other).await.unwrap(), NameClaim::Taken);
        assert_eq!(seen.find(&name).await.unwrap(), NamedSnapshot::Unfinished);
        made.store(&name, &archive, &|_, _| {}).await.unwrap();
        let target = bucket.place.path().join("fetched");
        let key = format!("filesystem_snapshots/{name}/{name}.tar");
        seen.fetch(&ArchivePath::parse(&key).unwrap(), &target, 1 << 20, NO_PROGRESS).await.unwrap();
        assert_eq!(std::fs::read_to_string(&target).unwrap(), name.to_string());
        seen.erase(&name).await.unwrap();
        assert_eq!(seen.list(None).await.unwrap(), []);
        assert_eq!(seen.claim(&name, &other).await.unwrap(), NameClaim::Ours, "the name is free again");
        seen.erase(&name).await.unwrap();
    }
    let kept = |name: &String| name != "filesystem_snapshots/";
    assert_eq!(bucket.names().into_iter().filter(kept).collect::<Vec<_>>(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_mounts_that_write_one_name_one_wins_and_keeps_it() {
    let bucket = OneBucket::new().await;
    let second = Gcsfuse::mount(bucket.fake.url(), BUCKET, &bucket.place.path().join("second"));
    let stores = [bucket.mounted.clone(), Arc::new(Mounted::new(second.path(), clock())) as Arc<dyn Store>];
    for round in 0..10 {
        let key = format!("races/{round}");
        let put = |store: &Arc<dyn Store>, text: &'static str| {
            let (store, key) = (store.clone(), key.clone());
            tokio::spawn(async move { store.put(&key, text.into(), Precondition::Absent).await.map(|_| text) })
        };
        let (one, two) = tokio::join!(put(&stores[0], "one"), put(&stores[1], "two"));
        let (winners, losers): (Vec<_>, Vec<_>) = [one.unwrap(), two.unwrap()].into_iter().partition(Result::is_ok);
        assert_eq!(winners.len(), 1, "{losers:?}");
        assert!(matches!(losers[0], Err(Error::Conflict(_))), "{losers:?}");
        let kept = bucket.fake.content(BUCKET, &key).expect("a loser takes nothing away");
        assert_eq!(kept, winners[0].as_ref().unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_other_way_deleted_is_gone_and_what_it_changed_is_not_mistaken() {
    let bucket = OneBucket::new().await;
    bucket.mounted.put("a/b", "1".into(), Precondition::Absent).await.unwrap();
    assert!(
        matches!(bucket.mounted.get_if_changed("a/b", None).await.unwrap(), PollResult::Changed(..)),
        "it is in the caches"
    );
    bucket.direct.delete("a/b", Precondition::Any).await.unwrap();
    let error = bucket.mounted.delete("a/b", Precondition::Any).await.unwrap_err();
    assert!(matches!(error, Error::NotFound(_)), "{error}");
    // A file whose content another way replaced by something of the same length is refused, not believed.
    let target = bucket.place.path().join("target");
    bucket.mounted.put("a/c", "1".into(), Precondition::Absent).await.unwrap();
    bucket.fake.put(BUCKET, "a/c", "2");
    let error = bucket.mounted.download("a/c", &target, &Digest::of(b"1"), NO_PROGRESS).await.unwrap_err();
    assert!(!target.exists(), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_is_recorded_by_the_name_of_its_bucket_and_a_probe_finds_out_if_that_is_wrong() {
    let bucket = OneBucket::new().await;
    let mut settings = StorageSettings {
        gcs_endpoint: Some(bucket.fake.url().to_owned()),
        metadata_bucket: Some(BUCKET.to_owned()),
        checkpoint_bucket: Some(BUCKET.to_owned()),
        checkpoint_mount: Some(bucket.mount.path().to_owned()),
        snapshot_bucket: Some(BUCKET.to_owned()),
        snapshot_mount: Some(bucket.place.path().join("only a directory")),
        call_timeout: Duration::from_secs(20),
        ..StorageSettings::default()
    };
    let stores = Stores::open(&settings, &clock());
    assert_eq!(stores.of_checkpoints().unwrap().bucket().map(String::as_str), Some(BUCKET));
    let probes = stores.probe().await;
    let of = |artifact| probes.iter().find(|probe| probe.artifact == artifact).unwrap();
    of(Artifact::Checkpoints).result.as_ref().expect("the mount shows the bucket");
    let error = of(Artifact::Snapshots).result.as_ref().unwrap_err().to_string();
    assert!(error.contains("the mount shows another one"), "{error}");
    assert!(!bucket.names().iter().any(|name| name.contains("probes/") && !name.ends_with('/')));
    settings.checkpoint_bucket = None;
    assert_eq!(Stores::open(&settings, &clock()).of_checkpoints().unwrap().bucket(), None);
}
