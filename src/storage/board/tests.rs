//! The board as its two sides use it.

use super::*;
use crate::clock::TestClock;
use std::time::Duration;

fn board() -> (Arc<Board>, SandboxId, SharedClock) {
    let clock: SharedClock = Arc::new(TestClock::new(1));
    (Board::new(clock.clone()), clock.sandbox_id(), clock)
}

#[tokio::test(start_paused = true)]
async fn a_follower_hears_every_phase_once_and_in_order() {
    let (board, id, _) = board();
    board.post(&id, Passing::Acquiring);
    let mut follower = board.follow(&id);
    board.post(&id, Passing::Acquired);
    board.post(&id, Passing::Unfenced);
    assert_eq!(follower.next().await, Posted { number: 2, passing: Passing::Acquired });
    assert_eq!(follower.next().await, Posted { number: 3, passing: Passing::Unfenced });
    let late = follower.next();
    tokio::pin!(late);
    assert!(futures::poll!(&mut late).is_pending());
    board.post(&id, Passing::Acquiring);
    assert_eq!(late.await.number, 4);
}

#[tokio::test(start_paused = true)]
async fn a_follower_that_fell_behind_sees_the_gap_in_the_numbers() {
    let (board, id, _) = board();
    let mut follower = board.follow(&id);
    for _ in 0..KEPT + 10 {
        board.post(&id, Passing::Acquiring);
    }
    assert_eq!(follower.next().await.number, 11);
}

#[tokio::test(start_paused = true)]
async fn many_nudges_before_the_look_are_one() {
    let (board, id, _) = board();
    board.nudge(&id);
    board.nudge(&id);
    assert_eq!(board.next_nudge().await, id);
    assert!(lock(&board.nudged).is_empty());
    let waiting = board.next_nudge();
    tokio::pin!(waiting);
    assert!(futures::poll!(&mut waiting).is_pending());
    board.nudge(&id);
    assert_eq!(waiting.await, id);
}

#[tokio::test(start_paused = true)]
async fn presence_lasts_as_long_as_the_session_and_leaving_counts_as_activity() {
    let (board, id, clock) = board();
    assert!(!board.presence(&id).ever_attached);
    let session = board.attach(&id);
    assert!(board.presence(&id).attached);
    clock.sleep(Duration::from_secs(5)).await;
    drop(session);
    let presence = board.presence(&id);
    assert!(!presence.attached && presence.ever_attached);
    assert_eq!(presence.active_at - presence.known_since, Duration::from_secs(5));
    assert_eq!(board.next_nudge().await, id);
}

#[tokio::test(start_paused = true)]
async fn no_more_are_admitted_than_there_is_room_for() {
    let (board, id, clock) = board();
    let first = board.admit(&id, 1).unwrap();
    assert!(board.admit(&clock.sandbox_id(), 1).is_none());
    let second = board.admit(&id, 1).expect("it is already here");
    drop((first, second));
    board.hold(&id, true);
    assert!(board.admit(&clock.sandbox_id(), 1).is_none());
    board.hold(&id, false);
    assert!(board.admit(&clock.sandbox_id(), 1).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_is_forgotten_only_when_nobody_reads() {
    let (board, id, _) = board();
    let follower = board.follow(&id);
    board.post(&id, Passing::Acquiring);
    board.forget(&id);
    assert_eq!(lock(&board.lines).len(), 1);
    drop(follower);
    board.forget(&id);
    assert_eq!(lock(&board.lines).len(), 0);
}

/// A board that only passes on, and what it said.
fn telling() -> (Arc<Board>, SharedClock, Arc<Mutex<Vec<Told>>>) {
    let clock: SharedClock = Arc::new(TestClock::new(1));
    let said = Arc::new(Mutex::new(Vec::new()));
    let board = Board::telling(clock.clone(), {
        let said = said.clone();
        move |told| lock(&said).push(told)
    });
    (board, clock, said)
}

#[tokio::test(start_paused = true)]
async fn a_board_of_the_api_says_whose_place_is_wanted_and_when_it_is_not_any_more() {
    let (board, clock, said) = telling();
    let (old, new) = (clock.sandbox_id(), clock.sandbox_id());
    board.hold(&old, true);
    assert!(board.make_room(&new, 1).await.is_none(), "it keeps its place");
    board.set_tenure(&old, Tenure::Spare { since: clock.now() });
    {
        let waiting = std::pin::pin!(board.make_room(&new, 1));
        assert!(futures::poll!(waiting).is_pending());
        assert_eq!(*lock(&said), [Told::Wanted(old.clone())]);
    }
    assert_eq!(lock(&said)[1..], [Told::Unwanted(old.clone())]);
    let waiting = board.make_room(&new, 1);
    tokio::pin!(waiting);
    assert!(futures::poll!(&mut waiting).is_pending());
    board.set_tenure(&old, Tenure::Leaves);
    assert!(futures::poll!(&mut waiting).is_pending());
    assert!(!board.is_wanted(&old), "it goes by itself");
    board.hold(&old, false);
    let attached = waiting.await.expect("its place is free");
    assert_eq!(lock(&said).last(), Some(&Told::Attached(new.clone())));
    drop(attached);
}

#[tokio::test(start_paused = true)]
async fn who_came_first_is_admitted_first_and_nobody_slips_in_between() {
    let (board, old, clock) = board();
    board.hold(&old, true);
    board.set_tenure(&old, Tenure::Spare { since: clock.now() });
    let (first, second) = (clock.sandbox_id(), clock.sandbox_id());
    let waiting = board.make_room(&first, 1);
    tokio::pin!(waiting);
    assert!(futures::poll!(&mut waiting).is_pending());
    board.hold(&old, false);
    assert!(board.admit(&second, 1).is_none(), "the place is promised");
    assert!(board.make_room(&second, 1).await.is_none(), "and there is no other");
    board.hold(&old, true);
    assert!(board.admit(&old, 1).is_some(), "what is here has its place");
    board.hold(&old, false);
    assert!(waiting.await.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_sign_of_life_answers_the_probe_it_was_asked_by_and_none_that_came_later() {
    let (board, id, _) = board();
    let _session = board.attach(&id);
    let mut follower = board.follow(&id);
    let first = board.probe(&id);
    assert_eq!(follower.next().await.passing, Passing::Probe { number: first });
    assert!(!board.is_alive(&id, first));
    board.alive(&id, first);
    assert_eq!(board.next_nudge().await, id, "who asked looks at once");
    let second = board.probe(&id);
    assert!(board.is_alive(&id, first) && !board.is_alive(&id, second));
}
