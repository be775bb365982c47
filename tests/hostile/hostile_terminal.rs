//! Text from strangers on the terminal of an operator or a user: labels, messages and errors bring it to do nothing.
//! The real binary writes to a real pseudo terminal; the control is a command's own output, which passes untouched.

use std::{fs, path::Path};

use baton_protocol::{
    event::Status,
    frame::Stream,
    id::{InstanceId, SandboxId},
    lock::Lock,
    metadata::{self, DesiredState, Metadata, Phase, Spec},
    printable::is_printable,
};
use serde_json::Value;
use tokio::process::Child;

use crate::{
    pty::Terminal,
    script::{Server, TOKEN, soon},
};

/// Sets the title, clears the screen in seven and in eight bits, ends the line, and turns what follows round.
const WORDS: &str = "a\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}2J\u{85}\u{7f}\u{202e}\u{2066}\u{200f}\u{61c}\u{2028}z";
const END: &str = "everything-was-shown";

/// The first character that a terminal does not just show. A new line and its return are ours.
fn obeyed(screen: &str) -> Option<char> {
    screen.chars().find(|letter| !is_printable(*letter) && !matches!(letter, '\r' | '\n'))
}

/// All that stands on the screen once the command has ended.
async fn rest(terminal: &mut Terminal, mut child: Child) -> String {
    soon(child.wait()).await.unwrap();
    soon(terminal.run("/bin/echo", &[END], &[]).wait()).await.unwrap();
    terminal.shows(END).await
}

/// A sandbox as whoever may write to the store leaves it.
fn plant(store: &Path, number: u32, change: impl FnOnce(&mut Metadata)) -> SandboxId {
    let id = SandboxId::parse(&format!("sandbox-{number:08x}-6f0e-4b1c-9d3e-0123456789ab")).unwrap();
    let folder = store.join(format!("sandboxes/{id}"));
    fs::create_dir_all(&folder).unwrap();
    let mut spec = Spec::new(id.clone(), String::new(), "2026-11-16T10:00:00Z".into(), InstanceId::from_bits([1; 16]));
    (spec.enable_sandbox_checkpoint, spec.desired_state) = (true, DesiredState::Checkpointed);
    let status = metadata::SandboxStatus { phase: Phase::Failed, ..Default::default() };
    let mut record = Metadata { spec, latest_sandbox_checkpoint: None, last_checkpointed: None, status };
    change(&mut record);
    fs::write(folder.join("lock.json"), serde_json::to_vec(&Lock::new(id.clone())).unwrap()).unwrap();
    fs::write(folder.join("metadata.json"), serde_json::to_vec(&record).unwrap()).unwrap();
    id
}

/// A store whose every text is hostile, and its two sandboxes; the second cannot be read.
fn store() -> (tempfile::TempDir, SandboxId, SandboxId) {
    let store = tempfile::tempdir().unwrap();
    let hostile = plant(store.path(), 1, |record| {
        record.spec.labels.insert(WORDS.into(), WORDS.into());
        record.spec.created_timestamp = WORDS.into();
        record.status.reason = WORDS.into();
        record.status.message = WORDS.into();
        record.status.updated = WORDS.into();
    });
    let broken = plant(store.path(), 2, |_| {});
    let file = store.path().join(format!("sandboxes/{broken}/metadata.json"));
    let mut record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    record["desired_state"] = WORDS.into();
    fs::write(&file, record.to_string()).unwrap();
    (store, hostile, broken)
}

#[tokio::test]
async fn nothing_in_the_store_reaches_an_operators_terminal_raw() {
    let (store, hostile, broken) = store();
    let (hostile, broken) = (hostile.as_str(), broken.as_str());
    let set = format!("labels.more={WORDS}");
    let verbs: [&[&str]; 9] = [
        &["list"],
        &["list", "-o", "json"],
        &["get", hostile],
        &["get", hostile, "-o", "json"],
        &["get", broken],
        &["get", broken, "-o", "json"],
        &["watch", "--for", "500ms", "--every", "100ms"],
        &["edit", hostile, "--set", &set, "--no-wait"],
        &["edit", broken, "--set", "labels.a=b", "--no-wait"],
    ];
    let place = store.path().to_str().unwrap();
    for verb in verbs {
        let mut terminal = Terminal::open();
        let child = terminal.run(env!("CARGO_BIN_EXE_baton"), verb, &[("CHECKPOINT_AND_RESTORE_PATH", place)]);
        let screen = rest(&mut terminal, child).await;
        // A live table begins with an empty screen.
        let shown = screen.replace("\u{1b}[H\u{1b}[2J", "");
        assert!(verb[0] != "watch" || shown != screen, "{verb:?}: {screen:?}");
        assert_eq!(obeyed(&shown), None, "{verb:?}: {screen:?}");
        assert!(shown.contains("]0;owned") || shown.contains(broken), "{verb:?} shows neither: {screen:?}");
    }
}

#[tokio::test]
async fn json_means_what_the_store_holds_and_is_harmless_to_read() {
    let (store, hostile, _) = store();
    for verb in [&["get", hostile.as_str(), "-o", "json"][..], &["list", "-o", "json"]] {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_baton"));
        command.env_clear().env("CHECKPOINT_AND_RESTORE_PATH", store.path()).args(verb);
        let text = String::from_utf8(soon(command.output()).await.unwrap().stdout).unwrap();
        assert_eq!(obeyed(&text), None, "{text:?}");
        let told: Value = serde_json::from_str(&text).unwrap();
        let labels = told.pointer("/metadata/labels").or_else(|| told.pointer("/0/labels")).unwrap();
        assert_eq!(labels[WORDS], WORDS, "the same text, escaped");
    }
}

/// On a terminal, as somebody who was told this token.
fn run(terminal: &Terminal, server: &Server, arguments: &[&str]) -> Child {
    let tokens = tempfile::tempdir().unwrap();
    let state = tokens.path().to_str().unwrap();
    let settings = [("BATON_URL", &*server.url()), ("BATON_TOKEN", TOKEN), ("XDG_STATE_HOME", state)];
    terminal.run(env!("CARGO_BIN_EXE_baton"), arguments, &settings)
}

#[tokio::test]
async fn why_a_command_was_lost_is_shown_clean_and_its_own_output_as_it_is() {
    let (server, mut terminal) = (Server::start().await, Terminal::open());
    let child = run(&terminal, &server, &["run", "--", "x"]);
    let mut peer = server.create().await;
    let id = peer.exec().await;
    peer.started(&id, 1).await;
    peer.output(Stream::Stdout, 1, 0, format!("{WORDS}|").as_bytes()).await;
    // The control: these bytes are what the user asked for.
    assert!(terminal.shows("z|").await.contains(WORDS));
    peer.gone(&id, WORDS).await;
    soon(peer.killed()).await;
    let screen = rest(&mut terminal, child).await;
    assert!(screen.contains("the command was lost: a?]0;owned"), "{screen:?}");
    assert_eq!(obeyed(&screen), None, "{screen:?}");
}

#[tokio::test]
async fn why_a_server_refuses_is_shown_clean() {
    let (server, mut terminal) = (Server::start().await, Terminal::open());
    let child = run(&terminal, &server, &["create"]);
    let mut peer = server.accept().await;
    peer.hello().await;
    peer.status(Status::Creating).await;
    peer.request().await;
    peer.refuse(Status::CreationError, WORDS).await;
    peer.close(4000).await;
    let screen = rest(&mut terminal, child).await;
    assert!(screen.contains("]0;owned"), "{screen:?}");
    assert_eq!(obeyed(&screen), None, "{screen:?}");
}

/// Only `screen.rs` writes lines; what else writes to a terminal is the output of commands and the bar of a transfer.
#[test]
fn nothing_on_the_command_line_prints_but_by_the_one_way() {
    let mut left = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cli")];
    let mut seen = 0;
    while let Some(place) = left.pop() {
        if place.is_dir() {
            left.extend(fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let text = fs::read_to_string(&place).unwrap();
        seen += 1;
        for word in ["println!(", "print!("] {
            assert!(!text.contains(word), "{place:?} has {word}: use cli::screen");
        }
    }
    assert!(seen > 30);
}
