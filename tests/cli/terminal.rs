//! `baton run --tty`, `exec -it` and `shell` on a real pseudo terminal.

use std::{
    io::Read,
    os::fd::{AsFd, OwnedFd},
    process::Stdio,
    thread,
};

use baton_protocol::{event::Event, frame::Stream, request::Request};
use rustix::{
    process::Signal,
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize},
};
use tokio::{process::Child, sync::mpsc};

use crate::{
    pipes::{baton, killed, send, started},
    script::{Heard, ID, Server, TOKEN, soon, view},
};

/// A terminal of 100 by 30, with somebody in front of it.
struct Terminal {
    keys: OwnedFd,
    screen: mpsc::UnboundedReceiver<Vec<u8>>,
    line: OwnedFd,
}

impl Terminal {
    fn open() -> Self {
        let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&keys).unwrap();
        unlockpt(&keys).unwrap();
        let name = ptsname(&keys, Vec::new()).unwrap().into_string().unwrap();
        let line: OwnedFd = std::fs::File::options().read(true).write(true).open(name).unwrap().into();
        let (sender, screen) = mpsc::unbounded_channel();
        let mut output = std::fs::File::from(keys.try_clone().unwrap());
        // Ends with an error once nobody has the other side open.
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut buffer) {
                if sender.send(buffer[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        let terminal = Self { keys, screen, line };
        terminal.resize(100, 30);
        terminal
    }

    fn resize(&self, cols: u16, rows: u16) {
        tcsetwinsize(&self.keys, Winsize { ws_col: cols, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    }

    fn press(&self, keys: &[u8]) {
        assert_eq!(rustix::io::write(&self.keys, keys).unwrap(), keys.len());
    }

    fn mode(&self) -> Termios {
        tcgetattr(&self.line).unwrap()
    }

    fn is_raw(&self) -> bool {
        !self.mode().local_modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    /// Reads the screen until this stands there.
    async fn shows(&mut self, text: &str) {
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains(text) {
            seen.extend(soon(self.screen.recv()).await.expect("the terminal is closed"));
        }
    }

    /// Runs it as a shell would: in a session of its own, with this as its terminal.
    fn run(&self, server: &Server, arguments: &[&str]) -> Child {
        let baton = baton(&server.url());
        let side = || Stdio::from(self.line.as_fd().try_clone_to_owned().unwrap());
        let mut command = tokio::process::Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(baton.as_std().get_program()).args(arguments);
        command.env_clear().env("PATH", "/usr/bin:/bin").env("TERM", "vt100").env("BATON_URL", server.url());
        command.env("BATON_TOKEN", TOKEN);
        command.kill_on_drop(true);
        command.stdin(side()).stdout(side()).stderr(side()).spawn().unwrap()
    }
}

#[tokio::test]
async fn keys_sizes_and_the_screen_pass_through_and_the_terminal_is_put_back() {
    let server = Server::start().await;
    let mut terminal = Terminal::open();
    let before = format!("{:?}", terminal.mode());
    let mut child = terminal.run(&server, &["run", "--tty", "--", "bash"]);
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
    assert_eq!(format!("{:?}", terminal.mode()), before);
}

#[tokio::test]
async fn the_terminal_is_put_back_when_a_signal_or_the_server_ends_it() {
    for by_signal in [true, false] {
        let server = Server::start().await;
        let mut terminal = Terminal::open();
        let before = format!("{:?}", terminal.mode());
        let mut child = terminal.run(&server, &["run", "--tty", "--", "bash"]);
        let (mut peer, ..) = started(&server).await;
        peer.output(Stream::Stdout, 1, 0, b"ready").await;
        terminal.shows("ready").await;
        assert!(terminal.is_raw());
        if by_signal {
            send_to_group(&child);
            killed(peer).await;
        } else {
            peer.status(baton_protocol::event::Status::Deleted).await;
            peer.close(1000).await;
            terminal.shows("the sandbox was deleted").await;
        }
        assert!(!soon(child.wait()).await.unwrap().success());
        assert_eq!(format!("{:?}", terminal.mode()), before);
    }
}

#[tokio::test]
async fn a_shell_in_a_sandbox_feels_local_also_over_a_broken_connection() {
    for arguments in [vec!["exec", "-it", ID, "--", "bash"], vec!["shell", ID], vec!["attach", ID]] {
        let server = Server::start().await;
        let mut terminal = Terminal::open();
        let before = format!("{:?}", terminal.mode());
        let mut child = terminal.run(&server, &arguments);
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
        assert_eq!(format!("{:?}", terminal.mode()), before);
    }
}

#[tokio::test]
async fn a_copy_shows_how_far_it_has_come_on_a_terminal_only() {
    let server = Server::start().await;
    let space = tempfile::tempdir().unwrap();
    let file = space.path().join("file");
    std::fs::write(&file, vec![7; 300_000]).unwrap();
    let (mut terminal, target) = (Terminal::open(), format!("{ID}:/data/"));
    let mut child = terminal.run(&server, &["cp", file.to_str().unwrap(), &target]);
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

/// `setsid` waits with its own id; what it started is its child.
fn send_to_group(setsid: &Child) {
    let children = format!("/proc/{0}/task/{0}/children", setsid.id().unwrap());
    let children = std::fs::read_to_string(children).unwrap();
    match children.split_whitespace().next() {
        Some(pid) => {
            let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
            rustix::process::kill_process(pid, Signal::TERM).unwrap();
        }
        None => send(setsid, Signal::TERM),
    }
}
