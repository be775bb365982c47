//! The rules of the lock: each write as a pure function from the lock that was read to the
//! lock that is wanted, and each judgement as one from what was seen to what it means.
//! Numbers in brackets are those of the rules in `docs/lease.md`.

use std::time::Duration;

use baton_protocol::{
    id::{InstanceId, Nonce, SandboxId},
    lock::{Claim, Head, Lease, Lock, Waiter},
};
use serde::{Deserialize, Serialize};

use crate::clock::Moment;

/// The lease's constants, already scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    pub renew: Duration,
    /// Between tries at a renewal that failed.
    pub retry: Duration,
    /// The longest a call for a small object may take.
    pub call: Duration,
    pub hold: Duration,
    pub takeover: Duration,
    pub waiter: Duration,
    pub beat: Duration,
    pub handoff_wait: Duration,
    /// How far the store's clock may run ahead of ours between two writes.
    pub frozen: Duration,
}

impl Times {
    pub const DEFAULT: Times = Times {
        renew: Duration::from_secs(5),
        retry: Duration::from_secs(1),
        call: Duration::from_secs(2),
        hold: Duration::from_secs(15),
        takeover: Duration::from_secs(30),
        waiter: Duration::from_secs(60),
        beat: Duration::from_secs(20),
        handoff_wait: Duration::from_secs(120),
        frozen: Duration::from_secs(3),
    };
}

/// Who we are, and whom we may inherit from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub me: InstanceId,
    /// [6] The last instance on this state directory. Its containers are gone for certain, so its
    /// leases need not be watched.
    pub predecessor: Option<InstanceId>,
}

/// [9] A new epoch. The head stays what it is; whoever waited has had his turn.
/// `runs`: the owner means to run it, so from here on "no head" means "lost", and a head that
/// is not replaced is behind.
pub fn acquired(lock: &Lock, me: &InstanceId, op: Nonce, times: &Times, runs: bool) -> Lock {
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

/// The write that makes a lock, held from the start by the instance that creates the sandbox. It is noted like every
/// write of a holder, with its nonce and the instant before it is sent, by whoever sends it for that holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitialLease {
    pub op: Nonce,
    /// On the clock of the machine; its API and its reconciler have the same one.
    pub sent: Moment,
}

/// [9] The first lock of a sandbox: held, and about to be run.
pub fn initial(id: SandboxId, me: &InstanceId, lease: &InitialLease, times: &Times) -> Lock {
    acquired(&Lock::new(id), me, lease.op.clone(), times, true)
}

/// Its creator has not written it again: it held the lease for less than *renew*, or never knew that it did.
pub fn is_initial(lock: &Lock) -> bool {
    let is_unrenewed = lock.lease.as_ref().is_some_and(|lease| lease.renew == 0);
    lock.epoch == 1 && is_unrenewed && lock.head.is_none()
}

/// [2] Every write of the owner changes `renew` and carries a fresh nonce; the waiter is copied.
pub fn renewed(lock: &Lock, op: Nonce) -> Lock {
    let mut next = lock.clone();
    if let Some(lease) = &mut next.lease {
        lease.renew += 1;
        lease.op = op;
    }
    next
}

/// A new head, in the same write that proves the lease.
pub fn committed(lock: &Lock, op: Nonce, head: Head) -> Lock {
    let mut next = renewed(lock, op);
    next.prev_head = next.head.replace(head);
    next
}

/// [11] Free again, the last commit in the same write. Without one the head is behind, if it ran.
pub fn released(lock: &Lock, head: Option<Head>, behind: bool) -> Lock {
    let mut next = Lock { lease: None, behind: behind && head.is_none(), ..lock.clone() };
    if let Some(head) = head {
        next.prev_head = next.head.replace(head);
    }
    next
}

/// [13] From here on the sandbox can only be purged.
pub fn purging(lock: &Lock, op: Nonce) -> Lock {
    Lock { purging: true, ..renewed(lock, op) }
}

/// [13] What is left after a purge: a small stone that keeps the epoch.
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

/// [12] Our name in the waiter slot, and what we claim; `lease` is copied unchanged.
pub fn waited(lock: &Lock, me: &InstanceId, claim: Claim, op: Nonce, times: &Times) -> Lock {
    let beat = match &lock.waiter {
        Some(waiter) if waiter.instance == *me => waiter.beat.saturating_add(1),
        Some(_) | None => 0,
    };
    let waiter = Waiter { instance: me.clone(), op, beat, ttl_ms: millis(times.waiter), claim, declined: false };
    Lock { waiter: Some(waiter), ..lock.clone() }
}

/// [12] The holder's answer to a waiter that asks: no. Proves the lease like every write of the holder.
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

/// Our own memory of a lease that we acquired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub epoch: u64,
    /// [3] Send instant of the last applied own write, plus hold.
    pub deadline: Moment,
    /// [4, 11] A release or the end of a purge was sent: nothing runs under this epoch any more.
    pub released: bool,
}

/// [2, 3] What a lock proves that carries the nonce of one of our own writes: we hold its epoch, until *hold*
/// after that write was **sent**, whenever its answer came. Also how an acquisition whose answer was lost is
/// found to have succeeded. With the send instant, before which no attempt can matter any more.
pub fn proven(
    held: Option<&Held>,
    attempts: &[(Nonce, Moment)],
    lock: &Lock,
    hold: Duration,
) -> Option<(Held, Moment)> {
    let op = &lock.lease.as_ref()?.op;
    let sent = attempts.iter().find(|(nonce, _)| nonce == op).map(|(_, sent)| *sent)?;
    let deadline = sent + hold;
    let held = match held {
        // [11] One way: whatever a late read shows, this epoch is over.
        Some(held) if held.epoch == lock.epoch && held.released => return None,
        Some(held) if held.epoch == lock.epoch => Held { deadline: held.deadline.max(deadline), ..*held },
        Some(_) | None => Held { epoch: lock.epoch, deadline, released: false },
    };
    Some((held, sent))
}

/// [2] Whether the lock is the one that we acquired and did not let go of: only then are its lease and its head
/// ours to write.
pub fn is_ours(lock: &Lock, held: Option<&Held>, me: &InstanceId) -> bool {
    let owned = lock.lease.as_ref().is_some_and(|lease| lease.owner == *me);
    owned && held.is_some_and(|held| held.epoch == lock.epoch && !held.released)
}

/// What became of a release, or of a burial, that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LetGo {
    Done,
    /// Another has taken the lease.
    Lost,
    /// It is still ours: send it again.
    NotYet,
}

/// [11] Only the lock as it was read decides: a free lease carries no nonce.
pub fn let_go(lock: &Lock, held: &Held, me: &InstanceId) -> LetGo {
    match &lock.lease {
        None if lock.epoch == held.epoch => LetGo::Done,
        Some(lease) if lock.epoch == held.epoch && lease.owner == *me => LetGo::NotYet,
        Some(_) | None => LetGo::Lost,
    }
}

/// What watching a lock has shown so far; kept across refused attaches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseWatch {
    lease: Option<(u64, Nonce)>,
    lease_for: Duration,
    waiter: Option<(InstanceId, Nonce, u64)>,
    waiter_for: Duration,
    last: Option<Moment>,
}

impl LeaseWatch {
    /// [9] A read succeeded. Only time between two reads in a row counts.
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

    /// A read failed: the time until the next one shows nothing.
    pub fn missed(&mut self) {
        self.last = None;
    }

    /// [9] The lease has stood unchanged for the larger of our takeover time and its own.
    pub fn is_abandoned(&self, lock: &Lock, times: &Times) -> bool {
        lock.lease
            .as_ref()
            .is_some_and(|lease| self.lease_for >= times.takeover.max(Duration::from_millis(lease.takeover_ms)))
    }

    /// [9, 12] Somebody else waits, is still there as far as we can tell, and was not told that it stays where it is.
    pub fn waiter<'a>(&self, lock: &'a Lock, me: &InstanceId) -> Option<&'a Waiter> {
        lock.waiter.as_ref().filter(|waiter| {
            waiter.instance != *me && !waiter.declined && self.waiter_for < Duration::from_millis(waiter.ttl_ms)
        })
    }
}

/// How an instance stands to a lock that it has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// Erased for good.
    Purged,
    Free,
    Theirs,
    Ours,
    Late,
}

pub fn stand(
    lock: &Lock,
    who: &Identity,
    held: Option<&Held>,
    sight: &LeaseWatch,
    times: &Times,
    now: Moment,
) -> LeaseState {
    // [13] A tombstone is nobody's to take.
    if lock.purged {
        return LeaseState::Purged;
    }
    if let Some(lease) = &lock.lease {
        if let Some(held) = held.filter(|_| is_ours(lock, held, &who.me)) {
            // [4, 7]
            return if now < held.deadline { LeaseState::Ours } else { LeaseState::Late };
        }
        // [6]
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
