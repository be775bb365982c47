//! Mistakes put in on purpose, from outside the product: each must be found.

use baton::storage::rules::Times;
use baton_protocol::lock::Lock;
use bytes::Bytes;
use std::time::Duration;

use crate::dice::Dice;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A lease is taken over before its holder must have stopped.
    TakeoverBelowHold,
    /// A holder believes that it may run for longer than others wait.
    HoldAboveTakeover,
    /// No deadline ever stops a container.
    NoFence,
    /// The guard stands still whenever its server does, and the containers do not.
    GuardHangsToo,
    /// Containers outlive their server.
    ContainersSurvive,
    /// A pause is said to be done and is not.
    PauseLies,
    /// A removal is said to be done and is not.
    RemoveLies,
    /// Nonces are counted, not drawn.
    CountedNonces,
    /// The store applies writes whose condition does not hold.
    NoConditions,
    /// The store answers a read with what was there before.
    CachedReads,
    /// Waiters are not seen.
    NoWaiterPriority,
    /// The head is left out of the write that should commit it.
    HeadNotCommitted,
    /// Files are said to be stored and are not.
    UploadsNothing,
    /// Nobody waits between two looks.
    NoRest,
    /// Clocks differ by more than is promised.
    WildClocks,
}

/// With a seed that finds it; others are tried when that one does not.
pub const MISTAKES: [(Mistake, u64); 15] = [
    (Mistake::TakeoverBelowHold, 70),
    (Mistake::HoldAboveTakeover, 86),
    (Mistake::NoFence, 1),
    (Mistake::GuardHangsToo, 230),
    (Mistake::ContainersSurvive, 87),
    (Mistake::PauseLies, 0),
    (Mistake::RemoveLies, 0),
    (Mistake::CountedNonces, 77),
    (Mistake::NoConditions, 19),
    (Mistake::CachedReads, 1),
    (Mistake::NoWaiterPriority, 1),
    (Mistake::HeadNotCommitted, 0),
    (Mistake::UploadsNothing, 0),
    (Mistake::NoRest, 1),
    (Mistake::WildClocks, 245),
];

impl Mistake {
    pub fn times(self) -> Times {
        match self {
            Self::TakeoverBelowHold => Times { takeover: Duration::from_secs(8), ..Times::DEFAULT },
            Self::HoldAboveTakeover => Times { hold: Duration::from_secs(50), ..Times::DEFAULT },
            Self::NoFence
            | Self::GuardHangsToo
            | Self::ContainersSurvive
            | Self::PauseLies
            | Self::RemoveLies
            | Self::CountedNonces
            | Self::NoConditions
            | Self::CachedReads
            | Self::NoWaiterPriority
            | Self::HeadNotCommitted
            | Self::UploadsNothing
            | Self::NoRest
            | Self::WildClocks => Times::DEFAULT,
        }
    }

    /// What a read of the lock shows under this mistake.
    pub fn read(self, key: &str, bytes: &Bytes, before: Option<&Bytes>, name: &str, dice: &Dice) -> Bytes {
        if !key.ends_with("lock.json") {
            return bytes.clone();
        }
        match (self, before) {
            (Self::CachedReads, Some(before)) if dice.falls(20) => before.clone(),
            (Self::NoWaiterPriority, _) => altered(bytes, |lock| {
                if lock.waiter.as_ref().is_some_and(|waiter| waiter.instance.as_str() != name) {
                    lock.waiter = None;
                }
            }),
            _ => bytes.clone(),
        }
    }

    /// What a write of the lock becomes under this mistake.
    pub fn write(self, key: &str, bytes: &Bytes) -> Bytes {
        if self == Self::HeadNotCommitted && key.ends_with("lock.json") {
            return altered(bytes, |lock| {
                if lock.lease.is_none() {
                    lock.head = lock.prev_head.take();
                }
            });
        }
        bytes.clone()
    }
}

fn altered(bytes: &Bytes, change: impl FnOnce(&mut Lock)) -> Bytes {
    let Ok(mut lock) = serde_json::from_slice::<Lock>(bytes) else { return bytes.clone() };
    change(&mut lock);
    serde_json::to_vec(&lock).unwrap().into()
}
