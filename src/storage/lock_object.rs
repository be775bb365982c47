//! `lock.json` as stored: parsed into a [`Lock`] and, if the instance has keys, verified and signed. Pure.
//!
//! The signature is the field `seal` of the object, an HMAC over the object's name and all its other fields. A lock
//! that cannot be verified is never returned, so no write can be based on it and sign forged content.

use baton_protocol::{lock::Lock, reason::Reason};
use serde::Serialize;
use serde_json::{Map, Value};

use super::{layout, signature::Seals};
use crate::config::variables::HMAC_KEY;

/// The field that holds the signature. It is not part of [`Lock`]: the rules of the lease do not depend on it.
const SEAL: &str = "seal";
/// Precedes the canonical bytes, so that another encoding can be introduced under another name.
const ENCODING: &[u8] = b"baton lock 1\n";

/// The largest integer that every JSON reader can represent.
const MAX_INTEGER: u64 = (1 << 53) - 1;

/// Why a stored lock cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    #[error("the lock cannot be parsed: {0}")]
    Garbled(String),
    #[error("the lock is not signed with a key of {}", HMAC_KEY)]
    Unsigned,
    /// An earlier version was restored over one that this instance has read or written.
    #[error("the lock is older than the version read before")]
    Older,
}

impl Unusable {
    pub fn reason(&self) -> Reason {
        match self {
            Self::Garbled(_) | Self::Older => Reason::InvalidLock,
            Self::Unsigned => Reason::Unsigned,
        }
    }
}

/// A usable lock, and whether it carries a signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLock {
    pub lock: Lock,
    pub is_sealed: bool,
}

/// A lock ready to be written, with its signature if there are keys.
#[derive(Debug, Serialize)]
pub struct Sealed<'a> {
    #[serde(flatten)]
    lock: &'a Lock,
    #[serde(skip_serializing_if = "Option::is_none")]
    seal: Option<String>,
}

/// Parses the content of the object `key`. With keys, only a lock that one of them signed is accepted.
pub fn parse(seals: &Seals, key: &str, bytes: &[u8]) -> Result<StoredLock, Unusable> {
    let (record, seal) = split(bytes)?;
    if seals.are_asked_for() {
        let seal = seal.as_ref().and_then(Value::as_str).unwrap_or_default();
        if !seals.is_verified(key, &canonical(&record), seal.as_bytes()) {
            return Err(Unusable::Unsigned);
        }
    }
    Ok(StoredLock { lock: read(key, record)?, is_sealed: seal.is_some() })
}

/// Parses the content of the object `key` without verification: for an operator who vouches for it, and for display.
pub fn parse_unverified(key: &str, bytes: &[u8]) -> Result<Lock, Unusable> {
    split(bytes).and_then(|(record, _)| read(key, record))
}

/// Encodes a lock to be written under `key`.
pub fn sealed<'a>(seals: &Seals, key: &str, lock: &'a Lock) -> serde_json::Result<Sealed<'a>> {
    let seal = if seals.are_asked_for() {
        let Value::Object(record) = serde_json::to_value(lock)? else {
            return Err(serde::ser::Error::custom("a lock is a JSON object"));
        };
        seals.seal(key, &canonical(&record))
    } else {
        None
    };
    Ok(Sealed { lock, seal })
}

/// Whether a lock was written before another one of the same sandbox: every acquisition increments the epoch, every
/// write of the holder increments the renewal counter, and a release ends the epoch.
pub fn is_older(lock: &Lock, known: &Lock) -> bool {
    let position = |lock: &Lock| (lock.epoch, lock.lease.as_ref().map_or(u64::MAX, |lease| lease.renew));
    position(lock) < position(known)
}

fn split(bytes: &[u8]) -> Result<(Map<String, Value>, Option<Value>), Unusable> {
    let mut record: Map<String, Value> =
        serde_json::from_slice(bytes).map_err(|error| Unusable::Garbled(error.to_string()))?;
    let seal = record.remove(SEAL);
    Ok((record, seal))
}

fn read(key: &str, record: Map<String, Value>) -> Result<Lock, Unusable> {
    let lock: Lock =
        serde_json::from_value(Value::Object(record)).map_err(|error| Unusable::Garbled(error.to_string()))?;
    if counters(&lock).any(|count| count > MAX_INTEGER) {
        return Err(Unusable::Garbled("a counter is larger than it can have become".to_owned()));
    }
    if layout::sandbox_of(key).is_some_and(|id| id != lock.sandbox_id) {
        return Err(Unusable::Garbled("sandbox_id is not that of this sandbox".to_owned()));
    }
    Ok(lock)
}

/// The fields that are incremented: they are bounded so that no increment overflows.
fn counters(lock: &Lock) -> impl Iterator<Item = u64> {
    let heads = lock.head.iter().chain(&lock.prev_head).flat_map(|head| [head.seq, head.epoch]);
    let renewals = lock.lease.iter().map(|lease| lease.renew);
    let beats = lock.waiter.iter().map(|waiter| waiter.beat);
    std::iter::once(lock.epoch).chain(heads).chain(renewals).chain(beats)
}

/// The bytes that are signed: one encoding per JSON value, independent of its formatting. Every value begins with its
/// kind; strings, arrays and objects carry their length; fields are sorted. Fields of later versions are covered too.
fn canonical(record: &Map<String, Value>) -> Vec<u8> {
    let mut bytes = ENCODING.to_vec();
    put_object(&mut bytes, record);
    bytes
}

fn put_object(bytes: &mut Vec<u8>, record: &Map<String, Value>) {
    let mut fields: Vec<_> = record.iter().collect();
    fields.sort_by(|(one, _), (other, _)| one.as_bytes().cmp(other.as_bytes()));
    put_length(bytes, b'o', fields.len());
    for (name, value) in fields {
        put_text(bytes, b's', name);
        put_value(bytes, value);
    }
}

fn put_value(bytes: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Null => bytes.push(b'n'),
        Value::Bool(true) => bytes.push(b't'),
        Value::Bool(false) => bytes.push(b'f'),
        Value::Number(number) => put_text(bytes, b'i', &number.to_string()),
        Value::String(text) => put_text(bytes, b's', text),
        Value::Array(values) => {
            put_length(bytes, b'a', values.len());
            values.iter().for_each(|value| put_value(bytes, value));
        }
        Value::Object(record) => put_object(bytes, record),
    }
}

fn put_text(bytes: &mut Vec<u8>, kind: u8, text: &str) {
    put_length(bytes, kind, text.len());
    bytes.extend_from_slice(text.as_bytes());
}

fn put_length(bytes: &mut Vec<u8>, kind: u8, length: usize) {
    bytes.push(kind);
    bytes.extend_from_slice(&(length as u64).to_be_bytes());
}

#[cfg(test)]
mod tests;
