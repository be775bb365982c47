//! Mistakes put into the model: each must be found.

use crate::lock_model::{LockView, Small, Ticks};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelMistake {
    /// What was released may run again.
    RunsAfterRelease,
    /// The deadline counts from the answer, not from the sending.
    DeadlineFromAnswer,
    TakeoverBelowHold,
    NoFence,
    GuardHangsToo,
    ContainersSurvive,
    /// A restart takes its predecessor's lease while a container of it may live.
    RestartBeforeWipe,
    /// A restore from the head as it was first seen.
    CachedHead,
    NoWaiterPriority,
    /// A restart takes its predecessor's lease past a fresh waiter.
    RestartPastWaiter,
    /// The same nonce in every write.
    OneNonce,
    /// An acquisition that does not raise the epoch.
    SameEpoch,
    /// Writes without a condition.
    NoConditions,
    /// The head is committed in another object than the lease.
    CommitElsewhere,
    /// A lease that is late counts again after a look that still shows it.
    LookProves,
    /// Whoever acquires what is being purged runs it.
    PurgeIsOpen,
    /// Checkpoints are erased before the mark.
    ErasesUnmarked,
    /// A lock that is missing is made anew.
    MissingIsFree,
    /// Whoever once held the lease writes as if it still did.
    NeverLooks,
    /// A checkpoint is begun while an earlier commit may still arrive.
    BeginsInDoubt,
    /// A restore does not say that it goes back in time.
    ForgetsWork,
}

impl ModelMistake {
    pub const ALL: [ModelMistake; 21] = [
        Self::RunsAfterRelease,
        Self::DeadlineFromAnswer,
        Self::TakeoverBelowHold,
        Self::NoFence,
        Self::GuardHangsToo,
        Self::ContainersSurvive,
        Self::RestartBeforeWipe,
        Self::CachedHead,
        Self::NoWaiterPriority,
        Self::RestartPastWaiter,
        Self::OneNonce,
        Self::SameEpoch,
        Self::NoConditions,
        Self::CommitElsewhere,
        Self::LookProves,
        Self::PurgeIsOpen,
        Self::ErasesUnmarked,
        Self::MissingIsFree,
        Self::NeverLooks,
        Self::BeginsInDoubt,
        Self::ForgetsWork,
    ];

    pub fn ticks(self, ticks: Ticks) -> Ticks {
        if self == Self::TakeoverBelowHold { Ticks { takeover: 1, ..ticks } } else { ticks }
    }

    /// What an instance believes to see.
    pub fn view(self, mut view: LockView) -> LockView {
        let blind = match self {
            Self::NoWaiterPriority => true,
            Self::RestartPastWaiter => view.predecessor > 0 && view.lock.owner == view.predecessor,
            _ => false,
        };
        if blind && view.lock.waiter != view.me {
            (view.lock.waiter, view.lock.waiter_op) = (0, 0);
        }
        if self == Self::RunsAfterRelease
            && let Some((_, _, released)) = &mut view.held
        {
            *released = false;
        }
        view
    }

    pub fn written(self, before: Small, mut lock: Small) -> Small {
        if self == Self::SameEpoch {
            lock.epoch = before.epoch.max(1);
        }
        lock
    }
}
