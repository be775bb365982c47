//! How far long work has come, as the reconciler tells it on the bus.

use baton::bus::{DOWNLOAD, LifecycleEvent, SNAPSHOT, UPLOAD};
use baton_protocol::metadata::{DesiredState, SpecRequest};

use crate::instances::{World, persistent};

/// What was told of one kind of work; it only grows, and never beyond its end.
#[track_caller]
fn told(passed: &[LifecycleEvent], of: &str) -> usize {
    let mut last = 0;
    let mut count = 0;
    for passing in passed {
        if let LifecycleEvent::Progress { what, done, total } = passing {
            assert_eq!(what, of, "{passed:?}");
            assert!(*done > last && done <= total, "{passed:?}");
            (last, count) = (*done, count + 1);
        }
    }
    count
}

#[tokio::test(start_paused = true)]
async fn what_takes_long_is_told_of_and_what_does_not_is_not() {
    let world = World::new();
    let one = world.instance();
    let mut visit = one.create(persistent).await;
    visit.until_running().await;
    for (is_slow, words) in [(false, 0..1), (true, 2..5)] {
        if is_slow {
            one.store.crawl(&world.clock);
        }
        let name = if is_slow { "slow" } else { "quick" };
        let request = SpecRequest::Snapshot { name: name.parse().unwrap(), full: false };
        let nonce = world.clock.nonce();
        one.edit(&visit.id, |spec| drop(spec.requests.insert(nonce.clone(), request.clone()))).await;
        while !one.metadata(&visit.id).await.unwrap().status.answers.contains_key(&nonce) {
            world.after(1).await;
        }
        one.edit(&visit.id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
        let passed = visit.until_left().await;
        let (snapshot, checkpoint) = passed.split_at(
            passed.iter().position(|passing| matches!(passing, LifecycleEvent::Checkpointing { .. })).unwrap(),
        );
        assert!(words.contains(&told(snapshot, SNAPSHOT)), "{snapshot:?}");
        assert!(words.contains(&told(checkpoint, UPLOAD)), "{checkpoint:?}");
        visit = one.attach(&visit.id).await;
        let passed = visit.until_running().await;
        assert!(words.contains(&told(&passed, DOWNLOAD)), "{passed:?}");
    }
    one.stop().await;
}
