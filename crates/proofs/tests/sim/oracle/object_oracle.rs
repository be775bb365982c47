//! What is written to the bucket and deleted from it.

use baton::storage::{layout, records};
use baton_protocol::{lock::Lock, metadata::DesiredState};
use bytes::Bytes;

use super::{Oracle, StatusHistory};
use crate::{
    sim_bucket::Bucket,
    time::Instant,
    words::{last, lock_of, picture, sandbox_of_checkpoint, short},
};

impl Oracle {
    pub fn deleted(&self, key: &str, who: &str) {
        let mut told = self.told.lock().unwrap();
        let now = self.start.elapsed();
        let name = told.name(who);
        told.note(now, &format!("{name} deletes {}", last(key)));
        if who == "operator" {
            told.touched(key);
            let Some(history) = layout::sandbox_of(key).and_then(|id| told.histories.get_mut(&id)) else { return };
            if lock_of(key).is_some() {
                history.lock_gone = true;
                history.former = history.lock.take();
            } else {
                history.unnamed_since = Some(Instant::now());
            }
            return;
        }
        if let Some(needed) = told.needed_by_copy(key) {
            told.wrong(now, &format!("I1: {name} deletes {key}, which {needed} needs"));
            return;
        }
        if key.contains("/pins/") {
            return;
        }
        if told.is_taken_back(key) {
            return;
        }
        let id = layout::sandbox_of(key).or_else(|| sandbox_of_checkpoint(key));
        let history = id.and_then(|id| told.histories.get(&id));
        // A lock that an operator deletes while its holder works says what it said.
        let purging = history.is_some_and(|history| {
            let lock = history.lock.as_ref().or(history.former.as_ref());
            history.may_be_purged && lock.is_some_and(|lock| lock.purging || lock.purged)
        });
        // What no head names may go, unless it may still be committed: by this epoch, with a number to come.
        let outdated = layout::checkpoint_of(key).is_some_and(|checkpoint| {
            history.and_then(|history| history.lock.as_ref().or(history.former.as_ref())).is_some_and(|lock| {
                let named = [&lock.head, &lock.prev_head].into_iter().flatten();
                let over = lock.head.as_ref().is_some_and(|head| checkpoint.seq() <= head.seq);
                (checkpoint.epoch() < lock.epoch || over)
                    && named.into_iter().all(|head| head.checkpoint_id != checkpoint)
            })
        });
        if !purging && !outdated {
            told.wrong(now, &format!("I6: {name} deletes {key}, and nobody wanted it deleted"));
        }
    }

    pub fn written(&self, key: &str, before: Option<&Bytes>, bytes: &Bytes, who: &str, bucket: &Bucket) {
        let mut told = self.told.lock().unwrap();
        let now = self.start.elapsed();
        if told.is_fleeting(key) {
            told.wrong(now, &format!("{who} stores {key}, of which nothing is to be stored"));
            return;
        }
        if who == "operator" || lock_of(key).is_none() {
            told.touched(key);
        }
        if let Some(id) = lock_of(key) {
            let Ok(lock) = serde_json::from_slice::<Lock>(bytes) else {
                let line = format!("{} writes garbage over the lock of {}", told.name(who), short(&id));
                told.note(now, &line);
                told.histories.entry(id).or_default().garbled = true;
                if who != "operator" {
                    told.wrong(now, "a lock was written that is none");
                }
                return;
            };
            let line = format!("{} writes {} {}", told.name(who), short(&id), picture(&lock, |id| told.name(id)));
            told.note(now, &line);
            told.histories.entry(id.clone()).or_default().garbled = false;
            for complaint in self.judge(&mut told, &id, &lock, who, bucket) {
                told.wrong(now, &complaint);
            }
        } else if let Some(id) = layout::sandbox_of(key) {
            let metadata = records::parse(&id, bytes);
            let line = match &metadata {
                Ok(metadata) => format!(
                    "{} wants {} {:?} on {}, status {:?} {}",
                    told.name(who),
                    short(&id),
                    metadata.spec.desired_state,
                    metadata.spec.placement.as_ref().map_or("none".to_owned(), |at| told.name(at.as_str())),
                    metadata.status.phase,
                    metadata.status.reason
                ),
                Err(error) => format!("{} writes garbage: {error}", told.name(who)),
            };
            told.note(now, &line);
            let history = told.histories.get_mut(&id).expect("it is expected");
            history.unnamed_since = None;
            if let Ok(metadata) = metadata {
                let status = history.status.replace(metadata.status.clone());
                let epoch = metadata.status.epoch;
                if status.is_some_and(|status| status != metadata.status)
                    && who != "operator"
                    && history.owners.get(&epoch).is_none_or(|owner| owner != who)
                {
                    told.wrong(now, "somebody who did not hold that epoch wrote the status");
                    return;
                }
                history.may_be_purged |= metadata.spec.desired_state == DesiredState::Deleted;
                let committed = |path: &str| history.chain.iter().any(|at| layout::checkpoint_prefix(at) == path);
                if metadata.latest_sandbox_checkpoint.is_some_and(|latest| !committed(&latest.path)) {
                    told.wrong(now, "the status names a checkpoint that is not committed");
                }
            }
        } else if before.is_some_and(|before| before != bytes) {
            told.wrong(now, &format!("{key} is immutable and was written again"));
        }
    }
}

impl StatusHistory {
    /// Whether this belongs to a copy that could not be made: nobody was told of it, and nobody ever acquired it.
    fn is_taken_back(&mut self, key: &str) -> bool {
        let history = layout::sandbox_of(key).and_then(|id| self.histories.get_mut(&id));
        let Some(history) = history.filter(|history| !history.is_told && history.owners.is_empty()) else {
            return false;
        };
        if lock_of(key).is_some() {
            history.lock = None;
        }
        true
    }

    /// The copy whose lock names the checkpoint that a key is part of.
    fn needed_by_copy(&self, key: &str) -> Option<String> {
        let checkpoint = layout::checkpoint_of(key)?;
        let needs = |lock: &Lock| {
            lock.sandbox_id != checkpoint.sandbox()
                && !lock.purging
                && !lock.purged
                && [&lock.head, &lock.prev_head].into_iter().flatten().any(|head| head.checkpoint_id == checkpoint)
        };
        // Another's pin may go.
        let mut needing = self.histories.iter().filter(|(_, history)| history.lock.as_ref().is_some_and(needs));
        let pinned_by = key.split_once("/pins/").map(|(_, sandbox)| sandbox);
        needing.find(|(id, _)| pinned_by.is_none_or(|sandbox| sandbox == id.as_str())).map(|(id, _)| short(id))
    }
}
