use baton_protocol::{
    id::{CheckpointId, InstanceId, Nonce, SandboxId, Sha256Name},
    lock::{Claim, Head, Lease, Waiter},
};
use serde_json::json;

use super::*;
use crate::telemetry::Redacted;

const NAME: &str = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";

fn seals(keys: &[&str]) -> Seals {
    Seals::new(keys.iter().map(|key| Redacted::new((*key).to_owned())).collect())
}

fn id() -> SandboxId {
    SandboxId::parse(NAME).unwrap()
}

fn key() -> String {
    layout::Object::Lock(&id()).key()
}

/// A lock in which every field has a value.
fn lock() -> Lock {
    let (me, op) = (InstanceId::from_bits([1; 16]), Nonce::from_bits([2; 16]));
    let head = |seq: u64| Head {
        seq,
        epoch: 6,
        checkpoint_id: CheckpointId::new(&id(), 6, seq, &Nonce::from_bits([3; 16])),
        bucket: Some("b".to_owned()),
        manifest_sha256: Sha256Name::from_bits([10; 32]),
    };
    Lock {
        epoch: 7,
        ran: true,
        behind: true,
        lease: Some(Lease { owner: me.clone(), renew: 41, op: op.clone(), hold_ms: 15000, takeover_ms: 30000 }),
        waiter: Some(Waiter { instance: me, op, beat: 3, ttl_ms: 60000, claim: Claim::Ask, declined: true }),
        head: Some(head(12)),
        prev_head: Some(head(11)),
        forked_from: Some(CheckpointId::new(&id(), 1, 1, &Nonce::from_bits([4; 16]))),
        purged_at: Some("2026-11-16T10:00:00Z".to_owned()),
        unknown: Map::from_iter([("later".to_owned(), json!({"x": [1, -2.5, null, "é"]}))]),
        ..Lock::new(id())
    }
}

fn written(seals: &Seals, lock: &Lock) -> Value {
    serde_json::to_value(sealed(seals, &key(), lock).unwrap()).unwrap()
}

fn reads(seals: &Seals, record: &Value) -> Result<StoredLock, Unusable> {
    parse(seals, &key(), record.to_string().as_bytes())
}

#[test]
fn the_signed_bytes_are_these() {
    let record = json!({"b": [true, false, null], "a": "é", "c": {"n": 12}});
    let mut expected = ENCODING.to_vec();
    for (kind, length, text) in [
        ("o", 3, ""),
        ("s", 1, "a"),
        ("s", 2, "é"),
        ("s", 1, "b"),
        ("a", 3, "tfn"),
        ("s", 1, "c"),
        ("o", 1, ""),
        ("s", 1, "n"),
        ("i", 2, "12"),
    ] {
        expected.extend_from_slice(kind.as_bytes());
        expected.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, length]);
        expected.extend_from_slice(text.as_bytes());
    }
    assert_eq!(canonical(record.as_object().unwrap()), expected);
}

#[test]
fn no_two_records_have_the_same_signed_bytes() {
    let records = [
        json!({}),
        json!({"a": null}),
        json!({"a": ""}),
        json!({"a": "null"}),
        json!({"a": 1}),
        json!({"a": "1"}),
        json!({"a": true}),
        json!({"a": []}),
        json!({"a": {}}),
        json!({"a": [[]]}),
        json!({"a": [], "b": []}),
        json!({"a": ["b"]}),
        json!({"a": "b"}),
        json!({"ab": ""}),
        json!({"a": {"b": 1}}),
        json!({"a": {}, "b": 1}),
    ];
    let bytes: std::collections::BTreeSet<_> =
        records.iter().map(|record| canonical(record.as_object().unwrap())).collect();
    assert_eq!(bytes.len(), records.len());
}

#[test]
fn a_signed_lock_comes_back_however_its_text_was_laid_out() {
    let one = seals(&["one"]);
    let lock = lock();
    let sealed = sealed(&one, &key(), &lock).unwrap();
    let expected = StoredLock { lock: lock.clone(), is_sealed: true };
    for text in [serde_json::to_vec(&sealed).unwrap(), serde_json::to_vec_pretty(&sealed).unwrap()] {
        assert_eq!(parse(&one, &key(), &text).unwrap(), expected);
    }
    // Through a map whose fields are in another order.
    assert_eq!(reads(&one, &written(&one, &lock)).unwrap(), expected);
}

#[test]
fn every_key_is_signed() {
    let one = seals(&["one"]);
    let good = written(&one, &lock());
    let names: Vec<String> = good.as_object().unwrap().keys().cloned().collect();
    assert!(names.len() > 14, "{names:?}");
    for name in &names {
        let mut forged = good.clone();
        drop(forged.as_object_mut().unwrap().remove(name));
        assert_eq!(reads(&one, &forged), Err(Unusable::Unsigned), "{name} removed");
        forged[name] = json!("0");
        assert_eq!(reads(&one, &forged), Err(Unusable::Unsigned), "{name} changed");
    }
    let mut more = good;
    more["more"] = json!(null);
    assert_eq!(reads(&one, &more), Err(Unusable::Unsigned));
}

#[test]
fn a_signature_counts_for_one_name_and_one_list_of_keys() {
    let (old, both, new) = (seals(&["old"]), seals(&["new", "old"]), seals(&["new"]));
    assert!(reads(&both, &written(&old, &lock())).is_ok() && reads(&new, &written(&both, &lock())).is_ok());
    assert_eq!(reads(&old, &written(&both, &lock())), Err(Unusable::Unsigned));
    let text = written(&new, &lock()).to_string();
    let other = "sandboxes/sandbox-1b9f5a52-6f0e-4b1c-9d3e-0123456789ab/lock.json";
    assert_eq!(parse(&new, other, text.as_bytes()), Err(Unusable::Unsigned));
}

#[test]
fn without_a_key_nothing_is_signed_or_looked_at_and_the_text_is_as_it_was() {
    let none = Seals::default();
    let text = serde_json::to_vec(&sealed(&none, &key(), &lock()).unwrap()).unwrap();
    assert_eq!(text, serde_json::to_vec(&lock()).unwrap());
    assert_eq!(parse(&none, &key(), &text).unwrap(), StoredLock { lock: lock(), is_sealed: false });
    assert_eq!(parse(&seals(&["one"]), &key(), &text), Err(Unusable::Unsigned));
    // Locks signed by others are read, and written without the signature, which would no longer be valid.
    let stored = reads(&none, &written(&seals(&["one"]), &lock())).unwrap();
    assert_eq!(stored, StoredLock { lock: lock(), is_sealed: true });
    let keeps = Seals::of_command(Vec::new());
    assert!(none.may_replace(true) && keeps.may_replace(false) && !keeps.may_replace(true));
    assert!(Seals::of_command(vec![Redacted::new("one".to_owned())]).may_replace(true));
}

#[test]
fn what_is_no_lock_of_this_sandbox_is_garbled_with_and_without_a_key() {
    let other = SandboxId::parse("sandbox-other").unwrap();
    let too_far = Lock { epoch: MAX_INTEGER + 1, ..Lock::new(id()) };
    for seals in [Seals::default(), seals(&["one"])] {
        for lock in [Lock::new(other.clone()), too_far.clone()] {
            let found = reads(&seals, &written(&seals, &lock));
            assert!(matches!(found, Err(Unusable::Garbled(_))), "{found:?}");
        }
        for text in ["", "[]", "null", "{", "\u{1f}\u{8b}"] {
            let found = parse(&seals, &key(), text.as_bytes());
            assert!(matches!(found, Err(Unusable::Garbled(_))), "{text}: {found:?}");
        }
    }
    let found = parse(&Seals::default(), &key(), b"{}");
    assert!(matches!(&found, Err(Unusable::Garbled(why)) if why.contains("missing field")), "{found:?}");
}

/// As instances wrote them, before signatures were introduced and after.
#[test]
fn the_stored_locks_of_both_kinds_are_read() {
    let plain = include_bytes!("../../../crates/protocol/fixtures/records/lock.json");
    let signed = include_bytes!("../../../crates/protocol/fixtures/records/signed_lock.json");
    let lock = parse_unverified(&key(), plain).unwrap();
    assert_eq!(parse(&Seals::default(), &key(), plain).unwrap(), StoredLock { lock: lock.clone(), is_sealed: false });
    let with_key = seals(&["this-is-the-key-of-the-fixture--"]);
    assert_eq!(parse(&with_key, &key(), plain), Err(Unusable::Unsigned));
    let expected = StoredLock { lock: lock.clone(), is_sealed: true };
    assert_eq!(parse(&with_key, &key(), signed).unwrap(), expected);
    assert_eq!(parse(&Seals::default(), &key(), signed).unwrap(), expected);
    let again = serde_json::to_vec_pretty(&sealed(&with_key, &key(), &lock).unwrap()).unwrap();
    assert_eq!(String::from_utf8(again).unwrap().trim_end(), String::from_utf8_lossy(signed).trim_end());
}

#[test]
fn a_lock_is_older_by_its_epoch_and_by_what_its_holder_wrote() {
    let at = |epoch: u64, renew: Option<u64>| {
        let lease = |renew| Lease { renew, ..lock().lease.unwrap() };
        Lock { epoch, lease: renew.map(lease), ..Lock::new(id()) }
    };
    // In chronological order: created free, acquired, renewed, released, acquired again.
    let life = [at(0, None), at(1, Some(0)), at(1, Some(1)), at(1, None), at(2, Some(0))];
    for (earlier, one) in life.iter().enumerate() {
        for (later, other) in life.iter().enumerate() {
            assert_eq!(is_older(one, other), earlier < later, "{earlier} {later}");
        }
    }
}
