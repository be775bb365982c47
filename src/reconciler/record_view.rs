//! The metadata of the sandbox as last read, and what was wrong with it.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::{
    id::{Nonce, SandboxId, hex},
    metadata::{DesiredState, Metadata, Spec, SpecRequest},
    reason::Reason,
};
use sha2::{Digest, Sha256};

use super::sweep::sweep_rules::{UnixTime, outlived};
use crate::{
    clock::Moment,
    storage::{
        records::{self, FoundMetadata, MetadataPoll, StoreKind},
        store::Version,
    },
};

/// An answer that is not collected within this time is dropped.
const ANSWER_COLLECTED_WITHIN: Duration = Duration::from_secs(10 * 60);

#[derive(Debug)]
pub(super) struct RecordView {
    /// The last valid metadata.
    found: Option<FoundMetadata>,
    spec_sha256: String,
    /// The placement whose session was waiting when the metadata was last read: its own write is in there, or a later one.
    placed: Option<u64>,
    fault: Option<MetadataFault>,
    /// The status of invalid metadata says what is wrong with it.
    is_fault_reported: bool,
    /// When to read the metadata again.
    pub(super) due: Moment,
    /// Answered requests whose client has not collected the answer, and since when.
    answered: BTreeMap<Nonce, Moment>,
}

/// What was wrong at the last read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MetadataFault {
    /// It has disappeared. Deletion requires `deleted` in the spec, so the holder writes it again.
    Missing,
    /// It cannot be used; the last valid spec stays in force.
    Invalid { reason: Reason, message: String },
    /// It could not be read, so it is unknown whether there is any.
    Unreadable,
}

impl RecordView {
    pub(super) fn new(now: Moment) -> Self {
        Self {
            found: None,
            spec_sha256: String::new(),
            placed: None,
            fault: None,
            is_fault_reported: false,
            due: now,
            answered: BTreeMap::new(),
        }
    }

    /// Takes in the result of a read. Metadata that is missing is forgotten unless this instance holds the lease.
    /// `placed`: the placement that was waiting before the read was sent.
    pub(super) fn note_read(
        &mut self,
        id: &SandboxId,
        looked: records::Result<Option<MetadataPoll>>,
        is_held: bool,
        placed: Option<u64>,
    ) {
        if looked.is_ok() {
            self.placed = placed;
        }
        self.fault = match looked {
            Ok(Some(MetadataPoll::Unchanged)) => None,
            Ok(Some(MetadataPoll::Found(found))) => {
                self.spec_sha256 = spec_sha256(&found.metadata.spec);
                self.found = Some(*found);
                self.is_fault_reported = false;
                None
            }
            Ok(None) if is_held => Some(MetadataFault::Missing),
            Ok(None) => {
                self.found = None;
                None
            }
            Err(error) => Some(match error.reason() {
                Some(reason) => {
                    if !self.is_fault_reported {
                        tracing::warn!(sandbox = %id, %error, "the metadata is invalid; the last valid spec stays in force");
                    }
                    let message = error.to_string();
                    let prefix = format!("{reason}: ");
                    let message = message.strip_prefix(&prefix).unwrap_or(&message).to_owned();
                    MetadataFault::Invalid { reason, message }
                }
                None => {
                    tracing::warn!(sandbox = %id, %error, "the metadata could not be read");
                    MetadataFault::Unreadable
                }
            }),
        };
    }

    pub(super) fn metadata(&self) -> Option<&Metadata> {
        self.found.as_ref().map(|found| &found.metadata)
    }

    pub(super) fn spec(&self) -> Option<&Spec> {
        self.metadata().map(|metadata| &metadata.spec)
    }

    pub(super) fn store_kind(&self) -> Option<StoreKind> {
        self.found.as_ref().map(|found| found.place)
    }

    /// What a read that is interested in changes only has to know.
    pub(super) fn known(&self) -> Option<(Version, StoreKind)> {
        self.found.as_ref().map(|found| (found.version.clone(), found.place))
    }

    /// The metadata were read since this placement was written.
    pub(super) fn is_newer_than(&self, placed: u64) -> bool {
        self.placed == Some(placed)
    }

    pub(super) fn spec_sha256(&self) -> &str {
        &self.spec_sha256
    }

    pub(super) fn fault(&self) -> Option<&MetadataFault> {
        self.fault.as_ref()
    }

    pub(super) fn is_unreadable(&self) -> bool {
        self.fault == Some(MetadataFault::Unreadable)
    }

    /// The metadata is invalid, and its status says so.
    pub(super) fn is_fault_reported(&self) -> bool {
        self.is_fault_reported
    }

    pub(super) fn fault_reported(&mut self) {
        self.is_fault_reported = true;
    }

    /// The sandbox was purged.
    pub(super) fn erased(&mut self) {
        self.found = None;
    }

    /// Whether the spec allows checkpoints: the records are in a store that other instances see.
    pub(super) fn is_persistent(&self) -> bool {
        self.spec().is_some_and(|spec| spec.enable_sandbox_checkpoint)
    }

    /// Whether the spec allows handoff.
    pub(super) fn is_movable(&self) -> bool {
        self.spec().is_some_and(|spec| spec.enable_sandbox_handoff)
    }

    /// The `ttl` is over, and the spec does not say so yet.
    pub(super) fn is_expired(&self, now: UnixTime) -> bool {
        self.spec().is_some_and(|spec| is_expired(spec, now))
    }

    /// Requests of this kind that were not answered yet.
    pub(super) fn unanswered(&self, kind: fn(&SpecRequest) -> bool) -> impl Iterator<Item = Nonce> + '_ {
        self.metadata().into_iter().flat_map(move |metadata| {
            let open = metadata
                .spec
                .requests
                .iter()
                .filter(move |(nonce, request)| kind(request) && !metadata.status.answers.contains_key(*nonce));
            open.map(|(nonce, _)| nonce.clone())
        })
    }

    /// Remembers since when each answer has waited to be collected.
    pub(super) fn note_answers(&mut self, now: Moment) {
        let Some(metadata) = self.metadata() else { return };
        let answered = metadata.spec.requests.keys().filter(|nonce| metadata.status.answers.contains_key(*nonce));
        let since = |nonce: &Nonce| self.answered.get(nonce).copied().unwrap_or(now);
        self.answered = answered.map(|nonce| (nonce.clone(), since(nonce))).collect();
    }

    /// Requests whose answer was not collected in time: their client is gone.
    pub(super) fn stale_answers(&self, now: Moment) -> Vec<Nonce> {
        let is_stale = |since: Moment| now - since >= ANSWER_COLLECTED_WITHIN;
        self.answered.iter().filter(|(_, since)| is_stale(**since)).map(|(nonce, _)| nonce.clone()).collect()
    }
}

pub(super) fn is_expired(spec: &Spec, now: UnixTime) -> bool {
    spec.desired_state != DesiredState::Deleted && outlived(spec, now)
}

/// The value that a holder reports as `observed_spec_sha256` once it has read this spec.
pub fn spec_sha256(spec: &Spec) -> String {
    let bytes = serde_json::to_vec(spec).unwrap_or_default();
    hex(&Sha256::digest(&bytes))
}
