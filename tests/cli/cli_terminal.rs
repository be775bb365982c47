//! `baton run --tty`, `exec -it` and `shell` on a real pseudo terminal.

use baton_protocol::{
    event::{Copied, Event, Progress, Status, Update},
    frame::Stream,
    id::{CheckpointId, SandboxId},
    request::Request,
};
use rustix::process::Signal;
use tokio::process::Child;

use crate::{
    pipes::{baton, killed, started},
    pty::{Terminal, send_to_child},
    script::{Heard, ID, Server, TOKEN, soon, token, view},
};

fn run(terminal: &Terminal, server: &Server, arguments: &[&str]) -> Child {
    let url = server.url();
    terminal.run(env!("CARGO_BIN_EXE_baton"), arguments, &[("BATON_URL", &url), ("BATON_TOKEN", TOKEN)])
}

#[tokio::test]
async fn keys_sizes_and_the_screen_pass_through_and_the_terminal_is_put_back() {
    let server = Server::start().await;
    let mut terminal = Terminal::open();
    let before = terminal.manners();
    let mut child = run(&terminal, &server, &["run", "--tty", "--", "bash"]);
    let (mut peer, exec, id) = started(&server).await;
    let pty = exec.pty.unwrap();
    assert_eq!((pty.cols, pty.rows, exec.stdin), (100, 30, true));
    assert_eq!(exec.env["TERM"], "vt100");
    peer.output(Stream::Stdout, 1, 0, b"ready\r\n").await;
    terminal.shows("ready").await;
    assert!(terminal.is_raw());
    // Ctrl-C is a key like any other, and is not interpreted here.
    terminal.press(b"ls\r\x03");
    let mut typed = Vec::new();
    while typed.len() < 4 {
        typed.extend_from_slice(&peer.stdin().await.1);
    }
    assert_eq!(typed, b"ls\r\x03");
    peer.say(&Event::StdinAck { exec_id: id.clone(), offset: 4 }).await;
    terminal.resize(120, 40);
    assert!(peer.request_but_ack().await == Request::Resize { exec_id: id.clone(), cols: 120, rows: 40 });
    peer.done(&id, 3).await;
    killed(peer).await;
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(3));
    assert_eq!(terminal.manners(), before);
}

#[tokio::test]
async fn the_terminal_is_put_back_when_a_signal_or_the_server_ends_it() {
    let signals = [(Signal::TERM, 143), (Signal::HUP, 129), (Signal::QUIT, 131)];
    for by_signal in signals.map(Some).into_iter().chain([None]) {
        let server = Server::start().await;
        let mut terminal = Terminal::open();
        let before = terminal.manners();
        let mut child = run(&terminal, &server, &["run", "--tty", "--", "bash"]);
        let (mut peer, ..) = started(&server).await;
        peer.output(Stream::Stdout, 1, 0, b"ready").await;
        terminal.shows("ready").await;
        assert!(terminal.is_raw());
        let code = if let Some((signal, code)) = by_signal {
            send_to_child(&child, signal);
            killed(peer).await;
            code
        } else {
            peer.status(Status::Deleted).await;
            peer.close(1000).await;
            terminal.shows("the sandbox was deleted").await;
            1
        };
        assert_eq!(soon(child.wait()).await.unwrap().code(), Some(code));
        assert_eq!(terminal.manners(), before);
    }
}

#[tokio::test]
async fn a_shell_in_a_sandbox_feels_local_also_over_a_broken_connection() {
    for arguments in [vec!["exec", "-it", ID, "--", "bash"], vec!["shell", ID], vec!["attach", ID]] {
        let server = Server::start().await;
        let mut terminal = Terminal::open();
        let before = terminal.manners();
        let mut child = run(&terminal, &server, &arguments);
        let mut peer = server.attach(vec![]).await;
        let Request::Exec(exec) = peer.request().await else { panic!("no exec") };
        let id = exec.exec_id.clone().unwrap();
        let pty = exec.pty.unwrap();
        assert_eq!((pty.cols, pty.rows, exec.stdin, exec.env["TERM"].as_str()), (100, 30, true, "vt100"));
        peer.started(&id, 1).await;
        peer.output(Stream::Stdout, 1, 0, b"ready\r\n").await;
        terminal.shows("ready").await;
        assert!(terminal.is_raw());
        peer.cut();
        let mut peer = server.attach(vec![view(&id, 1, 0)]).await;
        assert!(matches!(peer.request_but_ack().await, Request::Reconnect { .. }));
        terminal.press(b"\x03");
        assert_eq!(peer.stdin().await.1, &b"\x03"[..]);
        terminal.resize(120, 40);
        assert!(peer.request_but_ack().await == Request::Resize { exec_id: id.clone(), cols: 120, rows: 40 });
        peer.output(Stream::Stdout, 1, 7, b"bye\r\n").await;
        terminal.shows("bye").await;
        peer.done(&id, 5).await;
        // The sandbox stays: nothing but acknowledgements, then a goodbye.
        while let Heard::Request(request) = peer.heard().await {
            assert!(matches!(request, Request::Ack { .. }), "{request:?}");
        }
        assert_eq!(soon(child.wait()).await.unwrap().code(), Some(5));
        assert_eq!(terminal.manners(), before);
    }
}

#[tokio::test]
async fn a_shell_that_is_hung_up_ends_in_the_sandbox_and_puts_the_terminal_back() {
    let server = Server::start().await;
    let mut terminal = Terminal::open();
    let before = terminal.manners();
    let mut child = run(&terminal, &server, &["shell", ID]);
    let mut peer = server.attach(vec![]).await;
    let id = peer.exec().await;
    peer.started(&id, 1).await;
    peer.output(Stream::Stdout, 1, 0, b"ready").await;
    terminal.shows("ready").await;
    assert!(terminal.is_raw());
    send_to_child(&child, Signal::HUP);
    assert!(peer.request_but_ack().await == Request::KillProcess { exec_id: Some(id) });
    while let Heard::Request(_) = peer.heard().await {}
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(129));
    assert_eq!(terminal.manners(), before);
}

/// A sandbox that is restored, then checkpointed, each with a word in the middle.
async fn restored_and_checkpointed(server: &Server, mut middle: impl AsyncFnMut(&str)) -> CheckpointId {
    let moved = |status, done| Update { progress: Some(Progress { done, total: 8 << 20 }), ..Update::new(status) };
    let mut peer = server.accept().await;
    peer.hello().await;
    peer.status(Status::Restoring).await;
    peer.update(moved(Status::Restoring, 2 << 20)).await;
    middle("restoring [").await;
    peer.status(Status::Running).await;
    assert!(peer.request().await == Request::Checkpoint { live: false, keep_running: false });
    peer.status(Status::Checkpointing).await;
    peer.update(moved(Status::Checkpointing, 6 << 20)).await;
    middle("checkpointing [").await;
    for status in [Status::Deleting, Status::Deleted] {
        peer.status(status).await;
    }
    let id = CheckpointId::parse(&format!("{ID}-1-2-{}", "0".repeat(32))).unwrap();
    peer.update(Update { checkpoint_id: Some(id.clone()), ..Update::new(Status::Checkpointed) }).await;
    peer.close(1000).await;
    id
}

#[tokio::test]
async fn long_work_of_the_server_shows_how_far_it_is_on_a_terminal_only() {
    let server = Server::start().await;
    let mut terminal = Terminal::open();
    let mut child = run(&terminal, &server, &["checkpoint", ID]);
    let mut seen = Vec::new();
    let id = restored_and_checkpointed(&server, async |text| {
        let shown = terminal.shows(text).await;
        seen.push(if shown.contains("MiB") { shown } else { shown + &terminal.shows("MiB").await });
    })
    .await;
    assert!(seen[0].contains(" 25% 2.0 MiB") && seen[1].contains(" 75% 6.0 MiB"), "{seen:?}");
    // The line is gone before the answer stands there.
    assert!(terminal.shows(id.as_str()).await.contains("\r\u{1b}[K"));
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(0));

    let child = baton(&server.url()).env("BATON_TOKEN", TOKEN).args(["checkpoint", ID]).spawn().unwrap();
    let id = restored_and_checkpointed(&server, async |_| {}).await;
    let printed = soon(child.wait_with_output()).await.unwrap();
    assert_eq!((printed.status.code(), &printed.stderr[..]), (Some(0), &b""[..]));
    assert_eq!(printed.stdout, format!("{id}\n").as_bytes());
}

const COPY: &str = "sandbox-77aa5a52-6f0e-4b1c-9d3e-0123456789ab";

#[tokio::test]
async fn a_long_fork_shows_how_far_it_is() {
    let server = Server::start().await;
    let mut terminal = Terminal::open();
    let space = tempfile::tempdir().unwrap();
    let (url, tokens) = (server.url(), space.path().join("tokens.json").display().to_string());
    let variables = [("BATON_URL", url.as_str()), ("BATON_TOKEN", TOKEN), ("BATON_TOKENS", &tokens)];
    let mut child = terminal.run(env!("CARGO_BIN_EXE_baton"), &["fork", ID], &variables);
    let mut peer = server.attach(vec![]).await;
    assert!(peer.request().await == Request::Fork { count: 1 });
    let progress = Some(Progress { done: 6 << 20, total: 8 << 20 });
    peer.update(Update { progress, ..Update::new(Status::Checkpointing) }).await;
    let shown = terminal.shows("MiB").await;
    assert!(shown.contains("checkpointing [") && shown.contains(" 75% 6.0 MiB"), "{shown:?}");
    let copy = Copied { sandbox_id: SandboxId::parse(COPY).unwrap(), sandbox_token: token() };
    peer.say(&Event::Forked { sandboxes: vec![copy] }).await;
    while let Heard::Request(_) = peer.heard().await {}
    let shown = terminal.shows(COPY).await;
    assert!(shown.contains("\r\u{1b}[K"), "the line is gone before the answer stands there: {shown:?}");
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn the_screen_of_a_command_is_its_own() {
    let server = Server::start().await;
    let mut terminal = Terminal::open();
    let mut child = run(&terminal, &server, &["shell", ID]);
    let mut peer = server.attach(vec![]).await;
    let id = peer.exec().await;
    peer.started(&id, 1).await;
    // It moves meanwhile, which is nobody's business here.
    let progress = Some(Progress { done: 1, total: 2 });
    peer.update(Update { progress, ..Update::new(Status::Checkpointing) }).await;
    peer.output(Stream::Stdout, 1, 0, b"ready").await;
    assert_eq!(terminal.shows("ready").await, "ready");
    peer.done(&id, 0).await;
    while let Heard::Request(_) = peer.heard().await {}
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn a_copy_shows_how_far_it_has_come_on_a_terminal_only() {
    let server = Server::start().await;
    let space = tempfile::tempdir().unwrap();
    let file = space.path().join("file");
    std::fs::write(&file, vec![7; 300_000]).unwrap();
    let (mut terminal, target) = (Terminal::open(), format!("{ID}:/data/"));
    let mut child = run(&terminal, &server, &["cp", file.to_str().unwrap(), &target]);
    let mut peer = server.attach(vec![]).await;
    let id = peer.exec().await;
    peer.started(&id, 1).await;
    terminal.shows("%").await;
    let mut came = 0;
    while came < 300_000 {
        came += peer.stdin().await.1.len();
    }
    peer.done(&id, 0).await;
    while let Heard::Request(_) = peer.heard().await {}
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn detach_keys_leave_the_command_running() {
    for (arguments, keys, left) in [
        (vec!["exec", "-it", ID, "--", "bash"], &b"\x10\x11"[..], "keeps running"),
        (vec!["shell", "--detach-keys", "ctrl-a,d", ID], b"\x01d", "keeps running"),
    ] {
        let server = Server::start().await;
        let mut terminal = Terminal::open();
        let before = terminal.manners();
        let mut child = run(&terminal, &server, &arguments);
        let mut peer = server.attach(vec![]).await;
        let id = peer.exec().await;
        peer.started(&id, 1).await;
        peer.output(Stream::Stdout, 1, 0, b"ready\r\n").await;
        terminal.shows("ready").await;
        terminal.press(b"a");
        let typed = loop {
            match peer.heard().await {
                Heard::Binary(bytes) => break bytes.slice(13..),
                Heard::Request(request) => assert!(matches!(request, Request::Ack { .. }), "{request:?}"),
                Heard::Gone => panic!("it left"),
            }
        };
        assert_eq!(typed, &b"a"[..], "{arguments:?}");
        terminal.press(keys);
        // None of the keys, no signal, and not the end of its input.
        while let Heard::Request(request) = peer.heard().await {
            assert!(matches!(request, Request::Ack { .. }), "{request:?}");
        }
        terminal.shows(left).await;
        assert_eq!(soon(child.wait()).await.unwrap().code(), Some(0));
        assert_eq!(terminal.manners(), before);
    }
}

#[tokio::test]
async fn a_run_that_is_left_keeps_its_sandbox_and_its_token() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    let mut terminal = Terminal::open();
    let url = server.url();
    let settings = [("BATON_URL", url.as_str()), ("HOME", home.path().to_str().unwrap())];
    let mut child = terminal.run(env!("CARGO_BIN_EXE_baton"), &["run", "-it", "--", "bash"], &settings);
    let (mut peer, exec, _) = started(&server).await;
    assert!(exec.pty.is_some() && exec.stdin);
    peer.output(Stream::Stdout, 1, 0, b"ready\r\n").await;
    terminal.shows("ready").await;
    terminal.press(b"\x10\x11");
    while let Heard::Request(request) = peer.heard().await {
        assert!(matches!(request, Request::Ack { .. }), "{request:?}");
    }
    terminal.shows("baton kill").await;
    assert_eq!(soon(child.wait()).await.unwrap().code(), Some(0));
    let tokens = std::fs::read_to_string(home.path().join(".local/state/baton/tokens.json")).unwrap();
    assert!(tokens.contains(ID) && tokens.contains(TOKEN), "{tokens}");
}
