//! Waits until an edit has taken effect.

use std::time::Duration;

use anyhow::Result;
use baton_protocol::{
    id::{InstanceId, SandboxId},
    lock::Lock,
    metadata::{DesiredState, Metadata, Phase, Spec},
    reason::Reason,
};

use super::{
    rows::phase_name,
    storage_admin::{AdminResult, POLL_INTERVAL, StorageAdmin, describe_reason, describe_unusable},
};
use crate::reconciler::spec_sha256;

/// What an edit leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    Erased,
    /// No instance holds it.
    Released,
    /// It runs on this instance, or on any.
    Running(Option<InstanceId>),
    /// Its holder, if there is one, has read the new spec.
    Observed,
}

impl Expected {
    pub fn of(before: Option<&Spec>, after: &Spec) -> Self {
        let is_moved = before.is_none_or(|before| before.placement != after.placement);
        let is_changed = is_moved || before.is_none_or(|before| before.desired_state != after.desired_state);
        match after.desired_state {
            _ if !is_changed => Self::Observed,
            DesiredState::Deleted => Self::Erased,
            DesiredState::Checkpointed => Self::Released,
            DesiredState::HandedOff | DesiredState::Running if is_moved && after.placement.is_some() => {
                Self::Running(after.placement.clone())
            }
            DesiredState::HandedOff => Self::Released,
            DesiredState::Running if after.placement.is_none() => Self::Running(None),
            // Its placement is as it was: a sandbox at rest waits for a client.
            DesiredState::Running => Self::Observed,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum EditProgress {
    Done(String),
    Refused(String),
    /// What has to happen first.
    Waiting(String),
}

pub async fn wait_for_outcome(
    storage: &StorageAdmin,
    id: &SandboxId,
    expected: &Expected,
    timeout: Duration,
) -> Result<AdminResult> {
    let end = storage.clock.now() + timeout;
    let mut reported = String::new();
    loop {
        let lock = match storage.usable_lock(id).await? {
            Ok(lock) => lock,
            Err(unusable) => {
                let why = describe_unusable(id, &unusable);
                return Ok(AdminResult::Refused(format!("the metadata is changed, but without effect: {why}")));
            }
        };
        let found = match storage.records.find(id).await {
            Ok(found) => found,
            Err(error) if error.reason().is_some() => return Ok(AdminResult::Refused(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        match progress(id, expected, lock.as_ref(), found.as_ref()) {
            EditProgress::Done(line) => return Ok(AdminResult::Done(line)),
            EditProgress::Refused(line) => return Ok(AdminResult::Refused(line)),
            EditProgress::Waiting(line) => {
                if storage.clock.now() >= end {
                    return Ok(AdminResult::Late(format!("{id} is changed, but not there yet: {line}")));
                }
                if line != reported {
                    storage.notify(&line);
                    reported = line;
                }
            }
        }
        storage.clock.sleep(POLL_INTERVAL).await;
    }
}

fn progress(id: &SandboxId, expected: &Expected, lock: Option<&Lock>, found: Option<&Metadata>) -> EditProgress {
    let Some(found) = found.filter(|_| lock.is_none_or(|lock| !lock.purged)) else {
        return EditProgress::Done(format!("{id} is deleted"));
    };
    let Some(lock) = lock else {
        return EditProgress::Refused(format!(
            "the metadata is changed, but {}",
            describe_reason(id, Reason::LockMissing)
        ));
    };
    let (spec, status) = (&found.spec, &found.status);
    let holder = lock.lease.as_ref().map(|lease| &lease.owner);
    let why = if status.reason.is_empty() { String::new() } else { format!(", {}: {}", status.reason, status.message) };
    let line = format!("{id} is {}{why}", phase_name(status.phase));
    let has_read = status.observed_spec_sha256 == spec_sha256(spec);
    let is_final = matches!(
        Reason::find(&status.reason),
        Some(Reason::NotCheckpointable | Reason::InvalidSpec | Reason::OtherStore | Reason::Lost)
    );
    if is_final && holder.is_some() && has_read {
        return EditProgress::Refused(line);
    }
    let waiting = || match holder {
        Some(holder) => EditProgress::Waiting(format!("waiting for {holder}{why}")),
        None => EditProgress::Waiting(format!("waiting for the sweep of an instance{why}")),
    };
    match expected {
        Expected::Observed if holder.is_none() => EditProgress::Done(format!(
            "{line}; no instance holds it, and the next sweep of an instance picks up the change"
        )),
        Expected::Observed if has_read => EditProgress::Done(line),
        // The status is updated a moment after the release.
        Expected::Released if holder.is_none() && status.phase != Phase::Running => EditProgress::Done(line),
        Expected::Running(target) => {
            let is_there = holder.is_some() && target.as_ref().is_none_or(|target| holder == Some(target));
            match status.phase {
                Phase::Running if is_there && status.instance.as_ref() == holder => EditProgress::Done(line),
                Phase::Failed if holder.is_none() && spec.open_order().is_none() && target.is_some() => {
                    EditProgress::Refused(line)
                }
                Phase::Failed if is_final => EditProgress::Refused(line),
                Phase::Pending | Phase::Running | Phase::Checkpointed | Phase::Failed => waiting(),
            }
        }
        Expected::Erased | Expected::Released | Expected::Observed => waiting(),
    }
}

#[cfg(test)]
mod tests {
    use baton_protocol::metadata::SandboxStatus;

    use super::*;

    fn spec() -> Spec {
        let id = SandboxId::parse("sandbox-a").unwrap();
        let mut spec = Spec::new(id, String::new(), String::new(), InstanceId::from_bits([1; 16]));
        spec.desired_state = DesiredState::Checkpointed;
        spec
    }

    fn expected(change: impl FnOnce(&mut Spec)) -> Expected {
        let (before, mut after) = (spec(), spec());
        change(&mut after);
        Expected::of(Some(&before), &after)
    }

    #[test]
    fn each_edit_has_an_outcome_to_wait_for() {
        let target = InstanceId::from_bits([2; 16]);
        assert_eq!(expected(|spec| spec.ttl = Some(1)), Expected::Observed);
        assert_eq!(expected(|spec| spec.desired_state = DesiredState::Deleted), Expected::Erased);
        assert_eq!(expected(|spec| spec.desired_state = DesiredState::HandedOff), Expected::Released);
        assert_eq!(expected(|spec| spec.desired_state = DesiredState::Running), Expected::Observed);
        let anywhere = expected(|spec| (spec.desired_state, spec.placement) = (DesiredState::Running, None));
        assert_eq!(anywhere, Expected::Running(None));
        for state in [DesiredState::Running, DesiredState::HandedOff] {
            let there = expected(|spec| (spec.desired_state, spec.placement) = (state, Some(target.clone())));
            assert_eq!(there, Expected::Running(Some(target.clone())));
        }
    }

    #[test]
    fn a_sandbox_at_rest_has_nothing_to_wait_for_unless_it_is_to_change() {
        let spec = spec();
        let (id, lock) = (spec.sandbox_id.clone(), Lock::new(spec.sandbox_id.clone()));
        let status = SandboxStatus { phase: Phase::Checkpointed, ..SandboxStatus::default() };
        let found = Metadata { spec, latest_sandbox_checkpoint: None, last_checkpointed: None, status };
        let progress = |expected: &Expected, lock: Option<&Lock>| progress(&id, expected, lock, Some(&found));
        for expected in [Expected::Observed, Expected::Released] {
            assert!(matches!(progress(&expected, Some(&lock)), EditProgress::Done(_)), "{expected:?}");
        }
        for expected in [Expected::Erased, Expected::Running(None)] {
            assert!(matches!(progress(&expected, Some(&lock)), EditProgress::Waiting(_)), "{expected:?}");
        }
        let EditProgress::Refused(line) = progress(&Expected::Observed, None) else { panic!("not refused") };
        assert!(line.contains(&format!("baton repair {id} --nobody-runs-it")), "{line}");
        let purged = Lock { purged: true, ..lock };
        assert_eq!(progress(&Expected::Erased, Some(&purged)), EditProgress::Done(format!("{id} is deleted")));
    }
}
