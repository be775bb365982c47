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
    pub standing: LockState,
    pub container: Container,
    pub saved: Saved,
    /// The spec allows checkpoints.
    pub checkpointable: bool,
    /// The spec allows handoff and the lock has a holder, so registering as waiter makes sense.
    pub may_wait: bool,
    /// A checkpoint of the running sandbox was requested.
    pub owed_checkpoint: bool,
    /// A snapshot was requested and does not exist yet.
    pub owed_snapshot: bool,
    /// The root file system is not on this instance yet.
    pub owed_rootfs: bool,
    /// This instance is registered as waiter in the lock.
    pub registered: bool,
    /// Our waiter entry matches the current request, and the holder has not declined it.
    pub waiting: bool,
    /// Another instance waits and must be told that the sandbox is in use.
    pub declines: bool,
    /// The last attempt at this spec failed for good, and no session has attached since.
    pub refused: bool,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Register as waiter, or update our claim.
    Wait,
    Withdraw,
    /// Tell the waiter that the sandbox is in use.
    Decline,
    Acquire,
    /// Prove that the late lease is still ours.
    Renew,
    Extract,
    Create,
    Restore,
    /// Report permanently why the sandbox cannot run; nothing else changes.
    Refuse,
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
    /// Nothing to do until something changes.
    Rest,
}

pub fn plan(desired: Desired, seen: &Observed) -> Action {
    use {Action::*, Container as C, Desired as D, LockState::*};
    match (seen.standing, seen.container, desired) {
        (Unknown, _, _) => Rest,
        (Missing | Late, C::Running | C::Paused, _) => Fence,
        (Missing, _, D::Running) if !seen.refused => Refuse,
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
        (Ours, C::Absent, D::Running) if seen.saved == Saved::Lost => Refuse,
        (Ours, C::Absent, D::Running) if seen.owed_rootfs => Extract,
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
        (Ours, C::Running, _) if seen.owed_snapshot => Snapshot,
        (Ours, C::Running, _) if seen.owed_checkpoint && seen.checkpointable => Save,
        (Ours, C::Running, D::Running | D::Checkpointed | D::HandedOff) => Rest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every state the planner can observe.
    fn all() -> impl Iterator<Item = (Desired, Observed)> {
        Desired::ALL.into_iter().flat_map(|desired| {
            LockState::ALL.into_iter().flat_map(move |standing| {
                Container::ALL.into_iter().flat_map(move |container| {
                    Saved::ALL.into_iter().flat_map(move |saved| {
                        (0..512u16).map(move |bits| {
                            let bit = |n: u16| bits >> n & 1 == 1;
                            let seen = Observed {
                                standing,
                                container,
                                saved,
                                checkpointable: bit(0),
                                owed_checkpoint: bit(1),
                                owed_snapshot: bit(2),
                                owed_rootfs: bit(3),
                                waiting: bit(4),
                                refused: bit(5),
                                may_wait: bit(6),
                                registered: bit(7),
                                declines: bit(8),
                            };
                            (desired, seen)
                        })
                    })
                })
            })
        })
    }

    /// The state after `action` succeeded. `None` once the record is gone.
    fn after(action: Action, mut world: Observed) -> Option<Observed> {
        match action {
            Action::Wait => (world.registered, world.waiting) = (true, true),
            Action::Withdraw => (world.registered, world.waiting) = (false, false),
            Action::Decline => world.declines = false,
            Action::Acquire => {
                (world.standing, world.registered, world.waiting) = (LockState::Ours, false, false);
            }
            Action::Renew => world.standing = LockState::Ours,
            Action::Release => world.standing = LockState::Free,
            Action::Extract => world.owed_rootfs = false,
            Action::Create | Action::Restore | Action::Resume => world.container = Container::Running,
            Action::Refuse => world.refused = true,
            Action::Fence => world.container = Container::Fenced,
            Action::Snapshot => world.owed_snapshot = false,
            Action::Save => (world.owed_checkpoint, world.saved) = (false, Saved::Checkpoint),
            Action::Checkpoint => {
                world.container = Container::Stopped;
                world.saved = Saved::Checkpoint;
                world.standing = LockState::Free;
            }
            Action::Remove => {
                let had_run = !matches!(world.container, Container::Absent | Container::Partial);
                if had_run && world.saved == Saved::Nothing {
                    world.saved = Saved::Lost;
                }
                world.container = Container::Absent;
            }
            Action::Purge => return None,
            Action::Rest => {}
        }
        Some(world)
    }

    /// Follows the plan until it rests; returns the actions taken and the final state.
    fn settle(desired: Desired, start: Observed) -> (Vec<Action>, Option<Observed>) {
        let (mut world, mut path) = (Some(start), vec![]);
        while let Some(seen) = world {
            let action = plan(desired, &seen);
            if action == Action::Rest {
                break;
            }
            path.push(action);
            assert!(path.len() <= 8, "no rest: {desired:?} {start:?} {path:?}");
            world = after(action, seen);
        }
        (path, world)
    }

    #[test]
    fn without_the_lease_we_only_remove_our_own_copy() {
        for (desired, seen) in all().filter(|(_, o)| matches!(o.standing, LockState::Free | LockState::Theirs)) {
            let action = plan(desired, &seen);
            assert!(
                matches!(action, Action::Remove | Action::Acquire | Action::Wait | Action::Withdraw | Action::Rest),
                "{desired:?} {seen:?} -> {action:?}"
            );
            if seen.standing == LockState::Theirs {
                assert_ne!(action, Action::Acquire, "stole a held lease: {desired:?} {seen:?}");
            }
        }
    }

    #[test]
    fn not_knowing_or_being_late_destroys_nothing() {
        let unsure = [LockState::Unknown, LockState::Late, LockState::Missing];
        for (desired, seen) in all().filter(|(_, o)| unsure.contains(&o.standing)) {
            let action = plan(desired, &seen);
            assert!(matches!(action, Action::Rest | Action::Fence | Action::Renew | Action::Refuse));
        }
    }

    #[test]
    fn a_missing_lock_is_never_acquired_and_its_container_is_kept_fenced() {
        for (desired, start) in all().filter(|(_, o)| o.standing == LockState::Missing) {
            let (path, end) = settle(desired, start);
            assert!(path.iter().all(|action| matches!(action, Action::Fence | Action::Refuse)));
            let end = end.unwrap();
            if matches!(start.container, Container::Running | Container::Paused) {
                assert_eq!(end.container, Container::Fenced);
            } else {
                assert_eq!(end.container, start.container);
            }
        }
    }

    /// The contract that `act` relies on: the precondition of each action.
    #[test]
    fn each_action_has_its_precondition() {
        for (desired, o) in all() {
            let ours = o.standing == LockState::Ours;
            let absent = o.container == Container::Absent;
            let live = o.container == Container::Running;
            let action = plan(desired, &o);
            let starts = ours && absent && desired == Desired::Running && !o.refused;
            let holds = match action {
                Action::Wait => {
                    o.standing == LockState::Theirs
                        && absent
                        && desired == Desired::Running
                        && !o.waiting
                        && o.may_wait
                        && !o.refused
                }
                Action::Withdraw => o.registered && absent && (desired != Desired::Running || o.refused),
                Action::Decline => ours && live && desired == Desired::Running && o.declines,
                Action::Acquire => o.standing == LockState::Free && absent,
                Action::Renew => o.standing == LockState::Late && !live,
                Action::Fence => {
                    matches!(o.standing, LockState::Late | LockState::Missing)
                        && (live || o.container == Container::Paused)
                }
                Action::Resume => ours && matches!(o.container, Container::Paused | Container::Fenced),
                Action::Extract => starts && o.owed_rootfs && o.saved != Saved::Lost,
                Action::Create => starts && !o.owed_rootfs && o.saved == Saved::Nothing,
                Action::Restore => starts && !o.owed_rootfs && o.saved == Saved::Checkpoint,
                Action::Refuse => {
                    (starts && o.saved == Saved::Lost)
                        || (o.standing == LockState::Missing && !live && desired == Desired::Running)
                }
                Action::Snapshot => ours && live && o.owed_snapshot,
                Action::Save => ours && live && o.owed_checkpoint && o.checkpointable,
                Action::Checkpoint => {
                    ours && o.checkpointable
                        && matches!(o.container, Container::Running | Container::Paused)
                        && matches!(desired, Desired::Checkpointed | Desired::HandedOff)
                }
                Action::Remove => !absent,
                Action::Release => ours && absent,
                Action::Purge => ours && absent && matches!(desired, Desired::Deleted | Desired::Ended),
                Action::Rest => true,
            };
            assert!(holds, "{desired:?} {o:?} -> {action:?}");
        }
    }

    #[test]
    fn every_state_comes_to_rest() {
        assert_eq!(all().count(), 331_776);
        let longest = all().map(|(desired, start)| settle(desired, start).0.len()).max();
        assert!(longest <= Some(7), "{longest:?}");
    }

    #[test]
    fn rest_is_where_it_was_asked_to_be() {
        let known = |o: &Observed| !matches!(o.standing, LockState::Unknown | LockState::Missing);
        for (desired, seen) in all().filter(|(d, o)| known(o) && plan(*d, o) == Action::Rest) {
            let running_here = seen.standing == LockState::Ours && seen.container == Container::Running;
            let gone = seen.standing != LockState::Ours && seen.container == Container::Absent;
            let stays = running_here && (!seen.checkpointable || seen.refused);
            let ok = match desired {
                Desired::Running if seen.refused => running_here || (gone && !seen.registered),
                Desired::Running => running_here || (gone && (seen.waiting || !seen.may_wait)),
                Desired::Checkpointed | Desired::HandedOff => (gone && !seen.registered) || stays,
                Desired::Ended | Desired::Dropped => gone && !seen.registered,
                Desired::Deleted => gone,
            };
            assert!(ok, "{desired:?} {seen:?}");
        }
    }

    #[test]
    fn only_an_end_or_a_deletion_loses_a_running_sandbox() {
        for (desired, start) in all().filter(|(d, o)| {
            matches!(d, Desired::Running | Desired::Checkpointed | Desired::HandedOff)
                && matches!(o.standing, LockState::Ours | LockState::Late)
                && matches!(o.container, Container::Running | Container::Paused | Container::Fenced)
        }) {
            let end = settle(desired, start).1.expect("never purged");
            let kept = end.saved == Saved::Checkpoint || end.container == Container::Running;
            assert!(kept, "{desired:?} {start:?} -> {end:?}");
        }
    }

    #[test]
    fn a_committed_checkpoint_is_purged_only_by_a_deletion() {
        for (desired, start) in all().filter(|(d, o)| *d != Desired::Deleted && o.saved == Saved::Checkpoint) {
            assert!(settle(desired, start).1.is_some(), "{desired:?} {start:?}");
        }
    }

    #[test]
    fn whoever_asks_for_a_sandbox_without_a_lock_is_answered() {
        let asked =
            |d: &Desired, o: &Observed| *d == Desired::Running && o.standing == LockState::Missing && !o.refused;
        for (desired, start) in all().filter(|(d, o)| asked(d, o)) {
            let next = plan(desired, &start);
            let stops = matches!(start.container, Container::Running | Container::Paused);
            assert_eq!(next, if stops { Action::Fence } else { Action::Refuse }, "{start:?}");
        }
    }

    #[test]
    fn a_sandbox_that_nobody_may_wait_for_is_never_waited_for() {
        assert!(all().all(|(d, o)| o.may_wait || plan(d, &o) != Action::Wait));
    }

    #[test]
    fn who_waits_for_what_is_in_use_hears_so_before_anything_else_is_done_for_what_runs() {
        let in_use = |d: &Desired, o: &Observed| {
            *d == Desired::Running && o.standing == LockState::Ours && o.container == Container::Running && o.declines
        };
        assert!(all().filter(|(d, o)| in_use(d, o)).all(|(d, o)| plan(d, &o) == Action::Decline));
    }

    #[test]
    fn a_refused_wish_is_not_tried_again() {
        for (desired, start) in all().filter(|(_, o)| o.refused) {
            let tried = settle(desired, start).0;
            assert!(!tried.iter().any(|action| matches!(
                action,
                Action::Create | Action::Restore | Action::Extract | Action::Checkpoint | Action::Refuse | Action::Wait
            )));
        }
    }
}
