//! How far clients have come, kept on this instance between two sessions of a sandbox: without it a plain client that
//! reconnects late would not be told about dropped bytes.

use std::collections::BTreeMap;

use baton_protocol::id::SandboxId;
use parking_lot::Mutex;

use super::stream_cursor::Mark;

/// How many sandboxes are remembered.
const MAX_SANDBOXES: usize = 1024;

#[derive(Clone, Debug, Default)]
pub struct Marks(BTreeMap<u32, Mark>);

impl Marks {
    pub fn confirmed(&self, exec: u32) -> Option<Mark> {
        self.0.get(&exec).copied()
    }

    pub fn all(&self) -> Vec<Mark> {
        self.0.values().copied().collect()
    }
}

#[derive(Debug, Default)]
pub struct MarkCache(Mutex<BTreeMap<SandboxId, Marks>>);

impl MarkCache {
    /// Keeps the marks of a session that ended while its sandbox keeps running.
    pub fn insert(&self, id: &SandboxId, marks: Vec<Mark>) {
        let mut kept = self.0.lock();
        if marks.is_empty() || (kept.len() >= MAX_SANDBOXES && !kept.contains_key(id)) {
            kept.remove(id);
            return;
        }
        kept.insert(id.clone(), Marks(marks.into_iter().map(|mark| (mark.exec, mark)).collect()));
    }

    /// Takes the marks for a new session.
    pub fn remove(&self, id: &SandboxId) -> Marks {
        self.0.lock().remove(id).unwrap_or_default()
    }
}
