//! The rules of the lock as pure functions: each write maps the lock that was read to the lock to write, each judgement
//! maps observations to a conclusion. The rules are numbered as in `docs/lease.md`.

use std::time::Duration;

use baton_protocol::{
    id::{InstanceId, Nonce, SandboxId},
    lock::{Claim, Head, Lease, Lock, Waiter},
};
use serde::{Deserialize, Serialize};

use crate::{clock::Moment, config::LeaseTimes};

/// This instance, and the one it may inherit leases from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub me: InstanceId,
    /// Rule 6: The previous instance on this state directory. Its containers are certainly gone, so its leases need not
    /// be watched before a takeover.
    pub predecessor: Option<InstanceId>,
}

/// Rule 9: Starts a new epoch. The head is kept; the waiter entry is cleared. `runs`: the owner is going to run the
/// sandbox, so from here on "no head" means "lost", and a head that is not replaced is behind.
pub fn acquired(lock: &Lock, me: &InstanceId, op: Nonce, times: &LeaseTimes, runs: bool) -> Lock {
    let mut next = lock.clone();
    next.epoch += 1;
    next.ran |= runs;
    next.behind |= runs;
    next.waiter = None;
    next.lease = Some(Lease {
        owner: me.clone(),
        renew: 0,
        op,
        hold_ms: millis(times.hold),
        takeover_ms: millis(times.takeover),
    });
    next
}

/// The write that creates a lock, held from the start by the instance that creates the sandbox. Like every write of a
/// holder, it is recorded with its nonce and the instant before it is sent, here by the party that sends it for that
/// holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitialLease {
    pub op: Nonce,
    /// On the machine's clock, which its API and its reconciler share.
    pub sent: Moment,
}

/// Rule 9: The first lock of a sandbox: held, and about to be run.
pub fn initial(id: SandboxId, me: &InstanceId, lease: &InitialLease, times: &LeaseTimes) -> Lock {
    acquired(&Lock::new(id), me, lease.op.clone(), times, true)
}

/// Whether its creator has not written it again: it held the lease for less than *renew*, or never learned that it did.
pub fn is_initial(lock: &Lock) -> bool {
    let is_unrenewed = lock.lease.as_ref().is_some_and(|lease| lease.renew == 0);
    lock.epoch == 1 && is_unrenewed && lock.head.is_none()
}

/// Rule 2: Every write of the owner changes `renew` and carries a fresh nonce; the waiter is copied.
pub fn renewed(lock: &Lock, op: Nonce) -> Lock {
    let mut next = lock.clone();
    if let Some(lease) = &mut next.lease {
        lease.renew += 1;
        lease.op = op;
    }
    next
}

/// Sets a new head, in the same write that proves the lease.
pub fn committed(lock: &Lock, op: Nonce, head: Head) -> Lock {
    let mut next = renewed(lock, op);
    next.prev_head = next.head.replace(head);
    next
}

/// Rule 11: Frees the lease, with the last commit in the same write. Without one, the head is behind if the sandbox
/// ran.
pub fn released(lock: &Lock, head: Option<Head>, behind: bool) -> Lock {
    let mut next = Lock { lease: None, behind: behind && head.is_none(), ..lock.clone() };
    if let Some(head) = head {
        next.prev_head = next.head.replace(head);
    }
    next
}

/// Rule 13: From here on the sandbox can only be purged.
pub fn purging(lock: &Lock, op: Nonce) -> Lock {
    Lock { purging: true, ..renewed(lock, op) }
}

/// Rule 13: What a purge leaves: a small object that preserves the epoch.
pub fn tombstone(lock: &Lock, at: String) -> Lock {
    Lock {
        purged: true,
        purged_at: Some(at),
        purging: false,
        lease: None,
        waiter: None,
        head: None,
        prev_head: None,
        ..lock.clone()
    }
}

/// Rule 12: Puts our name and claim into the waiter entry; `lease` is copied unchanged.
pub fn waited(lock: &Lock, me: &InstanceId, claim: Claim, op: Nonce, times: &LeaseTimes) -> Lock {
    let beat = match &lock.waiter {
        Some(waiter) if waiter.instance == *me => waiter.beat.saturating_add(1),
        Some(_) | None => 0,
    };
    let waiter = Waiter { instance: me.clone(), op, beat, ttl_ms: millis(times.waiter), claim, declined: false };
    Lock { waiter: Some(waiter), ..lock.clone() }
}

/// Rule 12: The holder declines a waiter's request. Proves the lease like every write of the holder.
pub fn declined(lock: &Lock, op: Nonce) -> Lock {
    let mut next = renewed(lock, op);
    if let Some(waiter) = &mut next.waiter {
        waiter.declined = true;
    }
    next
}

pub fn withdrawn(lock: &Lock, me: &InstanceId) -> Lock {
    let mut next = lock.clone();
    if next.waiter.as_ref().is_some_and(|waiter| waiter.instance == *me) {
        next.waiter = None;
    }
    next
}

/// Our local record of a lease that we acquired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldLease {
    pub epoch: u64,
    /// Rule 3: Send instant of our last applied write, plus *hold*.
    pub deadline: Moment,
    /// [4, 11] A release or a tombstone was sent: nothing runs under this epoch any more.
    pub released: bool,
}

/// [2, 3] What a lock proves if it carries the nonce of one of our writes: we hold its epoch until *hold* after that
/// write was **sent**, whenever its answer arrived. This also detects an acquisition that succeeded although its answer
/// was lost. Also returns the send instant; earlier attempts no longer matter.
pub fn proven(
    held: Option<&HeldLease>,
    attempts: &[(Nonce, Moment)],
    lock: &Lock,
    hold: Duration,
) -> Option<(HeldLease, Moment)> {
    let op = &lock.lease.as_ref()?.op;
    let sent = attempts.iter().find(|(nonce, _)| nonce == op).map(|(_, sent)| *sent)?;
    let deadline = sent + hold;
    let held = match held {
        // Rule 11: One way: whatever a late read shows, this epoch has ended.
        Some(held) if held.epoch == lock.epoch && held.released => return None,
        Some(held) if held.epoch == lock.epoch => HeldLease { deadline: held.deadline.max(deadline), ..*held },
        Some(_) | None => HeldLease { epoch: lock.epoch, deadline, released: false },
    };
    Some((held, sent))
}

/// Rule 2: Whether this is the lock that we acquired and have not released: only then may we write its lease and head.
pub fn is_ours(lock: &Lock, held: Option<&HeldLease>, me: &InstanceId) -> bool {
    let owned = lock.lease.as_ref().is_some_and(|lease| lease.owner == *me);
    owned && held.is_some_and(|held| held.epoch == lock.epoch && !held.released)
}

/// The outcome of a release or tombstone that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseOutcome {
    Done,
    /// Another instance has taken the lease.
    Lost,
    /// The lease is still ours: send the write again.
    NotYet,
}

/// Rule 11: Only the lock as read decides: a free lease carries no nonce.
pub fn release_outcome(lock: &Lock, held: &HeldLease, me: &InstanceId) -> ReleaseOutcome {
    match &lock.lease {
        None if lock.epoch == held.epoch => ReleaseOutcome::Done,
        Some(lease) if lock.epoch == held.epoch && lease.owner == *me => ReleaseOutcome::NotYet,
        Some(_) | None => ReleaseOutcome::Lost,
    }
}

/// What watching a lock has shown so far; kept across refused attach requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseWatch {
    lease: Option<(u64, Nonce)>,
    lease_for: Duration,
    waiter: Option<(InstanceId, Nonce, u64)>,
    waiter_for: Duration,
    last: Option<Moment>,
}

impl LeaseWatch {
    /// Rule 9: Records a successful read. Only time between two consecutive reads counts.
    pub fn saw(&mut self, lock: &Lock, now: Moment) {
        let passed = self.last.map_or(Duration::ZERO, |last| now - last);
        let lease = lock.lease.as_ref().map(|lease| (lock.epoch, lease.op.clone()));
        self.lease_for = if lease == self.lease { self.lease_for + passed } else { Duration::ZERO };
        self.lease = lease;
        let waiter = lock.waiter.as_ref().map(|w| (w.instance.clone(), w.op.clone(), w.beat));
        self.waiter_for = if waiter == self.waiter { self.waiter_for + passed } else { Duration::ZERO };
        self.waiter = waiter;
        self.last = Some(now);
    }

    /// Records a failed read: the time until the next one proves nothing.
    pub fn missed(&mut self) {
        self.last = None;
    }

    /// Rule 9: Whether the lease has been unchanged for the larger of our takeover time and its own.
    pub fn is_abandoned(&self, lock: &Lock, times: &LeaseTimes) -> bool {
        lock.lease
            .as_ref()
            .is_some_and(|lease| self.lease_for >= times.takeover.max(Duration::from_millis(lease.takeover_ms)))
    }

    /// [9, 12] The waiter, if it is another instance, its entry is fresh and it was not declined.
    pub fn waiter<'a>(&self, lock: &'a Lock, me: &InstanceId) -> Option<&'a Waiter> {
        lock.waiter.as_ref().filter(|waiter| {
            waiter.instance != *me && !waiter.declined && self.waiter_for < Duration::from_millis(waiter.ttl_ms)
        })
    }
}

/// An instance's relation to a lock that it has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// Erased for good.
    Purged,
    Free,
    Theirs,
    Ours,
    Late,
}

pub fn lease_state(
    lock: &Lock,
    who: &Identity,
    held: Option<&HeldLease>,
    sight: &LeaseWatch,
    times: &LeaseTimes,
    now: Moment,
) -> LeaseState {
    // Rule 13: A tombstone cannot be acquired.
    if lock.purged {
        return LeaseState::Purged;
    }
    if let Some(lease) = &lock.lease {
        if let Some(held) = held.filter(|_| is_ours(lock, held, &who.me)) {
            // [4, 7]
            return if now < held.deadline { LeaseState::Ours } else { LeaseState::Late };
        }
        // Rule 6.
        let inherited = who.predecessor.as_ref() == Some(&lease.owner);
        if !inherited && !sight.is_abandoned(lock, times) {
            return LeaseState::Theirs;
        }
    }
    if sight.waiter(lock, &who.me).is_some() { LeaseState::Theirs } else { LeaseState::Free }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
