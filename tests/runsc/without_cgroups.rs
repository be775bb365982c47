//! A machine on which no cgroup can be made: every limit holds but one, and that one is not promised.

use std::{path::Path, process::Stdio};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::Command,
};

use crate::{
    fixture::{clock, directory, permit, piece},
    sandbox_limits::{GREEDY, said},
    servers::get,
    websocket_client::{Dialect, Socket},
};

/// In a view of the file system of its own, in which there are none.
const WITHOUT: &str = "umount -R /sys/fs/cgroup && exec \"$0\" serve";

#[tokio::test(flavor = "multi_thread")]
async fn without_cgroups_all_but_cpus_is_held_and_cpus_are_refused() {
    let (_permit, directory) = (permit().await, directory());
    let (state, log) = (directory.path().join("s"), directory.path().join("log"));
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", WITHOUT, env!("CARGO_BIN_EXE_baton")]);
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("BATON_LISTEN", "127.0.0.1:0").env("BATON_ADMIN_LISTEN", "off").env("BATON_STATE_DIR", &state);
    command.env("BATON_RUNSC", piece("BATON_RUNSC")).env("BATON_AGENT", piece("BATON_AGENT"));
    command.env("BATON_ROOTFS", piece("BATON_TEST_ROOTFS")).env("BATON_CACHE_DIR", directory.path().join("cache"));
    command.env("BATON_LIMITS", "memory=128MiB,cpus=1,pids=64,disk=64MiB,files=99");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
    let mut server = command.kill_on_drop(true).spawn().unwrap();
    let address = address(&log).await;

    let status: Value = serde_json::from_str(&get(&address, "/status").await.unwrap().1).unwrap();
    assert_eq!((&status["limits"]["cgroup"], &status["capabilities"]["cpus"]), (&json!("none"), &json!(false)));
    assert_eq!(status["limits"]["default"].get("cpus"), None, "{status}");
    let (mut socket, _) = Socket::create_at(&address, Dialect::V1, json!({})).await;
    let script = "ulimit -Hu; ulimit -Hn; dd if=/dev/zero of=/srv/full bs=1M count=100 2>&1 | grep -c 'No space left'";
    assert_eq!(said(&mut socket, json!(["bash", "-c", script])).await.1, "64\n99\n1\n");
    let (done, output) = said(&mut socket, json!(["python3", "-c", GREEDY])).await;
    assert_eq!((&done["signal"], &done["message"].is_string()), (&json!(9), &true), "{output}");
    assert_eq!(said(&mut socket, json!(["echo", "fine"])).await.1, "fine\n");

    let answer = execute(&address, "echo $(ulimit -Hu) $(ulimit -Hn)").await;
    assert!(answer.contains("64 99\n"), "whoever says nothing gets the defaults: {answer}");

    let mut refused = Socket::open_path(&address, "/create").await;
    refused.send(json!({"limits": {"cpus": 1}})).await;
    let message = refused.status("CREATION_ERROR").await["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("`limits.cpus` cannot be kept here"), "{message}");

    let pid = nix::unistd::Pid::from_raw(i32::try_from(server.id().unwrap()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(server.wait().await.unwrap().success());
    let said = std::fs::read_to_string(&log).unwrap();
    assert_eq!(said.matches("cpus cannot be limited here").count(), 1, "it is said once: {said}");
}

/// One `POST /execute`, and all that comes back.
async fn execute(address: &str, code: &str) -> String {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let head = "POST /execute?language=bash HTTP/1.1\r\nHost: test\r\nConnection: close\r\n";
    let request = format!("{head}Content-Length: {}\r\n\r\n{code}", code.len());
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    answer
}

async fn address(log: &Path) -> String {
    for _ in 0..1_000 {
        let said = std::fs::read_to_string(log).unwrap();
        if let Some((_, rest)) = said.split_once("serving address=") {
            return rest.split_whitespace().next().unwrap().to_owned();
        }
        clock().sleep(std::time::Duration::from_millis(20)).await;
    }
    panic!("it does not serve: {}", std::fs::read_to_string(log).unwrap());
}
