//! A new root file system and a new runsc come with a new server; what was stored goes on under the old ones.

use std::{os::unix::fs::PermissionsExt, path::PathBuf, process::Command};

use serde_json::json;

use crate::{
    fixture::{eventually, piece},
    servers::Machine,
    websocket_client::{Dialect, Socket},
};

/// The root file system with another file in it.
fn other_rootfs(machine: &Machine) -> PathBuf {
    let other = machine.directory.path().join("new-rootfs");
    let copied = Command::new("cp").arg("-al").arg(piece("BATON_TEST_ROOTFS")).arg(&other).status().unwrap();
    assert!(copied.success());
    std::fs::write(other.join("etc/generation"), "new\n").unwrap();
    other
}

/// Another build, as far as any version can tell: the version string that is compiled in has another last digit.
pub fn other_runsc(machine: &Machine) -> PathBuf {
    let mut bytes = std::fs::read(piece("BATON_RUNSC")).unwrap();
    let told = Command::new(piece("BATON_RUNSC")).arg("--version").output().unwrap().stdout;
    let told = String::from_utf8(told).unwrap();
    let version = told.lines().next().unwrap().strip_prefix("runsc version ").unwrap().as_bytes();
    let places: Vec<_> = (0..bytes.len() - version.len()).filter(|at| bytes[*at..].starts_with(version)).collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at + version.len() - 1] ^= 1;
    }
    let other = machine.directory.path().join("new-runsc");
    std::fs::write(&other, bytes).unwrap();
    std::fs::set_permissions(&other, std::fs::Permissions::from_mode(0o755)).unwrap();
    other
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_root_file_system_and_a_new_runsc_lose_nothing() {
    let machine = Machine::with_a_directory().await;
    let (rootfs, runsc) = (other_rootfs(&machine), other_runsc(&machine));
    let old = machine.server_with("old", &[("BATON_STORE_RUNTIME", "true")]).await;
    let (mut socket, key) =
        Socket::create(&old, Dialect::Plain, json!({"enable_checkpoint": true, "idle_timeout": null})).await;
    let count = "(n=0; while :; do n=$((n+1)); echo $n >/srv/next; mv /srv/next /srv/n; sleep 0.02; done) >/dev/null 2>&1 </dev/null &";
    socket.run("bash", count).await;
    let stored = |folder: &str| {
        std::fs::read_dir(machine.data().join(folder)).is_ok_and(|mut found| {
            found.any(|entry| entry.is_ok_and(|entry| !entry.file_name().to_string_lossy().starts_with('.')))
        })
    };
    eventually("they are stored", || stored("rootfs") && stored("runtimes")).await;
    socket.send(json!({"action": "checkpoint"})).await;
    assert_eq!(socket.end().await, Some(1000));
    let patient = json!({"enable_checkpoint": true, "idle_timeout": null, "on_incompatible": "files"});
    let (mut socket, modest) = Socket::create(&old, Dialect::Plain, patient).await;
    socket.run("bash", "echo kept >/srv/kept; rm /etc/hostname; sleep 1000 >/dev/null 2>&1 </dev/null &").await;
    socket.send(json!({"action": "checkpoint"})).await;
    assert_eq!(socket.end().await, Some(1000));
    let version = |text: &str| text.split("\"runsc\":\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    let before = version(&old.get("/status").await.1);
    old.stop().await;

    let settings =
        [("BATON_RUNSC", runsc.to_str().unwrap().to_owned()), ("BATON_ROOTFS", rootfs.to_str().unwrap().to_owned())];
    let settings: Vec<_> = settings.iter().map(|(name, value)| (*name, value.as_str())).collect();
    // Not on the operator's list: not run.
    let mut strict = settings.clone();
    let nobody = "0".repeat(64);
    strict.push(("BATON_RUNTIMES", &nobody));
    let server = machine.server_with("strict", &strict).await;
    let mut refused = Socket::attach(&server, Dialect::Plain, &key).await;
    let refusal = refused.status("RESTORE_ERROR").await;
    assert!(refusal["message"].as_str().unwrap().contains("BATON_RUNTIMES"), "{refusal}");
    // Who is content with the files gets them, and is told so.
    let left =
        "cat /srv/kept; ls /etc/hostname 2>&1 | grep -c cannot; cat /proc/[0-9]*/comm 2>/dev/null | grep -c ^sleep";
    for _ in 0..2 {
        let mut socket = Socket::attach(&server, Dialect::Plain, &modest).await;
        let running = socket.status("RUNNING").await;
        assert_eq!(socket.run("bash", left).await.0, "kept\n1\n0\n");
        if running["boot"].is_null() {
            socket.kill().await;
            break;
        }
        assert_eq!(running["boot"], json!("files"), "{running}");
        // From here it is a sandbox like any other.
        socket.send(json!({"action": "checkpoint"})).await;
        assert_eq!(socket.end().await, Some(1000));
    }
    server.stop().await;

    let mut last = 0;
    for name in ["new", "newer"] {
        let server = machine.server_with(name, &settings).await;
        assert_ne!(version(&server.get("/status").await.1), before);
        let (mut fresh, _) = Socket::create(&server, Dialect::Plain, json!({})).await;
        assert_eq!(fresh.run("bash", "cat /etc/generation").await.0, "new\n", "a new sandbox has the new one");
        fresh.kill().await;
        let mut socket = Socket::attach(&server, Dialect::Plain, &key).await;
        socket.status("RUNNING").await;
        let look = "cat /etc/generation 2>/dev/null; a=$(cat /srv/n); until [ $(cat /srv/n) -gt $a ]; do sleep 0.02; done; cat /srv/n";
        let (counted, _) = socket.run("bash", look).await;
        let counted: u64 = counted.trim().parse().expect("the old root file system has no such file");
        assert!(counted > last, "it goes on from where it was");
        last = counted;
        // And moves on to the next server, still under the old ones.
        socket.send(json!({"action": "checkpoint"})).await;
        assert_eq!(socket.end().await, Some(1000));
        server.stop().await;
    }
}
