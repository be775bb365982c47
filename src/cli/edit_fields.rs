//! Which fields of the metadata an operator may change.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use super::context::UsageError;

/// The fields that only the lease holder writes.
pub const HOLDER_FIELDS: [&str; 3] = ["status", "latest_sandbox_checkpoint", "last_checkpointed"];

/// The operator's fields.
const OPERATOR_FIELDS: [&str; 13] = [
    "desired_state",
    "placement",
    "labels",
    "ttl",
    "idle_timeout",
    "enable_idle_timeout_auto_checkpoint",
    "enable_sandbox_checkpoint",
    "enable_sandbox_handoff",
    "limits",
    "network",
    "plain",
    "on_incompatible",
    "token_sha256",
];

/// The fields of others, and what is theirs about them.
const FOREIGN_FIELDS: [(&str, &str); 11] = [
    ("sandbox_id", "it is fixed"),
    ("created_timestamp", "it is fixed"),
    ("lock_bucket", "it is fixed"),
    ("tenant", "it is set when the sandbox is created"),
    ("filesystem_snapshot_name", "it is set when the sandbox is created"),
    ("from_checkpoint", "it is set when the sandbox is created"),
    ("env", "the client sets it"),
    ("cwd", "the client sets it"),
    ("requests", "clients write requests, and instances answer them"),
    ("traceparent", "the server writes it with a request"),
    ("claim", "instances write it"),
];

/// The spec without what belongs to the holder.
pub fn spec_of(record: &Map<String, Value>) -> Map<String, Value> {
    let is_shown = |(key, _): &(&String, &Value)| !HOLDER_FIELDS.contains(&key.as_str());
    record.iter().filter(is_shown).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Sets fields by their paths, as in `labels.team`.
pub fn set_fields(mut spec: Map<String, Value>, settings: &[(String, Value)]) -> Result<Map<String, Value>> {
    for (name, value) in settings {
        let mut at = &mut spec;
        let mut parts = name.split('.').peekable();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                at.insert(part.to_owned(), value.clone());
                break;
            }
            let below = at.entry(part).or_insert_with(|| Value::Object(Map::new()));
            at = below.as_object_mut().with_context(|| format!("`{part}` has no fields"))?;
        }
    }
    Ok(spec)
}

/// The top-level fields that differ.
pub fn changed_fields<'a>(before: &'a Map<String, Value>, after: &'a Map<String, Value>) -> Vec<&'a String> {
    let keys: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    keys.into_iter().filter(|key| before.get(*key) != after.get(*key)).collect()
}

/// Refuses a change of a field that is not the operator's. `force` allows it, but never the holder's fields.
pub fn check_fields(before: &Map<String, Value>, after: &Map<String, Value>, force: bool) -> Result<(), UsageError> {
    for name in changed_fields(before, after) {
        let shown = baton_files::plain(name);
        if HOLDER_FIELDS.contains(&name.as_str()) {
            return Err(UsageError(format!("only the instance that holds the sandbox writes `{shown}`")));
        }
        if force || OPERATOR_FIELDS.contains(&name.as_str()) {
            continue;
        }
        if let Some((_, why)) = FOREIGN_FIELDS.iter().find(|(foreign, _)| foreign == name) {
            return Err(UsageError(format!("`{shown}` is not an operator's field: {why}; --force changes it anyway")));
        }
        // A key that another program put there may be changed.
        if !before.contains_key(name) {
            return Err(UsageError(format!(
                "there is no field `{shown}`; an operator's fields are {}; --force stores it anyway",
                OPERATOR_FIELDS.join(", ")
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use baton_protocol::{
        id::{InstanceId, SandboxId},
        metadata::{Metadata, SandboxStatus, Spec},
    };
    use serde_json::json;

    use super::*;

    fn map(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn fields_are_set_by_their_path() {
        let record = map(json!({"labels": {"a": "b"}, "ttl": null}));
        let set = |fields: &[(&str, Value)]| {
            let fields: Vec<_> = fields.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
            set_fields(record.clone(), &fields)
        };
        let after = set(&[("labels.team", json!("blue")), ("ttl", json!(60)), ("placement", Value::Null)]).unwrap();
        assert_eq!(Value::Object(after), json!({"labels": {"a": "b", "team": "blue"}, "ttl": 60, "placement": null}));
        assert!(set(&[("ttl.x", json!(1))]).is_err());
    }

    #[test]
    fn every_field_of_the_metadata_has_an_owner() {
        let id = SandboxId::parse("sandbox-a").unwrap();
        let spec = Spec::new(id, String::new(), String::new(), InstanceId::from_bits([1; 16]));
        let record = Metadata {
            spec,
            latest_sandbox_checkpoint: None,
            last_checkpointed: None,
            status: SandboxStatus::default(),
        };
        let record = serde_json::to_value(&record).unwrap();
        for name in record.as_object().unwrap().keys().map(String::as_str) {
            let is_known = HOLDER_FIELDS.contains(&name)
                || OPERATOR_FIELDS.contains(&name)
                || FOREIGN_FIELDS.iter().any(|(foreign, _)| *foreign == name);
            assert!(is_known, "{name}");
        }
    }

    #[test]
    fn fields_of_others_and_unknown_ones_need_force_and_the_holders_are_never_changed() {
        let before = map(json!({"ttl": 1, "env": {}, "note": "x", "status": {}}));
        let check = |change: Value, force: bool| {
            let mut after = before.clone();
            after.extend(map(change));
            check_fields(&before, &after, force).map_err(|error| error.0)
        };
        assert_eq!(check(json!({"ttl": 2, "note": "y", "placement": null}), false), Ok(()));
        assert!(check(json!({"env": {"A": "b"}}), false).unwrap_err().contains("the client sets it"));
        assert!(check(json!({"desired_sate": "running"}), false).unwrap_err().contains("desired_state"));
        assert_eq!(check(json!({"env": {"A": "b"}, "desired_sate": "running"}), true), Ok(()));
        assert!(check(json!({"status": {"phase": "running"}}), true).is_err());
    }
}
