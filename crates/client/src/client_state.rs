//! The latest state reported by the server. Nothing is decided here: callers wait until a condition on it holds.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::{
    event::{Copied, ExecView, Status, Token, Update},
    id::{InstanceId, SandboxId},
    request::Idle,
};

use crate::{Error, RollBack};

/// How to find a sandbox again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxRef {
    /// The sandbox's id, the same on every instance.
    pub id: SandboxId,
    /// The secret that allows attaching to it.
    pub token: Token,
}

#[derive(Debug, Default)]
pub(crate) struct SandboxState {
    /// Counts everything received.
    heard: u64,
    status: Option<Status>,
    /// The last update of each status, and its number.
    latest: BTreeMap<Status, (u64, Update)>,
    forked: Option<(u64, Vec<Copied>)>,
    idle_timeout: Option<(u64, Option<u64>)>,
    /// How many sessions reached RUNNING.
    pub(crate) sessions: u64,
    /// There is a session, and it reached RUNNING.
    pub(crate) is_open: bool,
    pub(crate) place: Option<SandboxRef>,
    pub(crate) instance: Option<InstanceId>,
    pub(crate) is_persistent: Option<bool>,
    /// Every roll-back so far.
    pub(crate) roll_backs: Vec<RollBack>,
    /// The commands that the sandbox knew when the session began.
    pub(crate) execs: Vec<ExecView>,
    /// Why the last connection was lost.
    pub(crate) lost: Option<Error>,
    /// Set when the connection has ended for good.
    pub(crate) end: Option<Error>,
}

impl SandboxState {
    pub(crate) fn of(place: Option<SandboxRef>) -> Self {
        Self { place, ..Self::default() }
    }

    pub(crate) fn heard(&self) -> u64 {
        self.heard
    }

    pub(crate) fn status(&self) -> Option<Status> {
        self.status
    }

    pub(crate) fn update(&mut self, update: Update) {
        self.heard += 1;
        self.status = Some(update.status);
        self.latest.insert(update.status, (self.heard, update));
    }

    pub(crate) fn forked(&mut self, copies: Vec<Copied>) {
        self.heard += 1;
        self.forked = Some((self.heard, copies));
    }

    pub(crate) fn idle_timeout_set(&mut self, seconds: Option<u64>) {
        self.heard += 1;
        self.idle_timeout = Some((self.heard, seconds));
    }

    /// The idle timeout that was set after number `since`.
    pub(crate) fn idle_timeout_since(&self, since: u64) -> Option<Idle> {
        let (_, seconds) = self.idle_timeout.filter(|(number, _)| *number > since)?;
        Some(seconds.map_or(Idle::Never, |seconds| Idle::After(Duration::from_secs(seconds))))
    }

    /// The newest update with one of these statuses that came after number `since`.
    pub(crate) fn since(&self, since: u64, statuses: &[Status]) -> Option<&Update> {
        statuses
            .iter()
            .filter_map(|status| self.latest.get(status))
            .filter(|(number, _)| *number > since)
            .max_by_key(|(number, _)| *number)
            .map(|(_, update)| update)
    }

    pub(crate) fn forked_since(&self, since: u64) -> Option<&[Copied]> {
        self.forked.as_ref().filter(|(number, _)| *number > since).map(|(_, copies)| copies.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_found_although_other_things_were_said_since() {
        let mut mirror = SandboxState::default();
        mirror.update(Update::new(Status::CheckpointError));
        let since = mirror.heard();
        assert_eq!(mirror.since(since, &[Status::CheckpointError]), None);
        mirror.update(Update::new(Status::Checkpointed));
        mirror.update(Update::new(Status::ExecutionDone));
        let found = mirror.since(since, &[Status::CheckpointError, Status::Checkpointed]).unwrap();
        assert_eq!(found.status, Status::Checkpointed);
        assert_eq!(mirror.status(), Some(Status::ExecutionDone));
    }
}
