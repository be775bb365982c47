//! What keeps a server from starting is said in one sentence, with what to do about it.

use std::{
    net::TcpListener,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::PathBuf,
    process::Command,
};

use tokio::{io::AsyncReadExt, process::Child};

/// Somebody who is not root.
const NOBODY: u32 = 65_534;

struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("bt").tempdir().unwrap();
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A server that has all it needs.
    fn server(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.arg("serve").env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("BATON_LISTEN", "127.0.0.1:0").env("BATON_STATE_DIR", self.path("state"));
        command.env("BATON_CACHE_DIR", self.path("cache"));
        for (name, from) in
            [("BATON_RUNSC", "BATON_RUNSC"), ("BATON_AGENT", "BATON_AGENT"), ("BATON_ROOTFS", "BATON_TEST_ROOTFS")]
        {
            let piece = std::env::var_os(from).unwrap_or_else(|| panic!("{from} is not set: run `make test`"));
            command.env(name, piece);
        }
        command
    }
}

/// It ends by itself, with one line, which is returned.
async fn refusal(command: Command) -> String {
    let mut command = tokio::process::Command::from(command);
    let output = tokio::time::timeout(std::time::Duration::from_secs(60), command.kill_on_drop(true).output());
    let output = output.await.expect("it ends by itself").unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(said.lines().count(), 1, "one sentence: {said}");
    assert!(said.starts_with("baton: "), "{said}");
    said
}

#[tokio::test]
async fn limits_that_contradict_themselves_keep_a_server_from_starting() {
    let place = Place::new();
    let mut server = place.server();
    server.env("BATON_LIMITS", "memory=2GiB/512MiB");
    let said = refusal(server).await;
    assert!(said.starts_with("baton: BATON_LIMITS is 'memory=2GiB/512MiB', but it must be limits such as "), "{said}");
}

#[tokio::test]
async fn without_root_nothing_else_is_blamed() {
    let place = Place::new();
    // Where nobody can execute it: the build may lie in a directory of root's.
    let copy = place.path("baton");
    std::fs::copy(env!("CARGO_BIN_EXE_baton"), &copy).unwrap();
    let mut command = Command::new(&copy);
    command.arg("serve").env_clear().current_dir("/").uid(NOBODY).gid(NOBODY);
    let said = refusal(command).await;
    assert!(said.contains("root is needed") && said.contains("sudo"), "{said}");
}

#[tokio::test]
async fn a_port_in_use_is_named_with_the_variable_to_change() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let place = Place::new();
    let mut command = place.server();
    command.env("BATON_LISTEN", &address);
    let said = refusal(command).await;
    assert!(said.contains(&address) && said.contains("in use") && said.contains("BATON_LISTEN"), "{said}");
}

#[tokio::test]
async fn a_missing_runsc_is_named_with_the_way_to_get_it() {
    let place = Place::new();
    let mut command = place.server();
    command.env_remove("BATON_RUNSC");
    let said = refusal(command).await;
    assert!(said.contains("no runsc") && said.contains("scripts/setup"), "{said}");

    let mut command = place.server();
    command.env("BATON_RUNSC", "/nowhere/runsc");
    let said = refusal(command).await;
    assert!(said.contains("BATON_RUNSC is /nowhere/runsc") && said.contains("scripts/setup"), "{said}");
}

#[tokio::test]
async fn a_state_directory_in_use_is_named_with_the_variable_to_change() {
    let place = Place::new();
    let mut first = serving(place.server()).await;
    let said = refusal(place.server()).await;
    assert!(said.contains("another server uses") && said.contains("BATON_STATE_DIR"), "{said}");
    first.start_kill().unwrap();
    first.wait().await.unwrap();
    // Its guard takes down what it had mounted, which would keep the directory.
    while !baton::guard::guard_mounts::below(&place.path("state")).unwrap().is_empty() {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

/// Started, and past everything that could keep it from serving.
async fn serving(command: Command) -> Child {
    let mut command = tokio::process::Command::from(command);
    let mut child = command.stderr(std::process::Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut said = Vec::new();
    let stderr = child.stderr.as_mut().unwrap();
    let heard = tokio::time::timeout(std::time::Duration::from_secs(60), async {
        while !String::from_utf8_lossy(&said).contains("serving address=") {
            assert_ne!(stderr.read_buf(&mut said).await.unwrap(), 0, "{}", String::from_utf8_lossy(&said));
        }
    });
    heard.await.expect("it serves");
    child
}
