//! `baton run` with pipes: bytes, codes, signals.

use std::{
    process::{ExitStatus, Stdio},
    time::Duration,
};

use baton_protocol::{
    event::{Event, Status, Update},
    frame::Stream,
    id::ExecId,
    request::{Command as What, ExecRequest, Request},
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, Command},
};

use crate::script::{ScriptedPeer, Server, soon, view};

pub fn baton(url: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.env_clear().env("PATH", "/usr/bin:/bin").env("BATON_URL", url).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(server: &Server, arguments: &[&str]) -> Command {
    let mut command = baton(&server.url());
    command.arg("run").args(arguments);
    command
}

/// The exec request, answered with a start under number 1.
pub async fn started(server: &Server) -> (ScriptedPeer, Box<ExecRequest>, ExecId) {
    let mut peer = server.create().await;
    let Request::Exec(exec) = peer.request().await else { panic!("no exec") };
    let id = exec.exec_id.clone().unwrap();
    peer.started(&id, 1).await;
    (peer, exec, id)
}

/// The next request but acknowledgements and the end of an empty stdin.
async fn next(peer: &mut ScriptedPeer) -> Request {
    loop {
        match peer.request_but_ack().await {
            Request::Stdin(stdin) if stdin.eof => {}
            request => return request,
        }
    }
}

/// The sandbox is deleted at the end, whatever the end is.
pub async fn killed(mut peer: ScriptedPeer) {
    assert!(next(&mut peer).await == Request::KillSandbox);
    peer.killed().await;
}

pub fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.id().unwrap() as i32).unwrap(), signal).unwrap();
}

async fn end(mut child: Child) -> (ExitStatus, Vec<u8>, Vec<u8>) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let (status, ..) =
        soon(async { tokio::join!(child.wait(), stdout.read_to_end(&mut out), stderr.read_to_end(&mut err)) }).await;
    (status.unwrap(), out, err)
}

#[tokio::test]
async fn the_command_and_its_circumstances_arrive_and_its_output_and_code_come_back() {
    let server = Server::start().await;
    let arguments =
        ["-e", "A=b", "--env", "C=d=e", "--cwd", "/src", "--user", "nobody", "--timeout", "90", "--", "make", "-j2"];
    let child = run(&server, &arguments).spawn().unwrap();
    let (mut peer, exec, id) = started(&server).await;
    assert_eq!(exec.command, What::Argv(vec!["make".into(), "-j2".into()]));
    assert_eq!(exec.env.into_iter().collect::<Vec<_>>(), [("A".into(), "b".into()), ("C".into(), "d=e".into())]);
    assert_eq!((exec.cwd.as_deref(), exec.user.as_deref()), (Some("/src"), Some("nobody")));
    assert_eq!((exec.timeout, exec.pty), (Some(Duration::from_secs(90)), None));
    let every_byte: Vec<u8> = (0..=255).collect();
    peer.output(Stream::Stdout, 1, 0, &every_byte).await;
    peer.output(Stream::Stderr, 1, 0, b"\xffoh\n").await;
    peer.done(&id, 42).await;
    killed(peer).await;
    let (status, out, err) = end(child).await;
    assert_eq!((status.code(), out, err), (Some(42), every_byte, b"\xffoh\n".to_vec()));
}

#[tokio::test]
async fn much_output_comes_back_whole_although_the_connection_is_cut() {
    const TOTAL: u64 = 3 << 20;
    const PART: u64 = 1 << 18;
    let server = Server::start().await;
    let child = run(&server, &["--", "flood"]).spawn().unwrap();
    let bytes = |from: u64, to: u64| (from..to).map(|n| (n * n / 251) as u8).collect::<Vec<_>>();
    let ((status, out, _), ()) = tokio::join!(end(child), async {
        let (mut peer, _, id) = started(&server).await;
        let (mut sent, mut is_cut) = (0, false);
        while sent < TOTAL {
            peer.output(Stream::Stdout, 1, sent, &bytes(sent, sent + PART)).await;
            sent += PART;
            if sent >= TOTAL / 2 && !is_cut {
                is_cut = true;
                peer.cut();
                peer = server.attach(vec![view(&id, 1, 0)]).await;
                let Request::Reconnect { offsets, .. } = next(&mut peer).await else { panic!() };
                sent = offsets[&id].stdout;
                peer.started(&id, 1).await;
            }
        }
        peer.done(&id, 0).await;
        killed(peer).await;
    });
    assert!(status.success() && out == bytes(0, out.len() as u64) && out.len() as u64 >= TOTAL);
}

#[tokio::test]
async fn piped_input_is_passed_on_with_its_end() {
    let server = Server::start().await;
    let mut child = run(&server, &["--", "cat"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let (mut peer, exec, id) = started(&server).await;
    assert!(exec.stdin);
    stdin.write_all(b"one\xff").await.unwrap();
    assert_eq!(peer.stdin().await, (0, b"one\xff".to_vec().into()));
    peer.say(&Event::StdinAck { exec_id: id.clone(), offset: 4 }).await;
    drop(stdin);
    let Request::Stdin(last) = peer.request().await else { panic!("no end of stdin") };
    assert_eq!((last.eof, last.offset), (true, Some(4)));
    peer.done(&id, 0).await;
    killed(peer).await;
    assert!(end(child).await.0.success());
}

#[tokio::test]
async fn the_code_says_which_signal_ended_it_or_that_its_time_was_up() {
    for (timed_out, code) in [(false, 128 + 9), (true, 124)] {
        let server = Server::start().await;
        let child = run(&server, &["--", "x"]).spawn().unwrap();
        let (mut peer, _, id) = started(&server).await;
        peer.update(Update { exec_id: Some(id), signal: Some(9), timed_out, ..Update::new(Status::ExecutionDone) })
            .await;
        killed(peer).await;
        assert_eq!(end(child).await.0.code(), Some(code));
    }
}

#[tokio::test]
async fn ctrl_c_interrupts_the_command_and_a_second_one_leaves() {
    let server = Server::start().await;
    let mut child = run(&server, &["--", "stubborn"]).spawn().unwrap();
    let (mut peer, _, id) = started(&server).await;
    peer.output(Stream::Stdout, 1, 0, b"up").await;
    // What it passed on shows that it listens to signals by now, and cannot be lost when it leaves.
    let mut up = [0; 2];
    child.stdout.as_mut().unwrap().read_exact(&mut up).await.unwrap();
    assert_eq!(&up, b"up");
    send(&child, Signal::INT);
    assert!(next(&mut peer).await == Request::Signal { exec_id: id, signal: "INT".into() });
    send(&child, Signal::INT);
    killed(peer).await;
    assert_eq!(end(child).await.0.code(), Some(130));
}

#[tokio::test]
async fn termination_deletes_the_sandbox_too() {
    let server = Server::start().await;
    let child = run(&server, &["--", "x"]).stdin(Stdio::piped()).spawn().unwrap();
    let (peer, _, _) = started(&server).await;
    send(&child, Signal::TERM);
    killed(peer).await;
    assert_eq!(end(child).await.0.code(), Some(128 + 15));
}

#[tokio::test]
async fn a_reader_that_has_seen_enough_ends_it_quietly() {
    let server = Server::start().await;
    let mut child = run(&server, &["--", "yes"]).stdin(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let (mut peer, _, _) = started(&server).await;
    peer.output(Stream::Stdout, 1, 0, b"y\n").await;
    killed(peer).await;
    let (mut stderr, mut text) = (child.stderr.take().unwrap(), String::new());
    let status = soon(child.wait()).await.unwrap();
    soon(stderr.read_to_string(&mut text)).await.unwrap();
    assert_eq!((status.code(), text.as_str()), (Some(128 + 13), ""));
}

#[tokio::test]
async fn without_a_server_one_sentence_says_what_to_do() {
    let server = Server::start().await;
    let mut command = run(&server, &["--", "true"]);
    let url = server.url();
    drop(server);
    let (status, out, err) = end(command.spawn().unwrap()).await;
    let text = String::from_utf8(err).unwrap();
    assert!(!status.success() && out.is_empty());
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains(&url) && text.contains("baton serve") && text.contains("--url"), "{text}");
}

#[tokio::test]
async fn a_command_that_does_not_start_is_an_error_with_the_reason() {
    let server = Server::start().await;
    let child = run(&server, &["--", "nothing"]).spawn().unwrap();
    let mut peer = server.create().await;
    let id = peer.exec().await;
    peer.gone(&id, "no such program").await;
    killed(peer).await;
    let (status, _, err) = end(child).await;
    assert!(!status.success());
    assert!(String::from_utf8(err).unwrap().contains("no such program"));
}
