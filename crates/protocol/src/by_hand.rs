//! `metadata.json` as an operator writes it by hand, to restore a sandbox from an existing checkpoint.
//!
//! The source document requires a name, the time of creation, an idle timeout and a checkpoint; every other key
//! gets its default here, and nowhere else. Two things are left out, because only an operator's command can provide
//! them: a token to attach with, and a lock.

use serde_json::{Map, Value, json};

/// Whether no instance has written to a record yet: an instance leaves a status.
pub fn is_by_hand(record: &Map<String, Value>) -> bool {
    !record.contains_key("status")
}

/// Adds the default of every key that is missing from a record written by hand. Existing keys stay unchanged, and so
/// does a record that an instance has written to: there, a missing key is a mistake.
///
/// `lock_bucket` is where the reader looks for locks.
pub fn complete(record: &mut Map<String, Value>, lock_bucket: Option<&str>) {
    if !is_by_hand(record) {
        return;
    }
    let has_checkpoint = record.get("latest_sandbox_checkpoint").is_some_and(|latest| !latest.is_null());
    let defaults = [
        // No instance runs it, and none should before a client attaches.
        ("desired_state", json!("checkpointed")),
        ("placement", Value::Null),
        // A sandbox with a checkpoint can be checkpointed and handed off.
        ("enable_sandbox_checkpoint", json!(has_checkpoint)),
        ("enable_sandbox_handoff", json!(has_checkpoint)),
        ("lock_bucket", json!(lock_bucket)),
        ("status", json!({ "phase": if has_checkpoint { "checkpointed" } else { "pending" } })),
    ];
    for (key, value) in defaults {
        record.entry(key).or_insert(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::{DesiredState, Metadata, OnIncompatible, Phase};

    /// The example of the source document, word for word.
    const EXAMPLE: &str = r#"{
      "sandbox_id": "sandbox-abc-123",
      "created_timestamp": "2025-10-08T10:00:00Z",
      "idle_timeout": 300,
      "latest_sandbox_checkpoint": {
        "bucket": "company-sandbox-checkpoints",
        "path": "sandbox_checkpoints/checkpoint-xyz/"
      }
    }"#;

    fn record(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    fn completed(mut record: Map<String, Value>) -> Metadata {
        complete(&mut record, Some("locks"));
        record.insert("token_sha256".to_owned(), json!("ab"));
        serde_json::from_value(Value::Object(record)).unwrap()
    }

    #[test]
    fn the_example_of_the_source_document_is_a_sandbox_that_rests_with_its_checkpoint() {
        let Metadata { spec, latest_sandbox_checkpoint, status, .. } = completed(record(EXAMPLE));
        assert_eq!((spec.sandbox_id.as_str(), spec.idle_timeout), ("sandbox-abc-123", Some(300)));
        assert_eq!((spec.desired_state, spec.placement), (DesiredState::Checkpointed, None));
        assert!(spec.enable_sandbox_checkpoint && spec.enable_sandbox_handoff);
        assert!(!spec.enable_idle_timeout_auto_checkpoint);
        assert_eq!((spec.lock_bucket.as_deref(), spec.ttl), (Some("locks"), None));
        assert_eq!((spec.on_incompatible, spec.limits), (OnIncompatible::Fail, Default::default()));
        assert!(spec.env.is_empty() && spec.labels.is_empty() && spec.requests.is_empty() && spec.unknown.is_empty());
        assert_eq!((spec.cwd, spec.filesystem_snapshot_name, spec.from_checkpoint), (None, None, None));
        assert_eq!((status.phase, status.epoch), (Phase::Checkpointed, 0));
        assert_eq!(latest_sandbox_checkpoint.unwrap().path, "sandbox_checkpoints/checkpoint-xyz/");
    }

    #[test]
    fn what_is_written_counts_and_what_nobody_here_knows_is_kept() {
        let mut own = record(EXAMPLE);
        own.extend(record(
            r#"{"desired_state": "running", "enable_sandbox_handoff": false, "labels": {"a": "b"}, "theirs": [1]}"#,
        ));
        let spec = completed(own).spec;
        assert_eq!((spec.desired_state, spec.enable_sandbox_handoff), (DesiredState::Running, false));
        assert_eq!((spec.labels["a"].as_str(), &spec.unknown["theirs"]), ("b", &json!([1])));
        let mut bare = record(EXAMPLE);
        bare.remove("latest_sandbox_checkpoint");
        bare.remove("idle_timeout");
        let Metadata { spec, status, .. } = completed(bare);
        assert_eq!((spec.enable_sandbox_checkpoint, spec.idle_timeout), (false, None));
        assert_eq!(status.phase, Phase::Pending);
    }

    #[test]
    fn a_key_that_somebody_removed_from_an_instances_record_is_not_made_up() {
        let mut record = record(EXAMPLE);
        record.insert("status".to_owned(), json!({"phase": "running", "epoch": 3}));
        let before = record.clone();
        complete(&mut record, None);
        assert_eq!(record, before);
    }
}
