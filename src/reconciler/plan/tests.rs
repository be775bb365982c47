use super::*;

/// Every state the planner can observe.
fn all() -> impl Iterator<Item = (Desired, Observed)> {
    Desired::ALL.into_iter().flat_map(|desired| {
        LockState::ALL.into_iter().flat_map(move |lock| {
            Container::ALL.into_iter().flat_map(move |container| {
                Saved::ALL.into_iter().flat_map(move |saved| {
                    (0..512u16).map(move |bits| {
                        let bit = |n: u16| bits >> n & 1 == 1;
                        let seen = Observed {
                            lock,
                            container,
                            saved,
                            checkpointable: bit(0),
                            checkpoint_requested: bit(1),
                            snapshot_requested: bit(2),
                            rootfs_missing: bit(3),
                            waiting: bit(4),
                            refused: bit(5),
                            may_wait: bit(6),
                            registered: bit(7),
                            declines: bit(8),
                            attachment: AttachState::None,
                            due: None,
                            deferred: None,
                        };
                        (desired, seen)
                    })
                })
            })
        })
    })
}

fn rests(action: Action) -> bool {
    matches!(action, Action::Rest | Action::Finish)
}

/// The state after `action` succeeded. `None` once the record is gone.
fn after(action: Action, mut world: Observed) -> Option<Observed> {
    match action {
        Action::Wait => (world.registered, world.waiting) = (true, true),
        Action::Withdraw => (world.registered, world.waiting) = (false, false),
        Action::Decline => world.declines = false,
        Action::Acquire => {
            (world.lock, world.registered, world.waiting) = (LockState::Ours, false, false);
        }
        Action::Renew => world.lock = LockState::Ours,
        Action::Release => world.lock = LockState::Free,
        Action::Extract => world.rootfs_missing = false,
        Action::Create | Action::Restore | Action::Resume => world.container = Container::Running,
        Action::Refuse(_) => world.refused = true,
        Action::Fence => world.container = Container::Fenced,
        Action::Snapshot => world.snapshot_requested = false,
        Action::Save => (world.checkpoint_requested, world.saved) = (false, Saved::Checkpoint),
        Action::Checkpoint => {
            world.container = Container::Stopped;
            world.saved = Saved::Checkpoint;
            world.lock = LockState::Free;
        }
        Action::Remove => {
            let had_run = !matches!(world.container, Container::Absent | Container::Partial);
            if had_run && world.saved == Saved::Nothing {
                world.saved = Saved::Lost;
            }
            world.container = Container::Absent;
        }
        Action::Purge => return None,
        // Upkeep leaves alone what a step depends on.
        Action::Probe
        | Action::Expire
        | Action::RecreateMetadata
        | Action::ReportInvalid
        | Action::SetEgress
        | Action::ForgetAnswers
        | Action::CollectGarbage
        | Action::Rest
        | Action::Finish => {}
    }
    Some(world)
}

/// Follows the plan until it rests; returns the actions taken and the final state.
fn settle(desired: Desired, start: Observed) -> (Vec<Action>, Option<Observed>) {
    let (mut world, mut path) = (Some(start), vec![]);
    while let Some(seen) = world {
        let action = plan(desired, &seen);
        if rests(action) {
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
    for (desired, seen) in all().filter(|(_, o)| matches!(o.lock, LockState::Free | LockState::Theirs)) {
        let action = plan(desired, &seen);
        assert!(
            rests(action) || matches!(action, Action::Remove | Action::Acquire | Action::Wait | Action::Withdraw),
            "{desired:?} {seen:?} -> {action:?}"
        );
        if seen.lock == LockState::Theirs {
            assert_ne!(action, Action::Acquire, "stole a held lease: {desired:?} {seen:?}");
        }
    }
}

#[test]
fn not_knowing_or_being_late_destroys_nothing() {
    let unsure = [LockState::Unknown, LockState::Late, LockState::Missing];
    for (desired, seen) in all().filter(|(_, o)| unsure.contains(&o.lock)) {
        let action = plan(desired, &seen);
        assert!(rests(action) || matches!(action, Action::Fence | Action::Renew | Action::Refuse(_)));
    }
}

#[test]
fn a_missing_lock_is_never_acquired_and_its_container_is_kept_fenced() {
    for (desired, start) in all().filter(|(_, o)| o.lock == LockState::Missing) {
        let (path, end) = settle(desired, start);
        assert!(path.iter().all(|action| matches!(action, Action::Fence | Action::Refuse(_))));
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
        let ours = o.lock == LockState::Ours;
        let absent = o.container == Container::Absent;
        let live = o.container == Container::Running;
        let action = plan(desired, &o);
        let starts = ours && absent && desired == Desired::Running && !o.refused;
        let holds = match action {
            Action::Wait => {
                o.lock == LockState::Theirs
                    && absent
                    && desired == Desired::Running
                    && !o.waiting
                    && o.may_wait
                    && !o.refused
            }
            Action::Withdraw => o.registered && absent && (desired != Desired::Running || o.refused),
            Action::Decline => ours && live && desired == Desired::Running && o.declines,
            Action::Acquire => o.lock == LockState::Free && absent,
            Action::Renew => o.lock == LockState::Late && !live,
            Action::Fence => {
                matches!(o.lock, LockState::Late | LockState::Missing) && (live || o.container == Container::Paused)
            }
            Action::Resume => ours && matches!(o.container, Container::Paused | Container::Fenced),
            Action::Extract => starts && o.rootfs_missing && o.saved != Saved::Lost,
            Action::Create => starts && !o.rootfs_missing && o.saved == Saved::Nothing,
            Action::Restore => starts && !o.rootfs_missing && o.saved == Saved::Checkpoint,
            Action::Refuse(Rejection::StateLost) => starts && o.saved == Saved::Lost,
            Action::Refuse(Rejection::NoLock) => o.lock == LockState::Missing && !live && desired == Desired::Running,
            Action::Refuse(_) => o.attachment != AttachState::None,
            Action::Snapshot => ours && live && o.snapshot_requested,
            Action::Save => ours && live && o.checkpoint_requested && o.checkpointable,
            Action::Checkpoint => {
                ours && o.checkpointable
                    && matches!(o.container, Container::Running | Container::Paused)
                    && matches!(desired, Desired::Checkpointed | Desired::HandedOff)
            }
            Action::Remove => !absent,
            Action::Release => ours && absent,
            Action::Purge => ours && absent && matches!(desired, Desired::Deleted | Desired::Ended),
            Action::Probe
            | Action::Expire
            | Action::RecreateMetadata
            | Action::ReportInvalid
            | Action::SetEgress
            | Action::ForgetAnswers
            | Action::CollectGarbage => ours && o.due.is_some(),
            Action::Finish => absent && !ours && !o.registered,
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
    let known = |o: &Observed| !matches!(o.lock, LockState::Unknown | LockState::Missing);
    for (desired, seen) in all().filter(|(d, o)| known(o) && rests(plan(*d, o))) {
        let running_here = seen.lock == LockState::Ours && seen.container == Container::Running;
        let gone = seen.lock != LockState::Ours && seen.container == Container::Absent;
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
            && matches!(o.lock, LockState::Ours | LockState::Late)
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
    let asked = |d: &Desired, o: &Observed| *d == Desired::Running && o.lock == LockState::Missing && !o.refused;
    for (desired, start) in all().filter(|(d, o)| asked(d, o)) {
        let next = plan(desired, &start);
        let stops = matches!(start.container, Container::Running | Container::Paused);
        assert_eq!(next, if stops { Action::Fence } else { Action::Refuse(Rejection::NoLock) }, "{start:?}");
    }
}

#[test]
fn a_sandbox_that_nobody_may_wait_for_is_never_waited_for() {
    assert!(all().all(|(d, o)| o.may_wait || plan(d, &o) != Action::Wait));
}

#[test]
fn who_waits_for_what_is_in_use_hears_so_before_anything_else_is_done_for_what_runs() {
    let in_use = |d: &Desired, o: &Observed| {
        *d == Desired::Running && o.lock == LockState::Ours && o.container == Container::Running && o.declines
    };
    assert!(all().filter(|(d, o)| in_use(d, o)).all(|(d, o)| plan(d, &o) == Action::Decline));
}

#[test]
fn a_refused_request_is_not_retried() {
    for (desired, start) in all().filter(|(_, o)| o.refused) {
        let tried = settle(desired, start).0;
        assert!(!tried.iter().any(|action| matches!(
            action,
            Action::Create | Action::Restore | Action::Extract | Action::Checkpoint | Action::Refuse(_) | Action::Wait
        )));
    }
}

#[test]
fn upkeep_is_done_by_the_holder_alone_and_changes_nothing_else() {
    for (desired, seen) in all() {
        let without = plan(desired, &seen);
        for due in Upkeep::ALL {
            let with = plan(desired, &Observed { due: Some(due), ..seen });
            let is_holder = seen.lock == LockState::Ours;
            let is_wanted = desired != Desired::Deleted || due == Upkeep::Renewal;
            let has_time = due != Upkeep::Garbage || without == Action::Rest;
            let expected = if is_holder && is_wanted && has_time { due.action() } else { without };
            assert_eq!(with, expected, "{desired:?} {seen:?} {due:?}");
        }
    }
}

#[test]
fn upkeep_comes_in_the_order_of_its_urgency() {
    assert!(Upkeep::ALL.is_sorted());
    assert!(Upkeep::ALL.into_iter().all(|due| due.action().is_upkeep()));
    let steps = all().map(|(desired, seen)| step(desired, &seen)).filter(|step| *step != Action::Renew);
    assert!(steps.into_iter().all(|step| !step.is_upkeep()));
}

#[test]
fn a_step_that_backs_off_holds_up_no_upkeep_and_is_replaced_by_nothing_else() {
    for (desired, seen) in all() {
        let step = step(desired, &seen);
        if step == Action::Rest {
            continue;
        }
        let deferred = Observed { deferred: Some(step), ..seen };
        assert!(rests(plan(desired, &deferred)), "{desired:?} {deferred:?}");
        let due = Observed { due: Some(Upkeep::Garbage), ..deferred };
        let collects = seen.lock == LockState::Ours && desired != Desired::Deleted;
        assert_eq!(plan(desired, &due) == Action::CollectGarbage, collects, "{desired:?} {due:?}");
        let other = if step == Action::Wait { Action::Acquire } else { Action::Wait };
        assert_eq!(plan(desired, &Observed { deferred: Some(other), ..seen }), plan(desired, &seen));
    }
}

#[test]
fn a_session_is_refused_only_what_is_not_here() {
    for (desired, seen) in all() {
        let alone = plan(desired, &seen);
        for attachment in AttachState::ALL {
            let seen = Observed { attachment, ..seen };
            let action = plan(desired, &seen);
            let is_away = matches!(seen.lock, LockState::Free | LockState::Theirs);
            let may_turn_away = is_away && seen.container == Container::Absent && !seen.refused;
            let waits_on = rests(action) && rests(alone);
            let refused = if let Action::Refuse(rejection) = action { Some(rejection) } else { None };
            let turned_away = refused.filter(|_| action != alone);
            assert!(action == alone || waits_on || turned_away.is_some_and(|_| may_turn_away), "{desired:?} {seen:?}");
            let expected = match (attachment, desired, seen.lock) {
                (AttachState::None, _, _) => None,
                (AttachState::Deleted, _, _) | (_, Desired::Deleted, _) => Some(Rejection::Deleted),
                (AttachState::Declined, _, LockState::Theirs) => Some(Rejection::InUse),
                (AttachState::Superseded, Desired::HandedOff, _) => Some(Rejection::Superseded),
                (AttachState::HeldElsewhere, Desired::Running, LockState::Theirs) => Some(Rejection::RunningElsewhere),
                (AttachState::TimedOut, Desired::Running, LockState::Theirs) => Some(Rejection::HandoffTimeout),
                _ => None,
            };
            assert_eq!(turned_away, expected.filter(|_| may_turn_away), "{desired:?} {seen:?}");
        }
    }
}

#[test]
fn a_worker_ends_only_when_nothing_is_here_and_no_session_waits() {
    for (desired, seen) in all() {
        for attachment in AttachState::ALL {
            let seen = Observed { attachment, ..seen };
            let action = plan(desired, &seen);
            if action == Action::Finish {
                assert!(seen.container == Container::Absent && !seen.registered, "{desired:?} {seen:?}");
                assert!(!matches!(seen.lock, LockState::Ours | LockState::Late | LockState::Unknown));
            }
            let is_awaited = attachment == AttachState::Waiting && desired == Desired::Running && !seen.refused;
            assert!(action != Action::Finish || !is_awaited, "{desired:?} {seen:?}");
        }
    }
}
