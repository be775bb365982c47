//! Warm containers that die, hang or never come: a create goes on without them.

use super::*;
use rustix::process::Signal;

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_container_that_was_killed_costs_nobody_anything_and_another_one_is_made() {
    let scene = Scene::new(8).await;
    for _ in 0..2 {
        let dead = scene.first_ready().await;
        scene.sentry(&dead).signal(Signal::KILL).unwrap();
        // At once, whether it was noticed or not.
        let (id, mut client) = scene.create(&start()).await;
        assert_eq!(output(&mut client, "echo here").await, "here\n");
        eventually("it is removed", || !scene.place.path("bundles").join(&dead).exists()).await;
        assert!(!names(scene.place.directory.path()).contains(&dead));
        scene.remove(&id).await;
    }
    assert_eq!(scene.figure("baton_warm_taken_total"), 0);
    scene.first_ready().await;
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_dies_while_nobody_asks_is_replaced() {
    let scene = Scene::new(8).await;
    let dead = scene.first_ready().await;
    scene.sentry(&dead).signal(Signal::KILL).unwrap();
    eventually("it is removed", || !scene.place.path("bundles").join(&dead).exists()).await;
    assert_ne!(scene.first_ready().await, dead);
    scene.create(&start()).await;
    assert_eq!(scene.figure("baton_warm_taken_total"), 1);
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_container_that_hangs_is_given_up_soon_and_killed() {
    let scene = Scene::new(8).await;
    let hanging = scene.first_ready().await;
    let stopped = scene.sentry(&hanging);
    stopped.signal(Signal::STOP).unwrap();
    let began = clock().now();
    let (id, mut client) = scene.create(&start()).await;
    println!("created after {:?}", clock().now() - began);
    assert!(clock().now() - began < Duration::from_secs(10));
    eventually("nothing of the sandbox is left in it", || stopped.has_ended()).await;
    assert_eq!(output(&mut client, "echo here").await, "here\n");
    assert_eq!(scene.figure("baton_warm_missed_total{why=\"broken\"}"), 1);
    eventually("it is removed", || !scene.place.path("bundles").join(&hanging).exists()).await;
    scene.remove(&id).await;
    scene.first_ready().await;
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_waits_for_the_one_that_is_being_made() {
    let (scene, names) = being_made().await;
    let start = start();
    let create = scene.create(&start);
    let soon = async {
        clock().sleep(Duration::from_millis(100)).await;
        let_go(names.path());
    };
    let ((_, mut client), ()) = tokio::join!(create, soon);
    assert_eq!(output(&mut client, "echo here").await, "here\n");
    assert_eq!((runs(names.path()), scene.figure("baton_warm_taken_total")), (1, 1));
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_does_not_wait_for_ever_for_the_one_that_is_being_made() {
    let names = tempfile::tempdir().unwrap();
    let runsc = with_shell(names.path(), "[ $n != 1 ] || sleep 3");
    let scene = Scene::with(8, |settings| RuntimeSettings { runsc, ..settings }).await;
    eventually("one is being made", || runs(names.path()) == 1).await;
    let (id, mut client) = scene.create(&start()).await;
    assert_eq!(output(&mut client, "echo here").await, "here\n");
    assert_eq!(scene.figure("baton_warm_missed_total{why=\"empty\"}"), 1, "it began from nothing");
    let own = names_of(&scene, &id).await;
    scene.ready(&own).await;
    scene.place.close().await;
}

/// The only container that runs, which is this sandbox's.
async fn names_of(scene: &Scene, id: &SandboxId) -> BTreeSet<String> {
    assert_eq!(scene.place.containers.local_sandboxes(), std::slice::from_ref(id));
    names(scene.place.directory.path())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_cannot_be_made_hurts_no_create_and_is_tried_again() {
    let names = tempfile::tempdir().unwrap();
    let runsc = with_shell(names.path(), "[ $n != 1 ] || exit 1");
    let scene = Scene::with(8, |settings| RuntimeSettings { runsc, ..settings }).await;
    eventually("one failed", || runs(names.path()) == 1).await;
    let (id, mut client) = scene.create(&start()).await;
    assert_eq!(output(&mut client, "echo here").await, "here\n");
    scene.remove(&id).await;
    scene.first_ready().await;
    scene.place.close().await;
}
