//! Reads `metadata.json`, which may have been edited by hand.

use baton_protocol::{
    by_hand,
    id::SandboxId,
    metadata::{MAX_BYTES, Metadata, Spec},
};
use serde_json::{Map, Value};

use super::{Error, Result};

/// The magic bytes of gzip. Objects are returned as stored, whatever their encoding.
const GZIP: &[u8] = &[0x1f, 0x8b];

/// A valid record that may still lack a token.
#[derive(Clone, Debug, PartialEq)]
pub struct Draft {
    /// Its token is empty if none is set.
    pub metadata: Metadata,
    pub has_token: bool,
    /// No instance has written to it yet.
    pub is_by_hand: bool,
}

/// Parses the metadata of a sandbox that clients can attach to. An invalid `status`, only a view, is ignored.
pub fn parse(id: &SandboxId, bytes: &[u8]) -> Result<Metadata> {
    draft(id, bytes, None)?.finished()
}

/// Like [`parse`], but accepts a record without a token, which only an operator's command can add. `lock_bucket` is
/// where the lock of a record written by hand is expected.
pub fn draft(id: &SandboxId, bytes: &[u8], lock_bucket: Option<&str>) -> Result<Draft> {
    let invalid = |why: String| Error::InvalidSpec(why);
    if bytes.len() > MAX_BYTES {
        return Err(invalid(format!("metadata.json is {} bytes long, the most is {MAX_BYTES}", bytes.len())));
    }
    if bytes.starts_with(GZIP) {
        return Err(invalid("metadata.json is compressed: store it again without `Content-Encoding: gzip`".to_owned()));
    }
    let mut record: Map<String, Value> = serde_json::from_slice(bytes)
        .map_err(|error| invalid(format!("metadata.json is not a JSON object: {error}")))?;
    let is_by_hand = by_hand::is_by_hand(&record);
    by_hand::complete(&mut record, lock_bucket);
    let status = record.remove("status").and_then(|status| serde_json::from_value(status).ok());
    let latest = record.remove("latest_sandbox_checkpoint").and_then(|latest| serde_json::from_value(latest).ok());
    let taken = record.remove("last_checkpointed").and_then(|taken| serde_json::from_value(taken).ok());
    let token = record.entry("token_sha256").or_insert(Value::Null);
    let has_token = !token.is_null();
    if !has_token {
        *token = Value::String(String::new());
    }
    let spec: Spec = serde_json::from_value(Value::Object(record)).map_err(|error| invalid(error.to_string()))?;
    if spec.sandbox_id != *id {
        return Err(invalid("sandbox_id is not that of this sandbox".to_owned()));
    }
    let metadata = Metadata {
        spec,
        latest_sandbox_checkpoint: latest.flatten(),
        last_checkpointed: taken.flatten(),
        status: status.unwrap_or_default(),
    };
    Ok(Draft { metadata, has_token, is_by_hand })
}

impl Draft {
    pub(super) fn finished(self) -> Result<Metadata> {
        if self.has_token { Ok(self.metadata) } else { Err(Error::TokenMissing) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn id() -> SandboxId {
        SandboxId::parse("sandbox-abc-123").unwrap()
    }

    fn text(change: impl Fn(&mut Value)) -> Vec<u8> {
        let mut record = json!({"sandbox_id": "sandbox-abc-123", "created_timestamp": "2025-10-08T10:00:00Z"});
        change(&mut record);
        serde_json::to_vec(&record).unwrap()
    }

    #[test]
    fn what_has_no_token_says_so_and_not_that_it_cannot_be_understood() {
        assert!(matches!(parse(&id(), &text(|_| {})), Err(Error::TokenMissing)));
        assert!(matches!(parse(&id(), &text(|record| record["token_sha256"] = Value::Null)), Err(Error::TokenMissing)));
        assert!(parse(&id(), &text(|record| record["token_sha256"] = json!("ab"))).is_ok());
        // Other defects are reported first: a new token would not repair them.
        let dancing = text(|record| record["desired_state"] = json!("dancing"));
        assert!(matches!(parse(&id(), &dancing), Err(Error::InvalidSpec(_))));
    }

    #[test]
    fn only_a_record_that_no_instance_has_written_to_is_completed() {
        let read = |change: fn(&mut Value)| draft(&id(), &text(change), Some("locks"));
        let by_hand = read(|_| {}).unwrap();
        assert!(by_hand.is_by_hand && !by_hand.has_token);
        assert_eq!(by_hand.metadata.spec.lock_bucket.as_deref(), Some("locks"));
        let error = read(|record| record["status"] = json!({"phase": "running"})).unwrap_err();
        assert!(matches!(&error, Error::InvalidSpec(why) if why.contains("desired_state")), "{error}");
    }
}
