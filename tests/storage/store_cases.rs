//! What every store promises, whatever it is made of.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use baton::storage::store::{Digest, Error, MAX_SMALL_OBJECT, PollResult, Precondition, Store, Version};
use bytes::Bytes;
use tokio::task::JoinSet;

use crate::store_suite::Subject;

const NO_PROGRESS: &(dyn Fn(u64) + Send + Sync) = &|_| {};

async fn read(store: &dyn Store, key: &str) -> (Bytes, Version) {
    match store.get_if_changed(key, None).await.unwrap() {
        PollResult::Changed(bytes, version) => (bytes, version),
        other @ (PollResult::Unchanged | PollResult::Missing) => panic!("{key}: {other:?}"),
    }
}

pub async fn an_object_is_created_once_updated_by_version_and_deleted_by_version(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}sandboxes/a/lock.json", subject.prefix));
    let first = store.put(&key, "1".into(), Precondition::Absent).await.unwrap().version;
    assert!(matches!(store.put(&key, "x".into(), Precondition::Absent).await, Err(Error::Conflict(_))));
    let second = store.put(&key, "2".into(), Precondition::Is(first.clone())).await.unwrap().version;
    assert_ne!(first, second);
    assert!(matches!(store.put(&key, "x".into(), Precondition::Is(first.clone())).await, Err(Error::Conflict(_))));
    assert_eq!(read(&**store, &key).await, ("2".into(), second.clone()));
    assert!(matches!(store.delete(&key, Precondition::Is(first)).await, Err(Error::Conflict(_))));
    assert_eq!(read(&**store, &key).await.0, "2");
    let third = store.put(&key, "3".into(), Precondition::Any).await.unwrap().version;
    assert!(matches!(store.delete(&key, Precondition::Is(second)).await, Err(Error::Conflict(_))));
    store.delete(&key, Precondition::Is(third.clone())).await.unwrap();
    assert_eq!(store.get_if_changed(&key, None).await.unwrap(), PollResult::Missing);
    let again = store.put(&key, "3".into(), Precondition::Absent).await.unwrap().version;
    assert_ne!(again, third, "a later object of the same content is another");
}

pub async fn what_is_not_there_is_missing_and_cannot_be_deleted(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}sandboxes/none/lock.json", subject.prefix));
    assert_eq!(store.get_if_changed(&key, None).await.unwrap(), PollResult::Missing);
    assert!(matches!(store.delete(&key, Precondition::Any).await, Err(Error::NotFound(_))));
    let some = store.put(&format!("{key}.other"), "1".into(), Precondition::Any).await.unwrap().version;
    assert_eq!(store.get_if_changed(&key, Some(&some)).await.unwrap(), PollResult::Missing);
    assert!(matches!(store.put(&key, "1".into(), Precondition::Is(some)).await, Err(Error::Conflict(_))));
    let target = tempfile::tempdir().unwrap();
    let file = target.path().join("file");
    let error = store.download(&key, &file, &Digest::of(b""), NO_PROGRESS).await.unwrap_err();
    assert!(matches!(error, Error::NotFound(_)), "{error:?}");
    assert!(is_empty(target.path()));
}

pub async fn a_poll_says_unchanged_changed_or_missing(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}sandboxes/p/metadata.json", subject.prefix));
    let first = store.put(&key, "one".into(), Precondition::Absent).await.unwrap().version;
    assert_eq!(store.get_if_changed(&key, Some(&first)).await.unwrap(), PollResult::Unchanged);
    let second = store.put(&key, "two".into(), Precondition::Any).await.unwrap().version;
    assert_eq!(
        store.get_if_changed(&key, Some(&first)).await.unwrap(),
        PollResult::Changed("two".into(), second.clone())
    );
    store.delete(&key, Precondition::Any).await.unwrap();
    assert_eq!(store.get_if_changed(&key, Some(&second)).await.unwrap(), PollResult::Missing);
}

pub async fn the_same_content_written_again_is_a_new_version(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}sandboxes/aba/lock.json", subject.prefix));
    let first = store.put(&key, "A".into(), Precondition::Absent).await.unwrap().version;
    store.put(&key, "B".into(), Precondition::Is(first.clone())).await.unwrap();
    let third = store.put(&key, "A".into(), Precondition::Any).await.unwrap().version;
    assert_ne!(first, third);
    assert!(matches!(store.put(&key, "C".into(), Precondition::Is(first)).await, Err(Error::Conflict(_))));
}

pub async fn of_forty_racing_creates_one_wins(subject: &Subject) {
    let key = format!("{}sandboxes/race/lock.json", subject.prefix);
    let mut racers = JoinSet::new();
    for racer in 0..40 {
        let (store, key) = ((subject.open)(), key.clone());
        racers.spawn(async move {
            let bytes = Bytes::from(racer.to_string());
            match store.put(&key, bytes.clone(), Precondition::Absent).await {
                Ok(written) => Some((bytes, written.version)),
                Err(Error::Conflict(_)) => None,
                Err(error) => panic!("{error}"),
            }
        });
    }
    let winners: Vec<_> = racers.join_all().await.into_iter().flatten().collect();
    assert_eq!(winners.len(), 1);
    assert_eq!(read(&*subject.store, &key).await, winners[0]);
}

/// Adds one to the number in an object, as often as it takes.
pub async fn increment(store: &dyn Store, key: &str) {
    loop {
        let (bytes, version) = read(store, key).await;
        let number: u64 = std::str::from_utf8(&bytes).unwrap().parse().unwrap();
        match store.put(key, (number + 1).to_string().into(), Precondition::Is(version)).await {
            Ok(_) => return,
            Err(Error::Conflict(_)) => {}
            Err(Error::RateLimited(_)) => tokio::time::sleep(Duration::from_secs(1)).await,
            Err(error) => panic!("{error}"),
        }
    }
}

pub async fn no_contended_increment_is_lost(subject: &Subject) {
    let key = format!("{}sandboxes/sum/lock.json", subject.prefix);
    subject.store.put(&key, "0".into(), Precondition::Absent).await.unwrap();
    let mut writers = JoinSet::new();
    for _ in 0..8 {
        let (store, key) = ((subject.open)(), key.clone());
        writers.spawn(async move {
            for _ in 0..20 {
                increment(&*store, &key).await;
            }
        });
    }
    writers.join_all().await;
    assert_eq!(read(&*subject.store, &key).await.0, "160");
}

pub async fn a_listing_goes_over_page_borders_in_the_order_of_keys(subject: &Subject) {
    let (store, prefix) = (&subject.store, &subject.prefix);
    // `-` sorts before `/`, and `/` before digits: folders must not be sorted by their bare names.
    let mut keys: Vec<String> = (0..2 * subject.page + 1).map(|n| format!("{prefix}list/a/{n:03}")).collect();
    keys.extend(["list/a-b/1", "list/a0", "list/b", "list/b/x/y"].map(|key| format!("{prefix}{key}")));
    keys.retain(|key| !key.ends_with("list/b"));
    for key in keys.iter().rev() {
        store.put(key, "x".into(), Precondition::Absent).await.unwrap();
    }
    store.put(&format!("{prefix}listing"), "x".into(), Precondition::Absent).await.unwrap();
    keys.sort();
    let mut found: Vec<String> = Vec::new();
    loop {
        let page = store.list(&format!("{prefix}list/"), found.last().map(String::as_str)).await.unwrap();
        assert!(page.entries.len() <= subject.page);
        assert!(page.entries.len() == subject.page || !page.more, "only the last page is short");
        found.extend(page.entries.into_iter().map(|entry| entry.key));
        if !page.more {
            break;
        }
    }
    assert_eq!(found, keys);
    let part = store.list(&format!("{prefix}list/a/00"), Some(&format!("{prefix}list/a/003"))).await.unwrap();
    let part: Vec<_> = part.entries.iter().map(|entry| entry.key.rsplit('/').next().unwrap()).collect();
    assert_eq!(part, ["004", "005", "006", "007", "008", "009"]);
    assert!(store.list(&format!("{prefix}nothing/"), None).await.unwrap().entries.is_empty());
    let before = store.list(&format!("{prefix}list/b/"), Some(&format!("{prefix}a"))).await.unwrap();
    assert_eq!(before.entries.len(), 1, "a key before the prefix hides nothing");
}

pub async fn a_listing_knows_the_version_a_poll_tells(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}versions/one", subject.prefix));
    store.put(&key, "first".into(), Precondition::Absent).await.unwrap();
    let written = store.put(&key, "second".into(), Precondition::Any).await.unwrap().version;
    let page = store.list(&key, None).await.unwrap();
    assert_eq!((page.entries.len(), page.more), (1, false));
    assert_eq!((&page.entries[0].version, page.entries[0].size), (&written, 6));
    assert_eq!(store.get_if_changed(&key, Some(&written)).await.unwrap(), PollResult::Unchanged);
}

pub async fn a_listing_says_when_an_object_was_last_written(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}sandboxes/when/lock.json", subject.prefix));
    let written = async || {
        let listed = store.list(&key, None).await.unwrap().entries;
        listed[0].updated.expect("a store that locks has a clock")
    };
    store.put(&key, "one".into(), Precondition::Absent).await.unwrap();
    let first = written().await;
    assert_eq!(written().await, first, "a look is no write");
    // A clock may be coarse: it moves on in the end.
    while written().await == first {
        tokio::time::sleep(Duration::from_millis(2)).await;
        store.put(&key, "two".into(), Precondition::Any).await.unwrap();
    }
    assert!(written().await > first);
}

pub async fn keys_that_climb_or_hide_are_refused(subject: &Subject) {
    let long = format!("a/{}", "b".repeat(2000));
    for key in ["", "/", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/./b", ".baton/locks/00", "a\0b", "a\nb", &long]
    {
        let store = &subject.store;
        let answers = [
            store.get_if_changed(key, None).await.err(),
            store.put(key, "x".into(), Precondition::Any).await.err(),
            store.delete(key, Precondition::Any).await.err(),
            store.upload(key, Path::new("/dev/null"), Precondition::Any, &Digest::of(b""), NO_PROGRESS).await.err(),
            store.download(key, Path::new("/nowhere"), &Digest::of(b""), NO_PROGRESS).await.err(),
        ];
        for answer in answers {
            assert!(matches!(answer, Some(Error::Other { .. })), "{key:?}: {answer:?}");
        }
    }
}

pub async fn a_large_object_is_not_polled_and_not_put(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}large", subject.prefix));
    let bytes = vec![7; MAX_SMALL_OBJECT as usize + 1];
    assert!(matches!(store.put(&key, bytes.clone().into(), Precondition::Any).await, Err(Error::Other { .. })));
    let folder = tempfile::tempdir().unwrap();
    let (file, digest) = file_of(folder.path(), &bytes);
    let version = store.upload(&key, &file, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap().version;
    assert!(matches!(store.get_if_changed(&key, None).await, Err(Error::Other { .. })));
    assert_eq!(store.get_if_changed(&key, Some(&version)).await.unwrap(), PollResult::Unchanged);
    assert_eq!(store.list(&key, None).await.unwrap().entries[0].version, version);
    store.delete(&key, Precondition::Is(version)).await.unwrap();
}

/// Bytes that repeat nowhere near, from a seed.
pub fn noise(seed: u64, size: usize) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

fn file_of(folder: &Path, bytes: &[u8]) -> (PathBuf, Digest) {
    let file = folder.join("source");
    std::fs::write(&file, bytes).unwrap();
    (file, Digest::of(bytes))
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().next().is_none()
}

pub async fn files_come_back_as_they_went(subject: &Subject) {
    for size in [0, 1, 4095, 256 << 10, (1 << 20) + 1, (8 << 20) - 1, 64 << 20] {
        let (store, key) = (&subject.store, format!("{}files/{size}", subject.prefix));
        let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let bytes = noise(size as u64, size);
        let (file, digest) = file_of(source.path(), &bytes);
        store.upload(&key, &file, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap();
        let back = target.path().join("back");
        store.download(&key, &back, &digest, NO_PROGRESS).await.unwrap();
        assert!(std::fs::read(&back).unwrap() == bytes, "{size} bytes differ");
        assert_eq!(std::fs::read_dir(target.path()).unwrap().count(), 1, "nothing beside the file");
        store.delete(&key, Precondition::Any).await.unwrap();
    }
}

pub async fn a_file_that_is_not_what_its_digest_says_is_not_uploaded(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}wrong", subject.prefix));
    let folder = tempfile::tempdir().unwrap();
    let (file, digest) = file_of(folder.path(), &noise(1, 300_000));
    for wrong in [
        Digest { size: digest.size + 1, ..digest.clone() },
        Digest { sha256: Digest::of(b"other").sha256, ..digest.clone() },
        Digest { crc32c: !digest.crc32c, ..digest.clone() },
    ] {
        let error = store.upload(&key, &file, Precondition::Absent, &wrong, NO_PROGRESS).await.unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
        assert!(store.list(&key, None).await.unwrap().entries.is_empty());
    }
}

pub async fn a_download_that_is_not_what_its_digest_says_is_not_published(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}other", subject.prefix));
    let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (file, digest) = file_of(source.path(), &noise(2, 300_000));
    store.upload(&key, &file, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap();
    let back = target.path().join("back");
    for wrong in [
        Digest { size: digest.size + 1, ..digest.clone() },
        Digest { size: digest.size - 1, ..digest.clone() },
        Digest { sha256: Digest::of(b"other").sha256, ..digest.clone() },
    ] {
        let error = store.download(&key, &back, &wrong, NO_PROGRESS).await.unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
        assert!(is_empty(target.path()));
    }
}

pub async fn an_upload_only_if_absent_keeps_what_is_there(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}once", subject.prefix));
    let folder = tempfile::tempdir().unwrap();
    let (file, digest) = file_of(folder.path(), b"first");
    let first = store.upload(&key, &file, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap().version;
    let (file, digest) = file_of(folder.path(), b"second");
    let error = store.upload(&key, &file, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap_err();
    assert!(matches!(error, Error::Conflict(_)), "{error:?}");
    assert_eq!(read(&**store, &key).await, ("first".into(), first.clone()));
    store.upload(&key, &file, Precondition::Is(first), &digest, NO_PROGRESS).await.unwrap();
    assert_eq!(read(&**store, &key).await.0, "second");
}

pub async fn an_upload_repeated_with_the_same_content_is_settled(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}twice", subject.prefix));
    let folder = tempfile::tempdir().unwrap();
    let (file, digest) = file_of(folder.path(), &noise(5, 3 << 20));
    let first = store.upload(&key, &file, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap().version;
    let again = store.upload(&key, &file, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap().version;
    assert_eq!(first, again, "nothing was written anew");
}

pub async fn a_transfer_cancelled_in_the_middle_leaves_nothing(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}cancelled", subject.prefix));
    let source = tempfile::tempdir().unwrap();
    let (file, digest) = file_of(source.path(), &noise(3, 64 << 20));
    // On a busy machine the end may come before the cancellation is heard: then try again.
    let mut tries = 0..20;
    loop {
        assert!(tries.next().is_some(), "a cancelled upload always leaves an object");
        until_half(&digest, async |progress| {
            drop(store.upload(&key, &file, Precondition::Absent, &digest, progress).await)
        })
        .await;
        match store.upload(&key, &file, Precondition::Absent, &digest, NO_PROGRESS).await {
            Ok(_) => break,
            // Perhaps it goes away by itself, a moment later. Meanwhile a mount may say of it what it likes.
            Err(error) if matches!(error, Error::Conflict(_) | Error::NotFound(_)) || error.is_passing() => {
                tokio::time::sleep(Duration::from_millis(50)).await;
                drop(store.delete(&key, Precondition::Any).await);
            }
            Err(error) => panic!("{error}"),
        }
    }
    loop {
        assert!(tries.next().is_some(), "a cancelled download always leaves a file");
        let target = tempfile::tempdir().unwrap();
        let back = target.path().join("back");
        until_half(&digest, async |progress| drop(store.download(&key, &back, &digest, progress).await)).await;
        // The work beside the event loop notices a moment later that nobody waits.
        for _ in 0..200 {
            if is_empty(target.path()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(back.exists(), "half a file stays for ever");
    }
}

/// Drops a transfer once half of it is done, if it is not whole before.
async fn until_half(digest: &Digest, transfer: impl AsyncFnOnce(&(dyn Fn(u64) + Send + Sync))) {
    let half = digest.size / 2;
    let written = tokio::sync::Notify::new();
    let progress = |done| {
        if done >= half {
            written.notify_one();
        }
    };
    tokio::select! {
        biased;
        () = written.notified() => {}
        () = transfer(&progress) => {}
    }
}

pub async fn progress_ends_at_the_size_of_the_file(subject: &Subject) {
    let (store, key) = (&subject.store, format!("{}progress", subject.prefix));
    let folder = tempfile::tempdir().unwrap();
    let (file, digest) = file_of(folder.path(), &noise(4, 20 << 20));
    let last = AtomicU64::new(0);
    let progress = |done| {
        assert!(last.swap(done, Ordering::SeqCst) <= done, "it goes forward");
    };
    store.upload(&key, &file, Precondition::Absent, &digest, &progress).await.unwrap();
    assert_eq!(last.swap(0, Ordering::SeqCst), digest.size);
    store.download(&key, &folder.path().join("back"), &digest, &progress).await.unwrap();
    assert_eq!(last.load(Ordering::SeqCst), digest.size);
}
