//! A server that dies after the last checkpoint: the work since then is lost, and the caller is told.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use baton_client::{CheckpointOptions, Connection, Options, RollBack};

use super::{Scene, bash, persistent, taken, text, tick, ticks, until};

pub async fn a_roll_back_is_loud() {
    let reported = Arc::new(Mutex::new(Vec::<RollBack>::new()));
    let sink = reported.clone();
    let on_roll_back = Arc::new(move |roll_back: &RollBack| sink.lock().unwrap().push(roll_back.clone()));
    let connection = Connection { on_roll_back: Some(on_roll_back), ..Connection::default() };
    let mut scene = Scene::with(Options { connection, ..persistent() }).await;

    let mut running = scene.sandbox.exec(tick(40)).await.unwrap();
    let mut stdout = taken(&mut running);
    until(&mut stdout, "line 5\n").await;
    let checkpoint = scene.sandbox.checkpoint_with(CheckpointOptions { live: true, keep_running: true }).await.unwrap();
    let mut later = scene.sandbox.exec(bash("sleep 60")).await.unwrap();
    until(&mut stdout, "line 25\n").await;
    drop(stdout);
    let Scene { testbed, proxy, .. } = &mut scene;
    testbed.crash("a", proxy).await;

    let lost = later.wait().await.unwrap();
    assert!(lost.rolled_back && lost.error.is_some(), "{lost:?}");
    let outcome = running.wait().await.unwrap();
    assert_eq!((outcome.exit_code, outcome.rolled_back), (Some(7), true));
    let expected: Vec<_> = reported.lock().unwrap().clone();
    assert_eq!(scene.sandbox.roll_backs(), expected);
    assert!(
        matches!(&expected[..], [one] if one.checkpoint_id == checkpoint && one.age > Duration::ZERO),
        "{expected:?}"
    );
    let after = scene.sandbox.run(bash("seq 40 | sed 's/^/line /'")).await.unwrap();
    assert!(!after.outcome.rolled_back);
    assert_eq!(text(&after.stdout), ticks(40));
    scene.end().await;
}
