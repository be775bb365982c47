//! The writer of a lock: every answer may be lost, twisted or late, and it still knows what is so.

use std::{sync::Arc, time::Duration};

use baton::{
    clock::SharedClock,
    config::LeaseTimes,
    storage::{
        lease::{
            Error, Lapse, LeaseHandle, Released,
            lease_rules::{Identity, LeaseState},
        },
        memory::Memory,
        store::{Precondition, Store},
    },
};
use baton_protocol::{
    id::{CheckpointId, InstanceId, Nonce},
    lock::{Claim, Head, Lock},
};
use baton_testkit::TestClock;

use crate::faulty_store::{Fault, Stage};

const KEY: &str = "sandboxes/x/lock.json";
const T: LeaseTimes = LeaseTimes::DEFAULT;

fn who(me: &InstanceId) -> Identity {
    Identity { me: me.clone(), predecessor: None }
}

/// The one that would follow.
fn head(lock: &Lock) -> Head {
    let checkpoint_id = CheckpointId::new(&lock.sandbox_id, lock.epoch, 1, &Nonce::from_bits([7; 16]));
    Head {
        seq: 1,
        epoch: lock.epoch,
        checkpoint_id,
        bucket: None,
        manifest_sha256: baton_protocol::id::Sha256Name::from_bits([0; 32]),
    }
}

struct World {
    clock: SharedClock,
    stage: Arc<Stage>,
}

impl World {
    async fn with_a_free_lock() -> Self {
        let clock: SharedClock = Arc::new(TestClock::new(7));
        let stage = Stage::new(Arc::new(Memory::new(clock.clone())));
        let lock = serde_json::to_vec(&Lock::new(clock.sandbox_id())).unwrap();
        stage.put(KEY, lock.into(), Precondition::Absent).await.unwrap();
        Self { clock, stage }
    }

    fn instance(&self) -> (LeaseHandle, InstanceId) {
        let me = self.clock.instance_id();
        (LeaseHandle::new(self.stage.clone(), KEY.to_owned(), who(&me), self.clock.clone(), T), me)
    }

    async fn holder(&self) -> LeaseHandle {
        let (mut lock, _) = self.instance();
        lock.read().await.unwrap();
        lock.acquire(true).await.unwrap();
        lock
    }

    async fn after(&self, seconds: u64) {
        self.clock.sleep(Duration::from_secs(seconds)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_acquired_lock_is_ours_until_hold_after_it_was_sent() {
    let world = World::with_a_free_lock().await;
    let lock = world.holder().await;
    assert_eq!(lock.state(), Some(LeaseState::Ours));
    assert_eq!((lock.lock().unwrap().epoch, lock.lock().unwrap().ran), (1, true));
    world.after(14).await;
    assert_eq!(lock.state(), Some(LeaseState::Ours));
    world.after(1).await;
    assert_eq!(lock.state(), Some(LeaseState::Late));
}

#[tokio::test(start_paused = true)]
async fn rule_07_a_machine_whose_clock_fell_behind_the_stores_was_frozen_and_its_lease_is_late() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    world.after(5).await;
    lock.renew().await.unwrap();
    assert_eq!(lock.state(), Some(LeaseState::Ours));
    world.stage.set_ahead(T.frozen + Duration::from_millis(1));
    world.after(5).await;
    lock.renew().await.unwrap();
    assert_eq!(lock.state(), Some(LeaseState::Late), "first it is stopped");
    lock.read().await.unwrap();
    assert_eq!(lock.state(), Some(LeaseState::Late), "reading it again proves nothing");
    lock.renew().await.unwrap();
    assert_eq!(lock.state(), Some(LeaseState::Ours), "then proven, and it goes on");
}

#[tokio::test(start_paused = true)]
async fn of_two_that_acquire_one_has_it_and_the_other_sees_it() {
    let world = World::with_a_free_lock().await;
    let ((mut one, _), (mut two, _)) = (world.instance(), world.instance());
    one.read().await.unwrap();
    two.read().await.unwrap();
    one.acquire(true).await.unwrap();
    assert!(matches!(two.acquire(true).await, Err(Error::Changed)));
    assert_eq!((one.state(), two.state()), (Some(LeaseState::Ours), Some(LeaseState::Theirs)));
}

#[tokio::test(start_paused = true)]
async fn rule_02_a_write_whose_answer_was_lost_or_twisted_is_found_by_its_nonce() {
    for fault in [Fault::AnswerLost, Fault::AnswerTwisted] {
        let world = World::with_a_free_lock().await;
        let (mut lock, _) = world.instance();
        lock.read().await.unwrap();
        world.stage.next_put(fault);
        lock.acquire(true).await.unwrap();
        assert_eq!(lock.state(), Some(LeaseState::Ours), "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_acquisition_that_could_not_be_settled_is_found_later_with_its_own_deadline() {
    let world = World::with_a_free_lock().await;
    let (mut lock, _) = world.instance();
    lock.read().await.unwrap();
    world.stage.next_put(Fault::AnswerLost);
    world.stage.next_poll(Fault::Refused);
    assert!(lock.acquire(true).await.is_err());
    world.after(10).await;
    lock.read().await.unwrap();
    assert_eq!(lock.state(), Some(LeaseState::Ours));
    world.after(5).await;
    assert_eq!(lock.state(), Some(LeaseState::Late), "the deadline counts from when it was sent");
}

#[tokio::test(start_paused = true)]
async fn rule_03_the_deadline_counts_from_when_a_write_was_sent_not_from_its_answer() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    let start = world.clock.now();
    world.after(5).await;
    world.stage.next_put(Fault::Late);
    assert!(lock.renew().await.is_err(), "it hangs for the length of a call");
    assert_eq!(world.clock.now() - start, Duration::from_secs(7));
    assert_eq!(world.stage.deliver().await, 1);
    lock.read().await.unwrap();
    assert_eq!(lock.held().unwrap().deadline - start, Duration::from_secs(20));
}

#[tokio::test(start_paused = true)]
async fn rule_01_a_write_that_was_dropped_in_the_middle_is_settled_before_the_next() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    world.stage.next_put(Fault::Late);
    {
        let renewal = lock.renew();
        tokio::pin!(renewal);
        assert!(futures::poll!(&mut renewal).is_pending());
    }
    assert!(
        matches!(lock.wait(Claim::Preempt).await, Err(Error::Changed)),
        "nothing is written on top of an open write"
    );
    lock.renew().await.expect("a renewal settles it by itself");
    assert_eq!(world.stage.deliver().await, 0, "the dropped write comes too late");
    assert_eq!(lock.state(), Some(LeaseState::Ours));
}

#[tokio::test(start_paused = true)]
async fn rule_08_a_waiter_that_registers_meanwhile_is_merged_into_the_renewal() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    let (mut other, name) = world.instance();
    other.read().await.unwrap();
    other.wait(Claim::Preempt).await.unwrap();
    lock.renew().await.unwrap();
    assert_eq!(lock.lock().unwrap().waiter.as_ref().unwrap().instance, name);
    assert!(lock.waiter().is_some() && other.entry().is_some());
    assert_eq!(other.state(), Some(LeaseState::Theirs));
}

#[tokio::test(start_paused = true)]
async fn rule_11_a_release_is_one_way_whatever_the_answer() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    world.stage.next_put(Fault::Refused);
    assert!(lock.release(None, true).await.is_err());
    assert_eq!(lock.state(), Some(LeaseState::Theirs), "nothing runs under an epoch whose release was sent");
    lock.read().await.unwrap();
    assert_eq!(lock.state(), Some(LeaseState::Theirs));
    assert_eq!(lock.release(None, true).await.unwrap(), Released::Freed, "but the release may be sent again");
    assert_eq!(lock.state(), Some(LeaseState::Free));

    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    world.stage.next_put(Fault::AnswerTwisted);
    assert_eq!(lock.release(None, true).await.unwrap(), Released::Freed);
    assert_eq!(lock.state(), Some(LeaseState::Free));
}

#[tokio::test(start_paused = true)]
async fn work_under_the_lease_is_renewed_while_it_runs_and_not_after() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    let clock = world.clock.clone();
    let done = lock.renew_while(async { clock.sleep(Duration::from_secs(60)).await }).await;
    assert_eq!(done, Ok(()));
    let renewals = lock.lock().unwrap().lease.as_ref().unwrap().renew;
    assert!((9..=12).contains(&renewals), "{renewals}");
    world.after(600).await;
    assert_eq!(lock.lock().unwrap().lease.as_ref().unwrap().renew, renewals);
}

#[tokio::test(start_paused = true)]
async fn work_goes_on_through_failed_renewals_until_the_deadline() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    for _ in 0..3 {
        world.stage.next_put(Fault::Refused);
    }
    let clock = world.clock.clone();
    assert_eq!(lock.renew_while(async { clock.sleep(Duration::from_secs(30)).await }).await, Ok(()));

    for _ in 0..40 {
        world.stage.next_put(Fault::Hangs);
    }
    let began = world.clock.now();
    let clock = world.clock.clone();
    let lapse = lock.renew_while(async { clock.sleep(Duration::from_secs(600)).await }).await;
    assert_eq!(lapse, Err(Lapse::Late));
    assert!(world.clock.now() - began <= Duration::from_secs(18));
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_fails_is_repeated_at_its_interval_though_the_lock_can_be_read() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    for _ in 0..100 {
        world.stage.next_lock_put(Fault::Refused);
    }
    let before = world.stage.calls().writes;
    assert_eq!(lock.renew_while(world.after(60)).await, Err(Lapse::Late));
    let tried = world.stage.calls().writes - before;
    let most = (T.hold - T.renew).as_secs() / T.retry.as_secs() + 1;
    assert!((5..=most).contains(&tried), "{tried} renewals");
}

#[tokio::test(start_paused = true)]
async fn a_write_proves_the_lease_once_however_often_it_is_read() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    let (held, due) = (lock.held().copied(), lock.next_renewal());
    for _ in 0..10 {
        world.after(1).await;
        lock.read().await.unwrap();
        assert_eq!((lock.held().copied(), lock.next_renewal()), (held, due));
    }
}

#[tokio::test(start_paused = true)]
async fn work_is_dropped_when_another_instance_has_the_lease() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    for _ in 0..40 {
        world.stage.next_put(Fault::Refused);
    }
    world.after(15).await;
    let (mut other, _) = world.instance();
    for _ in 0..40 {
        other.read().await.unwrap();
        world.after(1).await;
    }
    assert_eq!(other.state(), Some(LeaseState::Free), "the same lease was watched for the takeover time");
    while other.acquire(false).await.is_err() {
        other.read().await.unwrap();
    }
    let clock = world.clock.clone();
    let lapse = lock.renew_while(async { clock.sleep(Duration::from_secs(60)).await }).await;
    assert_eq!(lapse, Err(Lapse::Lost));
    assert_eq!(lock.state(), Some(LeaseState::Theirs));
}

#[tokio::test(start_paused = true)]
async fn rule_09_no_acquisition_creates_a_lock() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    world.stage.delete(KEY, Precondition::Any).await.unwrap();
    assert!(matches!(lock.renew().await, Err(Error::Missing | Error::Store(_))));
    assert!(matches!(lock.read().await, Err(Error::Missing)));
    assert!(matches!(lock.acquire(true).await, Err(Error::Missing)));
}

#[tokio::test(start_paused = true)]
async fn who_was_cut_off_and_taken_over_does_not_renew_the_lease_of_the_other() {
    let world = World::with_a_free_lock().await;
    let mut one = world.holder().await;
    world.stage.next_put(Fault::Refused);
    world.stage.next_poll(Fault::Refused);
    assert!(one.renew().await.is_err(), "its outcome is open");
    let (mut two, _) = world.instance();
    for _ in 0..2 {
        two.read().await.unwrap();
        world.after(30).await;
    }
    two.read().await.unwrap();
    two.acquire(true).await.unwrap();
    let lease = two.lock().unwrap().lease.clone();
    assert!(matches!(one.renew().await, Err(Error::Changed)));
    two.read().await.unwrap();
    assert_eq!(two.lock().unwrap().lease, lease);
    assert!(matches!(one.commit(head(one.lock().unwrap())).await, Err(Error::Changed)));
    assert!(matches!(one.purging().await, Err(Error::Changed)));
    two.read().await.unwrap();
    assert_eq!((two.state(), two.lock().unwrap().head.is_none()), (Some(LeaseState::Ours), true));
}

#[tokio::test(start_paused = true)]
async fn a_commit_without_an_answer_is_in_doubt_until_a_write_succeeds() {
    let world = World::with_a_free_lock().await;
    let mut lock = world.holder().await;
    world.stage.next_put(Fault::Late);
    assert!(lock.commit(head(lock.lock().unwrap())).await.is_err());
    assert!(lock.is_in_doubt());
    lock.renew().await.unwrap();
    assert!(!lock.is_in_doubt());
    world.stage.deliver().await;
    lock.read().await.unwrap();
    assert_eq!(lock.lock().unwrap().head, None, "it came too late");
}

#[tokio::test(start_paused = true)]
async fn whoever_let_go_speaks_of_its_own_epoch_though_it_has_read_a_later_one() {
    let world = World::with_a_free_lock().await;
    let mut first = world.holder().await;
    world.stage.next_lock_put(Fault::AnswerLost);
    world.stage.next_poll(Fault::Refused);
    assert!(first.release(None, true).await.is_err(), "it is not settled");
    let mut second = world.holder().await;
    assert_eq!(second.release(None, false).await.unwrap(), Released::Freed);
    assert_eq!(first.release(None, true).await.unwrap(), Released::Lost);
    assert_eq!((first.lock().unwrap().epoch, first.epoch()), (2, Some(1)));
    assert_eq!(second.epoch(), Some(2));
    assert_eq!(world.instance().0.epoch(), None, "who never held it says nothing");
}
