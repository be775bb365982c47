//! What this instance last saw of the sandboxes it deals with, so that a write need not begin with a read.
//!
//! Only ever a guess: a write made from it names its version and does not happen if that is gone.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use baton_protocol::id::SandboxId;

use super::records::Found;

/// More than this and all are forgotten, which costs a read each.
const REMEMBERED: usize = 1024;

#[derive(Debug, Default)]
pub struct Recent(Mutex<HashMap<SandboxId, Found>>);

impl Recent {
    pub fn get(&self, id: &SandboxId) -> Option<Found> {
        self.lock().get(id).cloned()
    }

    pub fn note(&self, id: &SandboxId, found: &Found) {
        let mut recent = self.lock();
        if recent.len() >= REMEMBERED && !recent.contains_key(id) {
            recent.clear();
        }
        recent.insert(id.clone(), found.clone());
    }

    pub fn forget(&self, id: &SandboxId) {
        self.lock().remove(id);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Found>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
