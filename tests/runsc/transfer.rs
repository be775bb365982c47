//! Files into a sandbox and out of it, with the real runsc: exact, also when the sandbox moves in the middle.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use baton::runtime::Lifecycle;
use baton_client::{Error, FileMode, Options, Sandbox, SandboxConfig, Transfer};
use baton_protocol::{
    agent::AgentExec,
    file_work::{FileEntry, Work},
};

use crate::{
    fixture::{Place, clock, sandbox, start},
    plain_session::{Client, command},
    proxy::Proxy,
    servers::Machine,
};

/// Nothing takes so long, however busy the machine is.
pub async fn soon<T>(work: impl Future<Output = T>) -> T {
    clock().timeout(Duration::from_secs(120), work).await.expect("it hangs")
}

fn asked(work: Work) -> AgentExec {
    AgentExec { stdin: work.has_stdin(), file: Some(work), ..command(&["baton-agent"]) }
}

fn read(path: &str) -> Work {
    Work::ReadFile { path: path.into(), offset: 0, length: None, archive: false }
}

fn write(path: &str, size: u64) -> Work {
    Work::WriteFile {
        path: path.into(),
        mode: Some(0o640),
        mtime_ms: Some(1_600_000_000_250),
        size: Some(size),
        archive: false,
    }
}

/// Bytes that are the same nowhere twice.
pub fn bytes(count: u64) -> Vec<u8> {
    (0..count / 8).flat_map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_goes_on_after_a_move() {
    let place = Place::new().await;
    let (containers, id, start) = (&*place.containers, sandbox(), start());
    containers.create(&id, &start).await.unwrap();
    let mut client = Client::attached(clock(), containers, &id);
    let content = bytes(1 << 20);
    let put = client.exec(asked(write("/data/new/file", content.len() as u64)), None).await;
    for (number, part) in content.chunks(100_000).enumerate() {
        client.stdin(put, part).await;
        if number == 5 {
            // What nobody has written to it yet is not in the image.
            client.until("it begins", |client| client.execs[&put].started).await;
            let image = place.path("image");
            containers.pause(&id).await.unwrap();
            containers.checkpoint(&id, &image).await.unwrap();
            containers.remove(&id).await.unwrap();
            containers.restore(&id, &start, &image).await.unwrap();
            client.reconnect(containers, &id).await;
        }
    }
    client.stdin_eof(put).await;
    let done = client.done(put).await;
    assert_eq!((done.exit.as_ref().unwrap().code, String::from_utf8_lossy(&done.stderr.bytes)), (Some(0), "".into()));
    let get = client.exec(asked(read("/data/new/file")), None).await;
    client.until("a part of it", |client| client.execs[&get].stdout.at > 300_000).await;
    let image = place.path("image-2");
    containers.pause(&id).await.unwrap();
    containers.checkpoint(&id, &image).await.unwrap();
    containers.remove(&id).await.unwrap();
    containers.restore(&id, &start, &image).await.unwrap();
    client.reconnect(containers, &id).await;
    let done = client.done(get).await;
    assert!(done.stdout.bytes == content, "{} bytes", done.stdout.bytes.len());
    // The agent's program is found after two moves, also by another user.
    let list = Work::ListFiles { path: "/data".into(), depth: 2 };
    let list = client.exec(AgentExec { user: Some("65534".into()), ..asked(list) }, None).await;
    let lines = String::from_utf8(client.done(list).await.stdout.bytes.clone()).unwrap();
    let entries: Vec<FileEntry> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let seen: Vec<_> = entries.iter().map(|entry| (entry.name.as_str(), entry.mode, entry.mtime_ms)).collect();
    assert_eq!(seen[1], ("new/file", 0o640, 1_600_000_000_250), "{seen:?}");
    let denied = client.exec(AgentExec { user: Some("65534".into()), ..asked(read("/data/new/file")) }, None).await;
    assert!(client.done(denied).await.stderr.bytes.starts_with(b"EACCES: "));
    place.close().await;
}

/// A tree of every kind of thing, about `large` bytes in all.
pub fn plant(root: &Path, large: u64) {
    fs::create_dir_all(root.join("a/empty")).unwrap();
    for number in 0..40 {
        fs::write(root.join(format!("a/{number}.txt")), format!("file {number}\n").repeat(number * 37)).unwrap();
    }
    fs::write(root.join("large"), bytes(large)).unwrap();
    fs::write(root.join("a/run.sh"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(root.join("a/run.sh"), fs::Permissions::from_mode(0o751)).unwrap();
    std::os::unix::fs::symlink("a/1.txt", root.join("link")).unwrap();
    fs::hard_link(root.join("a/2.txt"), root.join("again")).unwrap();
}

/// Names, modes, times and contents of everything in a directory.
pub fn look(root: &Path) -> Vec<(PathBuf, u32, i64, Vec<u8>)> {
    let (mut found, mut open) = (Vec::new(), vec![root.to_owned()]);
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let about = fs::symlink_metadata(&path).unwrap();
            let content = if about.is_dir() {
                open.push(path.clone());
                vec![]
            } else if about.is_symlink() {
                fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
            } else {
                fs::read(&path).unwrap()
            };
            found.push((path.strip_prefix(root).unwrap().to_owned(), about.mode(), about.mtime(), content));
        }
    }
    found.sort();
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_goes_in_and_out_over_fifty_cuts_and_a_handoff() {
    let machine = Machine::with_a_directory().await;
    let (one, two) = (machine.server("one").await, machine.server("two").await);
    let proxy = Proxy::start(&one, 50, 60_000).await;
    let config =
        SandboxConfig { enable_checkpoint: true, enable_sandbox_handoff: Some(true), ..SandboxConfig::default() };
    let sandbox = soon(Sandbox::create(&proxy.url(), Options { config, ..Options::default() })).await.unwrap();
    let here = machine.directory.path().join("here");
    plant(&here, 6 << 20);
    soon(sandbox.upload(&here, "/data/tree")).await.unwrap();
    let back = machine.directory.path().join("back");
    let reading = soon(sandbox.download("/data/tree", &back));
    // In the middle of it the sandbox moves to another server.
    let moving = async {
        proxy.after_bytes(9 << 20).await;
        proxy.lead_to(&two);
    };
    let (read, ()) = tokio::join!(reading, moving);
    read.unwrap();
    assert_eq!(look(&back), look(&here));
    assert!(proxy.connections() >= 50, "it was hardly cut: {}", proxy.connections());
    let moved = machine.lock(sandbox.id().as_str());
    assert!(moved["epoch"].as_u64().unwrap() > 1, "it moved: {moved}");
    assert!(two.log().contains(sandbox.id().as_str()), "it is on the other server");
    soon(sandbox.kill()).await.unwrap();
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_read_written_listed_and_missed() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("one").await;
    let sandbox = soon(Sandbox::create(&format!("ws://{}", server.address), Options::default())).await.unwrap();
    soon(sandbox.write_file("/data/note", "hello")).await.unwrap();
    assert_eq!(soon(sandbox.read_file("/data/note")).await.unwrap(), b"hello");
    let names: Vec<String> =
        soon(sandbox.list_files("/data", 1)).await.unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["note"]);
    let missing = |error: Error| matches!(error, Error::File { code, .. } if code == "ENOENT");
    assert!(missing(soon(sandbox.read_file("/data/none")).await.unwrap_err()));
    assert!(missing(soon(sandbox.list_files("/none", 1)).await.unwrap_err()));
    let here = machine.directory.path().join("note");
    assert!(missing(soon(sandbox.download("/data/none", &here)).await.unwrap_err()));
    assert!(!here.exists(), "nothing comes of nothing");
    assert!(missing(soon(sandbox.upload(machine.directory.path().join("none"), "/data/x")).await.unwrap_err()));
    soon(sandbox.download("/data/note", &here)).await.unwrap();
    assert_eq!(fs::read(&here).unwrap(), b"hello");
    // A write that is given up in the middle leaves what there was.
    let (sender, receiver) = tokio::sync::mpsc::channel::<Result<bytes::Bytes, Error>>(1);
    let content = futures::stream::unfold(receiver, |mut receiver| async { Some((receiver.recv().await?, receiver)) });
    let how = Transfer::default();
    let writing = sandbox.write_stream("/data/note", FileMode::default(), content, &how);
    let failing = async {
        sender.send(Ok(bytes::Bytes::from_static(b"half"))).await.unwrap();
        sender.send(Err(Error::Ended("given up".into()))).await.unwrap();
    };
    let (written, ()) = soon(async { tokio::join!(writing, failing) }).await;
    assert_eq!(written.unwrap_err(), Error::Ended("given up".into()));
    assert_eq!(soon(sandbox.read_file("/data/note")).await.unwrap(), b"hello");
    let names: Vec<String> =
        soon(sandbox.list_files("/data", 1)).await.unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["note"]);
    soon(sandbox.kill()).await.unwrap();
    server.stop().await;
}
