//! Tests of each write and each judgement of the lock.

use super::*;

const T: LeaseTimes = LeaseTimes::DEFAULT;

fn at(seconds: u64) -> Moment {
    Moment(Duration::from_secs(seconds))
}

fn me() -> InstanceId {
    InstanceId::from_bits([1; 16])
}

fn other() -> InstanceId {
    InstanceId::from_bits([2; 16])
}

fn who(n: u8) -> Identity {
    Identity { me: InstanceId::from_bits([n; 16]), predecessor: None }
}

fn op(n: u8) -> Nonce {
    Nonce::from_bits([n; 16])
}

fn free() -> Lock {
    Lock::new(SandboxId::parse("sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab").unwrap())
}

#[test]
fn an_acquisition_raises_the_epoch_keeps_the_head_and_clears_the_waiter() {
    let waiting = waited(&free(), &me(), Claim::Preempt, op(9), &T);
    let held = acquired(&waiting, &me(), op(1), &T, true);
    assert_eq!((held.epoch, held.ran, held.waiter.is_none()), (1, true, true));
    let again = acquired(&released(&held, None, true), &other(), op(2), &T, false);
    assert_eq!((again.epoch, again.ran), (2, true));
}

#[test]
fn every_write_of_the_owner_changes_renew_and_copies_the_waiter() {
    let held = waited(&acquired(&free(), &me(), op(1), &T, true), &other(), Claim::Preempt, op(5), &T);
    let next = renewed(&held, op(2));
    let (before, after) = (held.lease.unwrap(), next.lease.unwrap());
    assert_eq!((before.renew + 1, after.op), (after.renew, op(2)));
    assert_eq!(next.waiter, held.waiter);
}

#[test]
fn a_lease_is_late_from_its_deadline_on_and_never_ours_after_a_release() {
    let lock = acquired(&free(), &me(), op(1), &T, true);
    let sight = LeaseWatch::default();
    let mut held = HeldLease { epoch: 1, deadline: at(15), released: false };
    assert_eq!(lease_state(&lock, &who(1), Some(&held), &sight, &T, at(14)), LeaseState::Ours);
    assert_eq!(lease_state(&lock, &who(1), Some(&held), &sight, &T, at(15)), LeaseState::Late);
    held.released = true;
    assert_eq!(lease_state(&lock, &who(1), Some(&held), &sight, &T, at(14)), LeaseState::Theirs);
    held = HeldLease { epoch: 2, deadline: at(15), released: false };
    assert_eq!(lease_state(&lock, &who(1), Some(&held), &sight, &T, at(14)), LeaseState::Theirs);
}

#[test]
fn a_takeover_needs_the_same_lease_watched_for_the_larger_time_without_gaps() {
    let lock = acquired(&free(), &other(), op(1), &T, true);
    let mut sight = LeaseWatch::default();
    sight.saw(&lock, at(0));
    sight.saw(&lock, at(29));
    assert_eq!(lease_state(&lock, &who(1), None, &sight, &T, at(29)), LeaseState::Theirs);
    sight.missed();
    sight.saw(&lock, at(100));
    assert_eq!(lease_state(&lock, &who(1), None, &sight, &T, at(100)), LeaseState::Theirs, "blind time counted");
    sight.saw(&lock, at(101));
    assert_eq!(lease_state(&lock, &who(1), None, &sight, &T, at(101)), LeaseState::Free);
    sight.saw(&renewed(&lock, op(2)), at(102));
    assert_eq!(lease_state(&lock, &who(1), None, &sight, &T, at(102)), LeaseState::Theirs);

    let mut slow = lock.clone();
    slow.lease.as_mut().unwrap().takeover_ms = 60_000;
    let mut sight = LeaseWatch::default();
    sight.saw(&slow, at(0));
    sight.saw(&slow, at(59));
    assert_eq!(lease_state(&slow, &who(1), None, &sight, &T, at(59)), LeaseState::Theirs);
}

#[test]
fn a_fresh_waiter_comes_first_and_a_stale_one_does_not() {
    let lock = waited(&free(), &other(), Claim::Preempt, op(1), &T);
    let mut sight = LeaseWatch::default();
    sight.saw(&lock, at(0));
    assert_eq!(lease_state(&lock, &who(1), None, &sight, &T, at(0)), LeaseState::Theirs);
    assert_eq!(lease_state(&lock, &who(2), None, &sight, &T, at(0)), LeaseState::Free);
    sight.saw(&lock, at(60));
    assert_eq!(lease_state(&lock, &who(1), None, &sight, &T, at(60)), LeaseState::Free);
    sight.saw(&waited(&lock, &other(), Claim::Preempt, op(2), &T), at(61));
    assert_eq!(lease_state(&lock, &who(1), None, &sight, &T, at(61)), LeaseState::Theirs);
}

#[test]
fn a_waiter_that_was_declined_keeps_nobody_away_until_it_asks_again() {
    let held = acquired(&free(), &me(), op(1), &T, true);
    let asked = waited(&held, &other(), Claim::Ask, op(2), &T);
    let lock = declined(&asked, op(3));
    let (before, after) = (asked.lease.clone().unwrap(), lock.lease.clone().unwrap());
    assert_eq!((before.renew + 1, &after.op), (after.renew, &op(3)), "it is a renewal too");
    let sight = LeaseWatch::default();
    assert_eq!(sight.waiter(&asked, &me()).map(|waiter| waiter.claim), Some(Claim::Ask));
    assert_eq!(sight.waiter(&lock, &me()), None);
    let third = Identity { me: InstanceId::from_bits([3; 16]), predecessor: None };
    let freed = released(&lock, None, true);
    assert_eq!(lease_state(&freed, &third, None, &sight, &T, at(0)), LeaseState::Free);
    let again = waited(&lock, &other(), Claim::Preempt, op(4), &T);
    assert_eq!(sight.waiter(&again, &me()).map(|waiter| waiter.claim), Some(Claim::Preempt));
}

#[test]
fn a_tombstone_keeps_the_epoch_and_belongs_to_nobody() {
    let lock = tombstone(&purging(&acquired(&free(), &me(), op(1), &T, true), op(2)), String::new());
    assert_eq!((lock.epoch, lock.purged, lock.lease.is_none()), (1, true, true));
    assert_eq!(lease_state(&lock, &who(1), None, &LeaseWatch::default(), &T, at(0)), LeaseState::Purged);
}

#[test]
fn a_predecessors_lease_is_inherited_without_waiting_but_not_past_a_fresh_waiter() {
    let lock = acquired(&free(), &other(), op(1), &T, true);
    let heir = Identity { me: me(), predecessor: Some(other()) };
    assert_eq!(lease_state(&lock, &heir, None, &LeaseWatch::default(), &T, at(0)), LeaseState::Free);
    let third = InstanceId::from_bits([3; 16]);
    let lock = waited(&lock, &third, Claim::Preempt, op(2), &T);
    assert_eq!(lease_state(&lock, &heir, None, &LeaseWatch::default(), &T, at(0)), LeaseState::Theirs);
}

#[test]
fn a_head_is_behind_from_the_start_of_a_run_until_the_run_is_committed() {
    let running = acquired(&free(), &me(), op(1), &T, true);
    assert!(running.behind);
    assert!(released(&running, None, true).behind, "it ran and was not committed");
    assert!(!released(&running, None, false).behind, "it never started");
    let head = Head {
        seq: 1,
        epoch: 1,
        checkpoint_id: baton_protocol::id::CheckpointId::new(&free().sandbox_id, 1, 1, &op(7)),
        bucket: None,
        manifest_sha256: baton_protocol::id::Sha256Name::from_bits([0; 32]),
    };
    let stored = released(&running, Some(head.clone()), true);
    assert_eq!((stored.behind, stored.head), (false, Some(head.clone())));
    assert!(committed(&running, op(2), head).behind, "it runs on after a commit that keeps the lease");
}

#[test]
fn only_what_we_acquired_and_did_not_let_go_of_is_ours_to_write() {
    let lock = acquired(&free(), &me(), op(1), &T, true);
    let held = HeldLease { epoch: 1, deadline: at(0), released: false };
    assert!(is_ours(&lock, Some(&held), &me()), "late or not");
    assert!(!is_ours(&lock, Some(&HeldLease { released: true, ..held }), &me()));
    assert!(!is_ours(&lock, None, &me()));
    assert!(!is_ours(&acquired(&lock, &other(), op(2), &T, true), Some(&held), &me()));
    assert!(!is_ours(&released(&lock, None, true), Some(&held), &me()));
}

#[test]
fn only_our_own_name_is_withdrawn() {
    let lock = waited(&free(), &other(), Claim::Ask, op(1), &T);
    assert_eq!(withdrawn(&lock, &me()), lock);
    assert_eq!(withdrawn(&lock, &other()).waiter, None);
}

#[test]
fn a_lock_is_made_held_and_proves_that_to_whoever_noted_the_write() {
    let lease = InitialLease { op: op(1), sent: at(3) };
    let lock = initial(free().sandbox_id, &me(), &lease, &T);
    assert_eq!(lock, acquired(&free(), &me(), op(1), &T, true), "as if it had been free before");
    let (held, _) = proven(None, &[(lease.op, lease.sent)], &lock, T.hold).unwrap();
    assert_eq!(held, HeldLease { epoch: 1, deadline: at(3) + T.hold, released: false });
    assert!(is_initial(&lock));
    assert!(!is_initial(&renewed(&lock, op(2))) && !is_initial(&released(&lock, None, true)));
    assert!(!is_initial(&acquired(&lock, &other(), op(2), &T, true)) && !is_initial(&free()));
}
