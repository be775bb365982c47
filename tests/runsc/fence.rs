//! Deadlines, the guard and the server's end, with real containers.

use std::{
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    process::{Command as Program, Stdio},
    time::{Duration, Instant},
};

use baton::{
    guard::process_handle::ProcessHandle,
    runtime::{Container, Containers, Error, Lifecycle, RuntimeSettings, StartSpec},
};
use rustix::process::Signal;

use crate::{
    fixture::{self, Place, clock, eventually, sandbox, start},
    plain_session::{Client, command},
};

const TICKER: &str = "i=0; while :; do echo tick $i; i=$((i+1)); sleep 0.005; done";

fn tick(n: u64) -> String {
    format!("tick {n}\n")
}

async fn ticking(place: &Place, start: &StartSpec) -> (baton_protocol::id::SandboxId, Client) {
    let id = sandbox();
    place.containers.create(&id, start).await.unwrap();
    let mut client = Client::attached(clock(), &*place.containers, &id);
    client.exec(command(&["bash", "-c", TICKER]), Some(tick)).await;
    client.until("a tick", |client| client.execs[&1].stdout.lines() > 2).await;
    (id, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_deadline_all_output_ends_and_a_resume_goes_on_where_it_was() {
    let place = Place::new().await;
    let (id, mut client) = ticking(&place, &start()).await;
    let mut seen = place.containers.watch(&id);
    place.containers.extend(&id, clock().now() + Duration::from_millis(200)).await.unwrap();
    seen.wait_for(|seen| seen.container == Container::Fenced).await.unwrap();
    assert!(place.processes().iter().any(ProcessHandle::is_stopped));
    // What was in the pipes comes; then nothing does.
    client.read_for(Duration::from_millis(300)).await;
    let at = client.execs[&1].stdout.at;
    client.read_for(Duration::from_millis(300)).await;
    assert_eq!(client.execs[&1].stdout.at, at);
    assert!(matches!(place.containers.resume(&id).await, Err(Error::NotIn(_))));
    place.containers.extend(&id, clock().now() + Duration::from_secs(60)).await.unwrap();
    place.containers.resume(&id).await.unwrap();
    client.until("it goes on", |client| client.execs[&1].stdout.at > at + 100).await;
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_in_the_middle_of_a_checkpoint_keeps_the_sandbox() {
    let place = Place::new().await;
    let (id, mut client) = ticking(&place, &start()).await;
    place.containers.pause(&id).await.unwrap();
    let image = place.path("image");
    let (checkpoint, fenced) = tokio::join!(place.containers.checkpoint(&id, &image), place.containers.fence(&id));
    fenced.unwrap();
    println!("the checkpoint: {checkpoint:?}");
    place.containers.extend(&id, clock().now() + Duration::from_secs(60)).await.unwrap();
    place.containers.resume(&id).await.unwrap();
    let at = client.execs[&1].stdout.at;
    client.until("it goes on", |client| client.execs[&1].stdout.at > at + 100).await;
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_in_the_middle_of_a_pause_keeps_the_sandbox() {
    let place = Place::new().await;
    let (id, mut client) = ticking(&place, &start()).await;
    let mut seen = place.containers.watch(&id);
    // It hears the question and answers it much later.
    let processes = place.processes();
    processes.iter().for_each(|process| process.signal(Signal::STOP).unwrap());
    let asked_and_fenced = async {
        seen.wait_for(|seen| seen.container == Container::Paused).await.unwrap();
        place.containers.fence(&id).await.unwrap();
    };
    let (paused, ()) = tokio::join!(place.containers.pause(&id), asked_and_fenced);
    assert!(matches!(paused, Err(Error::Failed { what: "pause", .. })), "{paused:?}");
    processes.iter().for_each(|process| process.signal(Signal::CONT).unwrap());
    for _ in 0..2 {
        place.containers.extend(&id, clock().now() + Duration::from_secs(60)).await.unwrap();
        place.containers.resume(&id).await.unwrap();
        let at = client.execs[&1].stdout.at;
        client.until("it goes on", |client| client.execs[&1].stdout.at > at + 100).await;
        place.containers.pause(&id).await.unwrap();
    }
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_has_not_answered_by_its_deadline_is_killed() {
    let place = Place::new().await;
    let id = sandbox();
    let late = StartSpec { deadline: clock().now() + Duration::from_millis(20), ..start() };
    let error = place.containers.create(&id, &late).await.unwrap_err();
    println!("{error}");
    assert_eq!(place.containers.watch(&id).borrow().container, Container::Absent);
    eventually("nothing runs", || place.processes().is_empty()).await;
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_takes_longer_than_its_lease_lasts_goes_on_when_that_is_renewed() {
    let names = tempfile::tempdir().unwrap();
    let (slow, go) = (names.path().join("runsc"), names.path().join("go"));
    let runsc = fixture::piece("BATON_RUNSC");
    let waits = format!("case \" $* \" in *' run '*) while [ ! -e {} ]; do sleep 0.02; done;; esac", go.display());
    std::fs::write(&slow, format!("#!/bin/sh\n{waits}\nexec {} \"$@\"\n", runsc.display())).unwrap();
    std::fs::set_permissions(&slow, std::fs::Permissions::from_mode(0o755)).unwrap();
    let place = Place::with(|settings| RuntimeSettings { runsc: slow, ..settings }).await;
    let (id, deadline) = (sandbox(), clock().now() + Duration::from_secs(2));
    let (containers, start, name) = (place.containers.clone(), StartSpec { deadline, ..start() }, id.clone());
    let starting = tokio::spawn(async move { containers.create(&name, &start).await });
    let later = clock().now() + Duration::from_secs(60);
    while place.containers.extend(&id, later).await.is_err() {
        assert!(clock().now() < deadline, "it cannot be extended while it starts");
        clock().sleep(Duration::from_millis(10)).await;
    }
    clock().sleep_until(deadline + Duration::from_millis(500)).await;
    std::fs::write(&go, "").unwrap();
    starting.await.unwrap().unwrap();
    assert_eq!(place.containers.watch(&id).borrow().container, Container::Running);
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_guard_dies_everything_stands_until_there_is_a_new_one() {
    // A name of the program that can be taken away, so that for a while no guard can start.
    let names = tempfile::tempdir().unwrap();
    let (name, away) = (names.path().join("baton"), names.path().join("away"));
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_baton"), &name).unwrap();
    let place = Place::with(|settings| RuntimeSettings { exe: name.clone(), ..settings }).await;
    let (id, mut client) = ticking(&place, &start()).await;
    let (held, _) = ticking(&place, &start()).await;
    place.containers.fence(&held).await.unwrap();
    let old = guard_of(std::process::id(), place.directory.path());
    let mut seen = place.containers.watch(&id);
    std::fs::rename(&name, &away).unwrap();
    old.signal(Signal::KILL).unwrap();
    seen.wait_for(|seen| seen.container == Container::Fenced).await.unwrap();
    assert!(place.processes().iter().filter(|process| process.is_stopped()).count() >= 2, "both sentries stand");
    std::fs::rename(&away, &name).unwrap();
    seen.wait_for(|seen| seen.container == Container::Running).await.unwrap();
    assert_eq!(place.containers.watch(&held).borrow().container, Container::Fenced);
    let at = client.execs[&1].stdout.at;
    client.until("it goes on", |client| client.execs[&1].stdout.at > at + 100).await;
    // The new guard guards.
    assert_ne!(guard_of(std::process::id(), place.directory.path()).pid(), old.pid());
    place.containers.extend(&id, clock().now() + Duration::from_millis(50)).await.unwrap();
    seen.wait_for(|seen| seen.container == Container::Fenced).await.unwrap();
    place.close().await;
}

/// The guard among a process's children that knows this state directory.
pub fn guard_of(server: u32, state_dir: &std::path::Path) -> ProcessHandle {
    // Guards have no name of their own; the one whose stdin we hold is found by its arguments.
    let mut guards = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse::<u32>().ok());
        let directory = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
        if line.ends_with("baton\0guard\0") && parent == Some(server) && directory == state_dir {
            guards.push(pid);
        }
    }
    guards.sort_unstable();
    ProcessHandle::open(*guards.last().expect("a guard")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_ends_is_seen_as_stopped() {
    let place = Place::new().await;
    let (id, mut client) = ticking(&place, &start()).await;
    let mut seen = place.containers.watch(&id);
    for process in place.processes() {
        process.signal(Signal::KILL).unwrap();
    }
    seen.wait_for(|seen| seen.container == Container::Stopped).await.unwrap();
    while client.step().await {}
    assert!(matches!(place.containers.pause(&id).await, Err(Error::NotIn(_))));
    place.containers.remove(&id).await.unwrap();
    assert_eq!(seen.borrow().container, Container::Absent);
    place.close().await;
}

const ROLE: &str = "BATON_TEST_SERVER";
/// How long its containers may run, in milliseconds.
const HOLD: &str = "BATON_TEST_HOLD";

/// Not a test of its own: with the variable set this process is a server until it is killed.
#[tokio::test(flavor = "multi_thread")]
async fn as_a_server() {
    let Some(state_dir) = std::env::var_os(ROLE) else { return };
    let containers = Containers::open(fixture::settings(state_dir.as_ref()), clock()).await.unwrap();
    for _ in 0..3 {
        let id = sandbox();
        containers.create(&id, &start()).await.unwrap();
        let mut client = Client::attached(clock(), &containers, &id);
        client.exec(command(&["bash", "-c", "while :; do :; done"]), None).await;
        client.until("it runs", |client| client.execs[&1].started).await;
        std::mem::forget(client);
    }
    let ids = containers.local_sandboxes();
    containers.pause(&ids[0]).await.unwrap();
    containers.fence(&ids[1]).await.unwrap();
    if let Some(hold) = std::env::var(HOLD).ok().and_then(|text| text.parse().ok()) {
        for id in &ids {
            containers.extend(id, clock().now() + Duration::from_millis(hold)).await.unwrap();
        }
        // Orders are sent later and in turn: once this one stands, the guard has heard the others too.
        let last = sandbox();
        containers.create(&last, &start()).await.unwrap();
        containers.extend(&last, clock().now()).await.unwrap();
        containers.watch(&last).wait_for(|seen| seen.container == Container::Fenced).await.unwrap();
    }
    println!("\nready");
    std::future::pending::<()>().await;
}

/// Starts this program again as a server on `state_dir`; it has one running, one paused and
/// one fenced container when this returns; with `hold` another fenced one.
pub async fn server(state_dir: &std::path::Path, hold: Option<u64>) -> std::process::Child {
    let state_dir = state_dir.to_owned();
    let started = tokio::task::spawn_blocking(move || {
        let mut child = Program::new(std::env::current_exe().unwrap())
            .args(["--exact", "fence::as_a_server", "--nocapture"])
            .env(ROLE, state_dir)
            .envs(hold.map(|hold| (HOLD, hold.to_string())))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines.map_while(Result::ok).any(|line| line == "ready");
        assert!(ready, "the server did not come up");
        child
    });
    started.await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_are_gone_a_moment_after_the_server_was_killed() {
    let _permit = fixture::permit().await;
    let mut quickest = Duration::MAX;
    for _ in 0..3 {
        let directory = fixture::directory();
        let mut server = server(directory.path(), None).await;
        let processes = fixture::processes(directory.path());
        assert!(processes.len() >= 6, "three containers of two processes and more: {}", processes.len());
        let killed = Instant::now();
        server.kill().unwrap();
        eventually("everything is gone", || processes.iter().all(ProcessHandle::has_ended)).await;
        let took = killed.elapsed();
        server.wait().unwrap();
        processes.iter().for_each(ProcessHandle::reap);
        eventually("its mounts go", || fixture::is_unmounted(directory.path())).await;
        println!("gone after {took:?}");
        assert!(took < Duration::from_secs(5));
        quickest = quickest.min(took);
        if quickest < Duration::from_millis(100) {
            return;
        }
    }
    panic!("never within 100 ms on this machine: {quickest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stands_still_cannot_keep_its_containers_running() {
    let _permit = fixture::permit().await;
    let directory = fixture::directory();
    let mut server = server(directory.path(), Some(1_000)).await;
    let frozen = ProcessHandle::open(i32::try_from(server.id()).unwrap()).unwrap();
    frozen.signal(Signal::STOP).unwrap();
    let processes = fixture::processes(directory.path());
    // Each container has a sentry, and all four of them stand; whatever else there is may go on.
    eventually("the guard stops them", || processes.iter().filter(|process| process.is_stopped()).count() >= 4).await;
    assert!(!processes.iter().any(ProcessHandle::has_ended), "they are kept");
    server.kill().unwrap();
    server.wait().unwrap();
    eventually("everything is gone", || processes.iter().all(ProcessHandle::has_ended)).await;
    processes.iter().for_each(ProcessHandle::reap);
    eventually("its mounts go", || fixture::is_unmounted(directory.path())).await;
}
