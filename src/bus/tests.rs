//! The bus as its two sides use it.

use super::*;
use crate::testkit::TestClock;
use std::time::Duration;

fn bus() -> (Arc<Bus>, SandboxId, SharedClock) {
    let clock: SharedClock = Arc::new(TestClock::new(1));
    (Bus::new(clock.clone()), clock.sandbox_id(), clock)
}

#[tokio::test(start_paused = true)]
async fn a_follower_hears_every_phase_once_and_in_order() {
    let (bus, id, _) = bus();
    bus.post(&id, LifecycleEvent::Acquiring);
    let mut subscription = bus.follow(&id);
    bus.post(&id, LifecycleEvent::Acquired);
    bus.post(&id, LifecycleEvent::Unfenced);
    assert_eq!(subscription.next().await, NumberedEvent { number: 2, passing: LifecycleEvent::Acquired });
    assert_eq!(subscription.next().await, NumberedEvent { number: 3, passing: LifecycleEvent::Unfenced });
    let late = subscription.next();
    tokio::pin!(late);
    assert!(futures::poll!(&mut late).is_pending());
    bus.post(&id, LifecycleEvent::Acquiring);
    assert_eq!(late.await.number, 4);
}

#[tokio::test(start_paused = true)]
async fn a_follower_that_fell_behind_sees_the_gap_in_the_numbers() {
    let (bus, id, _) = bus();
    let mut subscription = bus.follow(&id);
    for _ in 0..EVENT_BUFFER + 10 {
        bus.post(&id, LifecycleEvent::Acquiring);
    }
    assert_eq!(subscription.next().await.number, 11);
}

#[tokio::test(start_paused = true)]
async fn many_nudges_before_the_look_are_one() {
    let (bus, id, _) = bus();
    bus.wake(&id);
    bus.wake(&id);
    assert_eq!(bus.next_wakeup().await, id);
    assert!(bus.woken.lock().is_empty());
    let waiting = bus.next_wakeup();
    tokio::pin!(waiting);
    assert!(futures::poll!(&mut waiting).is_pending());
    bus.wake(&id);
    assert_eq!(waiting.await, id);
}

#[tokio::test(start_paused = true)]
async fn presence_lasts_as_long_as_the_session_and_leaving_counts_as_activity() {
    let (bus, id, clock) = bus();
    assert!(!bus.presence(&id).ever_attached);
    let session = bus.attach(&id);
    assert!(bus.presence(&id).attached);
    clock.sleep(Duration::from_secs(5)).await;
    drop(session);
    let presence = bus.presence(&id);
    assert!(!presence.attached && presence.ever_attached);
    assert_eq!(presence.active_at - presence.known_since, Duration::from_secs(5));
    assert_eq!(bus.next_wakeup().await, id);
}

#[tokio::test(start_paused = true)]
async fn a_placement_waits_until_it_is_answered_or_another_session_comes() {
    let (bus, id, _) = bus();
    let first = bus.attach(&id);
    assert_eq!(bus.presence(&id).placed, None);
    bus.placed(&id);
    bus.post(&id, LifecycleEvent::Acquiring);
    assert_eq!(bus.presence(&id).placed, Some(1), "it is under way");
    bus.post(&id, LifecycleEvent::Unfenced);
    bus.post(&id, LifecycleEvent::LeaseLost { message: String::new() });
    assert_eq!(bus.presence(&id).placed, None);
    bus.placed(&id);
    assert_eq!(bus.presence(&id).placed, Some(2), "it asks again");
    drop(first);
    let _second = bus.attach(&id);
    assert_eq!(bus.presence(&id).placed, None);
}

#[tokio::test(start_paused = true)]
async fn no_more_are_admitted_than_there_is_room_for() {
    let (bus, id, clock) = bus();
    let first = bus.admit(&id, 1).unwrap();
    assert!(bus.admit(&clock.sandbox_id(), 1).is_none());
    let second = bus.admit(&id, 1).expect("it is already here");
    drop((first, second));
    bus.set_held(&id, true);
    assert!(bus.admit(&clock.sandbox_id(), 1).is_none());
    bus.set_held(&id, false);
    assert!(bus.admit(&clock.sandbox_id(), 1).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_is_forgotten_only_when_nobody_reads() {
    let (bus, id, _) = bus();
    let subscription = bus.follow(&id);
    bus.post(&id, LifecycleEvent::Acquiring);
    bus.forget(&id);
    assert_eq!(bus.entries.lock().len(), 1);
    drop(subscription);
    bus.forget(&id);
    assert_eq!(bus.entries.lock().len(), 0);
}

/// A bus that only forwards, and the messages it forwarded.
fn telling() -> (Arc<Bus>, SharedClock, Arc<Mutex<Vec<BusMessage>>>) {
    let clock: SharedClock = Arc::new(TestClock::new(1));
    let said = Arc::new(Mutex::new(Vec::new()));
    let bus = Bus::telling(clock.clone(), {
        let said = said.clone();
        move |told| said.lock().push(told)
    });
    (bus, clock, said)
}

#[tokio::test(start_paused = true)]
async fn a_board_of_the_api_says_whose_place_is_wanted_and_when_it_is_not_any_more() {
    let (bus, clock, said) = telling();
    let (old, new) = (clock.sandbox_id(), clock.sandbox_id());
    bus.set_held(&old, true);
    assert!(bus.make_room(&new, 1).await.is_none(), "it keeps its place");
    bus.set_tenure(&old, Evictability::Spare { since: clock.now() });
    {
        let waiting = std::pin::pin!(bus.make_room(&new, 1));
        assert!(futures::poll!(waiting).is_pending());
        assert_eq!(*said.lock(), [BusMessage::Wanted(old.clone())]);
    }
    assert_eq!(said.lock()[1..], [BusMessage::Unwanted(old.clone())]);
    let waiting = bus.make_room(&new, 1);
    tokio::pin!(waiting);
    assert!(futures::poll!(&mut waiting).is_pending());
    bus.set_tenure(&old, Evictability::Leaves);
    assert!(futures::poll!(&mut waiting).is_pending());
    assert!(!bus.is_wanted(&old), "it goes by itself");
    bus.set_held(&old, false);
    let attached = waiting.await.expect("its place is free");
    assert_eq!(said.lock().last(), Some(&BusMessage::Attached(new.clone())));
    drop(attached);
}

#[tokio::test(start_paused = true)]
async fn who_came_first_is_admitted_first_and_nobody_slips_in_between() {
    let (bus, old, clock) = bus();
    bus.set_held(&old, true);
    bus.set_tenure(&old, Evictability::Spare { since: clock.now() });
    let (first, second) = (clock.sandbox_id(), clock.sandbox_id());
    let waiting = bus.make_room(&first, 1);
    tokio::pin!(waiting);
    assert!(futures::poll!(&mut waiting).is_pending());
    bus.set_held(&old, false);
    assert!(bus.admit(&second, 1).is_none(), "the place is promised");
    assert!(bus.make_room(&second, 1).await.is_none(), "and there is no other");
    bus.set_held(&old, true);
    assert!(bus.admit(&old, 1).is_some(), "what is here has its place");
    bus.set_held(&old, false);
    assert!(waiting.await.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_sign_of_life_answers_the_probe_it_was_asked_by_and_none_that_came_later() {
    let (bus, id, _) = bus();
    let _session = bus.attach(&id);
    let mut subscription = bus.follow(&id);
    let first = bus.probe(&id);
    assert_eq!(subscription.next().await.passing, LifecycleEvent::Probe { number: first });
    assert!(!bus.is_alive(&id, first));
    bus.alive(&id, first);
    assert_eq!(bus.next_wakeup().await, id, "who asked looks at once");
    let second = bus.probe(&id);
    assert!(bus.is_alive(&id, first) && !bus.is_alive(&id, second));
}
