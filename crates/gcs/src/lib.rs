//! Cloud Storage through the official client library, behind plain types and boxed futures.
//!
//! The library is generic throughout, so every crate that calls it compiles most of it again. It is therefore called
//! only here, and the interface of this crate has no generic functions and no `async fn`. This crate makes no
//! decisions: waiting, resolving ambiguous outcomes and verification are up to the store.
//!
//! Writes and deletions of small objects are sent once: the library would retry one whose answer was lost and then
//! report the success of the first attempt as a conflict. Reads and transfers are retried.

mod calls;
mod classify;
mod content;
mod gcs_client;
mod source;

use std::{pin::Pin, time::SystemTime};

pub use content::Content;
pub use gcs_client::{GcsClient, GcsConnection};
pub use source::UploadSource;

pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Errors of a call, grouped by what the caller can do about them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The object or the whole bucket: the service uses one code for both.
    #[error("it does not exist")]
    NotFound,
    /// The precondition did not hold.
    #[error("it was changed by another writer")]
    Conflict,
    /// Wait at least a second.
    #[error("too many writes to it")]
    TooFast,
    #[error("{0}")]
    Unavailable(String),
    /// An operator has to act.
    #[error("{0}")]
    Denied(String),
    /// The checksum of what was read or sent does not match.
    #[error("{0}")]
    Damaged(String),
    /// The object exceeds the limit for small objects.
    #[error("{0} bytes")]
    TooLarge(u64),
    #[error("{0}")]
    Other(String),
}

pub type Result<T> = std::result::Result<T, Error>;

/// The attributes of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectAttributes {
    pub name: String,
    pub generation: i64,
    pub size: u64,
    pub crc32c: Option<u32>,
    /// The attribute [`SHA256`].
    pub sha256: Option<String>,
    pub updated: Option<SystemTime>,
}

/// The custom attribute that holds the SHA-256 of an object's content.
pub const SHA256: &str = "baton-sha256";

/// The answer to a conditional read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    Unchanged,
    Found(Vec<u8>, i64),
}

/// One page of a listing; `token` is empty on the last page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectPage {
    pub objects: Vec<ObjectAttributes>,
    pub token: String,
}

/// The parameters of an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadOptions {
    pub sha256: String,
    pub crc32c: u32,
    /// Generation 0 means that the object must not exist.
    pub if_generation: Option<i64>,
}
