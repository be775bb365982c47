//! The operator: what somebody with an editor and the keys to the bucket does to it.

use std::{collections::btree_map::Entry, time::Duration};

use baton::storage::{layout::Object, records, store::Precondition};
use baton_protocol::{
    id::SandboxId,
    metadata::{DesiredState, Spec},
};
use bytes::Bytes;

use crate::{
    kinds::ScenarioKind,
    sim_faults::{MACHINES, SimEvent},
    sim_world::World,
};

impl World {
    /// What follows from it, and how much later.
    pub fn operate(&self, event: SimEvent) -> Vec<(Duration, SimEvent)> {
        let id = self.pick().clone();
        let bucket = &self.shared.bucket;
        let (lock, metadata) = (Object::Lock(&id).key(), Object::Metadata(&id).key());
        let struck = match event {
            SimEvent::LockGarbage => {
                let mut locks = self.locks.lock().unwrap();
                let Some(there) = bucket.get(&lock) else { return Vec::new() };
                if let Entry::Vacant(entry) = locks.entry(id.clone()) {
                    entry.insert(there);
                    let garbage = self.rng.pick(&["", "{", "null", "{\"v\":1,\"epoch\":-1}"]);
                    bucket.overwrite(&lock, Bytes::from(garbage.as_bytes()));
                }
                drop(locks);
                self.shared.faults.tally.count(ScenarioKind::LockGarbage);
                return vec![(self.rng.seconds(1, 60), SimEvent::LockMended)];
            }
            SimEvent::LockMended => {
                self.mend_locks();
                None
            }
            SimEvent::StaleOverwrite => {
                let copy = self.copies.lock().unwrap().get(&id).map(|copies| self.rng.pick(copies).clone());
                copy.map(|copy| {
                    bucket.overwrite(&metadata, copy);
                    ScenarioKind::StaleOverwrite
                })
            }
            SimEvent::Garbage => {
                let garbage = self.rng.pick(&["{", "[]", "{}", "null", "{\"sandbox_id\":\"sandbox-1\"}"]);
                self.keep_copy(&id);
                bucket.overwrite(&metadata, Bytes::from(garbage.as_bytes()));
                Some(ScenarioKind::Garbage)
            }
            SimEvent::MetadataGone => {
                let gone = bucket.delete(&metadata, &Precondition::Any, "operator");
                gone.is_ok().then_some(ScenarioKind::MetadataGone)
            }
            SimEvent::LockGone => {
                bucket.delete(&lock, &Precondition::Any, "operator").is_ok().then_some(ScenarioKind::LockGone)
            }
            SimEvent::Flip => {
                let states = [DesiredState::Running, DesiredState::Checkpointed, DesiredState::HandedOff];
                let state = *self.rng.pick(&states);
                self.rewrite(&id, |spec| spec.desired_state = state).then_some(ScenarioKind::Flips)
            }
            SimEvent::Deletion => {
                self.rewrite(&id, |spec| spec.desired_state = DesiredState::Deleted).then_some(ScenarioKind::Deletion)
            }
            SimEvent::Order => self.order(&id).then_some(ScenarioKind::Orders),
            _ => None,
        };
        if let Some(kind) = struck {
            self.shared.faults.tally.count(kind);
        }
        Vec::new()
    }

    /// Reads, changes and writes back; whether there was anything to change.
    fn rewrite(&self, id: &SandboxId, change: impl FnOnce(&mut Spec)) -> bool {
        let key = Object::Metadata(id).key();
        let found = self.shared.bucket.get(&key).and_then(|bytes| records::parse(id, &bytes).ok());
        let Some(mut metadata) = found.filter(|found| found.spec.desired_state != DesiredState::Deleted) else {
            return false;
        };
        change(&mut metadata.spec);
        self.shared.bucket.overwrite(&key, serde_json::to_vec(&metadata).unwrap().into());
        true
    }

    /// Names an instance: one that is there, or was. It moves there, or leaves and is taken from there.
    fn order(&self, id: &SandboxId) -> bool {
        let machine = self.own.below(MACHINES as u64) as usize;
        let Some(named) = self.last_on(machine) else { return false };
        let state = if self.own.falls(70) { DesiredState::Running } else { DesiredState::HandedOff };
        self.rewrite(id, |spec| (spec.desired_state, spec.placement) = (state, Some(named)))
    }

    /// It is wanted deleted, and is still there.
    pub fn is_to_be_purged(&self, id: &SandboxId) -> bool {
        let lock = self.shared.oracle.lock(id).filter(|lock| !lock.purged);
        let found = self.shared.bucket.get(&Object::Metadata(id).key());
        let found = found.and_then(|bytes| records::parse(id, &bytes).ok());
        lock.is_some() && found.is_some_and(|found| found.spec.desired_state == DesiredState::Deleted)
    }

    /// Puts back what was there; what is deleted stays so.
    pub fn mend_locks(&self) {
        for (id, lock) in std::mem::take(&mut *self.locks.lock().unwrap()) {
            let key = Object::Lock(&id).key();
            if self.shared.bucket.get(&key).is_some() {
                self.shared.bucket.overwrite(&key, lock);
            }
        }
    }
}
