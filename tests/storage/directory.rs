//! What is special to a directory: operators edit it, other processes write it, the kernel tells.

use std::{os::unix::fs::MetadataExt, path::Path, sync::Arc, time::Duration};

use baton::storage::{
    directory::Directory,
    store::{Digest, Error, PollResult, Precondition, ProgressFn, Store},
};

use crate::{store_cases::noise, store_suite::clock};

const NO_PROGRESS: ProgressFn<'static> = &|_| {};

const KEY: &str = "sandboxes/x/metadata.json";

fn open(root: &Path) -> Directory {
    Directory::new(root, clock())
}

#[tokio::test]
async fn an_editors_write_is_a_new_version_whether_in_place_or_by_rename() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let path = root.path().join(KEY);
    let first = store.put(KEY, "{}".into(), Precondition::Absent).await.unwrap().version;
    assert_eq!(std::fs::read(&path).unwrap(), b"{}", "the object is plain");
    std::fs::write(&path, "{\"a\":1}").unwrap();
    let PollResult::Changed(bytes, second) = store.get_if_changed(KEY, Some(&first)).await.unwrap() else { panic!() };
    assert_eq!(bytes, "{\"a\":1}");
    assert!(matches!(store.put(KEY, "lost".into(), Precondition::Is(first)).await, Err(Error::Conflict(_))));
    let beside = root.path().join("sandboxes/x/.metadata.json.swp");
    std::fs::write(&beside, "{\"a\":2}").unwrap();
    std::fs::rename(&beside, &path).unwrap();
    assert!(matches!(store.get_if_changed(KEY, Some(&second)).await.unwrap(), PollResult::Changed(..)));
    let PollResult::Changed(_, third) = store.get_if_changed(KEY, None).await.unwrap() else { panic!() };
    store.put(KEY, "{}".into(), Precondition::Is(third)).await.unwrap();
}

#[tokio::test]
async fn a_file_somebody_put_there_is_an_object() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    std::fs::create_dir_all(root.path().join("sandboxes/x")).unwrap();
    std::fs::write(root.path().join(KEY), "by hand").unwrap();
    let PollResult::Changed(_, version) = store.get_if_changed(KEY, None).await.unwrap() else { panic!() };
    assert_eq!(store.list("sandboxes/", None).await.unwrap().entries[0].version, version);
    store.delete(KEY, Precondition::Is(version)).await.unwrap();
    assert!(!root.path().join("sandboxes").exists(), "empty folders go with the last object");
}

#[tokio::test]
async fn drafts_of_the_dead_are_swept_and_those_of_the_living_are_not() {
    let root = tempfile::tempdir().unwrap();
    let drafts = root.path().join(".baton/drafts");
    std::fs::create_dir_all(&drafts).unwrap();
    for (name, age) in [("dead", 25), ("living", 1)] {
        let file = std::fs::File::create(drafts.join(name)).unwrap();
        file.set_modified(std::time::SystemTime::now() - Duration::from_secs(age * 3600)).unwrap();
    }
    open(root.path()).put(KEY, "1".into(), Precondition::Absent).await.unwrap();
    let left: Vec<_> = std::fs::read_dir(&drafts).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["living"]);
}

#[tokio::test]
async fn a_change_by_another_store_an_editor_or_a_deletion_is_noticed_at_once() {
    let root = tempfile::tempdir().unwrap();
    let (here, there) = (Arc::new(open(root.path())), open(root.path()));
    let path = root.path().join(KEY);
    // Neither the object nor its folders exist yet.
    notices(&here, async { drop(there.put(KEY, "1".into(), Precondition::Absent).await.unwrap()) }).await;
    assert!(matches!(here.get_if_changed(KEY, None).await.unwrap(), PollResult::Changed(..)));
    notices(&here, async { drop(there.put(KEY, "2".into(), Precondition::Any).await.unwrap()) }).await;
    notices(&here, async { std::fs::write(&path, "edited").unwrap() }).await;
    notices(&here, async { std::fs::remove_file(&path).unwrap() }).await;
}

/// Watching ends after the change and not before.
async fn notices(store: &Arc<Directory>, change: impl Future<Output = ()>) {
    store.get_if_changed(KEY, None).await.unwrap();
    let watching = store.changed(KEY);
    tokio::pin!(watching);
    let early = tokio::time::timeout(Duration::from_millis(50), &mut watching).await;
    assert!(early.is_err(), "nothing has changed yet");
    change.await;
    // Far below any rhythm of polling, far above a busy machine's delay.
    tokio::time::timeout(Duration::from_secs(20), &mut watching).await.expect("the change is noticed");
}

#[tokio::test]
async fn a_change_between_the_read_and_the_watch_is_not_missed() {
    let root = tempfile::tempdir().unwrap();
    let (here, there) = (open(root.path()), open(root.path()));
    there.put(KEY, "1".into(), Precondition::Absent).await.unwrap();
    here.get_if_changed(KEY, None).await.unwrap();
    there.put(KEY, "2".into(), Precondition::Any).await.unwrap();
    tokio::time::timeout(Duration::from_secs(20), here.changed(KEY)).await.expect("it is old news");
}

#[tokio::test]
async fn a_lock_file_held_by_a_stopped_process_makes_the_store_unavailable_not_stuck() {
    let root = tempfile::tempdir().unwrap();
    let (store, hurried) = (open(root.path()), open(root.path()).with_patience(Duration::from_millis(500)));
    store.put(KEY, "1".into(), Precondition::Absent).await.unwrap();
    let mut held = Vec::new();
    for entry in std::fs::read_dir(root.path().join(".baton/locks")).unwrap() {
        let file = std::fs::File::open(entry.unwrap().path()).unwrap();
        file.lock().unwrap();
        held.push(file);
    }
    store.get_if_changed(KEY, None).await.expect("readers need no lock");
    let error = hurried.put(KEY, "2".into(), Precondition::Any).await.unwrap_err();
    assert!(error.is_passing(), "{error:?}");
    drop(held);
    store.put(KEY, "3".into(), Precondition::Any).await.unwrap();
}

/// The other half of the test below: it runs in a process of its own.
#[tokio::test]
#[ignore = "started by six_processes_lose_no_increment"]
async fn one_process_of_six() {
    let root = std::env::var("BATON_TEST_ROOT").expect("the root is given");
    let store = open(Path::new(&root));
    for _ in 0..100 {
        crate::store_cases::increment(&store, "sum").await;
    }
}

#[tokio::test]
async fn six_processes_lose_no_increment() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    store.put("sum", "0".into(), Precondition::Absent).await.unwrap();
    let mut children = Vec::new();
    for _ in 0..6 {
        let mut command = tokio::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "directory::one_process_of_six", "--ignored", "--nocapture"]);
        command.env("BATON_TEST_ROOT", root.path()).kill_on_drop(true).stdout(std::process::Stdio::null());
        children.push(command.spawn().unwrap());
    }
    for mut child in children {
        let ended = tokio::time::timeout(Duration::from_secs(120), child.wait()).await.expect("it ends");
        assert!(ended.unwrap().success());
    }
    assert!(
        matches!(store.get_if_changed("sum", None).await.unwrap(), PollResult::Changed(bytes, _) if bytes == "600")
    );
}

#[tokio::test]
async fn a_file_that_is_taken_is_not_copied_and_stays_when_its_giver_forgets_it() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let source = tempfile::tempdir_in(root.path().parent().unwrap()).unwrap();
    let (file, bytes) = (source.path().join("pages"), noise(1, 3 << 20));
    std::fs::write(&file, &bytes).unwrap();
    let inode = |path: &Path| std::fs::metadata(path).unwrap().ino();
    let given = inode(&file);
    let digest = store.upload_owned("c/pages.img", &file, NO_PROGRESS).await.expect("it takes files").unwrap();
    assert_eq!(digest, Digest::of(&bytes));
    let object = root.path().join("c/pages.img");
    assert_eq!(inode(&object), given, "one file system, one file");
    let again = store.upload_owned("c/pages.img", &file, NO_PROGRESS).await.unwrap().unwrap();
    assert_eq!(again, digest, "safe to repeat");
    std::fs::remove_file(&file).unwrap();

    let lent = source.path().join("lent");
    store.download_linked("c/pages.img", &lent, &digest, NO_PROGRESS).await.unwrap();
    assert_eq!((inode(&lent), std::fs::read(&lent).unwrap() == bytes), (given, true));
    std::fs::remove_file(&lent).unwrap();
    assert!(std::fs::read(&object).unwrap() == bytes, "what was lent is still there");

    std::fs::write(&file, noise(2, 3 << 20)).unwrap();
    let other = store.upload_owned("c/pages.img", &file, NO_PROGRESS).await.unwrap();
    assert!(matches!(other, Err(Error::Conflict(_))), "{other:?}");
    assert_eq!(std::fs::read_dir(root.path().join(".baton/drafts")).unwrap().count(), 0);
}

#[tokio::test]
async fn what_is_lent_is_what_its_digest_says_or_nothing() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let target = tempfile::tempdir_in(root.path().parent().unwrap()).unwrap();
    let file = target.path().join("file");
    let digest = Digest::of(&noise(1, 1 << 20));
    let missing = store.download_linked("c/pages.img", &file, &digest, NO_PROGRESS).await.unwrap_err();
    assert!(matches!(missing, Error::NotFound(_)), "{missing:?}");
    std::fs::create_dir_all(root.path().join("c")).unwrap();
    std::fs::write(root.path().join("c/pages.img"), noise(2, 1 << 20)).unwrap();
    let wrong = store.download_linked("c/pages.img", &file, &digest, NO_PROGRESS).await.unwrap_err();
    assert!(matches!(wrong, Error::Damaged { .. }), "{wrong:?}");
    assert_eq!(std::fs::read_dir(target.path()).unwrap().count(), 0, "nothing appears");
}

/// Another file system, if this machine has one that may be written to.
#[tokio::test]
async fn between_file_systems_a_file_is_copied_and_hashed_on_the_way() {
    let Ok(elsewhere) = tempfile::tempdir_in("/dev/shm") else { return };
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let (file, bytes) = (elsewhere.path().join("pages"), noise(1, 3 << 20));
    std::fs::write(&file, &bytes).unwrap();
    let digest = store.upload_owned("c/pages.img", &file, NO_PROGRESS).await.unwrap().unwrap();
    assert_eq!(digest, Digest::of(&bytes));
    assert!(std::fs::read(root.path().join("c/pages.img")).unwrap() == bytes);
    let lent = elsewhere.path().join("lent");
    store.download_linked("c/pages.img", &lent, &digest, NO_PROGRESS).await.unwrap();
    assert!(std::fs::read(&lent).unwrap() == bytes);
}
