//! Disk of the host that a sandbox can fill.

use std::{
    fs,
    path::{Path, PathBuf},
};

use baton::runtime::{Container, Error, Lifecycle, Shape, StartSpec};
use baton_protocol::{id::SandboxId, reason::Reason};
use serde_json::{Value, json};

use crate::real::{
    fixture::{Place, clock, sandbox, start},
    plain_session::{Client, command},
    servers::{Machine, Server, files_under},
    websocket_client::{Dialect, Socket},
};

const MIB: u64 = 1 << 20;
/// More than an archive may hold of a sandbox with [`DISK`], and little enough to be written once.
const SPARSE: u64 = 400;
const DISK: &str = "64MiB";

/// A sandbox, and somebody in it.
async fn limited(place: &Place, limits: Value) -> (SandboxId, Client) {
    let (id, limits) = (sandbox(), serde_json::from_value(limits).unwrap());
    place.containers.create(&id, &StartSpec { limits, ..start() }).await.unwrap();
    let client = Client::attached(clock(), &*place.containers, &id);
    (id, client)
}

async fn run(client: &mut Client, script: &str) -> String {
    let exec = client.exec(command(&["bash", "-c", script]), None).await;
    let done = client.done(exec).await;
    let (stdout, stderr) = (String::from_utf8_lossy(&done.stdout.bytes), String::from_utf8_lossy(&done.stderr.bytes));
    assert_eq!(done.exit.as_ref().unwrap().code, Some(0), "{stderr}");
    stdout.into_owned()
}

/// Takes a snapshot, and tells how large its files were at most.
async fn measured(place: &Place, id: &SandboxId, archive: &Path, shape: Shape) -> (Result<(), Error>, u64) {
    let folder = archive.parent().unwrap().to_owned();
    fs::create_dir_all(&folder).unwrap();
    let taking = place.containers.snapshot(id, archive, shape);
    let (mut taking, mut most, clock) = (std::pin::pin!(taking), 0, clock());
    loop {
        tokio::select! {
            taken = &mut taking => return (taken.map(drop), most.max(size(&folder))),
            () = clock.sleep(std::time::Duration::from_millis(2)) => most = most.max(size(&folder)),
        }
    }
}

fn size(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).unwrap().flatten();
    files.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn holes_do_not_become_bytes_of_the_host() {
    let place = Place::new().await;
    let (id, mut client) = limited(&place, json!({"disk": DISK})).await;
    run(&mut client, &format!("truncate -s {SPARSE}M /srv/sparse")).await;
    let folder = place.path("archives");
    for shape in [Shape::Layer, Shape::Complete] {
        let (refused, most) = measured(&place, &id, &folder.join("a.tar"), shape).await;
        let Err(Error::Refused { reason: Reason::TooLarge, message }) = refused else { panic!("{refused:?}") };
        assert!(message.contains("136MiB") && message.contains("sparse"), "{message}");
        assert!(most <= 137 * MIB, "{most} bytes were written");
        assert_eq!(files_under(&folder), 0, "nothing is left");
        assert_eq!(run(&mut client, "echo here").await, "here\n", "the sandbox goes on");
    }
    // One that stands still, as for a checkpoint, stands still afterwards too, and can go on.
    place.containers.pause(&id).await.unwrap();
    place.containers.snapshot(&id, &folder.join("b.tar"), Shape::Layer).await.unwrap_err();
    assert_eq!(place.containers.watch(&id).borrow().container, Container::Paused);
    place.containers.resume(&id).await.unwrap();
    assert_eq!(run(&mut client, "echo here").await, "here\n");
    // What it may have it can keep.
    run(&mut client, "rm /srv/sparse; head -c 60000000 /dev/urandom > /srv/real").await;
    let (taken, most) = measured(&place, &id, &folder.join("c.tar"), Shape::Layer).await;
    taken.unwrap();
    assert!((60_000_000..100_000_000).contains(&most), "{most}");

    // The attack works where nothing bounds it.
    let (free, mut client) = limited(&place, json!({})).await;
    run(&mut client, &format!("truncate -s {SPARSE}M /srv/sparse")).await;
    let (taken, most) = measured(&place, &free, &place.path("wide/d.tar"), Shape::Layer).await;
    taken.unwrap();
    assert!(most >= SPARSE * MIB, "{most}");
    place.close().await;
}

/// The manifest of a sandbox's only checkpoint.
fn manifest(machine: &Machine, id: &str) -> Value {
    let head = machine.lock(id)["head"]["checkpoint_id"].as_str().expect("a head").to_owned();
    machine.json(&format!("sandbox_checkpoints/{head}/manifest.json"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_with_files_is_bounded_too_and_keeps_everything() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server_with("a", &[("BATON_LIMITS", "disk=64MiB/10GiB")]).await;
    let config = |disk: &str| {
        json!({
            "enable_checkpoint": true, "enable_sandbox_handoff": true, "idle_timeout": null,
            "on_incompatible": "files", "limits": {"disk": disk},
        })
    };
    for (disk, is_bounded) in [(DISK, true), ("1GiB", false)] {
        let (mut socket, key) = Socket::create(&server, Dialect::V1, config(disk)).await;
        exec(&mut socket, &format!("truncate -s {SPARSE}M /srv/sparse; echo kept > /srv/small")).await;
        if is_bounded {
            socket.send(json!({"action": "snapshot_filesystem", "name": "sparse"})).await;
            let refused = socket.status("FILESYSTEM_SNAPSHOT_ERROR").await;
            assert!(refused["message"].as_str().unwrap().contains("holes in sparse files"), "{refused}");
        }
        socket.send(json!({"action": "checkpoint", "keep_running": true})).await;
        socket.status("CHECKPOINTED").await;
        assert_eq!(manifest(&machine, &key.id)["layer"].is_null(), is_bounded);
        let stored: PathBuf = machine.data().join("sandbox_checkpoints");
        let largest = sizes(&stored).into_iter().max().unwrap();
        assert_eq!(largest < SPARSE * MIB, is_bounded, "{largest}");
        assert_eq!(files_under(&server.staging()), 0, "nothing is left");
        exec(&mut socket, "grep kept /srv/small && test -s /srv/sparse").await;
        socket.kill().await;
    }
    server.stop().await;
}

async fn exec(socket: &mut Socket, script: &str) {
    socket.send(json!({"action": "exec", "argv": ["bash", "-c", script]})).await;
    let done = socket.status("EXECUTION_DONE").await;
    assert_eq!(done["exit_code"], json!(0), "{done}");
}

/// Of all files under a directory.
fn sizes(directory: &Path) -> Vec<u64> {
    let entries = fs::read_dir(directory).unwrap().flatten();
    entries
        .flat_map(|entry| match entry.metadata().unwrap() {
            about if about.is_dir() => sizes(&entry.path()),
            about => vec![about.len()],
        })
        .collect()
}

/// So many files, each of whose paths has more than three and a half kilobytes.
const MANY: u64 = 8_000;
const LONG_PATHS: &str = "
import os
os.chdir('/srv')
for n in range(14):
    os.mkdir('d' * 240); os.chdir('d' * 240)
for n in range(8000): os.close(os.open('f' * 200 + str(n), os.O_CREAT))";
const PATH: u64 = 14 * 241 + 200;

/// The most memory the server has had since it was last asked.
fn peak(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let kibibytes: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    fs::write(format!("/proc/{}/clear_refs", server.pid()), "5").unwrap();
    kibibytes << 10
}

async fn snapshot(socket: &mut Socket, name: &str) -> Value {
    socket.send(json!({"action": "snapshot_filesystem", "name": name, "full": true})).await;
    let answers = ["SANDBOX_FILESYSTEM_SNAPSHOT_CREATED", "SANDBOX_FILESYSTEM_SNAPSHOT_ERROR"];
    socket.until("an answer", |event| event["status"].as_str().is_some_and(|status| answers.contains(&status))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn many_long_paths_of_a_full_snapshot_are_not_held_in_memory_and_can_be_bounded() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("a").await;
    let (mut socket, _) = Socket::create(&server, Dialect::Plain, json!({"idle_timeout": null})).await;
    assert_eq!(snapshot(&mut socket, "before").await["status"], "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED");
    let (said, done) = socket.run("python", LONG_PATHS).await;
    assert_eq!(done["exit_code"], json!(0), "{said}");
    peak(&server);
    let before = peak(&server);
    assert_eq!(snapshot(&mut socket, "many").await["status"], "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED");
    let grown = peak(&server).saturating_sub(before);
    // All of the names are in the archive: whoever kept them would have had to hold them.
    let size =
        |name: &str| machine.json(&format!("filesystem_snapshots/{name}/manifest.json"))["size"].as_u64().unwrap();
    assert!(size("many") - size("before") > MANY * PATH, "{} and {}", size("many"), size("before"));
    assert!(grown < MANY * PATH / 2, "{grown} bytes more for {} of names", MANY * PATH);
    socket.kill().await;
    server.stop().await;

    // As many as an operator allows, and no more: the sandbox goes on, and nothing is stored.
    let entries = machine.json("filesystem_snapshots/before/manifest.json")["entries"].as_u64().unwrap() + 1_500;
    let server = machine.server_with("b", &[("BATON_ARCHIVE_ENTRIES", &entries.to_string())]).await;
    let (mut socket, _) = Socket::create(&server, Dialect::Plain, json!({"idle_timeout": null})).await;
    assert_eq!(snapshot(&mut socket, "few").await["status"], "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED");
    socket.run("python", &LONG_PATHS.replace("8000", "3000")).await;
    let refused = snapshot(&mut socket, "too-many").await;
    assert!(refused["message"].as_str().unwrap().contains(&format!("more than {entries} entries")), "{refused}");
    assert!(machine.object("filesystem_snapshots/too-many/too-many.tar").is_none());
    assert_eq!(files_under(&server.staging()), 0, "nothing is left");
    socket.until("what a person reads", |event| event["event"] == "error").await;
    assert_eq!(socket.run("bash", "echo here").await.0, "here\n");
    socket.kill().await;
    server.stop().await;
}
