//! The lock of the sandbox as this instance last saw it, and the lease on it.

use baton_protocol::{
    id::SandboxId,
    lock::{Head, Lock},
    reason::Reason,
};

use super::{
    actions::Failure,
    plan::{LockState, Saved},
};
use crate::{
    clock::Moment,
    storage::lease::{self, LeaseHandle, lease_rules::LeaseState},
};

#[derive(Debug)]
pub(super) struct LeaseView {
    /// `None` until it is known where the lock is stored.
    pub(super) handle: Option<LeaseHandle>,
    last_read: LockRead,
    /// When to read the lock again.
    pub(super) due: Moment,
    /// When our entry as waiter must be refreshed, or the holder takes us for dead.
    pub(super) beat_due: Moment,
    /// The sandbox ran here under the current lease.
    pub(super) ran: bool,
}

/// How the last read of the lock ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LockRead {
    Never,
    Good,
    Failed,
    /// There is no lock, or no usable one.
    Unusable(Reason),
}

impl LeaseView {
    pub(super) fn new(now: Moment, handle: Option<LeaseHandle>) -> Self {
        Self { handle, last_read: LockRead::Never, due: now, beat_due: now, ran: false }
    }

    /// An action needs the handle; without one, the state it was planned for is gone.
    pub(super) fn handle_mut(&mut self) -> Result<&mut LeaseHandle, Failure> {
        self.handle.as_mut().ok_or(Failure::Stale)
    }

    /// The lock as last read or written.
    pub(super) fn lock(&self) -> Option<&Lock> {
        self.handle.as_ref()?.lock()
    }

    pub(super) fn head(&self) -> Option<&Head> {
        self.lock()?.head.as_ref()
    }

    /// The last epoch we held, kept after its release.
    pub(super) fn epoch(&self) -> Option<u64> {
        self.handle.as_ref()?.epoch()
    }

    pub(super) fn state(&self) -> LockState {
        let relation = self.relation();
        match (self.last_read, relation) {
            (_, Some(LeaseState::Ours)) => LockState::Ours,
            // Rule 14.
            (LockRead::Unusable(_), _) => LockState::Missing,
            (_, Some(LeaseState::Late)) => LockState::Late,
            (LockRead::Never | LockRead::Failed, _) | (LockRead::Good, None) => LockState::Unknown,
            (LockRead::Good, Some(LeaseState::Free)) => LockState::Free,
            // Rule 9: No instance may acquire a tombstone.
            (LockRead::Good, Some(LeaseState::Theirs | LeaseState::Purged)) => LockState::Theirs,
        }
    }

    fn relation(&self) -> Option<LeaseState> {
        self.handle.as_ref().and_then(LeaseHandle::state)
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(self.state(), LockState::Ours | LockState::Late)
    }

    /// Only a tombstone is left.
    pub(super) fn is_purged(&self) -> bool {
        self.relation() == Some(LeaseState::Purged)
    }

    pub(super) fn is_renewal_due(&self, now: Moment) -> bool {
        let handle = self.handle.as_ref().filter(|_| self.relation() == Some(LeaseState::Ours));
        handle.is_some_and(|handle| now >= handle.next_renewal())
    }

    pub(super) fn next_renewal(&self) -> Option<Moment> {
        self.handle.as_ref().filter(|_| self.state() == LockState::Ours).map(LeaseHandle::next_renewal)
    }

    /// Rule 13: The lease was renewed just now.
    pub(super) fn is_renewed(&self) -> bool {
        self.handle.as_ref().is_some_and(LeaseHandle::is_renewed)
    }

    /// This instance is registered as waiter.
    pub(super) fn is_registered(&self) -> bool {
        self.handle.as_ref().is_some_and(|handle| handle.entry().is_some())
    }

    pub(super) fn was_read(&self) -> bool {
        self.last_read != LockRead::Never
    }

    /// Why there is no usable lock.
    pub(super) fn unusable(&self) -> Reason {
        match self.last_read {
            LockRead::Unusable(reason) => reason,
            LockRead::Never | LockRead::Good | LockRead::Failed => Reason::LockMissing,
        }
    }

    /// What the sandbox can start from. Our own acquisition has set `ran` in the lock; what matters is whether it
    /// really ran.
    pub(super) fn saved(&self) -> Saved {
        let Some(handle) = &self.handle else { return Saved::Nothing };
        let Some(lock) = handle.lock() else { return Saved::Nothing };
        let ran = if self.is_held() { self.ran || handle.before().ran } else { lock.ran };
        match (&lock.head, ran) {
            (Some(_), _) => Saved::Checkpoint,
            (None, true) => Saved::Lost,
            (None, false) => Saved::Nothing,
        }
    }

    /// Takes in the result of a read.
    pub(super) fn note_read(&mut self, id: &SandboxId, read: lease::Result<()>) {
        let before = self.last_read;
        self.last_read = match &read {
            Ok(()) | Err(lease::Error::Changed) => LockRead::Good,
            Err(error) => error.reason().map_or(LockRead::Failed, LockRead::Unusable),
        };
        // An error that persists until an operator acts is logged once.
        if let Err(error) = &read
            && (self.last_read == LockRead::Failed || self.last_read != before)
            && !matches!(error, lease::Error::Changed | lease::Error::Missing)
        {
            tracing::warn!(sandbox = %id, %error, "the lock could not be read");
        }
    }
}
