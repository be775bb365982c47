//! The verbs for a sandbox that exists, against a scripted server: what they ask, print and leave.

use std::{os::unix::fs::PermissionsExt, path::Path, process::Output};

use baton_protocol::{
    event::{Event, ExecView, Kept, Status, Update},
    frame::Stream,
    id::CheckpointId,
    request::Request,
};
use rustix::process::Signal;
use tokio::{io::AsyncWriteExt, process::Child};

use crate::{
    pipes::{baton, send},
    script::{Heard, ID, ScriptedPeer, Server, TOKEN, exec_id, soon, view},
};

/// `baton` with the token of the scripted sandbox.
fn with_token(server: &Server, arguments: &[&str]) -> tokio::process::Command {
    let mut command = baton(&server.url());
    command.env("BATON_TOKEN", TOKEN).args(arguments);
    command
}

pub async fn output(child: Child) -> Output {
    soon(child.wait_with_output()).await.unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The client says nothing but acknowledgements, and leaves.
pub async fn leaves(mut peer: ScriptedPeer) {
    while let Heard::Request(request) = peer.heard().await {
        let harmless =
            matches!(&request, Request::Ack { .. }) || matches!(&request, Request::Stdin(stdin) if stdin.eof);
        assert!(harmless, "{request:?}");
    }
}

#[tokio::test]
async fn a_command_gets_our_stdin_and_its_output_and_code_are_ours() {
    let server = Server::start().await;
    let mut command = with_token(&server, &["exec", "-e", "A=b", ID, "--", "tr", "a", "b"]);
    let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"aaa").await.unwrap();
    drop(stdin);
    let mut peer = server.attach(vec![]).await;
    let Request::Exec(exec) = peer.request().await else { panic!("no exec") };
    assert_eq!((exec.stdin, exec.pty, exec.env["A"].as_str()), (true, None, "b"));
    let id = exec.exec_id.clone().unwrap();
    peer.started(&id, 1).await;
    assert_eq!(peer.stdin().await.1, &b"aaa"[..]);
    peer.say(&Event::StdinAck { exec_id: id.clone(), offset: 3 }).await;
    peer.output(Stream::Stdout, 1, 0, b"bbb").await;
    peer.done(&id, 7).await;
    leaves(peer).await;
    let output = output(child).await;
    assert_eq!((output.status.code(), text(&output.stdout), text(&output.stderr)), (Some(7), "bbb", ""));
}

#[tokio::test]
async fn a_timeout_is_124_and_an_interrupt_130_and_the_second_one_kills() {
    let server = Server::start().await;
    let child = with_token(&server, &["exec", "--timeout", "1s", ID, "--", "sleep", "9"]).spawn().unwrap();
    let mut peer = server.attach(vec![]).await;
    let id = peer.exec().await;
    peer.started(&id, 1).await;
    let done = Update { exec_id: Some(id), signal: Some(9), timed_out: true, ..Update::new(Status::ExecutionDone) };
    peer.update(done).await;
    leaves(peer).await;
    assert_eq!(output(child).await.status.code(), Some(124));

    let child = with_token(&server, &["exec", ID, "--", "sleep", "9"]).spawn().unwrap();
    let mut peer = server.attach(vec![]).await;
    let id = peer.exec().await;
    peer.started(&id, 1).await;
    loop {
        if matches!(peer.request_but_ack().await, Request::Stdin(stdin) if stdin.eof) {
            break;
        }
    }
    send(&child, Signal::INT);
    assert!(peer.request_but_ack().await == Request::Signal { exec_id: id.clone(), signal: "INT".into() });
    send(&child, Signal::INT);
    assert!(peer.request_but_ack().await == Request::KillProcess { exec_id: Some(id.clone()) });
    leaves(peer).await;
    assert_eq!(output(child).await.status.code(), Some(130));
}

#[tokio::test]
async fn a_detached_command_is_left_alone_and_its_output_looked_at_without_taking_it() {
    let server = Server::start().await;
    let child = with_token(&server, &["exec", "--detach", ID, "--", "make"]).spawn().unwrap();
    let mut peer = server.attach(vec![]).await;
    let id = peer.exec().await;
    peer.started(&id, 1).await;
    leaves(peer).await;
    let printed = output(child).await;
    assert_eq!((printed.status.code(), text(&printed.stdout)), (Some(0), format!("{id}\n").as_str()));

    let kept = |from, to| Kept { from, to };
    let view = ExecView { stdout: kept(10, 15), stderr: kept(0, 2), ..view(&id, 1, 0) };
    let child = with_token(&server, &["logs", ID]).spawn().unwrap();
    let mut peer =
        server.attach(vec![ExecView { exec: 0, exec_id: exec_id("older"), ..view.clone() }, view.clone()]).await;
    let Request::Reconnect { offsets, peek } = peer.request().await else { panic!() };
    assert_eq!((offsets[&id].stdout, offsets[&id].stderr, peek), (10, 0, true));
    peer.started(&id, 1).await;
    peer.output(Stream::Stderr, 1, 0, b"oh").await;
    // What came after we did is not ours to print.
    peer.output(Stream::Stdout, 1, 10, b"hello and more").await;
    leaves(peer).await;
    let printed = output(child).await;
    assert_eq!((printed.status.code(), text(&printed.stdout)), (Some(0), "hello"));
    assert_eq!(text(&printed.stderr), "baton: 10 earlier bytes are no longer buffered\noh");

    let child = with_token(&server, &["logs", "--list", ID]).spawn().unwrap();
    let listed = ExecView { command: Some("make -j2".to_owned()), started_ms: Some(1_700_000_000_000), ..view.clone() };
    leaves(server.attach(vec![listed]).await).await;
    let listed = output(child).await.stdout;
    let row: Vec<_> = text(&listed).lines().last().unwrap().split_whitespace().collect();
    assert_eq!(row, [id.as_str(), "2023-11-14T22:13:20Z", "running", "17", "make", "-j2"]);

    // To follow is not to take it either.
    let child = with_token(&server, &["logs", "-f", ID]).spawn().unwrap();
    let mut peer = server.attach(vec![view]).await;
    assert!(matches!(peer.request().await, Request::Reconnect { peek: true, .. }));
    peer.started(&id, 1).await;
    peer.output(Stream::Stdout, 1, 10, b"hello and more").await;
    peer.done(&id, 3).await;
    leaves(peer).await;
    let printed = output(child).await;
    assert_eq!((printed.status.code(), text(&printed.stdout)), (Some(3), "hello and more"));
}

#[tokio::test]
async fn a_created_sandbox_is_found_by_the_beginning_of_its_id_until_it_is_killed() {
    let server = Server::start().await;
    let space = tempfile::tempdir().unwrap();
    let home = |arguments: &[&str]| {
        let mut command = baton(&server.url());
        command.env("HOME", space.path()).args(arguments);
        command.spawn().unwrap()
    };
    let child = home(&["create", "--checkpoint", "--idle", "never", "--label", "a=b"]);
    leaves(server.create().await).await;
    assert_eq!(text(&output(child).await.stdout), format!("{ID}\n"));
    let kept = space.path().join(".local/state/baton/tokens.json");
    assert_eq!(std::fs::metadata(&kept).unwrap().permissions().mode() & 0o777, 0o600);

    let child = home(&["checkpoint", "--live", "-o", "json", &ID[8..14]]);
    let mut peer = server.attach(vec![]).await;
    assert!(peer.request().await == Request::Checkpoint { live: true, keep_running: false });
    let id = CheckpointId::parse(&format!("{ID}-1-2-{}", "0".repeat(32))).unwrap();
    let update = Update::new(Status::Checkpointed);
    peer.update(Update { checkpoint_id: Some(id.clone()), ..update }).await;
    peer.close(1000).await;
    let printed = output(child).await;
    let told: serde_json::Value = serde_json::from_slice(&printed.stdout).unwrap();
    assert_eq!((printed.status.code(), &told["checkpoint_id"]), (Some(0), &serde_json::json!(id)));

    let child = home(&["kill", &ID[8..14]]);
    let request = server.answer("204 No Content", "").await;
    assert!(request.starts_with(&format!("DELETE /sandboxes/{ID}?wait=30 HTTP/1.1\r\n")), "{request}");
    assert!(request.contains(&format!("x-sandbox-token: {TOKEN}\r\n")), "{request}");
    assert_eq!(output(child).await.status.code(), Some(0));
    assert!(!std::fs::read_to_string(&kept).unwrap().contains(ID));
    let printed = output(home(&["exec", &ID[8..14], "--", "true"])).await;
    assert_eq!(printed.status.code(), Some(1));
    assert!(text(&printed.stderr).contains("no token for"), "{}", text(&printed.stderr));
}

#[tokio::test]
async fn a_roll_back_is_reported() {
    let server = Server::start().await;
    let child = with_token(&server, &["exec", ID, "--", "true"]).spawn().unwrap();
    let mut peer = server.accept().await;
    peer.hello().await;
    let checkpoint_id = CheckpointId::parse(&format!("{ID}-1-2-{}", "0".repeat(32))).unwrap();
    peer.say(&Event::RolledBack { checkpoint_id: checkpoint_id.clone(), age_ms: 61_500 }).await;
    peer.update(Update { execs: Some(vec![]), ..Update::new(Status::Running) }).await;
    let id = peer.exec().await;
    peer.started(&id, 1).await;
    peer.done(&id, 0).await;
    leaves(peer).await;
    let printed = output(child).await;
    let said = format!(
        "baton: the sandbox was rolled back to checkpoint {checkpoint_id}, which is 1m 1s old: later work is lost\n"
    );
    assert_eq!((printed.status.code(), text(&printed.stderr)), (Some(0), said.as_str()));
}

#[tokio::test]
async fn a_key_kills_a_sandbox_whose_token_is_not_here() {
    let (server, space) = (Server::start().await, tempfile::tempdir().unwrap());
    let url = server.url();
    let kill = |name: &str| {
        let mut command = baton(&url);
        command.args(["kill", name]).env("BATON_API_KEY", "k3y").env("HOME", space.path()).spawn().unwrap()
    };
    let child = kill(&ID[8..14]);
    let request = server.answer("200 OK", &format!(r#"{{"sandboxes":[{{"sandbox_id":"{ID}"}}],"next":null}}"#)).await;
    assert!(request.starts_with("GET /sandboxes HTTP/1.1\r\n") && request.contains("x-api-key: k3y\r\n"), "{request}");
    let request = server.answer("204 No Content", "").await;
    assert!(
        request.starts_with(&format!("DELETE /sandboxes/{ID}?")) && request.contains("x-api-key: k3y\r\n"),
        "{request}"
    );
    assert!(!request.contains("x-sandbox-token"), "{request}");
    assert_eq!(output(child).await.status.code(), Some(0));

    let child = kill(ID);
    server.answer("404 Not Found", "").await;
    let printed = output(child).await;
    assert_eq!(
        (printed.status.code(), text(&printed.stderr)),
        (Some(1), &*format!("baton: {ID}: there is no such sandbox\n"))
    );
}

#[tokio::test]
async fn completions_and_help_are_there_for_every_verb() {
    let run = async |arguments: &[&str]| {
        let mut command = baton("ws://127.0.0.1:1");
        let printed = output(command.args(arguments).spawn().unwrap()).await;
        assert_eq!(printed.status.code(), Some(0), "{arguments:?}");
        String::from_utf8(printed.stdout).unwrap()
    };
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&["completions", shell]).await;
        assert!(script.contains("checkpoint") && script.contains("logs"), "{shell}");
    }
    for verb in ["run", "create", "exec", "shell", "cp", "logs", "list", "get", "checkpoint", "handoff", "fork", "kill"]
    {
        let help = run(&[verb, "--help"]).await;
        assert!(help.contains("Examples:") && help.contains("BATON_URL"), "{verb}: {help}");
    }
}

/// Everything of a directory, by name.
pub fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
