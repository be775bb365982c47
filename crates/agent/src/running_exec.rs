//! One command: its streams, its exit status, and when it can be forgotten.

use std::{os::fd::BorrowedFd, time::Duration};

use baton_protocol::{
    agent::{self, ExecState, Exit},
    file_work::Work,
    frame::{self, FrameKind, Stream},
    id::ExecId,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::{
    io,
    termios::{LocalModes, SpecialCodeIndex, tcgetattr, tcgetpgrp},
};

use crate::{
    active_time,
    exec_spawn::Spawned,
    output_pipe::OutputPipe,
    poll::{Epoll, PollSource},
    stdin_pipe::StdinPipe,
};

/// A pending rescan of a killed tree.
#[derive(Clone, Copy, Debug)]
pub struct KillSweep {
    pub left: u32,
    pub at: Duration,
}

#[derive(Debug)]
pub struct RunningExec {
    pub number: u32,
    pub exec_id: ExecId,
    /// The number of the request that started it.
    pub request: u64,
    pub pid: i32,
    pub is_terminal: bool,
    /// As lists show it.
    command: String,
    started_ms: u64,
    is_background: bool,
    pub stdin: StdinPipe,
    pub stdout: OutputPipe,
    pub stderr: OutputPipe,
    pub exit: Option<Exit>,
    pub exit_acked: bool,
    /// When it began and when its time is up, in active time of the sandbox.
    began: Duration,
    deadline: Option<Duration>,
    pub timed_out: bool,
    /// Why its process was killed, if the sandbox was over a limit.
    pub reason: Option<String>,
    /// Its tree was killed and will be scanned again.
    pub sweep: Option<KillSweep>,
}

impl RunningExec {
    pub fn started(asked: &agent::AgentExec, number: u32, request: u64, spawned: Spawned, ran: Duration) -> Self {
        let is_terminal = asked.pty.is_some();
        Self {
            number,
            exec_id: asked.exec_id.clone(),
            request,
            pid: spawned.pid,
            is_terminal,
            command: agent::shown_command(&asked.argv),
            started_ms: active_time::wall_ms(),
            is_background: asked.file.as_ref().is_some_and(Work::is_background),
            stdin: StdinPipe::new(spawned.stdin, is_terminal),
            stdout: OutputPipe::new(Some(spawned.stdout)),
            stderr: OutputPipe::new(spawned.stderr),
            exit: None,
            exit_acked: false,
            began: ran,
            deadline: asked.timeout_ms.map(|span| ran.saturating_add(Duration::from_millis(span))),
            timed_out: false,
            reason: None,
            sweep: None,
        }
    }

    /// A command that was refused.
    pub fn refused(asked: &agent::AgentExec, number: u32, request: u64, error: String) -> Self {
        Self::not_started(asked, number, request, Exit { error: Some(error), ..Exit::default() })
    }

    /// A command whose program cannot be run: it ends at once, as in a shell.
    pub fn unrunnable(asked: &agent::AgentExec, number: u32, request: u64, code: i32, text: &str) -> Self {
        let mut exec = Self::not_started(asked, number, request, Exit { code: Some(code), ..Exit::default() });
        if exec.is_terminal {
            exec.stdout = OutputPipe::ended_with(&format!("{text}\r\n"));
        } else {
            exec.stderr = OutputPipe::ended_with(&format!("{text}\n"));
        }
        exec
    }

    fn not_started(asked: &agent::AgentExec, number: u32, request: u64, exit: Exit) -> Self {
        Self {
            number,
            exec_id: asked.exec_id.clone(),
            request,
            pid: 0,
            is_terminal: asked.pty.is_some(),
            command: agent::shown_command(&asked.argv),
            started_ms: active_time::wall_ms(),
            is_background: false,
            stdin: StdinPipe::new(None, false),
            stdout: OutputPipe::new(None),
            stderr: OutputPipe::new(None),
            exit: Some(exit),
            exit_acked: false,
            began: Duration::ZERO,
            deadline: None,
            timed_out: false,
            reason: None,
            sweep: None,
        }
    }

    /// Records that the command's own process has exited; its streams may continue.
    pub fn end(&mut self, code: Option<i32>, signal: Option<i32>, ran: Duration) {
        self.deadline = None;
        self.exit = Some(Exit {
            code,
            signal,
            error: None,
            timed_out: self.timed_out,
            reason: self.reason.take().filter(|_| signal.is_some()),
            duration_ms: ran.saturating_sub(self.began).as_millis() as u64,
        });
    }

    /// Adds a line by the agent to the command's output.
    pub fn note(&mut self, text: &str) {
        if self.is_terminal {
            self.stdout.add(format!("\r\n{text}\r\n").as_bytes());
        } else {
            self.stderr.add(format!("{text}\n").as_bytes());
        }
    }

    pub fn is_running(&self) -> bool {
        self.exit.is_none()
    }

    /// Time left until its deadline.
    pub fn time_left(&self, ran: Duration) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_sub(ran))
    }

    /// Whether its time is up; returns `true` once.
    pub fn take_deadline(&mut self, ran: Duration) -> bool {
        let is_up = self.deadline.is_some_and(|deadline| deadline <= ran);
        if is_up {
            self.deadline = None;
            self.timed_out = true;
        }
        is_up
    }

    pub fn output(&mut self, stream: Stream) -> Option<&mut OutputPipe> {
        match stream {
            Stream::Stdout => Some(&mut self.stdout),
            Stream::Stderr => Some(&mut self.stderr),
            Stream::Stdin | Stream::Exit | Stream::Tree => None,
        }
    }

    /// The held bytes of a stream.
    pub fn held(&self, stream: Stream, offset: u64, len: usize) -> [&[u8]; 2] {
        match stream {
            Stream::Stdout => self.stdout.held(offset, len),
            Stream::Stderr => self.stderr.held(offset, len),
            Stream::Stdin | Stream::Exit | Stream::Tree => [&[], &[]],
        }
    }

    /// The agent's side of its terminal, if it has one that is open.
    pub fn terminal(&self) -> Option<BorrowedFd<'_>> {
        self.stdout.source().filter(|_| self.is_terminal)
    }

    /// Sends `signal` to the command; in a terminal to the foreground job, as a key would.
    pub fn signal(&self, signal: Signal) {
        if let Some(terminal) = self.terminal() {
            if let Ok(front) = tcgetpgrp(terminal) {
                let _ = kill(Pid::from_raw(-front.as_raw_nonzero().get()), signal);
                return;
            }
            // Not every kernel reports the foreground job; if unknown, send the key itself.
            if let Some(key) = key_of(signal, terminal) {
                let _ = io::write(terminal, &[key]);
                return;
            }
        }
        let _ = kill(Pid::from_raw(-self.pid), signal);
    }

    /// Whether everything about it has been delivered.
    pub fn is_done(&self) -> bool {
        self.exit_acked && self.stdout.is_done() && self.stderr.is_done()
    }

    pub fn watch(&mut self, poll: &Epoll, attached: bool) -> io::Result<()> {
        self.stdout.watch(poll, PollSource::Stdout(self.number), attached)?;
        self.stderr.watch(poll, PollSource::Stderr(self.number), attached)
    }

    pub fn resync(&mut self) {
        self.stdout.resync();
        self.stderr.resync();
        self.stdin.ack_due = false;
        self.stdin.gone_due = false;
    }

    /// Appends pending frames about stdin.
    pub fn emit_stdin(&mut self, out: &mut Vec<u8>) {
        let offset = self.stdin.written();
        if std::mem::take(&mut self.stdin.ack_due) {
            frame::encode(out, FrameKind::StdinAck, Stream::Stdin, self.number, offset, 0, &[]);
        }
        if std::mem::take(&mut self.stdin.gone_due) {
            frame::encode(out, FrameKind::StdinAck, Stream::Exit, self.number, offset, 0, &[]);
        }
    }

    pub fn emit_started(&self, out: &mut Vec<u8>) {
        let pid = self.pid.unsigned_abs().into();
        let background = serde_json::to_vec(&agent::ExecStarted { background: true }).unwrap_or_default();
        let payload: &[u8] = if self.is_background { &background } else { &[] };
        frame::encode(out, FrameKind::Started, Stream::Stdin, self.number, pid, self.request, &[payload]);
    }

    pub fn emit_exit(&self, out: &mut Vec<u8>) {
        if let Some(exit) = &self.exit {
            emit_exit(out, self.number, self.request, exit);
        }
    }

    pub fn state(&self) -> ExecState {
        ExecState {
            exec: self.number,
            exec_id: self.exec_id.clone(),
            pid: self.pid,
            pty: self.is_terminal,
            command: self.command.clone(),
            started_ms: self.started_ms,
            background: self.is_background,
            stdin: self.stdin.taken(),
            stdin_crc32: Some(self.stdin.crc32()),
            stdin_closed: self.stdin.is_closed(),
            stdout: self.stdout.range(),
            stderr: self.stderr.range(),
            exit: self.exit.clone(),
        }
    }

    pub fn close(&mut self, poll: &Epoll) {
        self.stdin.close(poll);
        self.stdout.close(poll);
        self.stderr.close(poll);
    }

    pub fn is_slack(&self) -> bool {
        self.stdout.is_slack() || self.stderr.is_slack()
    }

    pub fn shrink(&mut self) {
        self.stdout.shrink();
        self.stderr.shrink();
    }
}

/// The key that sends `signal` with the terminal's current settings.
fn key_of(signal: Signal, terminal: BorrowedFd<'_>) -> Option<u8> {
    let key = [
        (Signal::SIGINT, SpecialCodeIndex::VINTR),
        (Signal::SIGQUIT, SpecialCodeIndex::VQUIT),
        (Signal::SIGTSTP, SpecialCodeIndex::VSUSP),
    ]
    .into_iter()
    .find_map(|(sent, key)| (sent == signal).then_some(key))?;
    let modes = tcgetattr(terminal).ok()?;
    modes.local_modes.contains(LocalModes::ISIG).then(|| modes.special_codes[key])
}

pub fn emit_exit(out: &mut Vec<u8>, exec: u32, request: u64, exit: &Exit) {
    let payload = serde_json::to_vec(exit).unwrap_or_default();
    frame::encode(out, FrameKind::Exit, Stream::Exit, exec, 0, request, &[&payload]);
}
