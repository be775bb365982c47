//! Checkpoints into storage and back, over every store and with things going wrong.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
};

use baton::storage::{
    checkpoint_io,
    directory::Directory,
    gcsfuse::Mounted,
    layout::{Image, Object},
    memory::Memory,
    store::{Error, PollResult, Precondition, Store},
};
use baton_fake_gcs::{FaultKind, InjectedFault, Op};
use baton_protocol::{
    id::{CheckpointId, Nonce, SandboxId, Sha256Name},
    manifest::{self, CheckpointManifest, Rootfs, RunscBuild},
    versioned::Versioned as _,
};

use crate::{
    store_cases::noise,
    store_suite::{BUCKET, clock, fake_gcs, gcs_on},
};

const QUIET: checkpoint_io::Total<'static> = &|_, _| {};

pub fn checkpoint_id() -> CheckpointId {
    let sandbox = SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
    CheckpointId::new(&sandbox, 7, 12, &Nonce::from_bits([0xab; 16]))
}

/// A folder as runsc leaves it: a small file, a tiny one and a large one.
pub fn image(folder: &Path) {
    for (image, size) in Image::ALL.into_iter().zip([300_000, 17, 33 << 20]) {
        std::fs::write(folder.join(image.file_name()), noise(size as u64, size)).unwrap();
    }
}

pub fn manifest_of(files: Vec<manifest::File>) -> CheckpointManifest {
    let id = checkpoint_id();
    CheckpointManifest {
        version: CheckpointManifest::VERSION,
        sandbox_id: id.sandbox(),
        epoch: id.epoch(),
        seq: id.seq(),
        checkpoint_id: id,
        parent: None,
        files,
        runsc: RunscBuild { version: "v".into(), platform: "systrap".into(), flags: Vec::new(), sha256: None },
        cpu_features: Vec::new(),
        oci_sha256: String::new(),
        agent_marker: String::new(),
        created: String::new(),
        rootfs: Rootfs {
            digest: Sha256Name::from_bits([0; 32]),
            base_digest: Sha256Name::from_bits([0; 32]),
            archive: None,
        },
        layer: None,
    }
}

fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
        })
        .collect()
}

/// Up, and down into another folder by the hash alone.
async fn round_trip(store: &dyn Store) {
    let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    image(source.path());
    let manifest = manifest_of(checkpoint_io::hash(&clock(), source.path()).await.unwrap());
    let told = Mutex::new(Vec::new());
    let progress = |done, total| told.lock().unwrap().push((done, total));
    let sha256 = checkpoint_io::upload(store, &clock(), source.path(), &manifest, &progress).await.unwrap();
    let size: u64 = manifest.files.iter().map(|file| file.size).sum();
    assert_eq!(told.lock().unwrap().iter().max(), Some(&(size, size)));
    told.lock().unwrap().clear();
    let found = checkpoint_io::manifest(store, &clock(), &manifest.checkpoint_id, &sha256).await.unwrap();
    assert_eq!(found, manifest);
    checkpoint_io::download(store, &clock(), &found, target.path(), &progress).await.unwrap();
    assert_eq!(told.lock().unwrap().iter().max(), Some(&(size, size)));
    assert!(contents(source.path()) == contents(target.path()));
}

#[tokio::test]
async fn a_checkpoint_comes_back_as_it_went_from_every_store() {
    let root = tempfile::tempdir().unwrap();
    let fake = fake_gcs().await;
    let stores: [Arc<dyn Store>; 4] = [
        Arc::new(Memory::new(clock())),
        Arc::new(Directory::new(root.path().join("local"), clock())),
        Arc::new(Mounted::new(root.path().join("mounted"), clock())),
        Arc::new(gcs_on(&fake)),
    ];
    for store in stores {
        round_trip(&*store).await;
    }
}

#[tokio::test]
async fn a_checkpoint_survives_lost_replies_cuts_and_refusals_on_its_way() {
    let fake = fake_gcs().await;
    for (op, kind, object) in [
        (Op::Write, FaultKind::Lost, "pages_meta.img"),
        (Op::Write, FaultKind::Status(503), "checkpoint.img"),
        (Op::Write, FaultKind::Status(429), "checkpoint.img"),
        (Op::Start, FaultKind::Drop, "pages.img"),
        (Op::Put, FaultKind::Cut(1 << 20), "pages.img"),
        (Op::Put, FaultKind::Lost, "pages.img"),
        (Op::Write, FaultKind::Lost, "manifest.json"),
        (Op::Read, FaultKind::Status(503), "manifest.json"),
        (Op::Read, FaultKind::Cut(100_000), "checkpoint.img"),
        (Op::Read, FaultKind::Drop, "pages.img"),
        (Op::Read, FaultKind::Cut(5 << 20), "pages.img"),
    ] {
        fake.add_fault(InjectedFault::new(op, kind).on(object));
    }
    round_trip(&gcs_on(&fake)).await;
    assert_eq!(fake.faults_left(), [], "all of them have happened");
}

#[tokio::test]
async fn a_manifest_of_a_later_version_is_not_taken_for_a_damaged_one() {
    let store = Memory::new(clock());
    let source = tempfile::tempdir().unwrap();
    image(source.path());
    let mut manifest = manifest_of(checkpoint_io::hash(&clock(), source.path()).await.unwrap());
    manifest.version += 1;
    let sha256 = checkpoint_io::upload(&store, &clock(), source.path(), &manifest, QUIET).await.unwrap();
    let read = checkpoint_io::manifest(&store, &clock(), &manifest.checkpoint_id, &sha256).await;
    assert!(matches!(read, Err(Error::Newer { .. })), "{read:?}");
}

#[tokio::test]
async fn an_upload_is_safe_to_repeat_and_refuses_another_checkpoint_of_the_same_name() {
    let store = Memory::new(clock());
    let source = tempfile::tempdir().unwrap();
    image(source.path());
    let manifest = manifest_of(checkpoint_io::hash(&clock(), source.path()).await.unwrap());
    let first = checkpoint_io::upload(&store, &clock(), source.path(), &manifest, QUIET).await.unwrap();
    let again = checkpoint_io::upload(&store, &clock(), source.path(), &manifest, QUIET).await.unwrap();
    assert_eq!(first, again);
    let other = CheckpointManifest { created: "later".into(), ..manifest };
    let error = checkpoint_io::upload(&store, &clock(), source.path(), &other, QUIET).await.unwrap_err();
    assert!(matches!(error, Error::Conflict(_)), "{error:?}");
}

#[tokio::test]
async fn the_manifest_comes_last() {
    let store = Memory::new(clock());
    let source = tempfile::tempdir().unwrap();
    image(source.path());
    let manifest = manifest_of(checkpoint_io::hash(&clock(), source.path()).await.unwrap());
    let pages = source.path().join("pages.img");
    let mut bytes = std::fs::read(&pages).unwrap();
    bytes[5] ^= 1;
    std::fs::write(&pages, bytes).unwrap();
    let error = checkpoint_io::upload(&store, &clock(), source.path(), &manifest, QUIET).await.unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
    let key = Object::CheckpointManifest(&manifest.checkpoint_id).key();
    assert_eq!(store.get_if_changed(&key, None).await.unwrap(), PollResult::Missing);
}

#[tokio::test]
async fn one_wrong_bit_anywhere_is_refused_before_use() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    let source = tempfile::tempdir().unwrap();
    image(source.path());
    let manifest = manifest_of(checkpoint_io::hash(&clock(), source.path()).await.unwrap());
    let id = &manifest.checkpoint_id;
    let sha256 = checkpoint_io::upload(&store, &clock(), source.path(), &manifest, QUIET).await.unwrap();
    for object in Image::ALL.map(|image| Object::Image(id, image)).map(|object| object.key()) {
        let whole = fake.content(BUCKET, &object).unwrap();
        for place in 0..10 {
            let mut rotten = whole.to_vec();
            let at = place * (whole.len() - 1) / 9;
            rotten[at] ^= 1 << (place % 8);
            fake.put(BUCKET, &object, rotten);
            let target = tempfile::tempdir().unwrap();
            let answer = checkpoint_io::download(&store, &clock(), &manifest, target.path(), QUIET).await;
            assert!(matches!(answer, Err(Error::Damaged { .. })), "{object} at {at}: {answer:?}");
            assert!(!target.path().join(object.rsplit('/').next().unwrap()).exists());
        }
        fake.put(BUCKET, &object, whole);
    }
    let key = Object::CheckpointManifest(id).key();
    let mut other = fake.content(BUCKET, &key).unwrap().to_vec();
    other.push(b' ');
    fake.put(BUCKET, &key, other);
    let error = checkpoint_io::manifest(&store, &clock(), id, &sha256).await.unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
}

#[tokio::test]
async fn a_manifest_that_names_other_files_is_refused() {
    let store = Memory::new(clock());
    let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    image(source.path());
    let files = checkpoint_io::hash(&clock(), source.path()).await.unwrap();
    let renamed = |name: &str| {
        let mut files = files.clone();
        files[0].name = name.to_owned();
        files
    };
    for wrong in [Vec::new(), files[..2].to_vec(), renamed("../../etc/passwd"), renamed("pages.img"), renamed("x")] {
        let manifest = manifest_of(wrong);
        let up = checkpoint_io::upload(&store, &clock(), source.path(), &manifest, QUIET).await;
        let down = checkpoint_io::download(&store, &clock(), &manifest, target.path(), QUIET).await;
        assert!(matches!(up, Err(Error::Damaged { .. })) && matches!(down, Err(Error::Damaged { .. })));
    }
}

#[tokio::test]
async fn a_missing_file_is_said_at_once() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path());
    std::fs::remove_file(folder.path().join("pages.img")).unwrap();
    let error = checkpoint_io::hash(&clock(), folder.path()).await.unwrap_err();
    assert!(matches!(error, Error::NotFound(_)), "{error:?}");
    let store = Memory::new(clock());
    let error =
        checkpoint_io::manifest(&store, &clock(), &checkpoint_id(), &Sha256Name::from_bits([0; 32])).await.unwrap_err();
    assert!(matches!(error, Error::NotFound(_)), "{error:?}");
}

#[tokio::test]
async fn a_purge_erases_the_checkpoint_and_nothing_beside_it() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    let source = tempfile::tempdir().unwrap();
    image(source.path());
    let manifest = manifest_of(checkpoint_io::hash(&clock(), source.path()).await.unwrap());
    checkpoint_io::upload(&store, &clock(), source.path(), &manifest, QUIET).await.unwrap();
    let beside = format!("sandbox_checkpoints/{}0/manifest.json", manifest.checkpoint_id);
    store.put(&beside, "x".into(), Precondition::Absent).await.unwrap();
    fake.add_fault(InjectedFault::new(Op::Delete, FaultKind::Lost));
    checkpoint_io::purge(&store, &clock(), &manifest.checkpoint_id).await.unwrap();
    checkpoint_io::purge(&store, &clock(), &manifest.checkpoint_id).await.expect("it is safe to repeat");
    let left = store.list("sandbox_checkpoints/", None).await.unwrap().entries;
    assert_eq!(left.into_iter().map(|entry| entry.key).collect::<Vec<_>>(), [beside]);
}
