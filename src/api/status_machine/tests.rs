//! The scenarios, as a session sends them.

use baton_protocol::reason::Reason;

use super::*;
use crate::bus::StartKind;

const CHECKPOINT: &str = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab-1-2-00112233445566778899aabbccddeeff";

fn open() -> StatusMachine {
    StatusMachine::new(OpenStage::Open, Dialect::Predecessor)
}

fn documents(stage: OpenStage) -> StatusMachine {
    with_handoff(StatusMachine::new(stage, Dialect::Documents))
}

fn with_handoff(mut status_machine: StatusMachine) -> StatusMachine {
    status_machine.features.has_handoff = true;
    status_machine
}

fn left(why: LeaveReason, checkpointed: bool) -> LifecycleEvent {
    LifecycleEvent::Left { why, checkpoint_id: checkpointed.then(|| CheckpointId::parse(CHECKPOINT).unwrap()) }
}

fn failed(why: LeaveReason) -> LifecycleEvent {
    LifecycleEvent::CheckpointFailed { why, reason: Reason::NoSpace, message: "no".into() }
}

/// The statuses without their prefix, and what happens at the end.
fn handle(status_machine: &mut StatusMachine, posted: &[LifecycleEvent]) -> (String, Reaction) {
    let mut words = vec![];
    for (at, event) in posted.iter().enumerate() {
        let answer = status_machine.handle(event);
        words.extend(answer.events.iter().map(|event| {
            if let Event::StatusUpdate(update) = event {
                return update.status.as_str()["SANDBOX_".len()..].to_owned();
            }
            assert!(matches!(event, Event::Error { .. }), "{event:?}");
            "E".to_owned()
        }));
        if at + 1 == posted.len() {
            return (words.join(" "), answer.reaction);
        }
        assert_eq!(answer.reaction, Reaction::Stay, "after {event:?}");
    }
    unreachable!("something is posted")
}

#[track_caller]
fn tells(mut status_machine: StatusMachine, posted: &[LifecycleEvent], words: &str, reaction: Reaction) {
    assert_eq!(handle(&mut status_machine, posted), (words.to_owned(), reaction));
}

const NORMAL: Reaction = Reaction::Close(Close::Normal);
const RESTART: Reaction = Reaction::Close(Close::Restart);
const FATAL: Reaction = Reaction::Close(Close::Fatal);

#[test]
fn locks_are_talked_of_only_with_handoff() {
    let running = LifecycleEvent::Running { boot: StartKind::Fresh };
    let posted = [LifecycleEvent::Acquiring, LifecycleEvent::Acquired, running];
    tells(StatusMachine::new(OpenStage::Creating, Dialect::Predecessor), &posted, "", Reaction::Open);
    let create = with_handoff(StatusMachine::new(OpenStage::Creating, Dialect::Predecessor));
    tells(create, &posted, "LOCK_ACQUIRING LOCK_ACQUIRED", Reaction::Open);
    let attach = with_handoff(StatusMachine::new(OpenStage::Attaching, Dialect::Predecessor));
    tells(attach, &posted, "RESTORING LOCK_ACQUIRING LOCK_ACQUIRED", Reaction::Open);
    tells(StatusMachine::new(OpenStage::Attaching, Dialect::Predecessor), &posted, "RESTORING", Reaction::Open);
}

#[test]
fn what_does_not_start_is_an_error_of_its_kind() {
    let failed = [LifecycleEvent::Failed { reason: Reason::Lost, message: "The state is lost.".into() }];
    tells(StatusMachine::new(OpenStage::Creating, Dialect::Predecessor), &failed, "CREATION_ERROR E", FATAL);
    tells(StatusMachine::new(OpenStage::Attaching, Dialect::Predecessor), &failed, "RESTORING RESTORE_ERROR E", FATAL);
    let lost =
        [LifecycleEvent::Acquiring, LifecycleEvent::Acquired, LifecycleEvent::LeaseLost { message: "taken".into() }];
    let attach = with_handoff(StatusMachine::new(OpenStage::Attaching, Dialect::Predecessor));
    tells(attach, &lost, "RESTORING LOCK_ACQUIRING LOCK_ACQUIRED RESTORE_ERROR E", FATAL);
}

#[test]
fn a_checkpoint_ends_the_session_that_asked_for_it() {
    let mut status_machine = open();
    status_machine.request_checkpoint();
    let posted =
        [LifecycleEvent::Checkpointing { why: LeaveReason::Checkpointed }, left(LeaveReason::Checkpointed, true)];
    tells(status_machine.clone(), &posted, "DELETING DELETED CHECKPOINTED", NORMAL);
    let locked = with_handoff(status_machine);
    tells(locked, &posted, "DELETING LOCK_RELEASING LOCK_RELEASED DELETED CHECKPOINTED", NORMAL);
    tells(open(), &posted, "CHECKPOINTING DELETING DELETED CHECKPOINTED", NORMAL);
}

#[test]
fn a_failed_checkpoint_closes_only_the_session_that_asked() {
    let mut status_machine = open();
    status_machine.request_checkpoint();
    let posted = [LifecycleEvent::Checkpointing { why: LeaveReason::Checkpointed }, failed(LeaveReason::Checkpointed)];
    tells(status_machine, &posted, "CHECKPOINT_ERROR E", Reaction::Revert);
    tells(open(), &posted, "CHECKPOINTING CHECKPOINT_ERROR E", Reaction::Stay);
}

#[test]
fn a_failure_is_reported_once_per_request() {
    let again = [LifecycleEvent::Checkpointing { why: LeaveReason::Waiter }, failed(LeaveReason::Waiter)];
    let mut status_machine = with_handoff(open());
    assert_eq!(handle(&mut status_machine, &again), ("CHECKPOINTING CHECKPOINT_ERROR E".into(), Reaction::Stay));
    assert!(!status_machine.is_leaving());
    assert_eq!(handle(&mut status_machine, &again), (String::new(), Reaction::Stay));
    assert_eq!(
        handle(&mut status_machine, &[release_requested(), again[0].clone(), again[1].clone()]),
        ("LOCK_RELEASE_REQUESTED CHECKPOINTING CHECKPOINT_ERROR E".into(), Reaction::Stay)
    );
    assert_eq!(
        handle(&mut status_machine, &[again[0].clone(), left(LeaveReason::Waiter, true)]),
        ("DELETING LOCK_RELEASING LOCK_RELEASED DELETED CHECKPOINTED".into(), NORMAL)
    );
}

fn release_requested() -> LifecycleEvent {
    LifecycleEvent::ReleaseRequested { by: InstanceId::from_bits([2; 16]), claim: Claim::Preempt }
}

#[test]
fn who_loses_the_sandbox_hears_to_whom() {
    for dialect in [Dialect::V1, Dialect::Predecessor] {
        let mut status_machine = with_handoff(StatusMachine { dialect, ..open() });
        let answer = status_machine.handle(&release_requested());
        let [Event::StatusUpdate(update)] = &answer.events[..] else { panic!("{answer:?}") };
        assert_eq!((update.status, answer.reaction), (Status::LockReleaseRequested, Reaction::Stay));
        let message = update.message.as_deref().unwrap_or_default();
        assert!(message.contains(InstanceId::from_bits([2; 16]).as_str()), "{message}");
        assert!(!message.contains("no sign of life"), "{message}");
    }
    let mut status_machine = with_handoff(StatusMachine { dialect: Dialect::V1, ..open() });
    let silent = LifecycleEvent::ReleaseRequested { by: InstanceId::from_bits([2; 16]), claim: Claim::Ask };
    let answer = status_machine.handle(&silent);
    assert!(matches!(&answer.events[..], [Event::StatusUpdate(update)]
        if update.message.as_ref().is_some_and(|message| message.contains("no sign of life"))));
}

#[test]
fn a_newcomer_hears_that_the_sandbox_is_in_use_where_it_is() {
    let in_use = LifecycleEvent::Failed { reason: Reason::InUse, message: String::new() };
    let attaching = || StatusMachine::new(OpenStage::Attaching, Dialect::Predecessor);
    tells(attaching(), std::slice::from_ref(&in_use), "RESTORING", Reaction::InUse);
    tells(attaching(), &[LifecycleEvent::Acquiring, in_use.clone()], "RESTORING", Reaction::InUse);
    tells(with_handoff(attaching()), &[LifecycleEvent::Acquiring, in_use], "RESTORING LOCK_ACQUIRING", Reaction::InUse);
}

#[test]
fn a_probe_is_answered_without_a_word() {
    tells(open(), &[LifecycleEvent::Probe { number: 1 }], "", Reaction::Stay);
}

#[test]
fn a_handoff_is_told_on_the_old_instance() {
    let posted = [
        release_requested(),
        LifecycleEvent::Checkpointing { why: LeaveReason::Waiter },
        left(LeaveReason::Waiter, true),
    ];
    tells(
        with_handoff(open()),
        &posted,
        "LOCK_RELEASE_REQUESTED CHECKPOINTING DELETING LOCK_RELEASING LOCK_RELEASED DELETED CHECKPOINTED",
        NORMAL,
    );
}

#[test]
fn a_kill_is_told_to_the_one_who_asked() {
    let mut status_machine = open();
    status_machine.requested = Some(EndingRequest::Kill);
    tells(status_machine.clone(), &[left(LeaveReason::Deleted, false)], "DELETING DELETED KILLED", NORMAL);
    tells(open(), &[left(LeaveReason::Deleted, false)], "DELETING DELETED", NORMAL);
    let posted = [failed(LeaveReason::Checkpointed), left(LeaveReason::Deleted, false)];
    tells(with_handoff(status_machine), &posted, "DELETING LOCK_RELEASING LOCK_RELEASED DELETED KILLED", NORMAL);
}

#[test]
fn an_idle_end_tells_of_a_checkpoint_only_when_one_was_made() {
    tells(open(), &[left(LeaveReason::Idle, false)], "DELETING DELETED", NORMAL);
    tells(open(), &[left(LeaveReason::Idle, true)], "DELETING DELETED", NORMAL);
    let posted = [LifecycleEvent::Checkpointing { why: LeaveReason::Idle }, left(LeaveReason::Idle, true)];
    tells(open(), &posted, "CHECKPOINTING DELETING DELETED CHECKPOINTED", NORMAL);
}

#[test]
fn the_end_of_a_session_has_its_reason() {
    let killed = StatusMachine { requested: Some(EndingRequest::Kill), ..open() };
    let mut checkpointed = open();
    checkpointed.request_checkpoint();
    let moved = StatusMachine { has_requested_handoff: true, ..open() };
    let mut expired = open();
    expired.features.is_expired = true;
    for (status_machine, why, reason) in [
        (killed.clone(), LeaveReason::Deleted, EndReason::Kill),
        (killed, LeaveReason::Drain, EndReason::Kill),
        (expired, LeaveReason::Deleted, EndReason::Expired),
        (open(), LeaveReason::Deleted, EndReason::Operator),
        (checkpointed.clone(), LeaveReason::Checkpointed, EndReason::Checkpoint),
        (checkpointed, LeaveReason::Drain, EndReason::Drain),
        (open(), LeaveReason::Checkpointed, EndReason::Operator),
        (moved, LeaveReason::HandedOff, EndReason::Handoff),
        (open(), LeaveReason::HandedOff, EndReason::Operator),
        (open(), LeaveReason::Waiter, EndReason::Attach),
        (open(), LeaveReason::Idle, EndReason::Idle),
        (open(), LeaveReason::Drain, EndReason::Drain),
        (open(), LeaveReason::Room, EndReason::Evicted),
    ] {
        for is_stored in [false, true] {
            let events = status_machine.clone().handle(&left(why, is_stored)).events;
            let ends = events.iter().filter_map(|event| {
                let Event::StatusUpdate(update) = event else { return None };
                matches!(update.status, Status::Deleted | Status::Checkpointed).then_some(update.reason)
            });
            let ends: Vec<_> = ends.collect();
            assert!(!ends.is_empty() || why == LeaveReason::Drain, "{why:?}");
            assert!(ends.iter().all(|told| *told == Some(reason)), "{why:?}: {ends:?}");
        }
    }
}

/// Every documented flow, for a sandbox that can move: neither locks nor the deletion of the local copy are reported.
#[test]
fn the_documents_know_neither_locks_nor_the_deletion_after_a_checkpoint() {
    let running = LifecycleEvent::Running { boot: StartKind::Fresh };
    let start = [LifecycleEvent::Acquiring, LifecycleEvent::Acquired, running];
    tells(documents(OpenStage::Creating), &start, "", Reaction::Open);
    tells(documents(OpenStage::Attaching), &start, "RESTORING", Reaction::Open);
    let mut asked = documents(OpenStage::Open);
    asked.request_checkpoint();
    let checkpoint =
        [LifecycleEvent::Checkpointing { why: LeaveReason::Checkpointed }, left(LeaveReason::Checkpointed, true)];
    tells(asked, &checkpoint, "CHECKPOINTED", NORMAL);
    let handoff = [
        release_requested(),
        LifecycleEvent::Checkpointing { why: LeaveReason::Waiter },
        left(LeaveReason::Waiter, true),
    ];
    tells(documents(OpenStage::Open), &handoff, "CHECKPOINTING CHECKPOINTED", NORMAL);
    let idle = [LifecycleEvent::Checkpointing { why: LeaveReason::Idle }, left(LeaveReason::Idle, true)];
    tells(documents(OpenStage::Open), &idle, "CHECKPOINTING CHECKPOINTED", NORMAL);
    tells(documents(OpenStage::Open), &[left(LeaveReason::Idle, false)], "DELETING DELETED", NORMAL);
    tells(documents(OpenStage::Open), &[left(LeaveReason::Deleted, false)], "DELETING DELETED", NORMAL);
}

#[test]
fn an_idle_end_without_a_checkpoint_says_what_is_lost() {
    for is_persistent in [false, true] {
        let mut status_machine = StatusMachine {
            features: SpecFeatures { has_handoff: true, is_persistent, is_expired: false },
            ..documents(OpenStage::Open)
        };
        let answer = status_machine.handle(&left(LeaveReason::Idle, false));
        let Some(Event::StatusUpdate(Update { message: Some(message), .. })) = answer.events.last() else {
            panic!("{answer:?}")
        };
        assert_eq!(message.contains("in memory only"), !is_persistent, "{message}");
    }
}

#[test]
fn at_drain_a_client_is_left_to_follow() {
    for why in [LeaveReason::Drain, LeaveReason::HandedOff, LeaveReason::Room] {
        let posted = [LifecycleEvent::Checkpointing { why }, left(why, true)];
        tells(with_handoff(open()), &posted, "CHECKPOINTING CHECKPOINTED", RESTART);
        tells(open(), &[left(why, false)], "DELETING DELETED", RESTART);
        tells(open(), &[LifecycleEvent::Checkpointing { why }, left(why, false)], "CHECKPOINTING", RESTART);
    }
}

#[test]
fn a_lost_lease_is_named_only_in_v1() {
    let lost = [LifecycleEvent::LeaseLost { message: "taken".into() }];
    tells(open(), &lost, "", RESTART);
    tells(StatusMachine::new(OpenStage::Open, Dialect::V1), &lost, "LOCK_RENEWAL_ERROR E", RESTART);
}

#[test]
fn what_was_lost_before_it_was_had_is_asked_for_again() {
    let lost = [LifecycleEvent::LeaseLost { message: "taken".into() }];
    tells(StatusMachine::new(OpenStage::Attaching, Dialect::V1), &lost, "RESTORING", Reaction::RequestAgain);
}

#[test]
fn whoever_waits_for_an_answer_looks_when_one_was_given() {
    tells(open(), &[LifecycleEvent::Answered], "", Reaction::PollAnswers);
}

#[test]
fn a_pause_is_told_only_in_v1() {
    let posted =
        [LifecycleEvent::Unfenced, LifecycleEvent::Fenced { message: "unreachable".into() }, LifecycleEvent::Unfenced];
    tells(open(), &posted, "", Reaction::Stay);
    tells(StatusMachine::new(OpenStage::Open, Dialect::V1), &posted, "PAUSED RUNNING", Reaction::Stay);
}

#[test]
fn what_leaves_before_it_was_had_is_asked_for_again() {
    for why in
        [LeaveReason::Checkpointed, LeaveReason::HandedOff, LeaveReason::Waiter, LeaveReason::Room, LeaveReason::Idle]
    {
        tells(
            StatusMachine::new(OpenStage::Attaching, Dialect::Predecessor),
            &[left(why, true)],
            "RESTORING",
            Reaction::RequestAgain,
        );
    }
    let gone = Reaction::Close(Close::Unavailable);
    tells(
        StatusMachine::new(OpenStage::Attaching, Dialect::Predecessor),
        &[left(LeaveReason::Deleted, false)],
        "RESTORING NOT_FOUND",
        gone,
    );
    tells(
        StatusMachine::new(OpenStage::Attaching, Dialect::Predecessor),
        &[left(LeaveReason::Drain, true)],
        "",
        RESTART,
    );
    tells(
        StatusMachine::new(OpenStage::Creating, Dialect::Predecessor),
        &[left(LeaveReason::Drain, false)],
        "CREATION_ERROR E",
        FATAL,
    );
}

#[test]
fn how_far_it_is_comes_with_the_word_that_was_said_and_in_v1_alone() {
    let moved = |what: &str, done| LifecycleEvent::Progress { what: what.to_owned(), done, total: 8 };
    let all = |done| [SNAPSHOT, UPLOAD, DOWNLOAD, EXTRACT].map(|what| moved(what, done));
    let unanswered = |snapshot, checkpoint| StatusMachine {
        unanswered: Unanswered { snapshot, checkpoint },
        ..StatusMachine::new(OpenStage::Open, Dialect::V1)
    };
    let restoring = |dialect| {
        let mut status_machine = StatusMachine::new(OpenStage::Attaching, dialect);
        status_machine.restoring();
        status_machine
    };
    let leaving = |dialect| {
        let mut status_machine = StatusMachine::new(OpenStage::Open, dialect);
        status_machine.request_checkpoint();
        status_machine
    };
    tells(StatusMachine::new(OpenStage::Creating, Dialect::V1), &all(3), "CREATING CREATING", Reaction::Stay);
    tells(restoring(Dialect::V1), &all(3), "RESTORING RESTORING", Reaction::Stay);
    tells(leaving(Dialect::V1), &all(3), "CHECKPOINTING", Reaction::Stay);
    tells(unanswered(true, false), &all(3), "FILESYSTEM_SNAPSHOT_CREATING", Reaction::Stay);
    tells(unanswered(false, true), &all(3), "CHECKPOINTING", Reaction::Stay);
    let by_a_waiter = [&[LifecycleEvent::Checkpointing { why: LeaveReason::Waiter }], &all(3)[..]].concat();
    tells(
        StatusMachine::new(OpenStage::Open, Dialect::V1),
        &by_a_waiter,
        "CHECKPOINTING CHECKPOINTING",
        Reaction::Stay,
    );
    let again = [&[failed(LeaveReason::Waiter)], &by_a_waiter[..]].concat();
    tells(StatusMachine::new(OpenStage::Open, Dialect::V1), &again, "CHECKPOINT_ERROR E", Reaction::Stay);
    // The request of another session, a sign of life, a sandbox that is being killed, a plain client.
    tells(StatusMachine::new(OpenStage::Open, Dialect::V1), &all(3), "", Reaction::Stay);
    tells(StatusMachine::new(OpenStage::Attaching, Dialect::V1), &all(3), "", Reaction::Stay);
    tells(restoring(Dialect::V1), &all(0), "", Reaction::Stay);
    tells(StatusMachine { requested: Some(EndingRequest::Kill), ..leaving(Dialect::V1) }, &all(3), "", Reaction::Stay);
    for plain in [
        StatusMachine::new(OpenStage::Creating, Dialect::Predecessor),
        restoring(Dialect::Documents),
        leaving(Dialect::Documents),
    ] {
        tells(plain, &all(3), "", Reaction::Stay);
    }
    let answer = leaving(Dialect::V1).handle(&moved(UPLOAD, 3));
    let [Event::StatusUpdate(update)] = &answer.events[..] else { panic!("{answer:?}") };
    assert_eq!(update.progress, Some(Progress { done: 3, total: 8 }));
}
