//! A mounted bucket: files show late, and `close` is where they fail.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use baton::storage::{
    checkpoint_io,
    gcsfuse::{Disk, Files, GcsfuseWriter, Mounted},
    store::{Digest, Error, PollResult, Precondition, Store},
};

use crate::{
    artifacts::{image, manifest_of},
    store_suite::clock,
};

const NO_PROGRESS: &(dyn Fn(u64) + Send + Sync) = &|_| {};

/// Hides each new file from its first readers, and fails to close when told.
#[derive(Debug, Default)]
struct Layer {
    /// How many looks a new file stays hidden for.
    hidden_looks: u32,
    /// Looks taken so far at each file.
    looks: Arc<Mutex<HashMap<PathBuf, u32>>>,
    stale: bool,
    closes_to_fail: Arc<AtomicU32>,
}

impl Layer {
    fn look(&self, path: &Path) -> io::Result<()> {
        let mut looks = self.looks.lock().unwrap();
        let seen = looks.entry(path.to_owned()).or_default();
        *seen += 1;
        if *seen > self.hidden_looks {
            return Ok(());
        }
        let kind = if self.stale { io::ErrorKind::StaleNetworkFileHandle } else { io::ErrorKind::NotFound };
        Err(kind.into())
    }
}

impl Disk for Layer {
    fn create(&self, path: &Path, replace: bool) -> io::Result<Box<dyn GcsfuseWriter>> {
        let inner = Files.create(path, replace)?;
        Ok(Box::new(Page { inner, closes_to_fail: self.closes_to_fail.clone() }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + Send>> {
        self.look(path)?;
        Files.open(path)
    }

    fn size(&self, path: &Path) -> io::Result<u64> {
        self.look(path)?;
        Files.size(path)
    }
}

struct Page {
    inner: Box<dyn GcsfuseWriter>,
    closes_to_fail: Arc<AtomicU32>,
}

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.inner.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl GcsfuseWriter for Page {
    fn close(self: Box<Self>) -> io::Result<()> {
        self.inner.close()?;
        let fails = self.closes_to_fail.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if fails.is_ok() { Err(io::Error::other("the object could not be finished")) } else { Ok(()) }
    }
}

#[tokio::test]
async fn a_checkpoint_that_shows_late_is_waited_for() {
    for stale in [false, true] {
        let (root, source, target) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let writer = Mounted::new(root.path(), clock());
        image(source.path());
        let manifest = manifest_of(checkpoint_io::hash(&clock(), source.path()).await.unwrap());
        let sha256 = checkpoint_io::upload(&writer, &clock(), source.path(), &manifest, &|_, _| {}).await.unwrap();
        // Another machine, whose caches know nothing yet.
        let layer = Layer { hidden_looks: 3, stale, ..Layer::default() };
        let reader = Mounted::new(root.path(), clock()).with_disk(Arc::new(layer));
        let id = &manifest.checkpoint_id;
        let found = checkpoint_io::manifest(&reader, &clock(), id, &sha256).await.unwrap();
        checkpoint_io::download(&reader, &clock(), &found, target.path(), &|_, _| {}).await.unwrap();
        assert_eq!(std::fs::read_dir(target.path()).unwrap().count(), 3);
    }
}

#[tokio::test]
async fn a_file_that_never_shows_is_not_waited_for_for_ever() {
    let root = tempfile::tempdir().unwrap();
    let store = Mounted::new(root.path(), clock()).with_settling(Duration::from_millis(300));
    let target = root.path().join("target");
    let error = store.download("a/b", &target, &Digest::of(b""), NO_PROGRESS).await.unwrap_err();
    assert!(matches!(error, Error::NotFound(_)), "{error:?}");
    assert_eq!(store.get_if_changed("a/b", None).await.unwrap(), PollResult::Missing, "a look does not wait");
}

#[tokio::test]
async fn a_failed_close_is_a_failed_write_and_leaves_nothing() {
    let (root, source) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let fails = Arc::new(AtomicU32::new(2));
    let layer = Layer { closes_to_fail: fails.clone(), ..Layer::default() };
    let store = Mounted::new(root.path(), clock()).with_disk(Arc::new(layer));
    let error = store.put("a/small", "x".into(), Precondition::Absent).await.unwrap_err();
    assert!(error.is_passing(), "{error:?}");
    let file = source.path().join("file");
    std::fs::write(&file, "content").unwrap();
    let digest = Digest::of(b"content");
    let error = store.upload("a/file", &file, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap_err();
    assert!(error.is_passing(), "{error:?}");
    assert!(store.list("a/", None).await.unwrap().entries.is_empty());
    store.upload("a/file", &file, Precondition::Absent, &digest, NO_PROGRESS).await.expect("the name is free");
}

#[tokio::test]
async fn a_checkpoint_whose_first_closes_fail_is_stored_all_the_same() {
    let (root, source) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    image(source.path());
    let manifest = manifest_of(checkpoint_io::hash(&clock(), source.path()).await.unwrap());
    let layer = Layer { closes_to_fail: Arc::new(AtomicU32::new(3)), ..Layer::default() };
    let store = Mounted::new(root.path(), clock()).with_disk(Arc::new(layer));
    checkpoint_io::upload(&store, &clock(), source.path(), &manifest, &|_, _| {}).await.unwrap();
    assert_eq!(store.list("", None).await.unwrap().entries.len(), 4);
}

#[tokio::test]
async fn comparing_and_setting_is_refused_with_advice() {
    let root = tempfile::tempdir().unwrap();
    let store = Mounted::new(root.path(), clock());
    let version = store.put("k", "1".into(), Precondition::Absent).await.unwrap().version;
    for error in [
        store.put("k", "2".into(), Precondition::Is(version.clone())).await.unwrap_err(),
        store.delete("k", Precondition::Is(version)).await.unwrap_err(),
    ] {
        assert!(error.to_string().contains("SANDBOX_METADATA_BUCKET"), "{error}");
    }
    assert!(matches!(store.put("k", "2".into(), Precondition::Absent).await, Err(Error::Conflict(_))));
    store.delete("k", Precondition::Any).await.unwrap();
    assert_eq!(store.get_if_changed("k", None).await.unwrap(), PollResult::Missing);
}
