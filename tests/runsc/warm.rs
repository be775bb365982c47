//! Containers that are ready before anybody asks: what takes them, what becomes of broken ones, and that a sandbox
//! which began in one is like any other.

mod broken;
mod deadline;
mod warm_servers;

use std::{
    collections::BTreeSet,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use baton::{
    guard::process_handle::{ProcessHandle, pids},
    metrics::Metrics,
    runtime::{
        ArchiveSource, Container, Containers, Extract, Lifecycle, RuntimeSettings, Shape, StartSpec, WarmSettings,
    },
};
use baton_protocol::{id::SandboxId, limits::Limits};

use crate::{
    fixture::{self, Place, clock, eventually, processes, sandbox, start},
    plain_session::{Client, command},
};

/// A place with warm containers, and its figures.
struct Scene {
    place: Place,
    metrics: Metrics,
}

impl Scene {
    /// One is kept ready, and there is room for `room` sandboxes.
    async fn new(room: usize) -> Self {
        Self::with(room, |settings| settings).await
    }

    async fn with(room: usize, change: impl FnOnce(RuntimeSettings) -> RuntimeSettings) -> Self {
        let metrics = Metrics::default();
        let warm = WarmSettings { count: 1, room, limits: Limits::default() };
        let place =
            Place::with(|settings| change(RuntimeSettings { warm, metrics: metrics.clone(), ..settings })).await;
        Self { place, metrics }
    }

    fn figure(&self, name: &str) -> u64 {
        let page = self.metrics.page(0, 0);
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().unwrap())
    }

    /// The name of the container that waits, once one does.
    async fn ready(&self, but: &BTreeSet<String>) -> String {
        eventually("one is ready", || self.figure("baton_warm_ready") == 1).await;
        let mut found = names(self.place.directory.path());
        found.retain(|name| !but.contains(name));
        assert_eq!(found.len(), 1, "{found:?}");
        found.pop_first().unwrap()
    }

    async fn first_ready(&self) -> String {
        self.ready(&BTreeSet::new()).await
    }

    fn sentry(&self, name: &str) -> ProcessHandle {
        sentry(self.place.directory.path(), name)
    }

    async fn create(&self, start: &StartSpec) -> (SandboxId, Client) {
        let id = sandbox();
        self.place.containers.create(&id, start).await.unwrap();
        let client = Client::attached(clock(), &*self.place.containers, &id);
        (id, client)
    }

    async fn remove(&self, id: &SandboxId) {
        self.place.containers.remove(id).await.unwrap();
    }
}

/// The containers here, as runsc has written them down.
fn names(state_dir: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(state_dir.join("runsc")).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| entry.file_name().into_string().ok());
    files.filter_map(|file| Some(file.strip_suffix(".state")?.split_once("_sandbox:")?.0.to_owned())).collect()
}

fn sentry(state_dir: &Path, name: &str) -> ProcessHandle {
    let file = state_dir.join(format!("runsc/{name}_sandbox:{name}.state"));
    ProcessHandle::open(pids(&file).expect("it runs").sentry).unwrap()
}

fn set(names: &[&String]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).clone()).collect()
}

async fn output(client: &mut Client, script: &str) -> String {
    let exec = client.exec(command(&["bash", "-c", script]), None).await;
    String::from_utf8(client.done(exec).await.stdout.bytes.clone()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_takes_the_warm_container_and_another_one_is_made() {
    let scene = Scene::new(8).await;
    let first = scene.first_ready().await;
    let pid = scene.sentry(&first).pid();
    let (one, mut client) = scene.create(&start()).await;
    assert_eq!(scene.sentry(&first).pid(), pid, "the very same");
    assert_eq!(output(&mut client, "echo here").await, "here\n");
    assert_eq!(scene.place.containers.local_sandboxes(), std::slice::from_ref(&one), "what waits is nobody's");
    let second = scene.ready(&set(&[&first])).await;
    let (two, _) = scene.create(&start()).await;
    assert_eq!(scene.figure("baton_warm_taken_total"), 2);
    scene.remove(&one).await;
    assert!(!names(scene.place.directory.path()).contains(&first), "it was the first one's");
    let third = scene.ready(&set(&[&second])).await;
    assert_ne!(third, first, "none is used twice");
    scene.remove(&two).await;
    eventually("one is left", || names(scene.place.directory.path()) == set(&[&third])).await;
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_began_warm_has_its_own_environment_directory_limits_and_files() {
    let scene = Scene::new(8).await;
    let script = "echo $WHO ${OTHER-none}; pwd; ulimit -n; ls /srv; echo $WHO >/srv/$WHO; cat /srv/*";
    for (who, other, files) in [("one", "OTHER", 64), ("two", "WHO", 96)] {
        scene.ready(&BTreeSet::new()).await;
        let env = [("WHO".to_owned(), who.to_owned()), (other.to_owned(), who.to_owned())].into();
        let limits = Limits { files: Some(files), ..Limits::default() };
        let (id, mut client) = scene.create(&StartSpec { env, cwd: Some("/usr".to_owned()), limits, ..start() }).await;
        let other = if who == "one" { "one" } else { "none" };
        assert_eq!(output(&mut client, script).await, format!("{who} {other}\n/usr\n{files}\n{who}\n"));
        scene.remove(&id).await;
    }
    assert_eq!(scene.figure("baton_warm_taken_total"), 2);
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_began_warm_is_restored_elsewhere_with_its_marker() {
    let scene = Scene::new(8).await;
    scene.first_ready().await;
    let start = start();
    let (id, mut client) = scene.create(&start).await;
    assert_eq!(scene.figure("baton_warm_taken_total"), 1);
    let exec = client.exec(baton_protocol::agent::AgentExec { stdin: true, ..command(&["cat"]) }, None).await;
    client.stdin(exec, b"before\n").await;
    client.until("an echo", |client| client.execs[&exec].stdout.bytes == b"before\n").await;
    let containers = &scene.place.containers;
    let image = scene.place.path("image");
    containers.pause(&id).await.unwrap();
    containers.checkpoint(&id, &image).await.unwrap();
    scene.remove(&id).await;
    let directory = fixture::directory();
    let elsewhere = Containers::open(fixture::settings(directory.path()), clock()).await.unwrap();
    assert_eq!(containers.facts(), elsewhere.facts());
    elsewhere.restore(&id, &start, &image).await.unwrap();
    client.reconnect(&elsewhere, &id).await;
    client.stdin(exec, b"after\n").await;
    client.stdin_eof(exec).await;
    assert_eq!(client.done(exec).await.stdout.bytes, b"before\nafter\n");
    elsewhere.close().await;
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_for_which_it_will_not_do_leaves_it_alone() {
    let scene = Scene::new(8).await;
    let (containers, warm) = (&scene.place.containers, scene.first_ready().await);
    let disk = Limits { disk: Some(64 << 20), ..Limits::default() };
    let (id, mut client) = scene.create(&StartSpec { limits: disk, ..start() }).await;
    assert_eq!(output(&mut client, "df -m --output=size / | tail -1 | tr -d ' '; echo kept >/srv/file").await, "64\n");
    let archive = scene.place.path("archive");
    let taken = containers.snapshot(&id, &archive, Shape::Layer).await.unwrap();
    let digest = baton_protocol::id::Sha256Name::from_bits([0x5e; 32]);
    let from = ArchiveSource::Layer { base_digest: taken.base_digest.unwrap() };
    let _hold = containers.extract(&archive, &Extract { digest: digest.clone(), from }).await.unwrap();
    let (other, mut client) = scene.create(&StartSpec { rootfs: Some(digest), ..start() }).await;
    assert_eq!(output(&mut client, "cat /srv/file").await, "kept\n");
    assert_eq!(scene.figure("baton_warm_missed_total{why=\"unfit\"}"), 2);
    scene.remove(&id).await;
    scene.remove(&other).await;
    assert_eq!(names(scene.place.directory.path()), set(&[&warm]));
    scene.create(&start()).await;
    assert_eq!(scene.figure("baton_warm_taken_total"), 1);
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn there_is_none_where_there_is_no_room_for_its_sandbox() {
    let scene = Scene::new(1).await;
    let state_dir = scene.place.directory.path();
    let first = scene.first_ready().await;
    let (id, _) = scene.create(&start()).await;
    clock().sleep(Duration::from_millis(500)).await;
    assert_eq!(names(state_dir), set(&[&first]), "the instance is full");
    scene.remove(&id).await;
    let second = scene.first_ready().await;
    // A start that has no use for it needs its room.
    let disk = Limits { disk: Some(64 << 20), ..Limits::default() };
    let (id, _) = scene.create(&StartSpec { limits: disk, ..start() }).await;
    eventually("it makes room", || names(state_dir).len() == 1 && !names(state_dir).contains(&second)).await;
    scene.remove(&id).await;
    scene.first_ready().await;
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_on_its_way_out_has_none() {
    let scene = Scene::new(8).await;
    let state_dir = scene.place.directory.path();
    let first = scene.first_ready().await;
    let (id, mut client) = scene.create(&start()).await;
    scene.ready(&set(&[&first])).await;
    scene.place.containers.drain();
    eventually("only the sandbox is left", || names(state_dir) == set(&[&first])).await;
    assert_eq!(scene.figure("baton_warm_ready"), 0);
    assert_eq!(output(&mut client, "echo here").await, "here\n");
    scene.remove(&id).await;
    let (_, mut client) = scene.create(&start()).await;
    assert_eq!(output(&mut client, "echo here").await, "here\n");
    assert_eq!((names(state_dir).len(), scene.figure("baton_warm_taken_total")), (1, 1));
    scene.place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_it_is_left_when_the_instance_closes() {
    // Also in the middle of making one.
    for wait in [true, false] {
        let scene = Scene::new(8).await;
        if wait {
            scene.first_ready().await;
        } else {
            eventually("one is being made", || !processes(scene.place.directory.path()).is_empty()).await;
        }
        let found = scene.place.processes();
        scene.place.containers.close().await;
        assert!(found.iter().all(ProcessHandle::has_ended));
        assert_eq!(scene.place.processes().len(), 0);
        for empty in ["bundles", "logs", "overlay", "runsc"] {
            assert_eq!(std::fs::read_dir(scene.place.path(empty)).unwrap().count(), 0, "{empty} is empty");
        }
        let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!table.contains(scene.place.directory.path().to_str().unwrap()), "{table}");
    }
}

/// One is being made, for as long as nobody lets it go on.
async fn being_made() -> (Scene, tempfile::TempDir) {
    let names = tempfile::tempdir().unwrap();
    let runsc =
        with_shell(names.path(), &format!("while [ ! -e {} ]; do sleep 0.02; done", go(names.path()).display()));
    let scene = Scene::with(1, |settings| RuntimeSettings { runsc, ..settings }).await;
    eventually("one is being made", || runs(names.path()) == 1).await;
    (scene, names)
}

fn let_go(names: &Path) {
    std::fs::write(go(names), "").unwrap();
}

fn go(names: &Path) -> PathBuf {
    names.join("go")
}

/// A runsc before whose every `run` these lines of a shell are run; `$n` is how many there were.
fn with_shell(names: &Path, script: &str) -> PathBuf {
    let (file, runs, runsc) = (names.join("runsc"), names.join("runs"), fixture::piece("BATON_RUNSC"));
    let counted = format!("echo run >>{0}; n=$(wc -l <{0}); {script}", runs.display());
    let text = format!("#!/bin/sh\ncase \" $* \" in *' run '*) {counted};; esac\nexec {} \"$@\"\n", runsc.display());
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    file
}

fn runs(names: &Path) -> usize {
    std::fs::read_to_string(names.join("runs")).unwrap_or_default().lines().count()
}
