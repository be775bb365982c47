//! An unresponsive holder, for display. Pure.
//!
//! The time of the last renewal is known only from when the lock object was written. Comparing that with the local wall
//! clock is good enough to inform an operator, but for nothing else: whether a lease may be taken over is decided by
//! watching it (`docs/lease.md`).

use std::time::{Duration, SystemTime};

use baton_protocol::{
    id::InstanceId,
    lock::Lock,
    metadata::{Committed, DesiredState, Metadata},
};

use serde_json::{Value, json};

use super::checkpoints::committed;

/// The displayed phase of such a sandbox, whatever its holder last reported.
pub const PHASE: &str = "unresponsive";

/// When an object was last written, by the store's clock, and its age when it was listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastWrite {
    pub at: SystemTime,
    pub age: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresponsive {
    pub instance: InstanceId,
    pub since: SystemTime,
    pub silent_for: Duration,
    /// What happens next.
    pub next: String,
}

impl Unresponsive {
    /// In whole seconds, as in records.
    pub fn since_text(&self) -> String {
        humantime::format_rfc3339_seconds(self.since).to_string()
    }

    /// As JSON, for scripts.
    pub fn json(&self) -> Value {
        json!({
            "instance": self.instance,
            "since": self.since_text(),
            "seconds": self.silent_for.as_secs(),
            "next": self.next,
        })
    }

    /// A summary in one line, which does not change until something happens.
    pub fn summary(&self) -> String {
        format!("{} has not renewed its lease since {}; {}", self.instance, self.since_text(), self.next)
    }
}

/// `None`: the lease is free, or its holder may be alive.
pub fn assess(lock: &Lock, found: &Metadata, written: LastWrite, takeover: Duration) -> Option<Unresponsive> {
    let lease = lock.lease.as_ref().filter(|_| !lock.purged)?;
    if written.age < takeover.max(Duration::from_millis(lease.takeover_ms)) {
        return None;
    }
    Some(Unresponsive {
        instance: lease.owner.clone(),
        since: written.at,
        silent_for: written.age,
        next: next(lock, found),
    })
}

fn next(lock: &Lock, found: &Metadata) -> String {
    let spec = &found.spec;
    if lock.purging || spec.desired_state == DesiredState::Deleted {
        return "the next sweep erases it".to_owned();
    }
    let Some(head) = &lock.head else {
        return "it has no checkpoint, so its state is lost if the instance does not come back".to_owned();
    };
    let shown = Committed { latest: found.latest_sandbox_checkpoint.clone(), at: found.last_checkpointed.clone() };
    let checkpoint = match shown.at.filter(|_| shown.latest == committed(head, None).latest) {
        Some(at) => format!("the checkpoint of {at}"),
        None => format!("checkpoint {}", head.checkpoint_id),
    };
    match spec.desired_state {
        DesiredState::Running if spec.placement.is_none() => format!("the next sweep restores {checkpoint}"),
        DesiredState::Running | DesiredState::Deleted => {
            format!("the next attach takes over and restores {checkpoint}")
        }
        DesiredState::Checkpointed | DesiredState::HandedOff => {
            format!("the next sweep frees it, and the next attach restores {checkpoint}")
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_protocol::{
        id::{CheckpointId, Nonce, SandboxId},
        lock::{Head, Lease},
        metadata::{SandboxStatus, Spec},
    };

    use super::*;
    use crate::config::LeaseTimes;

    const TAKEOVER: Duration = LeaseTimes::DEFAULT.takeover;

    fn id() -> SandboxId {
        SandboxId::parse("sandbox-abc-123").unwrap()
    }

    fn owner() -> InstanceId {
        InstanceId::from_bits([1; 16])
    }

    fn held() -> Lock {
        let lease =
            Lease { owner: owner(), renew: 3, op: Nonce::from_bits([2; 16]), hold_ms: 15_000, takeover_ms: 30_000 };
        Lock { lease: Some(lease), ran: true, ..Lock::new(id()) }
    }

    fn head() -> Head {
        let checkpoint_id = CheckpointId::new(&id(), 1, 1, &Nonce::from_bits([3; 16]));
        Head {
            seq: 1,
            epoch: 1,
            checkpoint_id,
            bucket: None,
            manifest_sha256: baton_protocol::id::Sha256Name::from_bits([0; 32]),
        }
    }

    fn found() -> Metadata {
        let spec = Spec::new(id(), String::new(), String::new(), owner());
        Metadata { spec, latest_sandbox_checkpoint: None, last_checkpointed: None, status: SandboxStatus::default() }
    }

    fn told(lock: &Lock, found: &Metadata, seconds: u64) -> Option<Unresponsive> {
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        assess(lock, found, LastWrite { at, age: Duration::from_secs(seconds) }, TAKEOVER)
    }

    #[test]
    fn a_lease_that_stands_still_for_the_takeover_time_is_said_to_be_unresponsive_and_since_when() {
        assert_eq!(told(&held(), &found(), 29), None);
        let found = told(&held(), &found(), 41).unwrap();
        assert_eq!((found.instance.clone(), found.silent_for), (owner(), Duration::from_secs(41)));
        assert_eq!(found.since_text(), "1970-01-12T13:46:40Z");
        assert!(found.summary().contains("since 1970-01-12T13:46:40Z"), "{}", found.summary());
    }

    #[test]
    fn what_is_free_or_erased_and_what_has_a_longer_time_of_its_own_is_not() {
        assert_eq!(told(&Lock { lease: None, ..held() }, &found(), 1000), None);
        assert_eq!(told(&Lock { purged: true, ..held() }, &found(), 1000), None);
        let mut slow = held();
        slow.lease.as_mut().unwrap().takeover_ms = 60_000;
        assert_eq!(told(&slow, &found(), 59), None);
        assert!(told(&slow, &found(), 60).is_some());
    }

    #[test]
    fn what_happens_next_follows_from_the_checkpoint_and_the_spec() {
        let stored = Lock { head: Some(head()), ..held() };
        let next = |lock: &Lock, change: &dyn Fn(&mut Metadata)| {
            let mut found = found();
            change(&mut found);
            told(lock, &found, 60).unwrap().next
        };
        assert!(next(&held(), &|_| {}).contains("no checkpoint"));
        assert!(next(&stored, &|_| {}).contains(head().checkpoint_id.as_str()));
        let dated = |found: &mut Metadata| {
            let Committed { latest, at } = committed(&head(), Some("2026-11-18T10:02:00.000Z".to_owned()));
            (found.latest_sandbox_checkpoint, found.last_checkpointed) = (latest, at);
        };
        assert_eq!(
            next(&stored, &dated),
            "the next attach takes over and restores the checkpoint of 2026-11-18T10:02:00.000Z"
        );
        let table = [
            (DesiredState::Checkpointed, "the next sweep frees it"),
            (DesiredState::HandedOff, "the next sweep frees it"),
            (DesiredState::Deleted, "the next sweep erases it"),
        ];
        for (state, text) in table {
            assert!(next(&stored, &|found| found.spec.desired_state = state).contains(text));
        }
        assert!(next(&stored, &|found| found.spec.placement = None).contains("the next sweep restores"));
        assert!(next(&Lock { purging: true, ..stored.clone() }, &|_| {}).contains("erases"));
    }
}
