//! A cache of the metadata that this instance last saw, so that a write need not begin with a read.
//!
//! Entries may be stale: a write based on one is conditional on its version and fails if that has changed.

use std::collections::HashMap;

use baton_protocol::id::SandboxId;
use parking_lot::Mutex;

use super::records::FoundMetadata;

/// The maximum number of entries; beyond it all are dropped, which costs one read each.
const MAX_ENTRIES: usize = 1024;

#[derive(Debug, Default)]
pub struct Recent(Mutex<HashMap<SandboxId, FoundMetadata>>);

impl Recent {
    pub fn get(&self, id: &SandboxId) -> Option<FoundMetadata> {
        self.0.lock().get(id).cloned()
    }

    pub fn note(&self, id: &SandboxId, found: &FoundMetadata) {
        let mut recent = self.0.lock();
        if recent.len() >= MAX_ENTRIES && !recent.contains_key(id) {
            recent.clear();
        }
        recent.insert(id.clone(), found.clone());
    }

    pub fn forget(&self, id: &SandboxId) {
        self.0.lock().remove(id);
    }
}
