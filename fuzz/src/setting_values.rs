//! What an operator or a client writes as a number, a size, a time or a list.

#[allow(dead_code, reason = "not every kind of setting is worth while")]
#[path = "../../src/config/parse.rs"]
mod parse;

use baton_protocol::{
    id::{CheckpointId, ExecId, InstanceId, Nonce, SandboxId, Sha256Name, SnapshotName},
    limits::{Limits, show_size},
    trace::Traceparent,
};

use crate::round_trip;

pub fn settings(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    round_trip::<Limits>(data);
    if let Some(bounds) = parse::limits(text) {
        assert_eq!(bounds.apply(&Limits::default()).as_ref(), Ok(&bounds.default), "a default is allowed");
    }
    if let Some(size) = parse::size(text) {
        let shown = show_size(size);
        let shown = shown.strip_suffix(" bytes").unwrap_or(&shown);
        assert_eq!(parse::size(shown), Some(size));
    }
    let _ = (parse::rate(text), parse::span_or_off(text), parse::factor(text), parse::count_or_none(text));
    let _ = (parse::address_or_off(text), parse::url_or_host(text), parse::digests(text));
    // A name becomes part of a key and of a path.
    for name in [
        SandboxId::parse(text).map(|id| id.to_string()),
        CheckpointId::parse(text).map(|id| id.to_string()),
        InstanceId::parse(text).map(|id| id.to_string()),
        SnapshotName::parse(text).map(|id| id.to_string()),
        ExecId::parse(text).map(|id| id.to_string()),
        Nonce::parse(text).map(|id| id.to_string()),
        Sha256Name::parse(text).map(|id| id.to_string()),
    ]
    .into_iter()
    .flatten()
    {
        assert_eq!(name, text);
        let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        assert!(is_plain && !name.is_empty() && !name.starts_with('.'), "{name:?}");
    }
    if let Some(parent) = Traceparent::parse(text) {
        assert_eq!(Traceparent::parse(&parent.to_string()), Some(parent));
    }
}
