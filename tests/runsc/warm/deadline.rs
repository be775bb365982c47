//! The deadline of a sandbox that began warm.

use super::*;
use crate::fence::guard_of;
use rustix::process::Signal;

const TICKER: &str = "i=0; while :; do echo tick $i; i=$((i+1)); sleep 0.005; done";

async fn ticks(client: &mut Client) {
    client.exec(command(&["bash", "-c", TICKER]), Some(|n| format!("tick {n}\n"))).await;
    client.until("a tick", |client| client.execs[&1].stdout.lines() > 2).await;
}

async fn fenced(scene: &Scene, id: &SandboxId) {
    let mut seen = scene.place.containers.watch(id);
    let fenced = seen.wait_for(|seen| seen.container == Container::Fenced);
    clock().timeout(Duration::from_secs(30), fenced).await.expect("the guard stops it").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn from_the_moment_it_is_taken_its_deadline_counts() {
    let scene = Scene::new(1).await;
    let warm = scene.first_ready().await;
    let sentry = scene.sentry(&warm);
    // Longer than a lease would have lasted.
    clock().sleep(Duration::from_millis(500)).await;
    let (id, mut client) =
        scene.create(&StartSpec { deadline: clock().now() + Duration::from_millis(600), ..start() }).await;
    ticks(&mut client).await;
    // It reads on, so that nothing is left on the way.
    client.read_for(Duration::from_millis(700)).await;
    fenced(&scene, &id).await;
    assert!(sentry.is_stopped() && !sentry.has_ended());
    client.read_for(Duration::from_millis(100)).await;
    let at = client.execs[&1].stdout.at;
    client.read_for(Duration::from_millis(200)).await;
    assert_eq!(client.execs[&1].stdout.at, at, "no output after it");
    scene.place.containers.extend(&id, clock().now() + Duration::from_secs(60)).await.unwrap();
    scene.place.containers.resume(&id).await.unwrap();
    client.until("it goes on", |client| client.execs[&1].stdout.at > at + 100).await;
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_begins_in_it_after_the_deadline() {
    let scene = Scene::new(8).await;
    let warm = scene.first_ready().await;
    let (sentry, id) = (scene.sentry(&warm), sandbox());
    let late = StartSpec { deadline: clock().now(), ..start() };
    scene.place.containers.create(&id, &late).await.unwrap_err();
    assert_eq!(scene.place.containers.watch(&id).borrow().container, Container::Absent);
    assert!(sentry.has_ended(), "the guard killed it");
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_that_comes_while_it_is_taken_counts() {
    let (scene, names) = being_made().await;
    let (id, deadline) = (sandbox(), clock().now() + Duration::from_millis(600));
    let (containers, start, name) = (scene.place.containers.clone(), StartSpec { deadline, ..start() }, id.clone());
    let starting = tokio::spawn(async move { containers.create(&name, &start).await });
    let later = clock().now() + Duration::from_secs(60);
    while scene.place.containers.extend(&id, later).await.is_err() {
        assert!(clock().now() < deadline, "it cannot be extended while it waits");
        clock().sleep(Duration::from_millis(5)).await;
    }
    let_go(names.path());
    starting.await.unwrap().unwrap();
    assert_eq!(scene.figure("baton_warm_taken_total"), 1);
    clock().sleep_until(deadline + Duration::from_millis(300)).await;
    assert_eq!(scene.place.containers.watch(&id).borrow().container, Container::Running);
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_guard_knows_the_warm_ones_too() {
    let scene = Scene::new(1).await;
    let warm = scene.first_ready().await;
    let sentry = scene.sentry(&warm);
    let state_dir = scene.place.directory.path().to_owned();
    let old = guard_of(std::process::id(), &state_dir);
    old.signal(Signal::KILL).unwrap();
    eventually("the old one is gone", || old.has_ended()).await;
    let (id, mut client) =
        scene.create(&StartSpec { deadline: clock().now() + Duration::from_secs(1), ..start() }).await;
    assert_eq!(scene.sentry(&warm).pid(), sentry.pid(), "the very same");
    ticks(&mut client).await;
    fenced(&scene, &id).await;
    assert!(sentry.is_stopped());
    scene.place.close().await;
}
