//! The store of sandboxes that end with their instance: the reconciler half owns it, and the API half calls it over
//! the socket, one call per connection.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use serde::{Deserialize, Serialize};

use super::{Handshake, ipc_socket, packed, unpacked, wire};
use crate::{
    clock::SharedClock,
    storage::store::{
        Digest, Error, ObjectEntry, Page, PollResult, Precondition, ProgressFn, Result, Store, Version, Written,
    },
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    Poll { key: String, known: Option<String> },
    Put { key: String, bytes: String, when: When },
    Delete { key: String, when: When },
    List { prefix: String, after: Option<String> },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    Any,
    Absent,
    Is(String),
}

impl From<Precondition> for When {
    fn from(condition: Precondition) -> Self {
        match condition {
            Precondition::Any => Self::Any,
            Precondition::Absent => Self::Absent,
            Precondition::Is(version) => Self::Is(version.0),
        }
    }
}

impl From<When> for Precondition {
    fn from(when: When) -> Self {
        match when {
            When::Any => Self::Any,
            When::Absent => Self::Absent,
            When::Is(version) => Self::Is(Version(version)),
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Polled(Polled),
    Written { version: String },
    Deleted,
    Listed { entries: Vec<(String, String, u64)>, more: bool },
    Failed(Failed),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Polled {
    Unchanged,
    Missing,
    Changed { bytes: String, version: String },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Failed {
    Conflict { key: String },
    NotFound { key: String },
    Other { key: String, why: String },
}

/// Answers one call from `memory`.
pub async fn serve(memory: &dyn Store, call: Call, mut wire: super::IpcStream) -> std::io::Result<()> {
    let answer = match call {
        Call::Poll { key, known } => memory.get_if_changed(&key, known.map(Version).as_ref()).await.map(|polled| {
            Answer::Polled(match polled {
                PollResult::Unchanged => Polled::Unchanged,
                PollResult::Missing => Polled::Missing,
                PollResult::Changed(bytes, version) => {
                    Polled::Changed { bytes: STANDARD.encode(&bytes), version: version.0 }
                }
            })
        }),
        Call::Put { key, bytes, when } => match STANDARD.decode(bytes) {
            Ok(bytes) => {
                let written = memory.put(&key, bytes.into(), when.into()).await;
                written.map(|written| Answer::Written { version: written.version.0 })
            }
            Err(error) => Err(Error::Other { key, why: error.to_string() }),
        },
        Call::Delete { key, when } => memory.delete(&key, when.into()).await.map(|()| Answer::Deleted),
        Call::List { prefix, after } => memory.list(&prefix, after.as_deref()).await.map(|page| Answer::Listed {
            entries: page.entries.into_iter().map(|entry| (entry.key, entry.version.0, entry.size)).collect(),
            more: page.more,
        }),
    };
    let answer = answer.unwrap_or_else(|error| {
        Answer::Failed(match error {
            Error::Conflict(key) => Failed::Conflict { key },
            Error::NotFound(key) => Failed::NotFound { key },
            Error::RateLimited(key) => Failed::Other { key, why: "too many writes".to_owned() },
            Error::Unsigned(key) => Failed::Other { key, why: "not signed".to_owned() },
            Error::Unavailable { key, why }
            | Error::Denied { key, why }
            | Error::Damaged { key, why }
            | Error::Newer { key, why }
            | Error::Other { key, why } => Failed::Other { key, why },
        })
    });
    wire.send(packed(&answer)?).await
}

/// The memory store of the reconciler half.
#[derive(Debug)]
pub struct RemoteStore {
    path: PathBuf,
    clock: SharedClock,
}

impl RemoteStore {
    pub fn new(path: PathBuf, clock: SharedClock) -> Arc<Self> {
        Arc::new(Self { path, clock })
    }

    async fn call(&self, key: &str, call: Call) -> Result<Answer> {
        let unavailable = |why: String| Error::Unavailable { key: key.to_owned(), why };
        let asked = async {
            let mut wire = wire(ipc_socket::dial(&self.path).await.map_err(std::io::Error::other)?);
            wire.send(packed(&Handshake::Memory(call))?).await?;
            let answer = wire.next().await.ok_or(std::io::ErrorKind::UnexpectedEof)?;
            unpacked(answer)
        };
        let answered = self.clock.timeout(CONNECT_TIMEOUT, asked).await;
        let answer: std::io::Result<Answer> = answered.map_err(|elapsed| unavailable(elapsed.to_string()))?;
        let answer = answer.map_err(|error| unavailable(error.to_string()))?;
        let Answer::Failed(failed) = answer else { return Ok(answer) };
        Err(match failed {
            Failed::Conflict { key } => Error::Conflict(key),
            Failed::NotFound { key } => Error::NotFound(key),
            Failed::Other { key, why } => Error::Other { key, why },
        })
    }
}

fn strange(key: &str) -> Error {
    Error::Other { key: key.to_owned(), why: "the other half answered something else".to_owned() }
}

#[async_trait]
impl Store for RemoteStore {
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> Result<PollResult> {
        let known = known.map(|version| version.0.clone());
        let answer = self.call(key, Call::Poll { key: key.to_owned(), known }).await?;
        let Answer::Polled(polled) = answer else { return Err(strange(key)) };
        match polled {
            Polled::Unchanged => Ok(PollResult::Unchanged),
            Polled::Missing => Ok(PollResult::Missing),
            Polled::Changed { bytes, version } => {
                let bytes = STANDARD.decode(bytes).map_err(|_| strange(key))?;
                Ok(PollResult::Changed(bytes.into(), Version(version)))
            }
        }
    }

    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> Result<Written> {
        let call = Call::Put { key: key.to_owned(), bytes: STANDARD.encode(&bytes), when: condition.into() };
        let Answer::Written { version } = self.call(key, call).await? else { return Err(strange(key)) };
        Ok(Written { version: Version(version), updated: None })
    }

    async fn delete(&self, key: &str, condition: Precondition) -> Result<()> {
        let answer = self.call(key, Call::Delete { key: key.to_owned(), when: condition.into() }).await?;
        let Answer::Deleted = answer else { return Err(strange(key)) };
        Ok(())
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        let call = Call::List { prefix: prefix.to_owned(), after: after.map(str::to_owned) };
        let Answer::Listed { entries, more } = self.call(prefix, call).await? else { return Err(strange(prefix)) };
        let entry = |(key, version, size)| ObjectEntry { key, version: Version(version), size, updated: None };
        Ok(Page { entries: entries.into_iter().map(entry).collect(), more, ..Page::default() })
    }

    async fn upload(&self, key: &str, _: &Path, _: Precondition, _: &Digest, _: ProgressFn<'_>) -> Result<Written> {
        Err(only_small(key))
    }

    async fn download(&self, key: &str, _: &Path, _: &Digest, _: ProgressFn<'_>) -> Result<()> {
        Err(only_small(key))
    }

    async fn download_unverified(&self, key: &str, _: &Path, _: u64, _: ProgressFn<'_>) -> Result<Digest> {
        Err(only_small(key))
    }
}

/// Sandboxes that end with their instance have no large objects.
fn only_small(key: &str) -> Error {
    Error::Other { key: key.to_owned(), why: "the other half keeps small objects only".to_owned() }
}
