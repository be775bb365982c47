//! Cloud Storage: what is not there, what is not whole, and how either is told from anything else.

use std::{sync::Arc, time::Duration};

use baton::storage::{
    gcs::{Gcs, GcsConnection},
    store::{Error, PollResult, Precondition, Store},
};
use baton_fake_gcs::{FaultKind, InjectedFault, Op};

use crate::{
    store_faults::{KEY, NO_PROGRESS, SHORT, file, read},
    store_suite::{BUCKET, clock, fake_gcs, gcs_on},
};

#[tokio::test]
async fn a_bucket_that_does_not_exist_is_not_an_empty_one() {
    let fake = fake_gcs().await;
    let connection = Arc::new(GcsConnection::new(Some(fake.url().to_owned())));
    let store = Gcs::new(connection, "elsewhere", clock()).with_timeouts(Duration::from_secs(20), SHORT);
    for error in [
        store.get_if_changed(KEY, None).await.unwrap_err(),
        store.put(KEY, "1".into(), Precondition::Absent).await.unwrap_err(),
        store.list("sandboxes/", None).await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::Denied { .. }), "{error:?}");
        assert!(error.to_string().contains("bucket does not exist"), "{error}");
    }
}

#[tokio::test]
async fn whether_the_bucket_or_the_object_is_missing_is_told_by_the_code_of_a_listing() {
    let fake = fake_gcs().await;
    // Whatever the service says in words.
    fake.add_fault(InjectedFault::new(Op::Read, FaultKind::Status(404)).times(0));
    fake.add_fault(InjectedFault::new(Op::Write, FaultKind::Status(404)).times(0));
    let (_folder, path, _, digest) = file(1000);
    let connection = Arc::new(GcsConnection::new(Some(fake.url().to_owned())));
    let elsewhere = Gcs::new(connection, "elsewhere", clock()).with_timeouts(Duration::from_secs(20), SHORT);
    assert_denied(elsewhere.get_if_changed(KEY, None).await.map(drop));
    assert_denied(elsewhere.delete(KEY, Precondition::Any).await);
    assert_denied(elsewhere.put(KEY, "1".into(), Precondition::Any).await.map(drop));
    assert_denied(elsewhere.upload(KEY, &path, Precondition::Any, &digest, NO_PROGRESS).await.map(drop));
    assert_denied(elsewhere.download(KEY, &path.with_extension("back"), &digest, NO_PROGRESS).await);
    let store = gcs_on(&fake);
    for _ in 0..2 {
        assert_eq!(store.get_if_changed(KEY, None).await.unwrap(), PollResult::Missing);
    }
}

#[tokio::test]
async fn what_was_damaged_on_its_way_is_moved_once_more() {
    let (folder, path, bytes, digest) = file(3 << 20);
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    fake.put(BUCKET, "pages.img", bytes.clone());
    fake.put(BUCKET, KEY, "small");
    let back = |name: &str| folder.path().join(name);
    let flip = |op| fake.add_fault(InjectedFault::new(op, FaultKind::Flip));
    flip(Op::Read);
    assert_eq!(read(&store).await.0, "small");
    flip(Op::Read);
    store.download("pages.img", &back("one"), &digest, NO_PROGRESS).await.unwrap();
    flip(Op::Read);
    store.download_unverified("pages.img", &back("two"), 4 << 20, NO_PROGRESS).await.unwrap();
    flip(Op::Write);
    store.put("put", "small".into(), Precondition::Absent).await.unwrap();
    flip(Op::Write);
    store.upload("sent.img", &path, Precondition::Absent, &digest, NO_PROGRESS).await.unwrap();
    assert_eq!(fake.faults_left(), [], "each has happened");
    assert!(std::fs::read(back("one")).unwrap() == bytes && std::fs::read(back("two")).unwrap() == bytes);
    assert!(fake.content(BUCKET, "put").unwrap() == "small" && fake.content(BUCKET, "sent.img").unwrap() == bytes);
}

#[tokio::test]
async fn a_flipped_bit_is_never_published_nor_polled() {
    let (_source, _, bytes, digest) = file(3 << 20);
    let target = tempfile::tempdir().unwrap();
    let fake = fake_gcs().await;
    let store = gcs_on(&fake);
    fake.put(BUCKET, "pages.img", bytes);
    fake.put(BUCKET, KEY, "small");
    fake.add_fault(InjectedFault::new(Op::Read, FaultKind::Flip).times(0));
    let error = store.download("pages.img", &target.path().join("back"), &digest, NO_PROGRESS).await.unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
    assert!(!target.path().join("back").exists());
    let error = store.get_if_changed(KEY, None).await.unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
}

#[tokio::test]
async fn an_object_that_rotted_in_the_bucket_is_never_published() {
    let (_source, _, bytes, digest) = file(3 << 20);
    let target = tempfile::tempdir().unwrap();
    let fake = fake_gcs().await;
    let mut rotten = bytes.to_vec();
    rotten[1 << 20] ^= 0x10;
    // Its own checksum is right: only the digest of the manifest can tell.
    fake.put(BUCKET, "pages.img", rotten);
    let back = target.path().join("back");
    let error = gcs_on(&fake).download("pages.img", &back, &digest, NO_PROGRESS).await.unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
    assert_eq!(std::fs::read_dir(target.path()).unwrap().count(), 0);
}

fn assert_denied(answer: Result<(), Error>) {
    let Err(error) = answer else { panic!("it is not there") };
    assert!(matches!(error, Error::Denied { .. }) && error.to_string().contains("bucket does not exist"), "{error:?}");
}
