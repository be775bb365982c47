//! A real pseudo terminal of 100 by 30, with somebody in front of it.

use std::{
    io::Read,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    process::Stdio,
    thread,
    time::Duration,
};

use rustix::{
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize},
};
use tokio::{
    process::{Child, Command},
    sync::mpsc,
};

/// Long enough for a busy machine, short enough to find a hang.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(60);

pub struct Terminal {
    keys: OwnedFd,
    screen: mpsc::UnboundedReceiver<Vec<u8>>,
    line: OwnedFd,
}

impl Terminal {
    pub fn open() -> Self {
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

    pub fn resize(&self, cols: u16, rows: u16) {
        tcsetwinsize(&self.keys, Winsize { ws_col: cols, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    }

    pub fn press(&self, keys: &[u8]) {
        assert_eq!(rustix::io::write(&self.keys, keys).unwrap(), keys.len());
    }

    fn mode(&self) -> Termios {
        tcgetattr(&self.line).unwrap()
    }

    /// All about how it treats keys and output, to compare.
    pub fn manners(&self) -> String {
        format!("{:?}", self.mode())
    }

    pub fn is_raw(&self) -> bool {
        !self.mode().local_modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    /// Reads the screen until this stands there; all that was read.
    pub async fn shows(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains(text) {
            match tokio::time::timeout(OUTPUT_TIMEOUT, self.screen.recv()).await {
                Ok(more) => seen.extend(more.expect("the terminal is closed")),
                Err(_) => panic!("{text:?} never stood there, but {:?}", String::from_utf8_lossy(&seen)),
            }
        }
        String::from_utf8_lossy(&seen).into_owned()
    }

    /// Runs it as a shell would: in a session of its own, with this as its terminal.
    pub fn run(&self, program: impl AsRef<Path>, arguments: &[&str], settings: &[(&str, &str)]) -> Child {
        let side = || Stdio::from(self.line.as_fd().try_clone_to_owned().unwrap());
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(program.as_ref()).args(arguments);
        command.env_clear().env("PATH", "/usr/bin:/bin").env("TERM", "vt100").envs(settings.iter().copied());
        command.kill_on_drop(true);
        command.stdin(side()).stdout(side()).stderr(side()).spawn().unwrap()
    }
}

/// `setsid` waits with its own id; what it started is its child.
pub fn send_to_child(setsid: &Child, signal: Signal) {
    let id = setsid.id().unwrap();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let pid = children.split_whitespace().next().map_or(id as i32, |child| child.parse().unwrap());
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}
