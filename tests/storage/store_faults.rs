//! Cloud Storage when things go wrong: each trap of the service and of its client library, once.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use baton::storage::{
    gcs::{Gcs, GcsConnection},
    store::{Digest, Error, PollResult, Precondition, Priority, Store, Version},
};
use baton_fake_gcs::{FakeGcs, FaultKind, InjectedFault, Op};
use bytes::Bytes;

use crate::{
    store_cases::noise,
    store_suite::{BUCKET, clock, fake_gcs, gcs_on},
};

pub const KEY: &str = "sandboxes/x/lock.json";
pub const NO_PROGRESS: &(dyn Fn(u64) + Send + Sync) = &|_| {};

/// Short enough for a test that waits for it to pass.
pub const SHORT: Duration = Duration::from_millis(400);

fn impatient(fake: &FakeGcs) -> Gcs {
    let patience = Duration::from_secs(20);
    // A first call makes the clients, which may take longer than a short call may.
    gcs_on(fake).with_timeouts(SHORT, patience)
}

pub async fn read(store: &Gcs) -> (Bytes, Version) {
    let PollResult::Changed(bytes, version) = store.get_if_changed(KEY, None).await.unwrap() else {
        panic!("it is there")
    };
    (bytes, version)
}

/// A file of this size, and the folder it lies in.
pub fn file(size: usize) -> (tempfile::TempDir, PathBuf, Bytes, Digest) {
    let folder = tempfile::tempdir().unwrap();
    let bytes = noise(size as u64, size);
    let path = folder.path().join("source");
    std::fs::write(&path, &bytes).unwrap();
    let digest = Digest::of(&bytes);
    (folder, path, bytes.into(), digest)
}

#[tokio::test]
async fn a_create_whose_reply_is_lost_is_ambiguous_and_a_read_settles_it() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    fake.add_fault(InjectedFault::new(Op::Write, FaultKind::Lost));
    let error = store.put(KEY, "nonce 1".into(), Precondition::Absent).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. } | Error::Conflict(_)), "{error:?}");
    assert_eq!(read(&store).await.0, "nonce 1");
}

#[tokio::test]
async fn a_write_whose_answer_breaks_off_is_ambiguous_and_not_damage() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    for clip in [0, 1, 40] {
        fake.add_fault(InjectedFault::new(Op::Write, FaultKind::Clip(clip)));
        let text = format!("nonce {clip}");
        let error = store.put(KEY, text.clone().into(), Precondition::Any).await.unwrap_err();
        assert!(matches!(error, Error::Unavailable { .. }), "{clip}: {error:?}");
        assert_eq!(read(&store).await.0, text);
    }
}

#[tokio::test]
async fn an_upload_whose_answer_breaks_off_may_simply_be_repeated() {
    for (size, op) in [(3 << 20, Op::Write), (40 << 20, Op::Put)] {
        let (_folder, path, bytes, digest) = file(size);
        let fake = fake_gcs().await;
        let store = gcs_on(&fake);
        fake.add_fault(InjectedFault::new(op, FaultKind::Clip(40)));
        // The library repeats some of these itself.
        let first = store.upload("pages.img", &path, Precondition::Absent, &digest, NO_PROGRESS).await;
        assert!(first.as_ref().err().is_none_or(Error::is_passing), "{first:?}");
        store.upload("pages.img", &path, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap();
        assert_eq!(fake.faults_left(), []);
        assert!(fake.content(BUCKET, "pages.img").unwrap() == bytes);
    }
}

#[tokio::test]
async fn an_update_whose_reply_is_lost_is_ambiguous_and_a_read_settles_it() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    let first = store.put(KEY, "nonce 1".into(), Precondition::Absent).await.unwrap().version;
    fake.add_fault(InjectedFault::new(Op::Write, FaultKind::Lost));
    let error = store.put(KEY, "nonce 2".into(), Precondition::Is(first.clone())).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. } | Error::Conflict(_)), "{error:?}");
    let (bytes, version) = read(&store).await;
    assert_eq!(bytes, "nonce 2");
    assert_ne!(version, first);
    store.put(KEY, "nonce 3".into(), Precondition::Is(version)).await.expect("it goes on from what was read");
}

#[tokio::test]
async fn a_delete_whose_reply_is_lost_is_ambiguous_and_a_read_settles_it() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    let first = store.put(KEY, "1".into(), Precondition::Absent).await.unwrap().version;
    fake.add_fault(InjectedFault::new(Op::Delete, FaultKind::Lost));
    let error = store.delete(KEY, Precondition::Is(first)).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. } | Error::NotFound(_)), "{error:?}");
    assert_eq!(store.get_if_changed(KEY, None).await.unwrap(), PollResult::Missing);
}

#[tokio::test]
async fn a_write_that_never_arrived_changes_nothing() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    for kind in [FaultKind::Drop, FaultKind::Status(503), FaultKind::Status(500)] {
        fake.add_fault(InjectedFault::new(Op::Write, kind));
        let error = store.put(KEY, "1".into(), Precondition::Absent).await.unwrap_err();
        assert!(error.is_passing(), "{kind:?}: {error:?}");
        assert_eq!(store.get_if_changed(KEY, None).await.unwrap(), PollResult::Missing);
    }
}

#[tokio::test]
async fn reads_and_listings_are_tried_again() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    store.put(KEY, "1".into(), Precondition::Absent).await.unwrap();
    for kind in [FaultKind::Drop, FaultKind::Status(503), FaultKind::Cut(0)] {
        fake.add_fault(InjectedFault::new(Op::Read, kind));
        assert_eq!(read(&store).await.0, "1");
        assert_eq!(fake.faults_left(), [], "{kind:?} has happened");
    }
    for kind in [FaultKind::Drop, FaultKind::Status(503)] {
        fake.add_fault(InjectedFault::new(Op::List, kind));
        assert_eq!(store.list("sandboxes/", None).await.unwrap().entries.len(), 1);
        assert_eq!(fake.faults_left(), [], "{kind:?} has happened");
    }
    fake.add_fault(InjectedFault::new(Op::Read, FaultKind::Status(503)).times(0));
    assert!(store.get_if_changed(KEY, None).await.unwrap_err().is_passing(), "but not for ever");
}

#[tokio::test]
async fn after_too_many_writes_the_object_rests_for_a_second() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    fake.add_fault(InjectedFault::new(Op::Write, FaultKind::Status(429)));
    let start = Instant::now();
    let error = store.put(KEY, "1".into(), Precondition::Absent).await.unwrap_err();
    assert!(matches!(error, Error::RateLimited(_)), "{error:?}");
    store.put("another", "1".into(), Precondition::Absent).await.expect("others do not wait");
    store.put(KEY, "1".into(), Precondition::Absent).await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
}

#[tokio::test]
async fn one_object_is_written_four_times_at_once_and_then_once_a_second() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    let start = Instant::now();
    for number in 0..6 {
        store.put(KEY, number.to_string().into(), Precondition::Any).await.unwrap();
    }
    assert!(start.elapsed() >= Duration::from_millis(1900), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_write_that_cannot_have_its_turn_in_time_is_not_sent() {
    let fake = fake_gcs().await;
    // No token comes back while a busy machine takes its time.
    let store = gcs_on(&fake).with_write_rate(1e-6, 4.0);
    for _ in 0..2 {
        store.put_as(KEY, "waiter".into(), Precondition::Any, Priority::Waiter).await.unwrap();
    }
    let store = store.with_timeouts(SHORT, SHORT);
    let before = fake.requests();
    let error = store.put_as(KEY, "waiter".into(), Precondition::Any, Priority::Waiter).await.unwrap_err();
    assert!(matches!(error, Error::RateLimited(_)), "{error:?}");
    assert_eq!(fake.requests(), before, "it was never sent: nothing to settle");
}

#[tokio::test]
async fn an_unchanged_object_costs_one_request_without_content() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    let version = store.put(KEY, "1".into(), Precondition::Absent).await.unwrap().version;
    let before = fake.requests();
    assert_eq!(store.get_if_changed(KEY, Some(&version)).await.unwrap(), PollResult::Unchanged);
    assert_eq!(fake.requests(), before + 1);
}

#[tokio::test]
async fn the_time_of_a_write_is_the_services() {
    let fake = fake_gcs().await;
    let written = gcs_on(&fake).put(KEY, "1".into(), Precondition::Absent).await.unwrap();
    let age = written.updated.expect("the service tells it").elapsed().unwrap_or_default();
    assert!(age < Duration::from_secs(60), "{age:?}");
}

#[tokio::test]
async fn a_call_that_hangs_ends_in_time_and_holds_up_no_other() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    let version = store.put(KEY, "1".into(), Precondition::Absent).await.unwrap().version;
    store.list("", None).await.unwrap();
    let hurried = impatient(&fake);
    for op in [Op::Read, Op::Write, Op::Delete] {
        fake.add_fault(InjectedFault::new(op, FaultKind::Hang).on("sandboxes/").times(0));
    }
    let late = |answer: Option<Error>, what: &str| {
        assert!(matches!(answer, Some(Error::Unavailable { .. })), "{what}: {answer:?}");
    };
    let hanging = async {
        late(hurried.get_if_changed(KEY, Some(&version)).await.err(), "poll");
        late(hurried.put(KEY, "2".into(), Precondition::Any).await.err(), "put");
        late(hurried.delete(KEY, Precondition::Any).await.err(), "delete");
    };
    let other = async {
        for number in 0..20 {
            store.put(&format!("elsewhere/{number}"), "1".into(), Precondition::Absent).await.unwrap();
        }
    };
    tokio::join!(hanging, other);
    fake.clear_faults();
    assert_eq!(read(&store).await.0, "1");
}

#[tokio::test]
async fn a_listing_has_the_callers_time_and_ends_only_when_it_stands_still() {
    let fake = fake_gcs().await;
    for number in 0..20 {
        fake.put(BUCKET, &format!("sandboxes/{number}"), "1");
    }
    let store = impatient(&fake);
    store.list("", None).await.unwrap();
    // Longer than a call on a small object may take.
    fake.add_fault(InjectedFault::new(Op::List, FaultKind::Delay(2 * SHORT)));
    assert!(store.list("sandboxes/", None).await.unwrap().more);
    fake.add_fault(InjectedFault::new(Op::List, FaultKind::Hang).times(0));
    let store = gcs_on(&fake).with_timeouts(Duration::from_secs(20), SHORT);
    let error = store.list("sandboxes/", None).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
}

#[tokio::test]
async fn a_service_that_is_not_there_is_a_passing_error_with_a_reason() {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let connection = Arc::new(GcsConnection::new(Some(format!("http://{address}"))));
    let store = Gcs::new(connection, BUCKET, clock());
    for error in [
        store.get_if_changed(KEY, None).await.unwrap_err(),
        store.put(KEY, "1".into(), Precondition::Absent).await.unwrap_err(),
        store.delete(KEY, Precondition::Any).await.unwrap_err(),
        store.list("", None).await.unwrap_err(),
    ] {
        assert!(error.is_passing() && error.to_string().len() > 40, "{error}");
    }
}

#[tokio::test]
async fn what_is_forbidden_is_for_an_operator() {
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    fake.add_fault(InjectedFault::new(Op::Any, FaultKind::Status(403)).times(0));
    for error in [
        store.get_if_changed(KEY, None).await.unwrap_err(),
        store.put(KEY, "1".into(), Precondition::Absent).await.unwrap_err(),
        store.delete(KEY, Precondition::Any).await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::Denied { .. }) && !error.is_passing(), "{error:?}");
    }
}

#[tokio::test]
async fn an_upload_that_is_cut_goes_on_and_what_is_stored_is_whole() {
    // Below the border of resumable uploads, and far above it.
    for (size, op) in [(3 << 20, Op::Write), (40 << 20, Op::Put)] {
        let (_folder, path, bytes, digest) = file(size);
        for cut in [0, 1, 300 << 10, 1 << 20, (2 << 20) + 77] {
            let fake = fake_gcs().await;
            let store = gcs_on(&fake);
            fake.add_fault(InjectedFault::new(op, FaultKind::Cut(cut)).times(2));
            store.upload("pages.img", &path, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap();
            assert_eq!(fake.faults_left(), [], "both cuts have happened");
            assert!(fake.content(BUCKET, "pages.img").unwrap() == bytes, "{size} bytes cut at {cut}");
        }
    }
}

#[tokio::test]
async fn an_upload_of_which_the_service_keeps_a_part_goes_on_from_there() {
    let (_folder, path, bytes, digest) = file(40 << 20);
    let fake = fake_gcs().await;
    fake.add_fault(InjectedFault::new(Op::Put, FaultKind::Keep(5 << 20)));
    fake.add_fault(InjectedFault::new(Op::Put, FaultKind::Keep(1)));
    fake.add_fault(InjectedFault::new(Op::Put, FaultKind::Status(503)));
    fake.add_fault(InjectedFault::new(Op::Start, FaultKind::Status(503)));
    gcs_on(&fake).upload("pages.img", &path, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap();
    assert_eq!(fake.faults_left(), []);
    assert!(fake.content(BUCKET, "pages.img").unwrap() == bytes);
}

#[tokio::test]
async fn an_upload_whose_reply_is_lost_is_settled_as_done() {
    for (size, op) in [(3 << 20, Op::Write), (40 << 20, Op::Put)] {
        let (_folder, path, bytes, digest) = file(size);
        let fake = fake_gcs().await;
        fake.add_fault(InjectedFault::new(op, FaultKind::Lost));
        gcs_on(&fake).upload("pages.img", &path, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap();
        assert_eq!(fake.faults_left(), []);
        assert!(fake.content(BUCKET, "pages.img").unwrap() == bytes);
    }
}

#[tokio::test]
async fn an_upload_that_stands_still_fails_and_leaves_nothing() {
    let (_folder, path, _, digest) = file(40 << 20);
    let fake = fake_gcs().await;
    fake.add_fault(InjectedFault::new(Op::Put, FaultKind::Hang).times(0));
    let store = gcs_on(&fake).with_timeouts(Duration::from_secs(20), SHORT);
    let error = store.upload("pages.img", &path, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap_err();
    assert!(error.is_passing(), "{error:?}");
    assert_eq!(fake.content(BUCKET, "pages.img"), None);
}

#[tokio::test]
async fn a_download_that_is_cut_goes_on_and_is_whole() {
    let (folder, _, bytes, digest) = file(20 << 20);
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    fake.put(BUCKET, "pages.img", bytes.clone());
    for cut in [0, 1, 300_000, 19 << 20] {
        let back = folder.path().join("back");
        fake.add_fault(InjectedFault::new(Op::Read, FaultKind::Cut(cut)).times(3));
        store.download("pages.img", &back, &digest, NO_PROGRESS).await.unwrap();
        assert!(std::fs::read(&back).unwrap() == bytes, "cut at {cut}");
        std::fs::remove_file(&back).unwrap();
        fake.clear_faults();
    }
}

#[tokio::test]
async fn a_download_that_stands_still_ends_and_leaves_nothing() {
    let (_source, _, bytes, digest) = file(1 << 20);
    let target = tempfile::tempdir().unwrap();
    let fake = fake_gcs().await;
    fake.put(BUCKET, "pages.img", bytes);
    fake.add_fault(InjectedFault::new(Op::Read, FaultKind::Hang).times(0));
    let store = gcs_on(&fake).with_timeouts(Duration::from_secs(20), SHORT);
    let error = store.download("pages.img", &target.path().join("back"), &digest, NO_PROGRESS).await.unwrap_err();
    assert!(error.is_passing(), "{error:?}");
    assert_eq!(std::fs::read_dir(target.path()).unwrap().count(), 0);
}
