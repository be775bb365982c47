//! What a server finds at its start, and who may have the state directory.

use baton::{
    guard::process_handle::ProcessHandle,
    runtime::{Containers, Error, RuntimeSettings},
};
use baton_protocol::reason::Reason;
use serde_json::json;

use crate::{
    fence,
    fixture::{self, Place, clock},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_second_server_on_the_same_state_directory_is_refused() {
    let place = Place::new().await;
    let refused = Containers::open(fixture::settings(place.directory.path()), clock()).await.unwrap_err();
    assert!(matches!(refused, Error::Refused { reason: Reason::StateDirHeld, .. }), "{refused}");
    assert!(refused.to_string().contains("BATON_STATE_DIR"), "{refused}");
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_server_left_is_wiped_at_the_next_start() {
    let _permit = fixture::permit().await;
    let directory = fixture::directory();
    let settings = fixture::settings(directory.path());
    let mut server = fence::server(directory.path(), None).await;
    server.kill().unwrap();
    server.wait().unwrap();
    // One that no server waits for: it has no death signal and lives on.
    let root = directory.path().join("runsc");
    let bundle = directory.path().join("bundles/detached");
    std::fs::create_dir_all(&bundle).unwrap();
    let spec = json!({
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["/bin/sleep", "600"], "cwd": "/"},
        "root": {"path": settings.rootfs, "readonly": true},
        "linux": {"resources": {}, "namespaces": [{"type": "network"}]},
    });
    std::fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
    let detached = std::process::Command::new(&settings.runsc)
        .arg("--root")
        .arg(&root)
        .args(["--platform=systrap", "--network=none", "--ignore-cgroups", "run", "--detach", "--bundle"])
        .arg(&bundle)
        .arg("detached")
        .status();
    assert!(detached.unwrap().success());
    let left = fixture::processes(directory.path());
    assert!(left.len() >= 2, "sentry and gofer live on");
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(table.contains(root.to_str().unwrap()), "a mount is left too");

    let containers = Containers::open(settings, clock()).await.unwrap();
    assert!(left.iter().all(ProcessHandle::has_ended));
    for empty in ["bundles", "logs", "overlay", "runsc"] {
        assert_eq!(std::fs::read_dir(directory.path().join(empty)).unwrap().count(), 0, "{empty} is empty");
    }
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!table.contains(directory.path().to_str().unwrap()), "{table}");
    containers.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_container_leaves_no_process_mount_or_file() {
    use baton::runtime::Lifecycle;
    let place = Place::new().await;
    let id = fixture::sandbox();
    place.containers.create(&id, &fixture::start()).await.unwrap();
    let processes = place.processes();
    assert!(processes.len() >= 2);
    place.containers.remove(&id).await.unwrap();
    assert!(processes.iter().all(ProcessHandle::has_ended));
    for process in &processes {
        assert!(!std::path::Path::new(&format!("/proc/{}", process.pid())).exists(), "no zombie is left");
    }
    for empty in ["bundles", "logs", "overlay"] {
        assert_eq!(std::fs::read_dir(place.path(empty)).unwrap().count(), 0, "{empty} is empty");
    }
    place.containers.close().await;
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!table.contains(place.directory.path().to_str().unwrap()), "{table}");
    assert_eq!(std::fs::read_dir(place.path("runsc")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_said_with_the_way_to_get_it() {
    let directory = fixture::directory();
    let settings = fixture::settings(directory.path());
    let no_agent = RuntimeSettings { agent: "/nowhere/agent".into(), ..settings.clone() };
    let error = Containers::open(no_agent, clock()).await.unwrap_err().to_string();
    assert!(error.contains("no agent") && error.contains("scripts/setup"), "{error}");
    let no_runsc = RuntimeSettings { runsc: "/bin/true".into(), ..settings.clone() };
    let error = Containers::open(no_runsc, clock()).await.unwrap_err().to_string();
    assert!(error.contains("not a runsc") && error.contains("scripts/setup"), "{error}");
    let old = directory.path().join("old-runsc");
    std::fs::write(&old, "#!/bin/sh\necho runsc version 2024; echo; echo tar\n").unwrap();
    std::fs::set_permissions(&old, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let error = Containers::open(RuntimeSettings { runsc: old, ..settings }, clock()).await.unwrap_err().to_string();
    assert!(error.contains("no fscheckpoint") && error.contains("no -background"), "{error}");
}
