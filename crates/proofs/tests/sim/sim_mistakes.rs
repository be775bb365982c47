//! Mistakes put in on purpose, from outside the product: each must be found.

use std::time::Duration;

use baton::config::{LeaseTimes, PollIntervals};
use baton::storage::{layout, records};
use baton_protocol::{
    id::{Nonce, SandboxId},
    lock::{Claim, Lock},
    metadata::Latest,
};
use bytes::Bytes;

use crate::{rng::Rng, sim_bucket::Bucket};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimMistake {
    /// A lease is taken over before its holder must have stopped.
    TakeoverBelowHold,
    /// A holder believes that it may run for longer than others wait.
    HoldAboveTakeover,
    /// The deadline counts from the answer to a write, not from its sending.
    DeadlineFromAnswer,
    /// No deadline ever stops a container.
    NoFence,
    /// The guard stands still whenever its server does, and the containers do not.
    GuardHangsToo,
    /// Containers outlive their server.
    ContainersSurvive,
    /// A server whose release was not answered lets its container go on.
    RunsAfterRelease,
    /// A pause is said to be done and is not.
    PauseLies,
    /// A removal is said to be done and is not.
    RemoveLies,
    /// Nonces are counted, not drawn, by a small counter that every process begins anew.
    CountedNonces,
    /// The store applies writes whose condition does not hold.
    NoConditions,
    /// The store answers a read with what was there before.
    CachedReads,
    /// Waiters are not seen.
    NoWaiterPriority,
    /// The head is left out of the write that should commit it.
    HeadNotCommitted,
    /// The head is committed in another write than the one that proves the lease.
    CommitElsewhere,
    /// The status names a checkpoint before it is committed.
    StatusAhead,
    /// Files are said to be stored and are not.
    UploadsNothing,
    /// Output is sent again from another byte than was asked for.
    WrongReplay,
    /// Nobody waits between two looks.
    NoRest,
    /// Clocks differ by more than is promised.
    WildClocks,
    /// Whoever asks is taken for one that gets the sandbox at once.
    AskingPreempts,
    /// A waiter does not see that it was declined.
    DeclineUnseen,
}

/// With a seed that finds it; others are tried when that one does not.
pub const MISTAKES: [(SimMistake, u64); 22] = [
    (SimMistake::TakeoverBelowHold, 5),
    (SimMistake::HoldAboveTakeover, 20),
    (SimMistake::DeadlineFromAnswer, 162),
    (SimMistake::NoFence, 5),
    (SimMistake::GuardHangsToo, 111),
    (SimMistake::ContainersSurvive, 11),
    (SimMistake::RunsAfterRelease, 3),
    (SimMistake::PauseLies, 0),
    (SimMistake::RemoveLies, 3),
    (SimMistake::CountedNonces, 144),
    (SimMistake::NoConditions, 1),
    (SimMistake::CachedReads, 1),
    (SimMistake::NoWaiterPriority, 1),
    (SimMistake::HeadNotCommitted, 0),
    (SimMistake::CommitElsewhere, 3),
    (SimMistake::StatusAhead, 5),
    (SimMistake::UploadsNothing, 0),
    (SimMistake::WrongReplay, 0),
    (SimMistake::NoRest, 1),
    (SimMistake::WildClocks, 8),
    (SimMistake::AskingPreempts, 0),
    (SimMistake::DeclineUnseen, 0),
];

impl SimMistake {
    pub fn times(self) -> LeaseTimes {
        match self {
            Self::TakeoverBelowHold => LeaseTimes { takeover: Duration::from_secs(8), ..LeaseTimes::DEFAULT },
            Self::HoldAboveTakeover => LeaseTimes { hold: Duration::from_secs(50), ..LeaseTimes::DEFAULT },
            Self::NoRest => {
                let poll = PollIntervals { lock: Duration::from_millis(1), ..LeaseTimes::DEFAULT.poll };
                LeaseTimes { poll, ..LeaseTimes::DEFAULT }
            }
            Self::DeadlineFromAnswer
            | Self::NoFence
            | Self::GuardHangsToo
            | Self::ContainersSurvive
            | Self::RunsAfterRelease
            | Self::PauseLies
            | Self::RemoveLies
            | Self::CountedNonces
            | Self::NoConditions
            | Self::CachedReads
            | Self::NoWaiterPriority
            | Self::HeadNotCommitted
            | Self::CommitElsewhere
            | Self::StatusAhead
            | Self::UploadsNothing
            | Self::WrongReplay
            | Self::WildClocks
            | Self::AskingPreempts
            | Self::DeclineUnseen => LeaseTimes::DEFAULT,
        }
    }

    /// Whether what was found wrong is what this mistake does, and no consequence that anything could have.
    pub fn shows_in(self, wrong: &str) -> bool {
        let two_execute = wrong.starts_with("[4]") || wrong.starts_with("I3");
        match self {
            Self::TakeoverBelowHold
            | Self::HoldAboveTakeover
            | Self::DeadlineFromAnswer
            | Self::NoFence
            | Self::GuardHangsToo
            | Self::ContainersSurvive
            | Self::RunsAfterRelease
            | Self::PauseLies
            | Self::WildClocks => two_execute,
            Self::AskingPreempts => wrong.contains("lost its sandbox to one that only asks"),
            Self::DeclineUnseen => wrong.contains("left waiting"),
            Self::RemoveLies
            | Self::CountedNonces
            | Self::NoConditions
            | Self::CachedReads
            | Self::NoWaiterPriority
            | Self::HeadNotCommitted
            | Self::CommitElsewhere
            | Self::StatusAhead
            | Self::UploadsNothing
            | Self::WrongReplay
            | Self::NoRest => true,
        }
    }

    /// What a read of the lock shows under this mistake.
    pub fn read(self, key: &str, bytes: &Bytes, before: Option<&Bytes>, name: &str, rng: &Rng) -> Bytes {
        if !key.ends_with("lock.json") {
            return bytes.clone();
        }
        match (self, before) {
            (Self::CachedReads, Some(before)) if rng.falls(20) => before.clone(),
            (Self::NoWaiterPriority, _) => altered(bytes, |lock| {
                if lock.waiter.as_ref().is_some_and(|waiter| waiter.instance.as_str() != name) {
                    lock.waiter = None;
                }
            }),
            (Self::AskingPreempts, _) => altered(bytes, |lock| {
                if let Some(waiter) = lock.waiter.as_mut().filter(|waiter| waiter.instance.as_str() != name) {
                    waiter.claim = Claim::Preempt;
                }
            }),
            (Self::DeclineUnseen, _) => altered(bytes, |lock| {
                if let Some(waiter) = lock.waiter.as_mut().filter(|waiter| waiter.instance.as_str() == name) {
                    waiter.declined = false;
                }
            }),
            _ => bytes.clone(),
        }
    }

    /// What a write becomes under this mistake.
    pub fn write(self, key: &str, bytes: &Bytes, bucket: &Bucket) -> Bytes {
        if self == Self::StatusAhead
            && let Some(metadata) = ahead(key, bytes, bucket)
        {
            return metadata;
        }
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

/// The lock that is there with the head of one that could not be written.
pub fn with_head(there: &Bytes, refused: &Bytes) -> Option<Bytes> {
    let lock = |bytes: &Bytes| serde_json::from_slice::<Lock>(bytes).ok();
    let head = lock(refused)?.head.filter(|head| lock(there).is_some_and(|lock| lock.head.as_ref() != Some(head)))?;
    Some(altered(there, |lock| lock.prev_head = lock.head.replace(head)))
}

/// Whether a write frees the lease.
pub fn frees(key: &str, bytes: &Bytes) -> Option<SandboxId> {
    let lock = serde_json::from_slice::<Lock>(bytes).ok().filter(|_| key.ends_with("lock.json"))?;
    lock.lease.is_none().then_some(lock.sandbox_id)
}

/// The nonce of a lease that `name` holds.
pub fn op_of(key: &str, bytes: &Bytes, name: &str) -> Option<Nonce> {
    let lock = serde_json::from_slice::<Lock>(bytes).ok().filter(|_| key.ends_with("lock.json"))?;
    lock.lease.filter(|lease| lease.owner.as_str() == name).map(|lease| lease.op)
}

/// Metadata that names the newest checkpoint, committed or not.
fn ahead(key: &str, bytes: &Bytes, bucket: &Bucket) -> Option<Bytes> {
    let id = layout::sandbox_of(key).filter(|id| layout::Object::Metadata(id).key() == key)?;
    let mut metadata = records::parse(&id, bytes).ok()?;
    let newest = bucket.newest_checkpoint(&id)?;
    metadata.latest_sandbox_checkpoint = Some(Latest { bucket: None, path: layout::checkpoint_prefix(&newest) });
    Some(serde_json::to_vec(&metadata).unwrap().into())
}

fn altered(bytes: &Bytes, change: impl FnOnce(&mut Lock)) -> Bytes {
    let Ok(mut lock) = serde_json::from_slice::<Lock>(bytes) else { return bytes.clone() };
    change(&mut lock);
    serde_json::to_vec(&lock).unwrap().into()
}
