//! The command line against a real server with real sandboxes, as a person uses it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use tokio::{io::AsyncWriteExt, process::Command};

use crate::{
    fixture::clock,
    proxy::Proxy,
    servers::{Machine, Server, is_proof},
    transfer::{bytes, look, plant, soon},
};

/// Somebody at a prompt: a home, a directory, a server.
pub struct Person {
    url: String,
    pub home: PathBuf,
}

impl Person {
    pub fn at(machine: &Machine, url: String) -> Self {
        let home = machine.directory.path().join("home");
        fs::create_dir_all(&home).unwrap();
        Self { url, home }
    }

    pub fn types(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(arguments).current_dir(&self.home).kill_on_drop(true).env_clear().env("PATH", "/usr/bin:/bin");
        command.env("HOME", &self.home).env("BATON_URL", &self.url);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    async fn sees(&self, arguments: &[&str]) -> Output {
        soon(self.types(arguments).output()).await.unwrap()
    }

    /// What is printed; it must work.
    pub async fn gets(&self, arguments: &[&str]) -> String {
        let output = self.sees(arguments).await;
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_creates_runs_copies_stores_and_ends() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server_with("one", &[("BATON_ADMIN_KEY", "admin")]).await;
    let person = Person::at(&machine, format!("ws://{}", server.address));
    let id = person.gets(&["create", "--checkpoint", "--handoff", "--label", "team=red"]).await.trim().to_owned();
    let short = &id[8..20];
    assert_eq!(person.gets(&["exec", short, "--", "sh", "-c", "echo $((6 * 7))"]).await, "42\n");
    let failed = person.sees(&["exec", short, "--", "sh", "-c", "echo oh >&2; exit 3"]).await;
    assert_eq!((failed.status.code(), &failed.stderr[..]), (Some(3), &b"oh\n"[..]));
    let late = person.sees(&["exec", "--timeout", "200ms", short, "--", "sleep", "60"]).await;
    assert_eq!(late.status.code(), Some(124));

    plant(&person.home.join("tree"), 100_000);
    person.gets(&["cp", "tree", &format!("{short}:/data/")]).await;
    let there = person.gets(&["exec", short, "--", "sh", "-c", "cd /data/tree && ls -R | wc -l && cat link"]).await;
    assert!(there.ends_with("file 1\n".repeat(37).as_str()), "{there}");
    person.gets(&["cp", &format!("{short}:/data/tree"), "back"]).await;
    assert_eq!(look(&person.home.join("back")), look(&person.home.join("tree")));
    // Piped in, and out again.
    let mut child = person.types(&["cp", "-", &format!("{short}:/data/piped")]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"through a pipe").await.unwrap();
    assert!(soon(child.wait_with_output()).await.unwrap().status.success());
    assert_eq!(person.gets(&["cp", &format!("{short}:/data/piped"), "-"]).await, "through a pipe");
    // Links that lead out of the copy stay in the sandbox.
    person
        .gets(&["exec", short, "--", "sh", "-c", "mkdir /evil; cd /evil; ln -s /etc/passwd a; ln -s .. b; echo c > c"])
        .await;
    let partly = person.sees(&["cp", &format!("{short}:/evil"), "."]).await;
    let told = String::from_utf8(partly.stderr).unwrap();
    assert_eq!((partly.status.code(), told.matches("left out").count()), (Some(1), 2), "{told}");
    assert_eq!(fs::read_dir(person.home.join("evil")).unwrap().count(), 1);

    let exec = person.gets(&["exec", "--detach", short, "--", "sh", "-c", "echo one; echo two >&2; sleep 600"]).await;
    let exec = exec.trim();
    let row = loop {
        let listed = person.gets(&["logs", "--list", short]).await;
        let row: Vec<_> = listed.lines().last().unwrap().split_whitespace().map(str::to_owned).collect();
        if row[3] == "8" {
            break row;
        }
    };
    assert_eq!(
        (&row[0][..], &row[2][..], row[4..].join(" ")),
        (exec, "running", "sh -c echo one; echo two >&2; sleep 600".to_owned())
    );
    assert!(humantime::parse_rfc3339(&row[1]).is_ok(), "{row:?}");
    for _ in 0..2 {
        let logs = person.sees(&["logs", short]).await;
        assert_eq!((&logs.stdout[..], &logs.stderr[..]), (&b"one\n"[..], &b"two\n"[..]), "it can be read again");
    }
    // Stored with the command in it, and fetched by the next verb.
    let refused = person.sees(&["checkpoint", short]).await;
    assert_eq!(refused.status.code(), Some(1));
    let checkpoint = person.gets(&["checkpoint", "--live", short]).await;
    assert!(checkpoint.starts_with(&id), "{checkpoint}");
    let logs = person.sees(&["logs", short, exec]).await;
    assert_eq!((&logs.stdout[..], &logs.stderr[..]), (&b"one\n"[..], &b"two\n"[..]));
    person.gets(&["handoff", short]).await;
    let listed = person.gets(&["list", "--api-key", "admin", "--label", "team=red", "-o", "json"]).await;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!((listed.as_array().unwrap().len(), listed[0]["sandbox_id"].as_str()), (1, Some(id.as_str())));
    assert!(person.gets(&["get", "--api-key", "admin", short]).await.contains(&id));
    assert_eq!(person.gets(&["list", "--api-key", "admin", "--label", "team=blue"]).await, "");
    let denied = person.sees(&["list"]).await;
    assert!(String::from_utf8_lossy(&denied.stderr).contains("admin key"), "{denied:?}");
    person.gets(&["kill", short]).await;
    assert_eq!(person.sees(&["exec", short, "--", "true"]).await.status.code(), Some(1));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_in_a_second_terminal_needs_no_variable() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server_with("one", &[("BATON_ADMIN_KEY", "admin")]).await;
    let person = Person::at(&machine, format!("ws://{}", server.address));
    // As `make run` does.
    let mut set = person.types(&["context", "set", "local", "--from-server", "--use"]);
    set.env("BATON_LISTEN", &server.address).env("BATON_ADMIN_KEY", "admin");
    set.env("CHECKPOINT_AND_RESTORE_PATH", machine.data());
    assert!(soon(set.output()).await.unwrap().status.success());
    let sees = async |arguments: &[&str]| soon(person.types(arguments).env_remove("BATON_URL").output()).await.unwrap();
    let gets = async |arguments: &[&str]| {
        let output = sees(arguments).await;
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let (kept, fleeting) = (gets(&["create"]).await, gets(&["create", "--ephemeral"]).await);
    let (kept, fleeting) = (kept.trim(), fleeting.trim());
    let listed = gets(&["list"]).await;
    assert!(listed.contains(kept) && listed.contains(fleeting), "{listed}");
    assert!(gets(&["get", &kept[8..20]]).await.contains("holder"), "from the storage");
    assert!(gets(&["get", &fleeting[8..20]]).await.contains("running"), "from the server");
    let watched = gets(&["watch", "--for", "1"]).await;
    assert!(watched.contains(kept) && watched.contains(fleeting), "{watched}");
    let stored = machine.object(&format!("sandboxes/{kept}/metadata.json"));
    assert!(stored.is_some() && machine.object(&format!("sandboxes/{fleeting}/metadata.json")).is_none());

    // More than is buffered: to follow does not hold the command up, and the end is there for others.
    let code = "i=0; while [ $i -lt 150000 ]; do echo \"$i is a line of some length, so that there are many bytes of it\"; i=$((i+1)); done; exit 7";
    let exec = gets(&["exec", "--detach", kept, "--", "bash", "-c", code]).await;
    for turn in 0..2 {
        let followed = sees(&["logs", "-f", kept, exec.trim()]).await;
        assert_eq!(followed.status.code(), Some(7), "{turn}: {}", String::from_utf8_lossy(&followed.stderr));
        let text = String::from_utf8(followed.stdout).unwrap();
        assert!(text.ends_with("149999 is a line of some length, so that there are many bytes of it\n"), "{turn}");
        assert!(text.len() > 2 << 20, "{turn}: only {} bytes are left", text.len());
    }
    assert!(gets(&["logs", "--list", kept]).await.contains("exit 7"));
    // An edit waits for its outcome.
    assert!(gets(&["edit", kept, "--set", "desired_state=checkpointed"]).await.contains("is checkpointed"));
    assert!(
        gets(&["edit", kept, "--set", "desired_state=running", "--set", "placement=null"]).await.contains("is running")
    );
    gets(&["kill", kept, fleeting]).await;
    assert!(!gets(&["list", "-o", "name"]).await.contains(fleeting));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_keeps_a_file_system_and_makes_copies() {
    let machine = Machine::with_a_directory().await;
    let server = machine.server("one").await;
    let person = Person::at(&machine, format!("ws://{}", server.address));
    let kept = async |arguments: &[&str]| {
        let mut command = person.types(arguments);
        let output = soon(command.env("CHECKPOINT_AND_RESTORE_PATH", machine.data()).output()).await.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let id = person.gets(&["create", "--checkpoint"]).await.trim().to_owned();
    let short = &id[8..20];
    person.gets(&["exec", short, "--", "sh", "-c", "echo kept >/opt/kept; rm /etc/hostname"]).await;
    person.gets(&["snapshot", "create", "tools", short]).await;
    let again = person.sees(&["snapshot", "create", "tools", short]).await;
    let why = String::from_utf8(again.stderr).unwrap();
    assert!(!again.status.success() && why.contains("`tools` exists already"), "{why}");
    let (_, listed, _) = kept(&["snapshot", "list"]).await;
    let columns: Vec<_> = listed.split_whitespace().collect();
    assert!(matches!(columns[..], ["tools", _, "snapshot", "-"]), "{listed}");

    let look = "cat /opt/kept; ls /etc/hostname 2>/dev/null | wc -l";
    let (_, seen, why) = kept(&["run", "--snapshot", "tools", "--", "sh", "-c", look]).await;
    assert_eq!(seen, "kept\n0\n", "{why}");
    let missing = person.sees(&["run", "--snapshot", "nothing", "--", "true"]).await;
    let why = String::from_utf8(missing.stderr).unwrap();
    assert!(!missing.status.success() && why.contains("`nothing` does not exist"), "{why}");

    // Whoever stands on it keeps it.
    let user = person.gets(&["create", "--checkpoint", "--snapshot", "tools"]).await.trim().to_owned();
    person.gets(&["checkpoint", &user]).await;
    let (deleted, _, why) = kept(&["snapshot", "delete", "tools"]).await;
    assert!(!deleted && why.contains(&format!("tools is not deleted: {user}")), "{why}");
    assert_eq!(person.gets(&["exec", &user, "--", "cat", "/opt/kept"]).await, "kept\n");
    person.gets(&["kill", &user]).await;
    let (exported, _, why) = kept(&["snapshot", "export", "tools"]).await;
    assert!(exported && why.contains("only the differences"), "{why}");
    assert!(machine.object("filesystem_snapshots/tools/tools.tar") == fs::read(person.home.join("tools.tar")).ok());
    let (deleted, _, why) = kept(&["snapshot", "delete", "tools"]).await;
    assert!(deleted && kept(&["snapshot", "list"]).await.1.is_empty(), "{why}");

    let copies = person.gets(&["fork", "--count", "2", short]).await;
    let mut all: Vec<_> = copies.lines().collect();
    assert_eq!(all.len(), 2);
    for copy in &all {
        assert_eq!(person.gets(&["exec", copy, "--", "cat", "/opt/kept"]).await, "kept\n");
    }
    all.push(&id);
    person.gets(&[&["kill"][..], &all[..]].concat()).await;
    server.stop().await;
}

/// The most memory a process ever had, in bytes; 0 once it is gone.
fn peak(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Runs a copy to its end; the most memory it had.
async fn copied(person: &Person, from: &str, to: &str) -> u64 {
    let mut child = person.types(&["cp", "-q", from, to]).spawn().unwrap();
    let (pid, mut most) = (child.id().unwrap(), 0);
    let ended = async {
        loop {
            most = most.max(peak(pid));
            if let Ok(ended) = clock().timeout(Duration::from_millis(10), child.wait()).await {
                return ended.unwrap();
            }
        }
    };
    let ended = clock().timeout(Duration::from_secs(600), ended).await.expect("it hangs");
    let output = child.wait_with_output().await.unwrap();
    assert!(ended.success(), "{}", String::from_utf8_lossy(&output.stderr));
    most
}

fn is_same(one: &Path, two: &Path) -> bool {
    std::process::Command::new("cmp").arg("-s").arg(one).arg(two).status().unwrap().success()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_file_goes_both_ways_and_memory_does_not_grow_with_it() {
    let megabytes: u64 = if is_proof() { 1024 } else { 96 };
    let machine = Machine::with_a_directory().await;
    let server: Server = machine.server("one").await;
    let pid = u32::try_from(server.pid().as_raw()).unwrap();
    let proxy = Proxy::start(&server, 0, 0).await;
    let person = Person::at(&machine, proxy.url());
    let id = person.gets(&["create"]).await.trim().to_owned();
    let (large, back) = (person.home.join("large"), person.home.join("back"));
    {
        use std::io::Write;
        let mut file = fs::File::create(&large).unwrap();
        for part in 0..megabytes {
            let mut piece = bytes(1 << 20);
            piece[..8].copy_from_slice(&part.to_le_bytes());
            file.write_all(&piece).unwrap();
        }
    }
    let before = peak(pid);
    let up = copied(&person, "large", &format!("{id}:/srv/large")).await;
    let down = copied(&person, &format!("{id}:/srv/large"), "back").await;
    assert!(is_same(&large, &back), "every byte is as it was");
    let grown = peak(pid).saturating_sub(before);
    println!("{megabytes} MiB: up {} KiB, down {} KiB at most, server grew {} KiB", up >> 10, down >> 10, grown >> 10);
    assert!(up < 64 << 20 && down < 64 << 20, "the client took {up} and {down} bytes");
    assert!(grown < 48 << 20, "the server grew by {grown} bytes");
    person.gets(&["kill", &id]).await;
    server.stop().await;
}
