//! Input of a command that several clients write to, one after the other.

use baton_client::{Exec, ExecId, Offsets, Sandbox};
use serde_json::json;

use super::{Scene, persistent, taken, text, until};

/// The bytes that a command has read already are not counted against those that another client writes.
pub async fn input_after_an_attach_is_exact() {
    let mut scene = Scene::with(persistent()).await;
    scene.testbed.server("other").await;
    let cat = Exec::argv(["cat"]).stdin().id(ExecId::parse("cat").unwrap());
    let mut running = scene.sandbox.exec(cat).await.unwrap();
    running.write_stdin("AB\n").await.unwrap();
    until(&mut taken(&mut running), "AB\n").await;
    let (id, token) = (scene.sandbox.id().clone(), scene.sandbox.token().clone());
    for (server, line) in [("a", "a longer line\n"), ("other", "the last one\n")] {
        scene.sandbox.close().await;
        scene.testbed.network(&scene.proxy, json!({"to": server})).await;
        scene.sandbox = Sandbox::attach(&scene.proxy.url, id.clone(), token.clone()).await.unwrap();
        let mut running = scene.sandbox.follow(&ExecId::parse("cat").unwrap(), Offsets::default()).await.unwrap();
        running.write_stdin(line).await.unwrap();
        until(&mut taken(&mut running), line).await;
    }
    scene.sandbox.close().await;
    scene.sandbox = Sandbox::attach(&scene.proxy.url, id, token).await.unwrap();
    let running = scene.sandbox.follow(&ExecId::parse("cat").unwrap(), Offsets::default()).await.unwrap();
    running.close_stdin();
    let ended = running.collect().await.unwrap();
    assert_eq!(text(&ended.stdout), "AB\na longer line\nthe last one\n");
    scene.end().await;
}

/// Another client, over a network of its own, writes a line while the connection of the first stands still.
async fn other_writes(scene: &mut Scene, line: &str, offset: u64) {
    scene.testbed.network(&scene.proxy, json!({"stall": true})).await;
    let proxy = scene.testbed.proxy("a").await;
    let (id, token) = (scene.sandbox.id().clone(), scene.sandbox.token().clone());
    let other = Sandbox::attach(&proxy.url, id, token).await.unwrap();
    let from = Offsets { stdout: offset, ..Offsets::default() };
    let mut followed = other.follow(&ExecId::parse("cat").unwrap(), from).await.unwrap();
    followed.write_stdin(line.to_owned()).await.unwrap();
    assert_eq!(until(&mut taken(&mut followed), line).await, line);
    other.close().await;
}

/// Bytes that another client wrote meanwhile are told from our own, and never cut off from them.
pub async fn input_after_that_of_another_client_is_exact() {
    let mut scene = Scene::new().await;
    let id = ExecId::parse("cat").unwrap();
    let mut running = scene.sandbox.exec(Exec::argv(["cat"]).stdin().id(id.clone())).await.unwrap();
    let mut stdout = taken(&mut running);
    running.write_stdin("one\n").await.unwrap();
    until(&mut stdout, "one\n").await;
    // By now the input is acknowledged, too.
    scene.sandbox.run(Exec::argv(["true"])).await.unwrap();
    other_writes(&mut scene, "two\n", 4).await;
    scene.testbed.network(&scene.proxy, json!({"stall": false, "cut": true})).await;
    until(&mut stdout, "two\n").await;
    running.write_stdin("three\n").await.unwrap();
    assert_eq!(until(&mut stdout, "three\n").await, "three\n");
    scene.sandbox.run(Exec::argv(["true"])).await.unwrap();
    // Written into a connection that is dead: as long as what the other one wrote, and not taken for it.
    other_writes(&mut scene, "four\n", 14).await;
    running.write_stdin("lost\n").await.unwrap();
    scene.testbed.network(&scene.proxy, json!({"stall": false, "cut": true})).await;
    let lost = running.wait().await.unwrap();
    assert!(lost.error.as_ref().is_some_and(|why| why.contains("another client wrote input")), "{lost:?}");
    drop((running, stdout));
    let from = Offsets { stdout: 19, ..Offsets::default() };
    let running = scene.sandbox.follow(&id, from).await.unwrap();
    running.write_stdin("five\n").await.unwrap();
    running.close_stdin();
    let ended = running.collect().await.unwrap();
    assert_eq!((text(&ended.stdout), ended.outcome.exit_code), ("five\n", Some(0)));
    scene.end().await;
}
