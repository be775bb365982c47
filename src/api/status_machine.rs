//! What a session sends when something happens to its sandbox: the table of the scenarios. Pure.
//!
//! The session itself sends the first status of what its client requested (CREATING, RESTORING, KILLING,
//! CHECKPOINTING); everything here follows the reconciler's events. Statuses that cannot be retracted (DELETING,
//! LOCK_*, DELETED) are sent only once the sandbox has left.

use baton_protocol::{
    event::{EndReason, Event, Progress, Status, Update},
    id::{CheckpointId, InstanceId},
    lock::Claim,
    metadata::Spec,
    reason::Reason,
};

use super::{close_code::Close, dialect::Dialect};
use crate::bus::{DOWNLOAD, EXTRACT, LeaveReason, LifecycleEvent, SNAPSHOT, UPLOAD};

const IDLE_IN_MEMORY: &str = "The sandbox was idle for longer than its `idle_timeout` and is deleted: it was created without \
     `enable_checkpoint`, so it was in memory only.";
const IDLE_STORED: &str = "The sandbox was idle for longer than its `idle_timeout` and is stopped without a checkpoint, as \
     `enable_idle_timeout_auto_checkpoint` says: only an earlier checkpoint, if there is one, can be restored.";

/// How a session opened its sandbox, until it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenStage {
    Creating,
    Attaching,
    Open,
}

/// A request of this session that ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndingRequest {
    Checkpoint,
    Kill,
}

/// One-shot requests of this session that are not answered yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unanswered {
    pub snapshot: bool,
    /// A checkpoint after which the sandbox keeps running; also that of a fork, which starts without a status.
    pub checkpoint: bool,
}

/// How to react to a lifecycle event.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct StatusReply {
    pub events: Vec<Event>,
    pub reaction: Reaction,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reaction {
    #[default]
    Stay,
    /// The sandbox runs here: open the link.
    Open,
    /// The sandbox left before this session had it: request it again.
    RequestAgain,
    /// An answer may have been written: poll for it.
    PollAnswers,
    /// The session's own checkpoint failed: request running again, then close.
    Revert,
    /// A live client on another instance holds the sandbox: report that a little later, and close.
    InUse,
    Close(Close),
}

/// What a session has sent so far.
#[derive(Clone, Debug)]
pub struct StatusMachine {
    pub stage: OpenStage,
    pub dialect: Dialect,
    pub features: SpecFeatures,
    pub requested: Option<EndingRequest>,
    pub unanswered: Unanswered,
    /// Whether this session requested a handoff.
    pub has_requested_handoff: bool,
    sent: SentStatuses,
    checkpoint: CheckpointState,
}

/// What the spec says about the statuses of a session.
#[derive(Clone, Copy, Debug, Default)]
pub struct SpecFeatures {
    /// Whether the spec allows handoff: only then are lock statuses sent.
    pub has_handoff: bool,
    /// Whether the sandbox is stored, so that its last checkpoint survives an idle stop.
    pub is_persistent: bool,
    /// Whether its `ttl` is over.
    pub is_expired: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct SentStatuses {
    restoring: bool,
    acquiring: bool,
    acquired: bool,
    paused: bool,
}

/// A checkpoint that ends the session.
#[derive(Clone, Copy, Debug, Default)]
struct CheckpointState {
    /// The reason for the one in progress.
    in_progress: Option<LeaveReason>,
    /// The reason for the one whose failure was sent.
    failed: Option<LeaveReason>,
}

impl StatusMachine {
    pub fn new(stage: OpenStage, dialect: Dialect) -> Self {
        Self {
            stage,
            dialect,
            features: SpecFeatures::default(),
            requested: None,
            unanswered: Unanswered::default(),
            has_requested_handoff: false,
            sent: SentStatuses::default(),
            checkpoint: CheckpointState::default(),
        }
    }

    /// Whether the sandbox is about to leave: commands and input are refused.
    pub fn is_leaving(&self) -> bool {
        self.requested.is_some() || self.checkpoint.in_progress.is_some()
    }

    /// Takes over what the spec says about the statuses of this session.
    pub fn apply_spec(&mut self, spec: &Spec, dialect: Dialect) {
        self.dialect = dialect;
        self.features = SpecFeatures {
            has_handoff: spec.enable_sandbox_handoff,
            is_persistent: spec.enable_sandbox_checkpoint,
            is_expired: false,
        };
    }

    fn sends_locks(&self) -> bool {
        self.features.has_handoff && self.dialect.sends_all_steps()
    }

    pub fn is_acquired(&self) -> bool {
        self.sent.acquired
    }

    /// Notes that the client requested a checkpoint and got CHECKPOINTING.
    pub fn request_checkpoint(&mut self) {
        self.requested = Some(EndingRequest::Checkpoint);
        self.checkpoint.in_progress = Some(LeaveReason::Checkpointed);
        self.checkpoint.failed = None;
    }

    /// RESTORING, the first time.
    pub fn restoring(&mut self) -> Vec<Event> {
        if std::mem::replace(&mut self.sent.restoring, true) { vec![] } else { vec![Event::status(Status::Restoring)] }
    }

    pub fn handle(&mut self, event: &LifecycleEvent) -> StatusReply {
        match event {
            LifecycleEvent::Acquiring => self.lock(Status::LockAcquiring),
            LifecycleEvent::Acquired => self.lock(Status::LockAcquired),
            LifecycleEvent::Running { .. } => StatusReply { events: vec![], reaction: Reaction::Open },
            LifecycleEvent::Failed { reason: Reason::InUse, .. } if self.stage == OpenStage::Attaching => {
                StatusReply { events: self.restoring(), reaction: Reaction::InUse }
            }
            LifecycleEvent::Failed { message, .. } => self.fail(message),
            LifecycleEvent::ReleaseRequested { by, claim } => self.release_requested(by, *claim),
            // The session itself answers probes.
            LifecycleEvent::Probe { .. } => StatusReply::default(),
            LifecycleEvent::Checkpointing { why } => self.checkpoint(*why),
            LifecycleEvent::CheckpointFailed { why, message, .. } => self.checkpoint_failed(*why, message),
            LifecycleEvent::Left { why, checkpoint_id } => self.leave(*why, checkpoint_id.as_ref()),
            LifecycleEvent::Fenced { message } => {
                self.sent.paused = true;
                let update = Update { message: Some(message.clone()), ..Update::new(Status::Paused) };
                let open = self.stage == OpenStage::Open && self.dialect.is_v1();
                stay(if open { vec![Event::StatusUpdate(update)] } else { vec![] })
            }
            LifecycleEvent::Unfenced => {
                let was = std::mem::replace(&mut self.sent.paused, false);
                self.when_open(was && self.dialect.is_v1(), Status::Running)
            }
            LifecycleEvent::LeaseLost { message } => self.lose(message),
            LifecycleEvent::EgressDenied { host, port, why } => {
                let (host, reason) = (host.clone(), why.clone());
                let is_told = self.stage == OpenStage::Open && self.dialect.is_v1();
                stay(if is_told { vec![Event::EgressDenied { host, port: *port, reason }] } else { vec![] })
            }
            LifecycleEvent::Answered => StatusReply { events: vec![], reaction: Reaction::PollAnswers },
            LifecycleEvent::Progress { what, done, total } => self.progress(what, *done, *total),
        }
    }

    /// In v1 the status that was sent at the start is sent again, with the progress. If none was sent, because another
    /// session made the request or because it failed before, nothing is sent now. Only a fork sends its first status
    /// here, if it takes long.
    fn progress(&self, what: &str, done: u64, total: u64) -> StatusReply {
        let leaves = self.checkpoint.in_progress.is_some() && self.checkpoint.failed != self.checkpoint.in_progress;
        let status = match (self.stage, what) {
            (OpenStage::Creating, DOWNLOAD | EXTRACT) => Status::Creating,
            (OpenStage::Attaching, DOWNLOAD | EXTRACT) if self.sent.restoring => Status::Restoring,
            (OpenStage::Open, SNAPSHOT) if self.unanswered.snapshot => Status::FilesystemSnapshotCreating,
            (OpenStage::Open, UPLOAD) if self.unanswered.checkpoint || leaves => Status::Checkpointing,
            _ => return StatusReply::default(),
        };
        // A transfer that has not moved any bytes yet only shows that it is alive.
        if !self.dialect.is_v1() || done == 0 || self.requested == Some(EndingRequest::Kill) {
            return StatusReply::default();
        }
        let progress = Some(Progress { done, total });
        stay(vec![Event::StatusUpdate(Update { progress, ..Update::new(status) })])
    }

    fn when_open(&self, holds: bool, status: Status) -> StatusReply {
        stay(if holds && self.stage == OpenStage::Open { vec![Event::status(status)] } else { vec![] })
    }

    /// Tells the client that loses the sandbox which instance takes it, and why; a plain client only with details.
    fn release_requested(&mut self, by: &InstanceId, claim: Claim) -> StatusReply {
        self.checkpoint.failed = None;
        if !self.sends_locks() || self.stage != OpenStage::Open {
            return StatusReply::default();
        }
        let silent = if claim == Claim::Ask { ", and this one gave no sign of life" } else { "" };
        let message = Some(format!("A client attached on instance {by}{silent}: the sandbox moves there."));
        stay(vec![Event::StatusUpdate(Update { message, ..Update::new(Status::LockReleaseRequested) })])
    }

    fn lock(&mut self, status: Status) -> StatusReply {
        if self.stage == OpenStage::Open {
            return StatusReply::default();
        }
        let sent = if status == Status::LockAcquiring { &mut self.sent.acquiring } else { &mut self.sent.acquired };
        if std::mem::replace(sent, true) {
            return StatusReply::default();
        }
        let mut events = if self.stage == OpenStage::Attaching { self.restoring() } else { vec![] };
        if self.sends_locks() {
            events.push(Event::status(status));
        }
        stay(events)
    }

    fn fail(&mut self, message: &str) -> StatusReply {
        let events = match self.stage {
            OpenStage::Creating => Event::refusal(Status::CreationError, message).to_vec(),
            OpenStage::Attaching | OpenStage::Open => {
                let mut events = if self.stage == OpenStage::Attaching { self.restoring() } else { vec![] };
                events.extend(Event::refusal(Status::RestoreError, message));
                events
            }
        };
        close(events, Close::Fatal)
    }

    fn checkpoint(&mut self, why: LeaveReason) -> StatusReply {
        if self.stage != OpenStage::Open {
            return StatusReply::default();
        }
        let is_sent = self.checkpoint.in_progress == Some(why) || self.checkpoint.failed == Some(why);
        self.checkpoint.in_progress = Some(why);
        stay(if is_sent { vec![] } else { vec![Event::status(Status::Checkpointing)] })
    }

    fn checkpoint_failed(&mut self, why: LeaveReason, message: &str) -> StatusReply {
        if self.stage != OpenStage::Open || self.requested == Some(EndingRequest::Kill) {
            self.checkpoint.in_progress = None;
            return StatusReply::default();
        }
        self.checkpoint.in_progress = None;
        if self.requested == Some(EndingRequest::Checkpoint) && why == LeaveReason::Checkpointed {
            self.requested = None;
            return StatusReply {
                events: Event::refusal(Status::CheckpointError, message).to_vec(),
                reaction: Reaction::Revert,
            };
        }
        if self.checkpoint.failed.replace(why) == Some(why) {
            return StatusReply::default();
        }
        stay(Event::refusal(Status::CheckpointError, message).to_vec())
    }

    fn leave(&mut self, why: LeaveReason, checkpoint_id: Option<&CheckpointId>) -> StatusReply {
        match self.stage {
            OpenStage::Open => self.leave_open(why, checkpoint_id),
            OpenStage::Creating => {
                let message = "The sandbox ended before it was ready.";
                close(Event::refusal(Status::CreationError, message).to_vec(), Close::Fatal)
            }
            OpenStage::Attaching => match why {
                LeaveReason::Deleted => {
                    let mut events = self.restoring();
                    events.push(Event::status(Status::NotFound));
                    close(events, Close::Unavailable)
                }
                LeaveReason::Drain => close(vec![], Close::Restart),
                // The action in progress has ended; this session's request comes next.
                LeaveReason::Checkpointed
                | LeaveReason::HandedOff
                | LeaveReason::Waiter
                | LeaveReason::Room
                | LeaveReason::Idle => self.request_again(),
            },
        }
    }

    fn request_again(&mut self) -> StatusReply {
        (self.sent.acquiring, self.sent.acquired) = (false, false);
        StatusReply { events: self.restoring(), reaction: Reaction::RequestAgain }
    }

    fn leave_open(&mut self, why: LeaveReason, checkpoint_id: Option<&CheckpointId>) -> StatusReply {
        let reason = self.end_reason(why);
        let checkpointed = || {
            Event::StatusUpdate(Update {
                checkpoint_id: checkpoint_id.cloned(),
                reason: Some(reason),
                ..Update::new(Status::Checkpointed)
            })
        };
        let began = self.checkpoint.in_progress.take().is_some() || self.checkpoint.failed.is_some();
        if self.requested == Some(EndingRequest::Kill) || why == LeaveReason::Deleted {
            let mut events = self.deletion(reason, None);
            if self.requested == Some(EndingRequest::Kill) {
                events.push(Event::status(Status::Killed));
            }
            return close(events, Close::Normal);
        }
        let mut events = vec![];
        match why {
            LeaveReason::Checkpointed | LeaveReason::Waiter => {
                if !began {
                    events.push(Event::status(Status::Checkpointing));
                }
                if self.dialect.sends_all_steps() {
                    events.extend(self.deletion(reason, None));
                }
                events.push(checkpointed());
                close(events, Close::Normal)
            }
            LeaveReason::Idle => {
                let is_checkpointed = began && checkpoint_id.is_some();
                if !is_checkpointed {
                    events.extend(self.deletion(
                        reason,
                        Some(if self.features.is_persistent { IDLE_STORED } else { IDLE_IN_MEMORY }),
                    ));
                } else if self.dialect.sends_all_steps() {
                    events.extend(self.deletion(reason, None));
                }
                if is_checkpointed {
                    events.push(checkpointed());
                }
                close(events, Close::Normal)
            }
            LeaveReason::HandedOff | LeaveReason::Room | LeaveReason::Drain => {
                if checkpoint_id.is_some() {
                    if !began {
                        events.push(Event::status(Status::Checkpointing));
                    }
                    events.push(checkpointed());
                } else if !began {
                    events.extend(
                        self.deletion(reason, Some("The server is shutting down and this sandbox cannot move.")),
                    );
                }
                close(events, Close::Restart)
            }
            LeaveReason::Deleted => close(self.deletion(reason, None), Close::Normal),
        }
    }

    /// Why the sandbox leaves this session.
    fn end_reason(&self, why: LeaveReason) -> EndReason {
        match (self.requested, why) {
            (Some(EndingRequest::Kill), _) => EndReason::Kill,
            (Some(EndingRequest::Checkpoint), LeaveReason::Checkpointed) => EndReason::Checkpoint,
            (_, LeaveReason::Deleted) if self.features.is_expired => EndReason::Expired,
            (_, LeaveReason::HandedOff) if self.has_requested_handoff => EndReason::Handoff,
            (_, LeaveReason::Checkpointed | LeaveReason::HandedOff | LeaveReason::Deleted) => EndReason::Operator,
            (_, LeaveReason::Waiter) => EndReason::Attach,
            (_, LeaveReason::Drain) => EndReason::Drain,
            (_, LeaveReason::Room) => EndReason::Evicted,
            (_, LeaveReason::Idle) => EndReason::Idle,
        }
    }

    fn deletion(&self, reason: EndReason, message: Option<&str>) -> Vec<Event> {
        let mut events = vec![Event::status(Status::Deleting)];
        if self.sends_locks() {
            events.extend([Event::status(Status::LockReleasing), Event::status(Status::LockReleased)]);
        }
        let deleted =
            Update { message: message.map(str::to_owned), reason: Some(reason), ..Update::new(Status::Deleted) };
        events.push(Event::StatusUpdate(deleted));
        events
    }

    fn lose(&mut self, message: &str) -> StatusReply {
        match self.stage {
            // The container that was here before this session belonged to another instance already.
            OpenStage::Attaching if !self.sent.acquired => self.request_again(),
            OpenStage::Creating | OpenStage::Attaching => self.fail(message),
            OpenStage::Open if self.dialect.is_v1() => {
                close(Event::refusal(Status::LockRenewalError, message).to_vec(), Close::Restart)
            }
            // This status would keep existing clients from following the sandbox.
            OpenStage::Open => close(vec![], Close::Restart),
        }
    }
}

fn stay(events: Vec<Event>) -> StatusReply {
    StatusReply { events, reaction: Reaction::Stay }
}

fn close(events: Vec<Event>, close: Close) -> StatusReply {
    StatusReply { events, reaction: Reaction::Close(close) }
}

#[cfg(test)]
mod tests;
