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
