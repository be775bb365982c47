//! What the sweep does about one sandbox that has no worker here: a pure function of what is in the store, first
//! match wins.

use std::time::{Duration, UNIX_EPOCH};

use baton_protocol::{
    id::InstanceId,
    lock::Claim,
    metadata::{DesiredState, Phase, SandboxStatus, Spec},
};

/// A lock without metadata for this long is left over from a create that was given up.
pub const ABANDONED: Duration = Duration::from_secs(10 * 60);
/// How long the tombstone of a purged sandbox is kept.
pub const TOMBSTONE: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The lock, as seen by the sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SweepLock {
    Missing,
    /// It cannot be parsed or read.
    Unknown,
    /// Its holder shows signs of life, or an instance waits for it.
    Held,
    Free,
    /// Its holder has shown no sign of life for the takeover time.
    Dead,
    Purged,
}

/// The desired state in the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SweepDesired {
    Missing,
    /// It cannot be parsed, or is meant for another store.
    Invalid,
    Is(DesiredState),
}

/// Where the sandbox should run, as seen by one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Here, because a client attached here; the next client to attach gets it.
    Me,
    /// Here, by an operator's order that this instance has not accepted yet.
    Ordered,
    /// Here, by an order that this instance has accepted.
    Accepted,
    Other,
    Anywhere,
}

impl Placement {
    pub const ALL: [Self; 5] = [Self::Me, Self::Ordered, Self::Accepted, Self::Other, Self::Anywhere];

    pub fn of(spec: &Spec, me: &InstanceId) -> Self {
        match &spec.placement {
            None => Self::Anywhere,
            Some(at) if at != me => Self::Other,
            Some(_) if spec.open_order().is_some() => Self::Ordered,
            Some(_) if spec.claim_at_placement() == Some(Claim::Order) => Self::Accepted,
            Some(_) => Self::Me,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SweepObservation {
    pub lock: SweepLock,
    /// A purge has begun.
    pub purging: bool,
    /// It has run, or has a checkpoint, so there is state to lose or to recover.
    pub started: bool,
    pub desired: SweepDesired,
    pub placement: Placement,
    /// The lock has been seen without metadata for long enough.
    pub is_abandoned: bool,
    /// Its own `ttl` or the retention has expired.
    pub is_overdue: bool,
    /// The status says that it runs.
    pub is_said_to_run: bool,
    /// There are unreferenced checkpoints.
    pub is_untidy: bool,
    /// Its tombstone has been kept for long enough.
    pub is_past: bool,
    /// This instance has a free slot.
    pub has_room: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SweepTask {
    Rest,
    /// Erase it, or continue erasing it.
    Purge,
    /// Its time is up: set `deleted` in the spec, then erase it.
    Expire,
    /// Place it here, take it over from its holder if it has one, and start it.
    Take,
    /// Correct the status to say that it runs nowhere, and release its lease.
    Correct,
    /// Erase unreferenced checkpoints.
    Tidy,
    /// Erase metadata that was put back over a tombstone, or a checkpoint that was left behind.
    Sweep,
    /// Erase the tombstone.
    Forget,
}

pub fn task_for(seen: &SweepObservation) -> SweepTask {
    use DesiredState as D;
    let is_ordered = matches!(seen.placement, Placement::Ordered | Placement::Accepted);
    match (seen.lock, seen.desired) {
        // Repeated until it is here: a holder that could not release it may be able to by now.
        (SweepLock::Held, SweepDesired::Is(D::Running)) if is_ordered && seen.has_room && !seen.purging => {
            SweepTask::Take
        }
        (SweepLock::Missing | SweepLock::Unknown | SweepLock::Held, _) => SweepTask::Rest,
        (SweepLock::Purged, SweepDesired::Missing) if seen.is_untidy => SweepTask::Sweep,
        (SweepLock::Purged, SweepDesired::Missing) if seen.is_past => SweepTask::Forget,
        (SweepLock::Purged, SweepDesired::Missing) => SweepTask::Rest,
        (SweepLock::Purged, SweepDesired::Invalid | SweepDesired::Is(_)) => SweepTask::Sweep,
        (SweepLock::Free | SweepLock::Dead, _) if seen.purging => SweepTask::Purge,
        (SweepLock::Free | SweepLock::Dead, SweepDesired::Missing) if !seen.started && seen.is_abandoned => {
            SweepTask::Purge
        }
        // An operator who deleted the metadata of a sandbox may want it back.
        (SweepLock::Free | SweepLock::Dead, SweepDesired::Missing | SweepDesired::Invalid) => SweepTask::Rest,
        (SweepLock::Free | SweepLock::Dead, SweepDesired::Is(D::Deleted)) => SweepTask::Purge,
        (SweepLock::Free | SweepLock::Dead, SweepDesired::Is(_)) if seen.is_overdue => SweepTask::Expire,
        (SweepLock::Free | SweepLock::Dead, SweepDesired::Is(D::Running))
            if seen.placement == Placement::Anywhere && seen.has_room =>
        {
            SweepTask::Take
        }
        // Only once: if it has ended here since then, no client asks for it.
        (SweepLock::Free | SweepLock::Dead, SweepDesired::Is(D::Running | D::HandedOff))
            if seen.placement == Placement::Ordered && seen.has_room =>
        {
            SweepTask::Take
        }
        // Its holder may only be cut off; it then continues where it stopped, unless a client attaches elsewhere.
        (SweepLock::Dead, SweepDesired::Is(D::Running)) => SweepTask::Rest,
        (SweepLock::Dead, SweepDesired::Is(D::Checkpointed | D::HandedOff)) => SweepTask::Correct,
        (SweepLock::Free, SweepDesired::Is(_)) if seen.is_said_to_run => SweepTask::Correct,
        (SweepLock::Free, SweepDesired::Is(_)) if seen.is_untidy => SweepTask::Tidy,
        (SweepLock::Free, SweepDesired::Is(_)) => SweepTask::Rest,
    }
}

/// Wall-clock time since 1970. The clocks of two machines may differ slightly, which is harmless here.
pub type UnixTime = Duration;

/// Parses a time from a record.
pub fn wall(text: &str) -> Option<UnixTime> {
    humantime::parse_rfc3339_weak(text).ok()?.duration_since(UNIX_EPOCH).ok()
}

/// When a sandbox without a holder is to be deleted: its own `ttl` counts from its creation, the operator's retention
/// from its last sign of life. Times that cannot be parsed are never overdue.
pub fn expires_at(spec: &Spec, status: &SandboxStatus, retention: Option<Duration>) -> Option<UnixTime> {
    let created = wall(&spec.created_timestamp);
    match (spec.ttl, retention) {
        (Some(ttl), _) => created?.checked_add(Duration::from_secs(ttl)),
        (None, Some(retention)) => created.max(wall(&status.updated))?.checked_add(retention),
        (None, None) => None,
    }
}

/// Whether a held sandbox has outlived its own `ttl`.
pub fn outlived(spec: &Spec, now: UnixTime) -> bool {
    spec.ttl.is_some() && expires_at(spec, &SandboxStatus::default(), None).is_some_and(|due| due <= now)
}

pub fn is_said_to_run(status: &SandboxStatus) -> bool {
    status.phase == Phase::Running
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCKS: [SweepLock; 6] =
        [SweepLock::Missing, SweepLock::Unknown, SweepLock::Held, SweepLock::Free, SweepLock::Dead, SweepLock::Purged];
    const DESIRED_STATES: [SweepDesired; 6] = [
        SweepDesired::Missing,
        SweepDesired::Invalid,
        SweepDesired::Is(DesiredState::Running),
        SweepDesired::Is(DesiredState::Checkpointed),
        SweepDesired::Is(DesiredState::HandedOff),
        SweepDesired::Is(DesiredState::Deleted),
    ];
    fn all() -> impl Iterator<Item = SweepObservation> {
        LOCKS.into_iter().flat_map(|lock| {
            DESIRED_STATES.into_iter().flat_map(move |desired| {
                Placement::ALL.into_iter().flat_map(move |placement| {
                    (0..256u32).map(move |bits| {
                        let bit = |n: u32| bits >> n & 1 == 1;
                        SweepObservation {
                            lock,
                            desired,
                            placement,
                            purging: bit(0),
                            started: bit(1),
                            is_abandoned: bit(2),
                            is_overdue: bit(3),
                            is_said_to_run: bit(4),
                            is_untidy: bit(5),
                            is_past: bit(6),
                            has_room: bit(7),
                        }
                    })
                })
            })
        })
    }

    #[test]
    fn what_is_held_missing_or_unknown_is_left_alone_unless_it_was_ordered_here() {
        for seen in all().filter(|seen| matches!(seen.lock, SweepLock::Held | SweepLock::Missing | SweepLock::Unknown))
        {
            let is_ordered = matches!(seen.placement, Placement::Ordered | Placement::Accepted);
            let moves =
                seen.lock == SweepLock::Held && seen.desired == SweepDesired::Is(DesiredState::Running) && is_ordered;
            let expected = if moves && seen.has_room && !seen.purging { SweepTask::Take } else { SweepTask::Rest };
            assert_eq!(task_for(&seen), expected, "{seen:?}");
        }
    }

    #[test]
    fn an_order_starts_what_is_free_once() {
        for seen in all().filter(|seen| matches!(seen.lock, SweepLock::Free | SweepLock::Dead)) {
            assert!(seen.placement != Placement::Accepted || task_for(&seen) != SweepTask::Take, "{seen:?}");
        }
    }

    #[test]
    fn garbage_and_a_missing_object_delete_nothing_that_ever_ran() {
        for seen in all().filter(|seen| matches!(seen.desired, SweepDesired::Missing | SweepDesired::Invalid)) {
            let erases = matches!(task_for(&seen), SweepTask::Purge | SweepTask::Expire);
            assert!(!erases || seen.purging || (!seen.started && seen.desired == SweepDesired::Missing), "{seen:?}");
        }
    }

    #[test]
    fn only_what_is_wanted_anywhere_or_ordered_here_is_taken_and_only_with_room() {
        for seen in all().filter(|seen| task_for(seen) == SweepTask::Take) {
            assert!(seen.has_room && (!seen.is_overdue || seen.lock == SweepLock::Held), "{seen:?}");
            assert!(!matches!(seen.placement, Placement::Me | Placement::Other), "{seen:?}");
            assert!(
                matches!(seen.desired, SweepDesired::Is(DesiredState::Running | DesiredState::HandedOff)),
                "{seen:?}"
            );
        }
    }

    #[test]
    fn a_running_sandbox_of_a_holder_that_is_only_cut_off_is_not_touched() {
        for seen in all().filter(|seen| {
            seen.lock == SweepLock::Dead
                && seen.desired == SweepDesired::Is(DesiredState::Running)
                && !matches!(seen.placement, Placement::Anywhere | Placement::Ordered)
                && !seen.purging
                && !seen.is_overdue
        }) {
            assert_eq!(task_for(&seen), SweepTask::Rest);
        }
    }

    #[test]
    fn a_tombstone_is_forgotten_only_when_nothing_is_left_of_the_sandbox() {
        for seen in all().filter(|seen| task_for(seen) == SweepTask::Forget) {
            assert!(seen.lock == SweepLock::Purged && seen.desired == SweepDesired::Missing && !seen.is_untidy);
        }
    }

    #[test]
    fn ttl_counts_from_creation_retention_from_the_last_sign_and_nonsense_never() {
        let id = baton_protocol::id::SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap();
        let me = InstanceId::from_bits([1; 16]);
        let mut spec = Spec::new(id, String::new(), "2026-11-16T10:00:00Z".to_owned(), me);
        let mut status = SandboxStatus { updated: "2026-11-16T12:00:00Z".to_owned(), ..SandboxStatus::default() };
        let at = |text: &str| Some(wall(text).unwrap());
        let hour = Some(Duration::from_secs(3600));
        assert_eq!(expires_at(&spec, &status, None), None);
        assert_eq!(expires_at(&spec, &status, hour), at("2026-11-16T13:00:00Z"));
        spec.ttl = Some(60);
        assert_eq!(expires_at(&spec, &status, hour), at("2026-11-16T10:01:00Z"));
        assert!(outlived(&spec, at("2026-11-16T10:01:00Z").unwrap()));
        assert!(!outlived(&spec, at("2026-11-16T10:00:59Z").unwrap()));
        spec.ttl = Some(u64::MAX);
        assert_eq!(expires_at(&spec, &status, hour), None);
        spec.ttl = None;
        spec.created_timestamp = "yesterday".to_owned();
        status.updated.clear();
        assert_eq!(expires_at(&spec, &status, hour), None);
    }
}
