//! Label values of the reconciler's metrics.

use super::{
    actions::{ActionResult, Failure},
    plan::Action,
};
use crate::{
    bus::LeaveReason,
    metrics::{Named, Outcome},
    runtime::Container,
};

impl Named for Action {
    fn name(&self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Wait => "wait",
            Self::Withdraw => "withdraw",
            Self::Decline => "decline",
            Self::Renew => "renew",
            Self::Create => "create",
            Self::Refuse(_) => "refuse",
            Self::Fence => "fence",
            Self::Resume => "resume",
            Self::Remove => "remove",
            Self::Release => "release",
            Self::Purge => "purge",
            Self::Restore => "restore",
            Self::Checkpoint => "checkpoint",
            Self::Save => "save",
            Self::Snapshot => "snapshot",
            Self::Extract => "extract",
            Self::Probe => "probe",
            Self::Expire => "expire",
            Self::RecreateMetadata => "recreate_metadata",
            Self::ReportInvalid => "report_invalid",
            Self::ForgetAnswers => "forget_answers",
            Self::CollectGarbage => "collect_garbage",
            Self::Rest => "rest",
            Self::Finish => "finish",
        }
    }
}

impl Named for Container {
    fn name(&self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Partial => "partial",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Fenced => "fenced",
            Self::Stopped => "stopped",
        }
    }
}

impl Named for LeaveReason {
    fn name(&self) -> &'static str {
        match self {
            Self::Checkpointed => "checkpointed",
            Self::HandedOff => "handed_off",
            Self::Waiter => "waiter",
            Self::Drain => "drain",
            Self::Room => "room",
            Self::Idle => "idle",
            Self::Deleted => "deleted",
        }
    }
}

pub(super) fn outcome(done: &ActionResult) -> Outcome {
    match done {
        Ok(()) => Outcome::Done,
        Err(Failure::Stale) => Outcome::Again,
        Err(Failure::Transient(_) | Failure::NoSpace(_)) => Outcome::Failed,
        Err(Failure::Refused { .. }) => Outcome::Refused,
    }
}
