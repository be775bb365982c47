//! The only writer of one `lock.json` on this instance: reads and writes it, resolves writes whose answer was lost, and
//! tracks the deadline of the lease.
//!
//! Every write is a compare-and-set on the version last seen. It carries a fresh nonce, recorded with the send instant
//! *before* the write is sent, and a lost answer is resolved by reading. A call may be cancelled at any point: the next
//! one reads first.

pub mod lease_rules;
mod lease_write;

use std::{future::Future, pin::pin, sync::Arc, time::SystemTime};

use baton_protocol::{
    id::Nonce,
    lock::{Claim, Head, Lock, Waiter},
    reason::Reason,
};
use tokio::sync::watch;

use self::lease_rules::{HeldLease, Identity, InitialLease, LeaseState, LeaseWatch};
use super::{
    lock_object::{self, Unusable},
    signature::Seals,
    store::{self, PollResult, Priority, Store, Version},
};
use crate::{
    clock::{Moment, SharedClock},
    config::{LeaseTimes, variables::HMAC_KEY},
    metrics::Metrics,
};

/// Errors of the lock, grouped by what the caller can do about them.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Observe again: the lock is no longer the one the write was based on.
    #[error("the lock was changed by another writer")]
    Changed,
    /// No instance may create a replacement.
    #[error("the lock does not exist")]
    Missing,
    /// It is never overwritten: an operator has to repair it.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// The operator's command has no key; instances with a key would reject what it writes.
    #[error("the lock is signed: set {} to the key of the instances", HMAC_KEY)]
    Sealed,
    #[error("the lock cannot be encoded: {0}")]
    Unencoded(String),
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl Error {
    /// Why no usable lock exists. Nothing is written until an operator has acted.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Missing => Some(Reason::LockMissing),
            Self::Unusable(unusable) => Some(unusable.reason()),
            Self::Changed | Self::Sealed | Self::Unencoded(_) | Self::Store(_) => None,
        }
    }
}

pub type Result<T> = std::result::Result<T, Error>;

/// Why work that needs the lease was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Lapse {
    /// The lease may still be ours; the guard has stopped the container.
    #[error("the lease could not be renewed in time")]
    Late,
    /// Another instance holds the lease.
    #[error("another instance took the lease")]
    Lost,
}

/// How an attempt to release the lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    Freed,
    /// Another instance holds the lease; nothing of ours was committed.
    Lost,
}

/// What the lock said when we acquired it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PriorRun {
    pub ran: bool,
    pub behind: bool,
}

#[derive(Debug)]
pub struct LeaseHandle {
    store: Arc<dyn Store>,
    key: String,
    who: Identity,
    clock: SharedClock,
    times: LeaseTimes,
    seals: Seals,
    known: Option<(Lock, Version)>,
    /// Whether the lock as last read or written is signed.
    is_sealed: bool,
    sight: LeaseWatch,
    held: Option<HeldLease>,
    /// The last epoch we held, kept after its release.
    epoch: Option<u64>,
    before: PriorRun,
    /// The store's time and our own at the last write: both advance at the same rate.
    updated: Option<(SystemTime, Moment)>,
    /// Nonces of this epoch's writes with the instant each was sent.
    attempts: Vec<(Nonce, Moment)>,
    /// A write was sent and its outcome is unknown.
    unsettled: bool,
    /// A commit was sent and not seen applied: it may still arrive.
    in_doubt: bool,
    next_renewal: Moment,
    /// When the next renewal was first due, however often it has been retried since.
    due: Moment,
    deadline: watch::Sender<Option<Moment>>,
    metrics: Metrics,
}

impl LeaseHandle {
    pub fn new(store: Arc<dyn Store>, key: String, who: Identity, clock: SharedClock, times: LeaseTimes) -> Self {
        let next_renewal = clock.now();
        Self {
            store,
            key,
            who,
            clock,
            times,
            seals: Seals::default(),
            known: None,
            is_sealed: false,
            sight: LeaseWatch::default(),
            held: None,
            epoch: None,
            before: PriorRun::default(),
            updated: None,
            attempts: Vec::new(),
            unsettled: false,
            in_doubt: false,
            next_renewal,
            due: next_renewal,
            deadline: watch::Sender::new(None),
            metrics: Metrics::default(),
        }
    }

    /// Rule 2: Records the write that created this lock on our behalf. It takes effect when the lock is read.
    pub fn begun_by(mut self, lease: InitialLease) -> Self {
        self.attempts.push((lease.op, lease.sent));
        self
    }

    /// With keys, a lock is accepted only if one of them signed it, and every write is signed.
    #[must_use]
    pub fn sealed_by(self, seals: Seals) -> Self {
        Self { seals, ..self }
    }

    /// Reports how late renewals are.
    pub fn measured_by(mut self, metrics: Metrics) -> Self {
        self.metrics = metrics;
        self
    }

    /// The lock as last read or written.
    pub fn lock(&self) -> Option<&Lock> {
        self.known.as_ref().map(|(lock, _)| lock)
    }

    /// Our relation to the lock as last read or written.
    pub fn state(&self) -> Option<LeaseState> {
        let lock = self.lock()?;
        Some(lease_rules::lease_state(lock, &self.who, self.held.as_ref(), &self.sight, &self.times, self.clock.now()))
    }

    /// Another instance that waits, if its entry is fresh and not declined.
    pub fn waiter(&self) -> Option<&Waiter> {
        self.lock().and_then(|lock| self.sight.waiter(lock, &self.who.me))
    }

    /// Our own waiter entry, even if it is stale or declined.
    pub fn entry(&self) -> Option<&Waiter> {
        self.lock()?.waiter.as_ref().filter(|waiter| waiter.instance == self.who.me)
    }

    /// What the lock said when we acquired it.
    pub fn before(&self) -> PriorRun {
        self.before
    }

    pub fn held(&self) -> Option<&HeldLease> {
        self.held.as_ref()
    }

    /// The last epoch we held, kept after its release: only as its holder do we report status.
    pub fn epoch(&self) -> Option<u64> {
        self.epoch
    }

    /// Rule 13: Whether our last applied write renewed the lease, less than *renew* ago.
    pub fn is_renewed(&self) -> bool {
        let renewals = self.lock().and_then(|lock| lock.lease.as_ref()).map_or(0, |lease| lease.renew);
        let fresh = self.times.hold.saturating_sub(self.times.renew);
        let left = self.held.filter(|held| !held.released).map(|held| held.deadline - self.clock.now());
        renewals > 0 && left.is_some_and(|left| left > fresh)
    }

    pub fn next_renewal(&self) -> Moment {
        self.next_renewal
    }

    /// A watch of the deadline until which the container may run.
    pub fn deadline(&self) -> watch::Receiver<Option<Moment>> {
        self.deadline.subscribe()
    }

    /// Reads the lock and resolves every write whose outcome is unknown.
    pub async fn read(&mut self) -> Result<()> {
        let known = self.known.as_ref().map(|(_, version)| version);
        let polled = self.clock.timeout(self.times.call, self.store.get_if_changed(&self.key, known)).await;
        let polled = polled.unwrap_or_else(|elapsed| Err(self.unanswered(elapsed)));
        match polled {
            Ok(PollResult::Unchanged) => {}
            Ok(PollResult::Changed(bytes, version)) => {
                let stored = lock_object::parse(&self.seals, &self.key, &bytes).and_then(|stored| match &self.known {
                    Some((known, _)) if lock_object::is_older(&stored.lock, known) => Err(Unusable::Older),
                    Some(_) | None => Ok(stored),
                });
                // The known lock is kept: a write based on it is refused, because its version is not the current one.
                let stored = stored.inspect_err(|_| self.sight.missed())?;
                (self.known, self.is_sealed) = (Some((stored.lock, version)), stored.is_sealed);
            }
            Ok(PollResult::Missing) => {
                // Rule 14: A missing lock is not free, and not ours to create. Nor can a pending write be applied any
                // more.
                self.unsettled = false;
                self.known = None;
                self.sight.missed();
                return Err(Error::Missing);
            }
            Err(error) => {
                self.sight.missed();
                return Err(error.into());
            }
        }
        self.unsettled = false;
        if let Some((lock, _)) = &self.known {
            self.sight.saw(lock, self.clock.now());
        }
        self.applied();
        Ok(())
    }

    /// The lock could not be observed: the time until the next read proves nothing.
    pub fn missed(&mut self) {
        self.sight.missed();
    }

    /// Acquires the lease under a new epoch. `runs`: the sandbox is going to run under it.
    pub async fn acquire(&mut self, runs: bool) -> Result<()> {
        let op = self.clock.nonce();
        // Rule 9: The lease was judged free from this very lock: the precondition of the write guarantees that it still
        // is.
        let lock = self.current()?;
        let before = PriorRun { ran: lock.ran, behind: lock.behind };
        let next = lease_rules::acquired(lock, &self.who.me, op.clone(), &self.times, runs);
        self.before = before;
        self.send(next, &op, Priority::Commit, |lock| is_op(lock, &op)).await
    }

    /// Proves that the lease is still ours, which extends it.
    pub async fn renew(&mut self) -> Result<()> {
        self.next_renewal = self.clock.now() + self.times.retry;
        if self.unsettled {
            self.read().await?;
        }
        let op = self.clock.nonce();
        let next = lease_rules::renewed(self.ours()?, op.clone());
        match self.send(next, &op, Priority::Renewal, |lock| is_op(lock, &op)).await {
            // Rule 8: A waiter registered in between: merge its entry and write again at once.
            Err(Error::Changed) if matches!(self.state(), Some(LeaseState::Ours | LeaseState::Late)) => {
                let op = self.clock.nonce();
                let next = lease_rules::renewed(self.ours()?, op.clone());
                self.send(next, &op, Priority::Renewal, |lock| is_op(lock, &op)).await
            }
            sent => sent,
        }
    }

    /// Makes `head` the committed checkpoint and keeps the lease.
    pub async fn commit(&mut self, head: Head) -> Result<()> {
        let op = self.clock.nonce();
        let next = lease_rules::committed(self.ours()?, op.clone(), head);
        self.in_doubt = true;
        self.send(next, &op, Priority::Commit, |lock| is_op(lock, &op)).await?;
        self.in_doubt = false;
        Ok(())
    }

    /// Rule 2: Whether the head may still change through our own commit whose answer was lost. A renewal rules that
    /// out: no write based on an older lock can be applied after it.
    pub fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }

    /// Rule 11: Releases the lease, with `head` as the last commit in the same write. `ran`: the sandbox ran under this
    /// lease. One way: once this is called, nothing runs under this epoch any more, whatever the answer. Safe to repeat
    /// until it succeeds or the lease proves lost.
    pub async fn release(&mut self, head: Option<Head>, ran: bool) -> Result<Released> {
        let Some(held) = self.held else { return Ok(Released::Lost) };
        if self.unsettled {
            self.read().await?;
        }
        let lock = self.lock().ok_or(Error::Missing)?;
        if let Some(released) = self.settled(lock, &held) {
            self.held = None;
            return Ok(released);
        }
        let op = self.clock.nonce();
        self.write_release(lease_rules::released(lock, head, ran || self.before.behind), &op).await?;
        Ok(Released::Freed)
    }

    /// Rule 13: Marks the start of a purge.
    pub async fn purging(&mut self) -> Result<()> {
        let op = self.clock.nonce();
        let next = lease_rules::purging(self.ours()?, op.clone());
        self.send(next, &op, Priority::Commit, |lock| is_op(lock, &op)).await
    }

    /// Rule 13: Ends a purge: only the tombstone remains. One way and safe to repeat, like a release.
    pub async fn write_tombstone(&mut self) -> Result<Released> {
        let Some(held) = self.held else { return Ok(Released::Lost) };
        if self.unsettled {
            self.read().await?;
        }
        let lock = self.lock().ok_or(Error::Missing)?;
        if let Some(released) = self.settled(lock, &held) {
            self.held = None;
            return Ok(released);
        }
        let op = self.clock.nonce();
        self.write_release(lease_rules::tombstone(lock, self.clock.timestamp()), &op).await?;
        Ok(Released::Freed)
    }

    /// Rule 12: Declines the waiter whose entry carries this nonce: the sandbox stays here. Also renews the lease.
    pub async fn decline(&mut self, waiter: &Nonce) -> Result<()> {
        let op = self.clock.nonce();
        let lock = self.ours()?;
        if lock.waiter.as_ref().is_none_or(|entry| entry.op != *waiter) {
            return Err(Error::Changed);
        }
        let next = lease_rules::declined(lock, op.clone());
        self.send(next, &op, Priority::Renewal, |lock| is_op(lock, &op)).await
    }

    /// Registers as waiter, or refreshes our entry. This clears an earlier decline.
    pub async fn wait(&mut self, claim: Claim) -> Result<()> {
        let op = self.clock.nonce();
        let next = lease_rules::waited(self.current()?, &self.who.me, claim, op.clone(), &self.times);
        let registered = |lock: &Lock| lock.waiter.as_ref().is_some_and(|waiter| waiter.op == op);
        self.send(next, &op, Priority::Waiter, registered).await
    }

    pub async fn withdraw(&mut self) -> Result<()> {
        let op = self.clock.nonce();
        let me = self.who.me.clone();
        let next = lease_rules::withdrawn(self.current()?, &me);
        let gone = |lock: &Lock| lock.waiter.as_ref().is_none_or(|waiter| waiter.instance != me);
        self.send(next, &op, Priority::Waiter, gone).await
    }

    /// Polls `work` and the renewals in one future, so that neither outlives the other. A failed renewal only makes the
    /// lease late; the work is dropped once the deadline has passed or the lease is lost.
    pub async fn renew_while<T>(&mut self, work: impl Future<Output = T>) -> std::result::Result<T, Lapse> {
        let mut work = pin!(work);
        let clock = self.clock.clone();
        loop {
            let deadline = self.held.map_or(clock.now(), |held| held.deadline);
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                () = clock.sleep_until(self.next_renewal.min(deadline)) => {}
            }
            // The work continues during the renewal, and a renewal is never cancelled.
            let mut done = None;
            {
                let mut renewal = pin!(self.renew());
                loop {
                    tokio::select! {
                        biased;
                        _ = &mut renewal => break,
                        result = &mut work, if done.is_none() => done = Some(result),
                    }
                }
            }
            match (self.state(), done) {
                (Some(LeaseState::Ours), Some(done)) => return Ok(done),
                (Some(LeaseState::Ours), None) => {}
                // [4, 7] Late is not lost: the work is dropped, the stopped container is kept.
                (Some(LeaseState::Late) | None, _) => return Err(Lapse::Late),
                (Some(LeaseState::Free | LeaseState::Theirs | LeaseState::Purged), _) => return Err(Lapse::Lost),
            }
        }
    }
}

fn is_op(lock: &Lock, op: &Nonce) -> bool {
    lock.lease.as_ref().is_some_and(|lease| lease.op == *op)
}
