//! `manifests/local`, as somebody runs it who tries baton on one machine.

use std::{net::TcpListener, path::Path, process::Stdio, time::Duration};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use tokio::process::{Child, Command};

use crate::{
    fixture::{clock, directory, eventually, permit, piece},
    live_handoff::movable,
    servers::get,
    websocket_client::{Dialect, Socket},
};

const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Ends with everything it started, whatever becomes of the test.
struct Script(Child);

impl Script {
    fn end(&self) {
        if let Some(pid) = self.0.id() {
            kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGTERM).unwrap();
        }
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        self.end();
        for _ in 0..3_000 {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Ports that were free a moment ago.
fn ports() -> [u16; 3] {
    let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.each_ref().map(|listener| listener.local_addr().unwrap().port())
}

async fn two_servers_share_a_sandbox(arguments: &[&str]) {
    let _permit = permit().await;
    let (place, home) = (directory(), directory());
    let ports = ports();
    let mut script = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/local"));
    script.args(arguments).args(ports.map(|port| port.to_string())).arg("off");
    script.env("BATON", env!("CARGO_BIN_EXE_baton")).env("TMPDIR", place.path()).env("BATON_STORE_RUNTIME", "false");
    script.env("BATON_RUNSC", piece("BATON_RUNSC")).env("BATON_ROOTFS", piece("BATON_TEST_ROOTFS"));
    script.env("BATON_AGENT", piece("BATON_AGENT")).env("XDG_CONFIG_HOME", home.path());
    let log = place.path().join("log");
    let file = std::fs::File::create(&log).unwrap();
    script.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
    let mut script = Script(script.spawn().unwrap());
    let said = || std::fs::read_to_string(&log).unwrap();

    let [one, two, _] = ports.map(|port| format!("127.0.0.1:{port}"));
    for address in [&one, &two] {
        let up = async {
            loop {
                assert!(script.0.try_wait().unwrap().is_none(), "it ended:\n{}", said());
                if get(address, "/status").await.is_ok_and(|(status, _)| status == 200) {
                    return;
                }
                clock().sleep(Duration::from_millis(50)).await;
            }
        };
        clock().timeout(START_TIMEOUT, up).await.unwrap_or_else(|_| panic!("{address} never answered:\n{}", said()));
    }
    let (mut socket, key) = Socket::create_at(&one, Dialect::Plain, movable()).await;
    socket.run("bash", "echo kept >/srv/file").await;
    drop(socket);
    // The line that is printed is all that another terminal needs.
    let line = "export BATON_CONTEXT=";
    let said_so = said();
    let context = said_so.lines().find_map(|said| said.split_once(line)).unwrap_or_else(|| panic!("{said_so}")).1;
    let id = key.id.clone();
    for verb in [&["list"][..], &["get", &id], &["checkpoints", &id], &["snapshot", "list"], &["gc", "--dry-run"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(verb).env_clear().env("XDG_CONFIG_HOME", home.path()).env("BATON_CONTEXT", context);
        let output = command.output().await.unwrap();
        assert!(output.status.success(), "{verb:?}: {}", String::from_utf8_lossy(&output.stderr));
        let is_shown = String::from_utf8_lossy(&output.stdout).contains(&id);
        assert!(is_shown || !["list", "get"].contains(&verb[0]), "{verb:?}: {output:?}");
    }
    let mut socket = Socket::attach_at(&two, Dialect::Plain, &key).await;
    socket.status("RUNNING").await;
    assert_eq!(socket.run("bash", "cat /srv/file").await.0, "kept\n");
    socket.send(json!({"action": "kill_sandbox"})).await;
    socket.status("KILLED").await;

    script.end();
    let ended = clock().timeout(START_TIMEOUT, script.0.wait()).await.expect("it ends").unwrap();
    assert!(ended.success(), "{ended}\n{}", said());
    let place = place.path().display().to_string();
    eventually("everything ends with it", || {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let mut lines = all.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
        !lines.any(|line| String::from_utf8_lossy(&line).contains(&place))
    })
    .await;
    let left: Vec<_> = std::fs::read_dir(&place).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["log"], "nothing is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_servers_on_one_machine_share_a_sandbox() {
    two_servers_share_a_sandbox(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_servers_of_two_halves_on_one_machine_share_a_sandbox() {
    two_servers_share_a_sandbox(&["halves"]).await;
}
