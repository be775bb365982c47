//! Cloud Storage through the official client library, behind plain types and boxed futures.
//!
//! The library is generic from top to bottom: whoever calls it compiles most of it anew. So it is
//! called here and nowhere else, and what this crate shows has no generic function and no `async fn`.
//! It decides nothing: when to wait, what to settle and what to believe is the store's business.
//!
//! Writes and deletions of small objects are sent once: the library would repeat one whose reply was
//! lost and then report the success of the first as a conflict. Reads and transfers are repeated.

mod calls;
mod classify;
mod client;
mod content;
mod source;

use std::{pin::Pin, time::SystemTime};

pub use client::{Client, Connection};
pub use content::Content;
pub use source::Source;

pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// By what the caller can do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The object, or the whole bucket: the service has one code for both.
    #[error("it does not exist")]
    NotFound,
    /// The condition did not hold.
    #[error("it was changed by somebody else")]
    Conflict,
    /// Wait at least a second.
    #[error("it is written too often")]
    TooFast,
    #[error("{0}")]
    Unavailable(String),
    /// An operator has to act.
    #[error("{0}")]
    Denied(String),
    /// What was read or sent is not what it should be.
    #[error("{0}")]
    Damaged(String),
    /// A small object was wanted.
    #[error("{0} bytes")]
    TooLarge(u64),
    #[error("{0}")]
    Other(String),
}

pub type Result<T> = std::result::Result<T, Error>;

/// What the service says of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    pub name: String,
    pub generation: i64,
    pub size: u64,
    pub crc32c: Option<u32>,
    /// The attribute [`SHA256`].
    pub sha256: Option<String>,
    pub updated: Option<SystemTime>,
}

/// What an object is said to hold, among its own attributes.
pub const SHA256: &str = "baton-sha256";

/// The answer to a conditional read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    Unchanged,
    Found(Vec<u8>, i64),
}

/// One page of a listing; `token` is empty after the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    pub objects: Vec<About>,
    pub token: String,
}

/// A file on its way into the bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    pub sha256: String,
    pub crc32c: u32,
    /// Generation 0 stands for an object that does not exist.
    pub if_generation: Option<i64>,
}
