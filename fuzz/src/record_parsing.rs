//! Objects of the bucket, as whoever can write there may leave them.

use baton_protocol::{
    by_hand,
    lock::Lock,
    manifest::{CheckpointManifest, SnapshotManifest},
    metadata::Metadata,
    versioned::{self, Versioned},
};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::round_trip;

pub fn lock(data: &[u8]) {
    if let Some(lock) = round_trip::<Lock>(data) {
        for head in [&lock.head, &lock.prev_head].into_iter().flatten() {
            let id = &head.checkpoint_id;
            let _ = (id.sandbox(), id.epoch(), id.seq());
        }
    }
}

pub fn metadata(data: &[u8]) {
    if let Some(record) = round_trip::<Metadata>(data) {
        let _ = (record.spec.plain_words(), record.spec.claim_at_placement(), record.spec.open_order());
    }
    if let Ok(mut record) = serde_json::from_slice::<Map<String, Value>>(data) {
        let given = record.clone();
        by_hand::complete(&mut record, Some("locks"));
        assert!(given.iter().all(|(key, value)| record.get(key) == Some(value)), "a key was replaced");
        assert!(!by_hand::is_by_hand(&record), "what was completed is complete");
        round_trip::<Metadata>(&serde_json::to_vec(&record).unwrap());
    }
}

pub fn manifest(data: &[u8]) {
    stored_manifest::<CheckpointManifest>(data);
    stored_manifest::<SnapshotManifest>(data);
}

/// A manifest of any version that can be read is written and read again as the current one.
fn stored_manifest<T: Versioned + Serialize + PartialEq + std::fmt::Debug>(data: &[u8]) {
    if let Ok(read) = versioned::parse::<T>(data) {
        let written = serde_json::to_vec(&read).expect("a manifest can be written");
        assert_eq!(versioned::parse::<T>(&written).expect("what was written can be read"), read);
    }
}
