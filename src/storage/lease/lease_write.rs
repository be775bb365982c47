//! One write of the lock: what it is based on, how it is sent, and what its answer or a later read proves.

use std::time::SystemTime;

use baton_protocol::{id::Nonce, lock::Lock};

use super::{Error, LeaseHandle, Released, Result, is_op};
use crate::storage::{
    lease::lease_rules::{self, HeldLease, ReleaseOutcome},
    lock_object,
    store::{self, Precondition, Priority},
};

impl LeaseHandle {
    /// [1, 2] The lock a write is based on: the last one read or written, whose version is the precondition. Fails
    /// while the outcome of an earlier write is unknown: that has to be resolved by reading first.
    pub(super) fn current(&self) -> Result<&Lock> {
        if self.unsettled {
            return Err(Error::Changed);
        }
        self.lock().ok_or(Error::Missing)
    }

    /// Rule 2: Like [`current`](Self::current), for a write of the holder: a lock that another instance has acquired is
    /// not ours to change.
    pub(super) fn ours(&self) -> Result<&Lock> {
        let lock = self.current()?;
        if lease_rules::is_ours(lock, self.held.as_ref(), &self.who.me) { Ok(lock) } else { Err(Error::Changed) }
    }

    /// Whether a release that was sent has succeeded, or has lost to another instance.
    pub(super) fn settled(&self, lock: &Lock, held: &HeldLease) -> Option<Released> {
        match lease_rules::release_outcome(lock, held, &self.who.me) {
            ReleaseOutcome::Done => Some(Released::Freed),
            ReleaseOutcome::Lost => Some(Released::Lost),
            ReleaseOutcome::NotYet => None,
        }
    }

    pub(super) async fn write_release(&mut self, next: Lock, op: &Nonce) -> Result<()> {
        let epoch = next.epoch;
        // [4, 11] Set before the write is sent, and for good: whatever comes back, nothing runs under this epoch any
        // more.
        if let Some(held) = &mut self.held {
            held.released = true;
        }
        self.deadline.send_replace(None);
        self.send(next, op, Priority::Commit, |lock| lock.epoch == epoch && lock.lease.is_none()).await?;
        self.held = None;
        Ok(())
    }

    /// Sends one write and resolves its outcome. `applied` recognises the write in a lock that was read.
    pub(super) async fn send(
        &mut self,
        next: Lock,
        op: &Nonce,
        urgency: Priority,
        applied: impl Fn(&Lock) -> bool,
    ) -> Result<()> {
        let (_, version) = self.known.as_ref().ok_or(Error::Missing)?;
        if !self.seals.may_replace(self.is_sealed) {
            return Err(Error::Sealed);
        }
        let encoded = lock_object::sealed(&self.seals, &self.key, &next).and_then(|sealed| serde_json::to_vec(&sealed));
        let bytes = encoded.map_err(|error| Error::Unencoded(error.to_string()))?;
        // Rule 3: Taken before the write is sent: the deadline counts from here, however long the call takes.
        let sent = self.clock.now();
        self.attempts.push((op.clone(), sent));
        // Rule 1: Holds even if this future is dropped: a dropped write may still be applied.
        self.unsettled = true;
        let put = self.store.put_as(&self.key, bytes.into(), Precondition::Is(version.clone()), urgency);
        let answer = self.clock.timeout(self.times.call, put).await;
        match answer.unwrap_or_else(|elapsed| Err(self.unanswered(elapsed))) {
            Ok(written) => {
                self.sight.saw(&next, self.clock.now());
                (self.known, self.is_sealed) = (Some((next, written.version)), self.seals.are_asked_for());
                (self.unsettled, self.in_doubt) = (false, false);
                self.applied();
                if let Some(updated) = written.updated {
                    self.compare_clocks(updated);
                }
                Ok(())
            }
            // Rule 2: After a lost answer the client library reports success as a conflict: only a read decides.
            Err(error @ (store::Error::Conflict(_) | store::Error::Unavailable { .. })) => {
                self.read().await?;
                if self.lock().is_some_and(&applied) {
                    return Ok(());
                }
                Err(if matches!(error, store::Error::Conflict(_)) { Error::Changed } else { error.into() })
            }
            Err(error) => {
                self.unsettled = false;
                Err(error.into())
            }
        }
    }

    /// Applies what the lock as last read or written proves. Each of our writes proves it once: reading the same lock
    /// again neither extends the deadline nor makes the next renewal due.
    pub(super) fn applied(&mut self) {
        let Some((lock, _)) = &self.known else { return };
        let Some((held, sent)) = lease_rules::proven(self.held.as_ref(), &self.attempts, lock, self.times.hold) else {
            return;
        };
        if self.held.is_some_and(|before| before.epoch == held.epoch && before.deadline < held.deadline) {
            self.metrics.renewed(self.clock.now() - self.due);
        }
        (self.held, self.epoch) = (Some(held), Some(held.epoch));
        self.next_renewal = sent + self.clock.jittered(self.times.renew);
        self.due = self.next_renewal;
        self.attempts.retain(|(op, at)| *at >= sent && !is_op(lock, op));
        self.deadline.send_replace(Some(held.deadline));
    }

    /// Rule 7: If the store's clock ran well ahead of ours, this machine was frozen, and another instance may have
    /// taken over meanwhile. The deadline counts as passed: fencing comes first, then a renewal.
    fn compare_clocks(&mut self, updated: SystemTime) {
        let now = self.clock.now();
        if let Some((before, then)) = self.updated.replace((updated, now))
            && let Ok(theirs) = updated.duration_since(before)
            && theirs > (now - then) + self.times.frozen
            && let Some(held) = self.held.as_mut().filter(|held| !held.released)
        {
            held.deadline = now;
            self.deadline.send_replace(Some(now));
        }
    }

    pub(super) fn unanswered(&self, elapsed: crate::clock::Elapsed) -> store::Error {
        store::Error::Unavailable { key: self.key.clone(), why: elapsed.to_string() }
    }
}
