//! The records of a sandbox in a bucket: what a create leaves there, however its calls end.

use std::time::Duration;

use baton::{
    clock::SharedClock,
    config::LeaseTimes,
    storage::{
        lease::lease_rules::{Identity, InitialLease},
        memory::Memory,
        records::{Durable, Error, Records, StoreKind},
        store,
    },
};
use baton_fake_gcs::{FakeGcs, FaultKind, InjectedFault, Op};
use baton_protocol::{
    id::{InstanceId, SandboxId},
    metadata::Spec,
};
use std::sync::Arc;

use crate::store_suite::{BUCKET, clock, fake_gcs, gcs_on};

fn records(fake: &FakeGcs) -> Records {
    records_on(Arc::new(gcs_on(fake)))
}

fn records_on(store: Arc<dyn store::Store>) -> Records {
    let clock: SharedClock = clock();
    let durable = Durable { locks: store.clone(), metadata: store, lock_bucket: None };
    // Long enough for a busy machine, and between tries as short as a test may be.
    let times = LeaseTimes { call: Duration::from_secs(20), retry: Duration::from_millis(5), ..LeaseTimes::DEFAULT };
    Records::new(clock.clone(), Arc::new(Memory::new(clock)), Some(durable), false, times)
}

fn me() -> InstanceId {
    InstanceId::from_bits([1; 16])
}

fn lease() -> InitialLease {
    InitialLease { op: clock().nonce(), sent: clock().now() }
}

fn spec() -> Spec {
    let (id, now) = (clock().sandbox_id(), clock().timestamp());
    Spec { enable_sandbox_checkpoint: true, ..Spec::new(id, "token".to_owned(), now, me()) }
}

fn objects(fake: &FakeGcs, id: &SandboxId) -> [Option<bytes::Bytes>; 2] {
    ["lock.json", "metadata.json"].map(|name| fake.content(BUCKET, &format!("sandboxes/{id}/{name}")))
}

#[tokio::test]
async fn a_create_whose_answers_break_off_or_are_lost_is_settled_by_reading() {
    for name in ["lock.json", "metadata.json"] {
        for kind in [FaultKind::Clip(20), FaultKind::Lost, FaultKind::Drop, FaultKind::Status(503)] {
            let (fake, spec) = (fake_gcs().await, spec());
            fake.add_fault(InjectedFault::new(Op::Write, kind).on(name));
            records(&fake).create(&spec, &me(), &lease()).await.unwrap();
            assert_eq!(fake.faults_left(), [], "{kind:?} has happened to {name}");
            assert!(objects(&fake, &spec.sandbox_id).iter().all(Option::is_some), "{name}, {kind:?}");
        }
    }
}

#[tokio::test]
async fn what_another_has_written_under_the_name_is_a_conflict_and_stays() {
    for name in ["lock.json", "metadata.json"] {
        let (fake, spec) = (fake_gcs().await, spec());
        let key = format!("sandboxes/{}/{name}", spec.sandbox_id);
        fake.put(BUCKET, &key, "another's");
        let error = records(&fake).create(&spec, &me(), &lease()).await.unwrap_err();
        assert!(matches!(error, Error::Store(store::Error::Conflict(_))), "{name}: {error:?}");
        assert_eq!(fake.content(BUCKET, &key).unwrap(), "another's");
    }
}

#[tokio::test]
async fn a_create_that_fails_leaves_nothing_behind() {
    for name in ["lock.json", "metadata.json"] {
        for kind in [FaultKind::Drop, FaultKind::Status(403), FaultKind::Status(503), FaultKind::Cut(0)] {
            let (fake, spec) = (fake_gcs().await, spec());
            fake.add_fault(InjectedFault::new(Op::Write, kind).on(name).times(0));
            records(&fake).create(&spec, &me(), &lease()).await.unwrap_err();
            assert_eq!(objects(&fake, &spec.sandbox_id), [None, None], "{name}, {kind:?}");
        }
    }
}

#[tokio::test]
async fn a_create_whose_outcome_cannot_be_read_takes_back_what_it_wrote() {
    let (fake, spec) = (fake_gcs().await, spec());
    // Four writes whose answers break off, and as many reads that fail, three times each.
    fake.add_fault(InjectedFault::new(Op::Write, FaultKind::Clip(20)).on("metadata.json").times(4));
    fake.add_fault(InjectedFault::new(Op::Read, FaultKind::Status(503)).on("metadata.json").times(12));
    records(&fake).create(&spec, &me(), &lease()).await.unwrap_err();
    assert_eq!(objects(&fake, &spec.sandbox_id), [None, None]);
}

#[tokio::test]
async fn a_create_that_fails_keeps_the_lock_of_metadata_that_another_has_changed_since() {
    let (fake, spec) = (fake_gcs().await, spec());
    fake.add_fault(InjectedFault::new(Op::Write, FaultKind::Clip(20)).on("metadata.json").times(4));
    fake.add_fault(InjectedFault::new(Op::Read, FaultKind::Status(503)).on("metadata.json").times(12));
    // Between the read that finds its own record and the deletion of it another writes: the condition does not hold.
    fake.add_fault(InjectedFault::new(Op::Delete, FaultKind::Status(412)).on("metadata.json"));
    records(&fake).create(&spec, &me(), &lease()).await.unwrap_err();
    assert_eq!(fake.faults_left(), [], "all of that has happened");
    assert!(objects(&fake, &spec.sandbox_id).iter().all(Option::is_some), "metadata are never left without a lock");
}

#[tokio::test]
async fn a_page_of_sandboxes_costs_the_names_of_those_sandboxes_and_none_is_passed_over() {
    let fake = fake_gcs().await;
    let mut ids: Vec<SandboxId> = (0..60).map(|_| clock().sandbox_id()).collect();
    for id in &ids {
        fake.put(BUCKET, &format!("sandboxes/{id}/lock.json"), "{}");
        fake.put(BUCKET, &format!("sandboxes/{id}/metadata.json"), "{}");
        // What is left of another one.
        fake.put(BUCKET, &format!("sandboxes/{}/lock.json", clock().sandbox_id()), "{}");
    }
    ids.sort();
    let records = records_on(Arc::new(gcs_on(&fake).with_page(998)));
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let before = fake.listed();
        let (page, more) = records.list(after.as_ref(), 10).await.unwrap();
        assert!(page.len() <= 10);
        assert!(fake.listed() - before <= 60, "{} names for {} sandboxes", fake.listed() - before, page.len());
        after = page.last().cloned();
        found.extend(page);
        if !more {
            break;
        }
    }
    assert_eq!(found, ids);
}

#[tokio::test]
async fn metadata_that_is_stored_compressed_is_invalid_and_says_so() {
    let (fake, spec) = (fake_gcs().await, spec());
    fake.put(BUCKET, &format!("sandboxes/{}/metadata.json", spec.sandbox_id), &b"\x1f\x8b\x08rest"[..]);
    let error = records(&fake).find(&spec.sandbox_id).await.unwrap_err();
    assert!(matches!(&error, Error::InvalidSpec(why) if why.contains("Content-Encoding: gzip")), "{error:?}");
}

#[tokio::test]
async fn a_create_writes_each_object_once_so_that_no_limit_on_writes_slows_it() {
    let (fake, spec, lease) = (fake_gcs().await, spec(), lease());
    fake.set_write_interval(Some(Duration::from_secs(3600)));
    let records = records(&fake);
    records.create(&spec, &me(), &lease).await.unwrap();
    let who = Identity { me: me(), predecessor: None };
    let mut lock = records.lock_file(&spec.sandbox_id, StoreKind::Durable, &who).unwrap().begun_by(lease);
    lock.read().await.unwrap();
    assert!(lock.held().is_some_and(|held| held.epoch == 1), "it is ours without another write");
}
