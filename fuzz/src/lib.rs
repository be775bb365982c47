//! What each fuzz target does with one input. A target is `fuzz_targets/NAME.rs`, its seeds are in `corpus/NAME`.
//!
//! | target | reads |
//! |---|---|
//! | [`client_messages`] | texts and binary messages of a client, and events of a server |
//! | [`agent_intake`] | frames from the server, as the agent reads them |
//! | [`agent_frames`] | frames from the agent, as the server reads them |
//! | [`name_queries`] | name queries of programs in a sandbox, as the agent reads them |
//! | [`lock`], [`metadata`], [`manifest`] | objects of the bucket |
//! | [`files_archive`] | an archive from a hostile sandbox, as a client unpacks it |
//! | [`server_archive`] | a snapshot or root file system, as an instance extracts it |
//! | [`settings`] | limits, rates, sizes and times of an operator |
//!
//! No input may make any of them panic. What was read is written and read again, and must be the same; an archive
//! may change nothing outside its directory. `scripts/fuzz` builds the targets with overflow checks and runs them.
// It includes sources of other crates, whose own tests run where they belong.
#![cfg(not(test))]
#![allow(clippy::unwrap_used, reason = "a target that is surprised ends: that is a finding")]
#![allow(clippy::wildcard_enum_match_arm, reason = "a target looks at what it is about")]

mod archives;
mod frames;
mod messages;
mod name_queries;
mod recipe;
mod record_parsing;
mod setting_values;

pub use self::{
    archives::{files_archive, server_archive},
    frames::{agent_frames, agent_intake},
    messages::client_messages,
    name_queries::name_queries,
    record_parsing::{lock, manifest, metadata},
    setting_values::settings,
};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// Reads a JSON record; what was understood must survive being written and read again. Numbers with a fraction, which
/// only keys of somebody else's have, may change in their last digit.
fn round_trip<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<T> {
    let read: T = serde_json::from_slice(bytes).ok()?;
    let written = serde_json::to_vec(&read).expect("a record can be written");
    let again: T = serde_json::from_slice(&written).expect("what was written can be read");
    let has_fraction = serde_json::from_slice(&written).is_ok_and(|value| has_fraction(&value));
    assert!(has_fraction || read == again, "{read:?} {again:?}");
    Some(read)
}

fn has_fraction(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(values) => values.iter().any(has_fraction),
        Value::Object(values) => values.values().any(has_fraction),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}
