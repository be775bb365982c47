//! Names in a sandbox: changed, looked up, and watched over checkpoints and moves.

use std::time::Duration;

use baton_client::{Error, Exec, FileChangeKind, FileWatch, Idle, Sandbox};
use serde_json::json;

use super::{Scene, bash, persistent};

/// The changes up to this one.
async fn seen(watch: &mut FileWatch, last: &str) -> Vec<String> {
    let mut seen = Vec::new();
    while seen.last().is_none_or(|line| line != last) {
        let change = watch.next().await.unwrap().expect("the watch goes on");
        let kind = match change.kind {
            FileChangeKind::Create => "create",
            FileChangeKind::Write => "write",
            FileChangeKind::Remove => "remove",
            FileChangeKind::Rename => "rename",
            FileChangeKind::Chmod => "chmod",
            FileChangeKind::Ready | FileChangeKind::Overflow | FileChangeKind::Other => panic!("{change:?}"),
        };
        let to = change.to.map(|to| format!(" {to}")).unwrap_or_default();
        seen.push(format!("{kind} {}{to}", change.name));
    }
    seen
}

fn code<T: std::fmt::Debug>(done: Result<T, Error>) -> String {
    match done {
        Err(Error::File { code, .. }) => code,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_changed_and_every_change_is_seen_also_after_a_move() {
    let permit = crate::fixture::permit().await;
    let mut scene = Scene::with(persistent()).await;
    scene.testbed.server("other").await;
    let sandbox = &scene.sandbox;
    sandbox.make_directory("/data/deep").await.unwrap();
    let mut watch = sandbox.watch_files("/data", true).await.unwrap();
    sandbox.write_file("/data/deep/a", "x").await.unwrap();
    let changes = seen(&mut watch, "rename deep/a deep/b");
    let (changes, ()) = futures::join!(changes, async {
        assert!(sandbox.file_exists("/data/deep/a").await.unwrap());
        assert_eq!(sandbox.stat_file("/data/deep/a").await.unwrap().size, 1);
        sandbox.rename_file("/data/deep/a", "/data/deep/b").await.unwrap();
        assert!(!sandbox.file_exists("/data/deep/a").await.unwrap());
    });
    assert!(changes.iter().any(|change| change.ends_with(" deep/a")), "{changes:?}");
    assert_eq!(code(sandbox.remove_file("/data/deep", false).await), "ENOTEMPTY");
    assert_eq!(code(sandbox.rename_file("/data/none", "/data/x").await), "ENOENT");
    assert_eq!(code(sandbox.watch_files("/data/none", false).await.map(drop)), "ENOENT");
    // A watch is no running command: a checkpoint need not be live.
    scene.testbed.network(&scene.proxy, json!({"to": "other"})).await;
    let before = sandbox.instance();
    sandbox.handoff().await.unwrap();
    assert_ne!(sandbox.instance(), before);
    sandbox.run(bash("echo y > /data/deep/c; mkdir /data/new; echo z > /data/new/d")).await.unwrap().check().unwrap();
    let changes = seen(&mut watch, "create new/d").await;
    assert!(changes.iter().any(|change| change == "create deep/c"), "{changes:?}");
    sandbox.remove_file("/data", true).await.unwrap();
    seen(&mut watch, "remove data").await;
    assert_eq!(watch.next().await.unwrap(), None);
    scene.end().await;
    drop(permit);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_keeps_no_sandbox_from_being_idle() {
    let permit = crate::fixture::permit().await;
    let scene = Scene::with(persistent()).await;
    let mut watch = scene.sandbox.watch_files("/tmp", false).await.unwrap();
    assert_eq!(
        scene.sandbox.set_idle_timeout(Idle::After(Duration::from_millis(500))).await.unwrap(),
        Idle::After(Duration::from_secs(1))
    );
    let Err(Error::Ended(end)) = watch.next().await else { panic!("the watch went on") };
    assert_eq!(end.reason, Some(baton_client::EndReason::Idle), "{end}");
    let (id, token) = (scene.sandbox.id().clone(), scene.sandbox.token().clone());
    let again = Sandbox::attach(&scene.proxy.url, id, token).await.unwrap();
    again.kill().await.unwrap();
    scene.testbed.end().await;
    drop(permit);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_program_ends_as_in_a_shell() {
    let permit = crate::fixture::permit().await;
    let scene = Scene::new().await;
    let ended = scene.sandbox.run(Exec::argv(["nope"])).await.unwrap();
    assert_eq!((ended.outcome.exit_code, &ended.stderr[..]), (Some(127), &b"nope: command not found\n"[..]));
    assert_eq!(ended.to_string(), "exit code 127\nstderr:\nnope: command not found");
    let ended = scene.sandbox.run(Exec::argv(["/etc/passwd"])).await.unwrap();
    assert_eq!((ended.outcome.exit_code, &ended.stderr[..]), (Some(126), &b"/etc/passwd: Permission denied\n"[..]));
    scene.end().await;
    drop(permit);
}
