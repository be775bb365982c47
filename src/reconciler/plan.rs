//! The plan: maps the desired and the observed state to the next action. Pure.
//!
//! ```text
//!            asked to run                        asked to checkpoint / hand off
//!   Free ──Acquire──▶ Ours ──Create|Restore──▶ Running ──Checkpoint──▶ Free, Stopped
//!     ▲                                           │ ▲                       │Remove
//!     │                               lease late  ▼ │ Renew, Resume         ▼
//!     └──────Release|Purge── Absent ◀──Remove── Fenced                   Absent
//! ```
//!
//! `plan` composes three smaller functions: `refusal` answers a session that cannot get the sandbox, `upkeep` does
//! what has become due while the lease is held, and `step` brings the sandbox closer to the desired state.
//!
//! Rules that hold for every row; the tests check each of them over the whole state space:
//!
//! 1. Without the lease, the only change this instance makes is to remove its own container.
//! 2. One action per pass. The next pass observes again before it acts.
//! 3. Nothing is removed because something else is impossible.
//! 4. A refused spec is not retried until it changes.

use crate::runtime::Container;

/// What this instance should bring about for one sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Desired {
    /// Run here.
    Running,
    /// Keep the state, run nowhere.
    Checkpointed,
    /// Hand it off: another instance waits for it, the spec says so, or it is placed elsewhere.
    HandedOff,
    /// Idle for too long, and the spec keeps no checkpoint.
    Ended,
    /// The drain time is up: release it and keep only what is stored.
    Dropped,
    /// Erase it, also from storage.
    Deleted,
}

impl Desired {
    pub const ALL: [Self; 6] =
        [Self::Running, Self::Checkpointed, Self::HandedOff, Self::Ended, Self::Dropped, Self::Deleted];
}

/// Everything the planner depends on, read at the start of each pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observed {
    pub lock: LockState,
    pub container: Container,
    pub saved: Saved,
    /// The spec allows checkpoints.
    pub checkpointable: bool,
    /// The spec allows handoff and the lock has a holder, so registering as waiter makes sense.
    pub may_wait: bool,
    /// A checkpoint of the running sandbox was requested.
    pub checkpoint_requested: bool,
    /// A snapshot was requested and does not exist yet.
    pub snapshot_requested: bool,
    /// The root file system is not on this instance yet.
    pub rootfs_missing: bool,
    /// This instance is registered as waiter in the lock.
    pub registered: bool,
    /// Our waiter entry matches the current request, is fresh, and the holder has not declined it.
    pub waiting: bool,
    /// Another instance waits and must be told that the sandbox is in use.
    pub declines: bool,
    /// The last attempt at this spec failed for good, and no session has attached since.
    pub refused: bool,
    /// The session that attached here and waits for the sandbox.
    pub attachment: AttachState,
    /// The most urgent upkeep that is due.
    pub due: Option<Upkeep>,
    /// The step that failed last, while its retry is not due yet.
    pub deferred: Option<Action>,
}

/// The prospects of a session that attached here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttachState {
    /// No session is attached.
    None,
    /// Nothing is known that would keep the sandbox from running here.
    Waiting,
    /// The sandbox does not exist any more.
    Deleted,
    /// The holder declined our request: a live client is attached there.
    Declined,
    /// A later attach placed the sandbox on another instance.
    Superseded,
    /// The sandbox may not be handed off, and its holder has shown that it is alive.
    HeldElsewhere,
    /// The holder did not release the sandbox in time.
    TimedOut,
}

impl AttachState {
    pub const ALL: [Self; 7] = [
        Self::None,
        Self::Waiting,
        Self::Deleted,
        Self::Declined,
        Self::Superseded,
        Self::HeldElsewhere,
        Self::TimedOut,
    ];
}

/// Work that becomes due while the lease is held, most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Upkeep {
    /// The lease must be renewed.
    Renewal,
    /// A waiter asks for the sandbox, and the client attached here was not probed for it yet.
    Probe,
    /// The sandbox has outlived its `ttl`.
    Expiry,
    /// The container has another network policy than the spec.
    Egress,
    /// The metadata has disappeared, although its deletion was not requested.
    MetadataMissing,
    /// The metadata is invalid, and its status does not say so yet.
    MetadataInvalid,
    /// Requests were answered long ago, and their clients have not collected the answers.
    StaleAnswers,
    /// There may be checkpoints that nothing references any more, and the lease was just renewed.
    Garbage,
}

impl Upkeep {
    pub const ALL: [Self; 8] = [
        Self::Renewal,
        Self::Probe,
        Self::Expiry,
        Self::Egress,
        Self::MetadataMissing,
        Self::MetadataInvalid,
        Self::StaleAnswers,
        Self::Garbage,
    ];

    pub const fn action(self) -> Action {
        match self {
            Self::Renewal => Action::Renew,
            Self::Probe => Action::Probe,
            Self::Expiry => Action::Expire,
            Self::Egress => Action::SetEgress,
            Self::MetadataMissing => Action::RecreateMetadata,
            Self::MetadataInvalid => Action::ReportInvalid,
            Self::StaleAnswers => Action::ForgetAnswers,
            Self::Garbage => Action::CollectGarbage,
        }
    }
}

/// Why a session cannot get the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rejection {
    /// The lock is missing or unusable.
    NoLock,
    /// The sandbox ran and left no checkpoint.
    StateLost,
    Deleted,
    InUse,
    Superseded,
    RunningElsewhere,
    HandoffTimeout,
}

/// The state of the lock, as seen by this instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockState {
    /// It could not be read. The container is kept; the guard enforces our deadline.
    Unknown,
    /// There is metadata but no usable lock. No instance may create one, or overwrite one that cannot be parsed or
    /// verified.
    Missing,
    /// There is no lease, or its holder was observed to be unresponsive for long enough; and no other waiter is
    /// fresh.
    Free,
    /// Another instance holds the lease, or is next to take it.
    Theirs,
    /// It has our epoch, and our deadline has not passed.
    Ours,
    /// It has our epoch as far as we know, but our deadline has passed.
    Late,
}

impl LockState {
    pub const ALL: [Self; 6] = [Self::Unknown, Self::Missing, Self::Free, Self::Theirs, Self::Ours, Self::Late];
}

/// What storage has of the sandbox's memory and files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Saved {
    /// It never ran, so nothing can be lost.
    Nothing,
    Checkpoint,
    /// It ran and left no checkpoint. Starting over silently would hide the loss.
    Lost,
}

impl Saved {
    pub const ALL: [Self; 3] = [Self::Nothing, Self::Checkpoint, Self::Lost];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Action {
    /// Register as waiter, update our claim, or show that we still wait.
    Wait,
    Withdraw,
    /// Tell the waiter that the sandbox is in use.
    Decline,
    Acquire,
    /// Prove that the lease is still ours, which extends it.
    Renew,
    Extract,
    Create,
    Restore,
    /// Tell the sessions and, as holder, the status why the sandbox cannot run; nothing else changes.
    Refuse(Rejection),
    /// Have the guard stop it.
    Fence,
    /// Let it continue, whether it was paused or fenced.
    Resume,
    Snapshot,
    /// Commit a checkpoint and keep running.
    Save,
    /// Commit a checkpoint and release the lease in one write; the container stops.
    Checkpoint,
    Remove,
    Release,
    Purge,
    /// Ask the attached client for a sign of life.
    Probe,
    /// Set `deleted` in the spec.
    Expire,
    /// Give the running container the network policy of the spec.
    SetEgress,
    RecreateMetadata,
    /// Write to the status of invalid metadata what is wrong with it.
    ReportInvalid,
    /// Remove answered requests from the spec.
    ForgetAnswers,
    /// Erase checkpoints that nothing references.
    CollectGarbage,
    /// Nothing to do until something changes.
    Rest,
    /// Nothing of the sandbox is here, and no session here waits for it: the worker ends.
    Finish,
}

impl Action {
    /// Whether it neither changes the container nor who holds the lease.
    pub fn is_upkeep(self) -> bool {
        Upkeep::ALL.iter().any(|upkeep| upkeep.action() == self)
    }
}

pub fn plan(desired: Desired, seen: &Observed) -> Action {
    if let Some(rejection) = refusal(desired, seen) {
        return Action::Refuse(rejection);
    }
    let due = upkeep(desired, seen);
    if let Some(due) = due.filter(|due| *due != Upkeep::Garbage) {
        return due.action();
    }
    let step = step(desired, seen);
    if step != Action::Rest && seen.deferred != Some(step) {
        return step;
    }
    match due {
        Some(due) => due.action(),
        None if is_finished(desired, seen) => Action::Finish,
        None => Action::Rest,
    }
}

/// Why the session that waits here cannot get the sandbox, if it cannot.
fn refusal(desired: Desired, seen: &Observed) -> Option<Rejection> {
    if seen.refused || seen.container != Container::Absent {
        return None;
    }
    match (seen.lock, seen.attachment, desired) {
        (LockState::Unknown | LockState::Missing | LockState::Ours | LockState::Late, _, _) => None,
        (_, AttachState::None, _) => None,
        (_, AttachState::Deleted, _) | (_, _, Desired::Deleted) => Some(Rejection::Deleted),
        (LockState::Theirs, AttachState::Declined, _) => Some(Rejection::InUse),
        (_, AttachState::Superseded, Desired::HandedOff) => Some(Rejection::Superseded),
        (LockState::Theirs, AttachState::HeldElsewhere, Desired::Running) => Some(Rejection::RunningElsewhere),
        (LockState::Theirs, AttachState::TimedOut, Desired::Running) => Some(Rejection::HandoffTimeout),
        (LockState::Free | LockState::Theirs, _, _) => None,
    }
}

/// Upkeep needs the lease, and a sandbox that is being deleted needs only the lease.
fn upkeep(desired: Desired, seen: &Observed) -> Option<Upkeep> {
    let is_wanted = |due: &Upkeep| desired != Desired::Deleted || *due == Upkeep::Renewal;
    seen.due.filter(|_| seen.lock == LockState::Ours).filter(is_wanted)
}

/// Nothing of the sandbox is here, and no session here can expect it to run.
fn is_finished(desired: Desired, seen: &Observed) -> bool {
    let is_away = matches!(seen.lock, LockState::Free | LockState::Theirs | LockState::Missing);
    let is_awaited = match seen.attachment {
        AttachState::None | AttachState::Deleted => false,
        AttachState::Waiting
        | AttachState::Declined
        | AttachState::Superseded
        | AttachState::HeldElsewhere
        | AttachState::TimedOut => desired == Desired::Running && !seen.refused,
    };
    seen.container == Container::Absent && !seen.registered && is_away && !is_awaited
}

/// The next step towards the desired state.
fn step(desired: Desired, seen: &Observed) -> Action {
    use {Action::*, Container as C, Desired as D, LockState::*};
    match (seen.lock, seen.container, desired) {
        (Unknown, _, _) => Rest,
        (Missing | Late, C::Running | C::Paused, _) => Fence,
        (Missing, _, D::Running) if !seen.refused => Refuse(Rejection::NoLock),
        (Missing, _, _) => Rest,
        (Late, _, _) => Renew,

        (Free | Theirs, C::Partial | C::Running | C::Paused | C::Fenced | C::Stopped, _) => Remove,
        (Free | Theirs, C::Absent, D::Checkpointed | D::HandedOff | D::Ended | D::Dropped) if seen.registered => {
            Withdraw
        }
        (Free | Theirs, C::Absent, D::Running) if seen.registered && seen.refused => Withdraw,
        (Theirs, C::Absent, D::Running) if seen.may_wait && !seen.waiting && !seen.refused => Wait,
        (Theirs, C::Absent, _) => Rest,
        (Free, C::Absent, D::Running) if seen.refused => Rest,
        (Free, C::Absent, D::Running | D::Deleted) => Acquire,
        (Free, C::Absent, D::Checkpointed | D::HandedOff | D::Ended | D::Dropped) => Rest,

        (Ours, C::Partial | C::Stopped, _) => Remove,

        (Ours, C::Absent, D::Running) if seen.refused => Release,
        (Ours, C::Absent, D::Running) if seen.saved == Saved::Lost => Refuse(Rejection::StateLost),
        (Ours, C::Absent, D::Running) if seen.rootfs_missing => Extract,
        (Ours, C::Absent, D::Running) if seen.saved == Saved::Checkpoint => Restore,
        (Ours, C::Absent, D::Running) => Create,
        (Ours, C::Absent, D::Checkpointed | D::HandedOff | D::Dropped) => Release,
        (Ours, C::Absent, D::Ended) if seen.saved == Saved::Checkpoint => Release,
        (Ours, C::Absent, D::Ended | D::Deleted) => Purge,

        (Ours, C::Running | C::Paused | C::Fenced, D::Ended | D::Dropped | D::Deleted) => Remove,
        (Ours, C::Fenced, _) => Resume,
        (Ours, C::Running | C::Paused, D::Checkpointed | D::HandedOff) if seen.checkpointable && !seen.refused => {
            Checkpoint
        }
        (Ours, C::Paused, D::Running | D::Checkpointed | D::HandedOff) => Resume,
        (Ours, C::Running, D::Running) if seen.declines => Decline,
        (Ours, C::Running, _) if seen.snapshot_requested => Snapshot,
        (Ours, C::Running, _) if seen.checkpoint_requested && seen.checkpointable => Save,
        (Ours, C::Running, D::Running | D::Checkpointed | D::HandedOff) => Rest,
    }
}

#[cfg(test)]
mod tests;
