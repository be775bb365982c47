//! A sandbox without a server: runsc with the real spec, and a test that speaks with the agent over its pipes.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, sync_channel},
    time::{Duration, Instant},
};

use baton_protocol::{
    agent::{AgentExec, AgentState, Assign, Exit, NameResolution, NetworkAccess, Resync},
    frame::{Decoder, Frame, FrameKind, Stream},
    id::{ExecId, hex},
};
use tempfile::TempDir;

use self::{argv::RunscCommand, bundle::Layout};
use crate::fixture::{Permit, directory, piece};

#[allow(dead_code, reason = "its tests and the rest of its uses are elsewhere")]
#[path = "../../src/runtime/argv.rs"]
mod argv;
#[allow(dead_code, reason = "its tests and the rest of its uses are elsewhere")]
#[path = "../../src/runtime/bundle.rs"]
mod bundle;

/// Nothing that is waited for takes so long, however busy the machine is.
const FRAME_TIMEOUT: Duration = Duration::from_secs(120);
const MARKER: [u8; 16] = *b"\x91marker of tests";
const NAME: &str = "bare";

pub struct BareSandbox {
    directory: TempDir,
    child: Child,
    stdin: ChildStdin,
    output: Receiver<Vec<u8>>,
    decoder: Decoder,
    /// Frames that came while another was waited for.
    kept: Vec<Frame>,
    /// What programs are told about names, however often they ask.
    names: BTreeMap<Vec<u8>, Vec<u8>>,
    last_exec: u32,
    _permit: Permit,
}

/// How a command ended, and what it wrote.
#[derive(Debug)]
pub struct BareOutput {
    pub text: String,
    pub code: Option<i32>,
}

impl BareSandbox {
    /// One whose agent is assigned and has its network.
    pub fn start(permit: Permit) -> Self {
        let directory = directory();
        let bundle = directory.path().join("bundle");
        fs::create_dir_all(bundle.join("agent")).unwrap();
        for name in ["overlay", "root"] {
            fs::create_dir_all(directory.path().join(name)).unwrap();
        }
        fs::copy(piece("BATON_AGENT"), bundle.join("agent/agent")).unwrap();
        let spec = bundle::spec(Layout::Networked, &piece("BATON_TEST_ROOTFS"), &bundle.join("agent"), None);
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        let verb = RunscCommand::Run { bundle: &bundle, layout: Layout::Networked, disk: None };
        let (child, stdin, output) = attach(directory.path(), verb);
        let (decoder, kept) = (Decoder::default(), Vec::new());
        let mut sandbox = Self {
            directory,
            child,
            stdin,
            output,
            decoder,
            kept,
            names: BTreeMap::new(),
            last_exec: 0,
            _permit: permit,
        };
        sandbox.wait_for(FrameKind::Hello, 0);
        let assign = Assign {
            marker_inverted: hex(&MARKER.map(|byte| !byte)),
            hostname: Some("inside".to_owned()),
            ..Assign::default()
        };
        sandbox.send_json(FrameKind::Assign, &assign);
        sandbox.set_egress(true);
        sandbox
    }

    pub fn send(&mut self, frame: Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.stdin.write_all(&bytes).unwrap();
    }

    pub fn set_egress(&mut self, egress: bool) {
        self.send_json(FrameKind::Network, &NetworkAccess { egress });
    }

    fn send_json(&mut self, kind: FrameKind, payload: &impl serde::Serialize) {
        self.send(Frame::new(kind).payload(serde_json::to_vec(payload).unwrap()));
    }

    pub fn next_frame(&mut self) -> Frame {
        let deadline = Instant::now() + FRAME_TIMEOUT;
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                if !self.answers(&frame) {
                    return frame;
                }
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let bytes = self
                .output
                .recv_timeout(left)
                .unwrap_or_else(|_| panic!("the agent says something; {:?} came", self.kept));
            self.decoder.push(&bytes);
        }
    }

    /// From now on answers queries for `name`, which a program may ask for once for each kind of address.
    pub fn answer_name(&mut self, name: &str, outcome: NameResolution) {
        self.names.insert(name.as_bytes().to_vec(), serde_json::to_vec(&outcome).unwrap());
        for frame in std::mem::take(&mut self.kept) {
            if !self.answers(&frame) {
                self.kept.push(frame);
            }
        }
    }

    /// Answers a query for a name that is known. Returns whether it is one.
    fn answers(&mut self, frame: &Frame) -> bool {
        let Some(payload) = self.names.get(&frame.payload).filter(|_| frame.kind == FrameKind::Resolve) else {
            return false;
        };
        self.send(Frame::new(FrameKind::Resolved).exec(frame.exec).payload(payload.clone()));
        true
    }

    pub fn wait_for(&mut self, kind: FrameKind, number: u32) -> Frame {
        self.wait_until(|frame| frame.kind == kind && frame.exec == number)
    }

    /// The next frame that is meant, of those that came already or come now; others are kept for later.
    pub fn wait_until(&mut self, is_meant: impl Fn(&Frame) -> bool) -> Frame {
        if let Some(at) = self.kept.iter().position(&is_meant) {
            return self.kept.remove(at);
        }
        loop {
            let frame = self.next_frame();
            if is_meant(&frame) {
                return frame;
            }
            self.kept.push(frame);
        }
    }

    /// Everything the agent had to say before it answered.
    pub fn settle(&mut self) -> Vec<Frame> {
        self.send(Frame::new(FrameKind::Ping).sequence(u64::MAX));
        let pong = self.wait_until(|frame| frame.kind == FrameKind::Pong && frame.sequence == u64::MAX);
        assert_eq!(pong.kind, FrameKind::Pong);
        std::mem::take(&mut self.kept)
    }

    /// Starts a command as this user, and returns its number.
    pub fn exec_as(&mut self, user: Option<&str>, argv: &[&str]) -> u32 {
        self.last_exec += 1;
        let exec = AgentExec {
            exec_id: ExecId::parse(&format!("e{}", self.last_exec)).unwrap(),
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
            env: BTreeMap::new(),
            cwd: None,
            user: user.map(str::to_owned),
            stdin: false,
            pty: None,
            timeout_ms: None,
            file: None,
        };
        let number = self.last_exec;
        let payload = serde_json::to_vec(&exec).unwrap();
        self.send(Frame::new(FrameKind::Exec).exec(number).sequence(number.into()).payload(payload));
        for stream in [Stream::Stdout, Stream::Stderr] {
            self.send(Frame::new(FrameKind::Credit).exec(number).stream(stream).offset(u64::MAX));
        }
        number
    }

    pub fn python(&mut self, script: &str) -> u32 {
        self.exec_as(None, &["python3", "-c", script])
    }

    /// Waits until the command has ended, and returns its output, both streams together.
    pub fn output(&mut self, number: u32) -> BareOutput {
        let exit: Exit = serde_json::from_slice(&self.wait_for(FrameKind::Exit, number).payload).unwrap();
        let mut text = Vec::new();
        for stream in [Stream::Stdout, Stream::Stderr] {
            let is_meant = |kind: FrameKind| {
                move |frame: &Frame| frame.exec == number && frame.stream == stream && frame.kind == kind
            };
            let end = self.wait_until(is_meant(FrameKind::Eof)).offset;
            let mut have = 0;
            while have < end {
                let frame = self.wait_until(is_meant(FrameKind::Data));
                assert_eq!(frame.offset, have);
                have += frame.payload.len() as u64;
                text.extend(frame.payload);
            }
        }
        BareOutput { text: String::from_utf8_lossy(&text).trim().to_owned(), code: exit.code }
    }

    /// The output of a script, which must succeed.
    pub fn run_python(&mut self, script: &str) -> String {
        let number = self.python(script);
        let output = self.output(number);
        assert_eq!(output.code, Some(0), "{}", output.text);
        output.text
    }

    /// Saves the sandbox, ends it, and goes on with a restored one. It has no network until it is told.
    pub fn checkpoint_and_restore(&mut self) {
        let image = self.path("image");
        fs::create_dir_all(&image).unwrap();
        call(self.directory.path(), RunscCommand::Checkpoint { image: &image });
        call(self.directory.path(), RunscCommand::Delete);
        self.child.wait().unwrap();
        fs::remove_dir_all(self.path("overlay")).unwrap();
        fs::create_dir_all(self.path("overlay")).unwrap();
        let bundle = self.path("bundle");
        let verb = RunscCommand::Restore { bundle: &bundle, layout: Layout::Networked, image: &image };
        (self.child, self.stdin, self.output) = attach(self.directory.path(), verb);
        self.decoder = Decoder::default();
        self.kept.clear();
        self.resync([7; 16]);
        fs::remove_dir_all(image).unwrap();
    }

    fn resync(&mut self, nonce: [u8; 16]) {
        self.stdin.write_all(&MARKER.repeat(2)).unwrap();
        let payload = serde_json::to_vec(&Resync { nonce: hex(&nonce) }).unwrap();
        self.send(Frame::new(FrameKind::Resync).sequence(1).payload(payload));
        let deadline = Instant::now() + FRAME_TIMEOUT;
        let at = loop {
            if let Some(at) = self.decoder.find(&nonce) {
                break at;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            self.decoder.push(&self.output.recv_timeout(left).expect("the agent answers the resync"));
        };
        self.decoder.skip(at + nonce.len());
        let state = self.wait_for(FrameKind::ResyncAck, 0);
        let state: AgentState = serde_json::from_slice(&state.payload).unwrap();
        for exec in state.execs {
            for (stream, range) in [(Stream::Stdout, exec.stdout), (Stream::Stderr, exec.stderr)] {
                let replay = Frame::new(FrameKind::Replay).exec(exec.exec).stream(stream).offset(range.from);
                self.send(replay);
                self.send(Frame::new(FrameKind::Credit).exec(exec.exec).stream(stream).offset(u64::MAX));
            }
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for BareSandbox {
    fn drop(&mut self) {
        // After a failed test too.
        let _ = command(self.directory.path(), RunscCommand::Delete).output();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(directory: &Path, verb: RunscCommand<'_>) -> Command {
    let log = directory.join(format!("log-{}", verb.name()));
    let mut command = Command::new(piece("BATON_RUNSC"));
    command.args(argv::line(&directory.join("root"), &directory.join("overlay"), &log, verb, NAME));
    command
}

fn call(directory: &Path, verb: RunscCommand<'_>) {
    let output = command(directory, verb).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}: {}", verb.name(), String::from_utf8_lossy(&output.stderr));
}

fn attach(directory: &Path, verb: RunscCommand<'_>) -> (Child, ChildStdin, Receiver<Vec<u8>>) {
    let mut command = command(directory, verb);
    let stderr = fs::File::create(directory.join("stderr")).unwrap();
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
    let (stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    rustix::pipe::fcntl_setpipe_size(&stdin, 1 << 20).unwrap();
    rustix::pipe::fcntl_setpipe_size(&stdout, 1 << 20).unwrap();
    // Bounded, so that a test that does not read holds the agent back.
    let (sender, output) = sync_channel(4);
    std::thread::spawn(move || {
        let mut bytes = vec![0; 1 << 20];
        while let Ok(count @ 1..) = stdout.read(&mut bytes) {
            if sender.send(bytes[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    (child, stdin, output)
}
