//! The desired state of one sandbox on one instance: a pure function, first match wins.

use std::time::Duration;

use baton_protocol::metadata::DesiredState;

use super::{
    plan::{Desired, Saved},
    precedence::Verdict,
};
use crate::bus::LeaveReason;

/// Everything the desired state depends on.
#[derive(Clone, Copy, Debug)]
pub struct Inputs {
    /// The desired state in the spec.
    pub spec: DesiredState,
    /// The lock says that a purge has begun.
    pub purging: bool,
    /// This instance holds the lease.
    pub held: bool,
    /// The decision about a waiter elsewhere, given the client attached here.
    pub verdict: Verdict,
    /// The spec allows handoff.
    pub movable: bool,
    /// Its records are in a store that other instances see.
    pub persistent: bool,
    pub drain: Drain,
    /// Eviction was requested, and the sandbox is unused.
    pub yields: bool,
    pub idle: bool,
    /// Keep the state when the sandbox becomes idle.
    pub checkpoint_when_idle: bool,
    /// `placement` names this instance.
    pub placed_here: bool,
    /// A session attached here, or the sweep has just taken the sandbox.
    pub asked_here: bool,
    pub saved: Saved,
    /// The last attempt failed for good.
    pub refused: bool,
}

/// Whether this instance is draining.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Drain {
    #[default]
    No,
    Draining,
    /// The drain time is up.
    Over,
}

/// The desired state, and the reason to report when the sandbox leaves.
pub fn desired(inputs: &Inputs) -> (Desired, LeaveReason) {
    if inputs.spec == DesiredState::Deleted || inputs.purging {
        return (Desired::Deleted, LeaveReason::Deleted);
    }
    match inputs.verdict {
        Verdict::Yield if inputs.held && inputs.movable => return (Desired::HandedOff, LeaveReason::Waiter),
        // An operator may move any sandbox that can be checkpointed; its clients follow.
        Verdict::Relocate if inputs.held && inputs.persistent => return (Desired::HandedOff, LeaveReason::HandedOff),
        Verdict::Keep | Verdict::Decline | Verdict::Yield | Verdict::Relocate => {}
    }
    match (inputs.drain, inputs.persistent) {
        (Drain::No, _) => {}
        (Drain::Draining, true) => return (Desired::HandedOff, LeaveReason::Drain),
        (Drain::Over, true) => return (Desired::Dropped, LeaveReason::Drain),
        (Drain::Draining | Drain::Over, false) => return (Desired::Ended, LeaveReason::Drain),
    }
    // No other instance can ever run it, and it has no state left: only its record remains to be purged.
    if !inputs.persistent && inputs.refused && inputs.saved != Saved::Checkpoint {
        return (Desired::Ended, LeaveReason::Idle);
    }
    // Checked before idleness, which may discard the state.
    if inputs.held && inputs.persistent && inputs.yields {
        return (Desired::HandedOff, LeaveReason::Room);
    }
    if inputs.held && inputs.idle {
        let end = if inputs.checkpoint_when_idle { Desired::Checkpointed } else { Desired::Ended };
        return (end, LeaveReason::Idle);
    }
    match inputs.spec {
        DesiredState::HandedOff => (Desired::HandedOff, LeaveReason::HandedOff),
        DesiredState::Checkpointed => (Desired::Checkpointed, LeaveReason::Checkpointed),
        DesiredState::Running if inputs.held || (inputs.placed_here && inputs.asked_here) => {
            (Desired::Running, LeaveReason::HandedOff)
        }
        DesiredState::Running | DesiredState::Deleted => (Desired::HandedOff, LeaveReason::HandedOff),
    }
}

/// Time until the sandbox counts as idle. Zero means now; `None` means never in the current state.
pub fn idle_in(timeout: Option<Duration>, since_active: Duration, running_execs: u32) -> Option<Duration> {
    if running_execs > 0 {
        return None;
    }
    Some(timeout?.saturating_sub(since_active))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPECS: [DesiredState; 4] =
        [DesiredState::Running, DesiredState::Checkpointed, DesiredState::HandedOff, DesiredState::Deleted];

    fn all() -> impl Iterator<Item = Inputs> {
        SPECS.into_iter().flat_map(|spec| {
            [Drain::No, Drain::Draining, Drain::Over].into_iter().flat_map(move |drain| {
                Saved::ALL.into_iter().flat_map(move |saved| {
                    Verdict::ALL.into_iter().flat_map(move |verdict| {
                        (0..1024u16).map(move |bits| {
                            let bit = |n: u16| bits >> n & 1 == 1;
                            Inputs {
                                spec,
                                drain,
                                saved,
                                verdict,
                                purging: bit(0),
                                held: bit(1),
                                movable: bit(2),
                                persistent: bit(3),
                                idle: bit(4),
                                checkpoint_when_idle: bit(5),
                                placed_here: bit(6),
                                asked_here: bit(7),
                                refused: bit(8),
                                yields: bit(9),
                            }
                        })
                    })
                })
            })
        })
    }

    #[test]
    fn deletion_comes_before_everything_and_from_nothing_else() {
        for inputs in all() {
            let asked = inputs.spec == DesiredState::Deleted || inputs.purging;
            assert_eq!(desired(&inputs).0 == Desired::Deleted, asked, "{inputs:?}");
        }
    }

    fn yields_to_a_waiter(inputs: &Inputs) -> bool {
        inputs.held && inputs.movable && inputs.verdict == Verdict::Yield
    }

    fn is_relocated(inputs: &Inputs) -> bool {
        inputs.held && inputs.persistent && inputs.verdict == Verdict::Relocate
    }

    #[test]
    fn a_waiter_moves_only_what_may_move_and_is_held() {
        for inputs in all().filter(|w| desired(w).1 == LeaveReason::Waiter) {
            assert!(yields_to_a_waiter(&inputs), "{inputs:?}");
        }
    }

    #[test]
    fn an_order_moves_all_that_can_be_checkpointed_and_lets_its_clients_follow() {
        for inputs in all().filter(|w| is_relocated(w) && w.spec != DesiredState::Deleted && !w.purging) {
            assert_eq!(desired(&inputs), (Desired::HandedOff, LeaveReason::HandedOff), "{inputs:?}");
        }
    }

    #[test]
    fn a_waiter_that_is_declined_or_not_judged_yet_changes_nothing() {
        for inputs in all().filter(|inputs| matches!(inputs.verdict, Verdict::Decline)) {
            assert_eq!(desired(&inputs), desired(&Inputs { verdict: Verdict::Keep, ..inputs }), "{inputs:?}");
        }
    }

    #[test]
    fn nothing_starts_on_an_instance_that_drains() {
        assert!(all().filter(|w| w.drain != Drain::No).all(|w| desired(&w).0 != Desired::Running));
    }

    #[test]
    fn a_persistent_sandbox_ends_only_by_idling_without_a_checkpoint() {
        for inputs in all().filter(|w| w.persistent && desired(w).0 == Desired::Ended) {
            assert!(inputs.held && inputs.idle && !inputs.checkpoint_when_idle, "{inputs:?}");
        }
    }

    #[test]
    fn what_yields_is_kept_and_let_go_unless_it_is_deleted_waited_for_or_drained() {
        for inputs in all() {
            let comes_first = inputs.spec == DesiredState::Deleted
                || inputs.purging
                || yields_to_a_waiter(&inputs)
                || is_relocated(&inputs)
                || inputs.drain != Drain::No;
            let yields = inputs.held && inputs.persistent && inputs.yields && !comes_first;
            assert_eq!(desired(&inputs) == (Desired::HandedOff, LeaveReason::Room), yields, "{inputs:?}");
            assert_eq!(desired(&inputs).1 == LeaveReason::Room, yields, "{inputs:?}");
        }
    }

    #[test]
    fn a_place_that_is_not_wanted_changes_nothing_and_neither_does_one_that_nobody_here_can_give() {
        for inputs in all().filter(|inputs| inputs.yields && !(inputs.held && inputs.persistent)) {
            assert_eq!(desired(&inputs), desired(&Inputs { yields: false, ..inputs }), "{inputs:?}");
        }
    }

    #[test]
    fn running_needs_the_lease_or_somebody_who_asked_here() {
        for inputs in all().filter(|w| desired(w).0 == Desired::Running) {
            assert!(inputs.held || (inputs.placed_here && inputs.asked_here), "{inputs:?}");
            assert_eq!(inputs.spec, DesiredState::Running);
        }
    }

    #[test]
    fn a_running_command_keeps_a_sandbox_from_being_idle() {
        let minute = Some(Duration::from_secs(60));
        assert_eq!(idle_in(minute, Duration::from_secs(90), 1), None);
        assert_eq!(idle_in(minute, Duration::from_secs(90), 0), Some(Duration::ZERO));
        assert_eq!(idle_in(minute, Duration::from_secs(20), 0), Some(Duration::from_secs(40)));
        assert_eq!(idle_in(None, Duration::from_secs(20), 0), None);
    }
}
