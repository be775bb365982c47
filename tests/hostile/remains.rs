//! What a killed server leaves behind, and who removes it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use baton::guard::{guard_mounts, process_handle::ProcessHandle};
use baton_fake_gcs::{FaultKind, InjectedFault, Op};
use nix::sys::signal::Signal;
use rustix::process::Signal as Kill;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::real::{
    fixture::eventually,
    servers::{Machine, Server, files_under},
    websocket_client::{Dialect, Socket},
};

/// The files of a state directory that outlast its server: who may use it, and who did last.
const KEPT: [&str; 2] = ["instance", "lock"];

/// Everything of the machine that a server with this state directory has.
#[derive(Debug, Default, PartialEq, Eq)]
struct World {
    mounts: Vec<PathBuf>,
    processes: Vec<String>,
    cgroups: Vec<String>,
    files: Vec<PathBuf>,
}

impl World {
    fn of(state: &Path) -> Self {
        Self {
            mounts: guard_mounts::below(state).unwrap(),
            processes: processes(state).into_iter().map(|(_, line)| line).collect(),
            cgroups: cgroups(state),
            files: files(state).into_iter().filter(|file| !KEPT.iter().any(|kept| file.ends_with(kept))).collect(),
        }
    }
}

/// Living processes that stand in the state directory, or name it.
fn processes(state: &Path) -> Vec<(i32, String)> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let lines = pids.filter_map(|pid| {
        let line = String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).ok()?).replace('\0', " ");
        let stands = fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|place| place.starts_with(state));
        let is_ours = !line.is_empty() && (stands || line.contains(state.to_str()?));
        is_ours.then_some((pid, line))
    });
    lines.collect()
}

fn cgroups(state: &Path) -> Vec<String> {
    let digest = Sha256::digest(state.as_os_str().as_encoded_bytes());
    let name = format!("baton-{}", baton_protocol::id::hex(&digest[..8]));
    let found = Command::new("find").args(["/sys/fs/cgroup", "-path", &format!("*/{name}*"), "-type", "d"]).output();
    String::from_utf8(found.unwrap().stdout).unwrap().lines().map(str::to_owned).collect()
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let paths = entries.map(|entry| (entry.path(), entry.file_type().is_ok_and(|kind| kind.is_dir())));
    paths.flat_map(|(path, is_directory)| if is_directory { files(&path) } else { vec![path] }).collect()
}

fn guard(state: &Path) -> Option<ProcessHandle> {
    let pid = processes(state).into_iter().find(|(_, line)| line.ends_with(" guard "))?.0;
    ProcessHandle::open(pid).ok()
}

/// A server with sandboxes that have limits, one that waits for nobody, and a checkpoint on its way to the store.
async fn busy(machine: &Machine) -> (Server, Vec<Socket>) {
    let settings = [("BATON_WARM", "1"), ("BATON_LIMITS", "memory=256MiB,pids=64,disk=64MiB")];
    let server = machine.server_with("a", &settings).await;
    let config = json!({"enable_checkpoint": true, "enable_sandbox_handoff": true, "idle_timeout": null});
    let (one, _) = Socket::create(&server, Dialect::V1, config.clone()).await;
    let (mut two, _) = Socket::create(&server, Dialect::V1, config).await;
    machine.bucket().add_fault(InjectedFault::new(Op::Write, FaultKind::Hang).on("sandbox_checkpoints").times(0));
    two.send(json!({"action": "checkpoint"})).await;
    eventually("an image waits", || files_under(&server.staging()) > 0).await;
    (server, vec![one, two])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_leaves_no_mount_and_after_a_restart_nothing() {
    let machine = Machine::with_a_bucket().await;
    for dies_with_its_guard in [false, true] {
        let (mut server, sockets) = busy(&machine).await;
        let state = server.state.clone();
        let had = World::of(&state);
        assert!(!had.mounts.is_empty() && !had.processes.is_empty(), "{had:?}");
        let guard = guard(&state).expect("a guard");
        if dies_with_its_guard {
            // It would start another one.
            server.signal(Signal::SIGSTOP);
            guard.signal(Kill::KILL).unwrap();
        }
        server.die().await;
        drop(sockets);
        machine.bucket().clear_faults();
        eventually("the guard ends", || guard.has_ended()).await;
        let left = World::of(&state);
        assert_eq!(left.mounts.is_empty(), !dies_with_its_guard, "the guard takes mounts down: {left:?}");
        assert!(left.files.iter().any(|file| file.starts_with(server.staging())), "an image is left: {left:?}");

        let server = machine.server("a").await;
        // One that answers hears signals too.
        server.get("/status").await;
        server.stop().await;
        assert_eq!(World::of(&state), World::default());
        assert!(files(&state).len() <= KEPT.len());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_server_has_a_state_directory_at_once_though_the_old_guard_still_ends() {
    let machine = Machine::with_a_directory().await;
    for _ in 0..3 {
        let mut server = machine.server("a").await;
        let (socket, _) = Socket::create(&server, Dialect::Plain, json!({})).await;
        server.die().await;
        drop(socket);
        let server = machine.server("a").await;
        let (mut socket, _) = Socket::create(&server, Dialect::Plain, json!({})).await;
        assert_eq!(socket.run("bash", "echo here").await.0, "here\n");
        drop(socket);
        server.stop().await;
    }
}
