//! Connects a command in a sandbox to this process: our streams are its streams, our signals its signals.
//!
//! ```text
//!   our stdin ──▶ detach keys ──▶ write_stdin      Ctrl-C ──▶ INT, the second one leaves
//!   our stdout, stderr ◀── chunks  window size ──▶ resize
//! ```

pub mod detach_keys;
mod keyboard;
pub mod raw_terminal;

use std::{io, time::Duration};

use anyhow::{Context, anyhow, bail};
use baton_client::{Chunk, Control, Exec, Outcome, Running, StdStream};
use tokio::{
    io::AsyncWriteExt,
    signal::unix::{Signal, SignalKind, signal},
};

use self::{
    detach_keys::{DetachKeys, KeyFilter, parse_keys},
    keyboard::Keyboard,
    raw_terminal::Raw,
};
use super::time_value::parse_time;

const TIMED_OUT: u8 = 124;
const SIGHUP: u8 = 1;
const SIGINT: u8 = 2;
const SIGQUIT: u8 = 3;
const SIGPIPE: u8 = 13;
const SIGTERM: u8 = 15;

/// How to run a command.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct CommandArgs {
    /// Environment variable of the command; repeatable
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = parse_variable)]
    pub env: Vec<(String, String)>,
    /// Working directory of the command
    #[arg(short = 'w', long, value_name = "DIRECTORY")]
    pub cwd: Option<String>,
    /// User inside the sandbox, as a name or a number
    #[arg(short, long)]
    pub user: Option<String>,
    /// Kill the command after this time, as in `30s` or `5m`
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub timeout: Option<Duration>,
    /// Type of this terminal, passed to the command
    #[arg(long, env = "TERM", hide = true)]
    pub term: Option<String>,
}

impl CommandArgs {
    pub fn to_exec(&self, argv: &[String], tty: bool, stdin: bool) -> Exec {
        let mut exec = Exec::argv(argv.to_vec());
        if let Some(term) = self.term.as_ref().filter(|_| tty) {
            exec = exec.env("TERM", term);
        }
        for (name, value) in &self.env {
            exec = exec.env(name, value);
        }
        if let Some(cwd) = &self.cwd {
            exec = exec.cwd(cwd);
        }
        if let Some(user) = &self.user {
            exec = exec.user(user);
        }
        if let Some(timeout) = self.timeout {
            exec = exec.timeout(timeout);
        }
        if tty {
            let (cols, rows) = raw_terminal::size().unwrap_or((80, 24));
            exec = exec.pty(cols, rows);
        }
        if stdin { exec.stdin() } else { exec }
    }
}

pub fn parse_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE".to_owned()),
    }
}

/// How a command is connected to this process.
#[derive(Clone, Debug, Default)]
pub struct LocalStreams {
    pub tty: bool,
    /// Whether our stdin is passed to the command.
    pub stdin: bool,
    pub detach_keys: Option<DetachKeys>,
}

/// The option of the verbs that give a command a terminal.
#[derive(Clone, Debug, clap::Args)]
pub struct DetachOption {
    /// Keys that leave the command running and end this process, if it has a terminal; empty for none
    #[arg(long = "detach-keys", value_name = "KEYS", default_value = detach_keys::DEFAULT, value_parser = parse_keys)]
    pub keys: DetachKeys,
}

/// The signals that this process handles.
#[derive(Debug)]
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    quit: Signal,
    window: Signal,
}

impl Signals {
    pub fn listen() -> anyhow::Result<Self> {
        let listen = || {
            Ok::<_, io::Error>(Self {
                interrupt: signal(SignalKind::interrupt())?,
                terminate: signal(SignalKind::terminate())?,
                hangup: signal(SignalKind::hangup())?,
                quit: signal(SignalKind::quit())?,
                window: signal(SignalKind::window_change())?,
            })
        };
        listen().context("signals cannot be received")
    }

    /// Waits for a signal that ends this process; returns the exit code.
    pub async fn end(&mut self) -> u8 {
        128 + tokio::select! {
            _ = self.interrupt.recv() => SIGINT,
            _ = self.terminate.recv() => SIGTERM,
            _ = self.hangup.recv() => SIGHUP,
            _ = self.quit.recv() => SIGQUIT,
        }
    }
}

/// How the command ended, as seen by this process.
#[derive(Debug)]
pub enum BridgeEnd {
    Outcome(Outcome),
    /// This process exits with the code before the command has ended.
    Left(u8),
    /// The detach keys were pressed: the command keeps running.
    Detached,
}

impl BridgeEnd {
    pub fn code(&self) -> anyhow::Result<u8> {
        match self {
            Self::Left(code) => Ok(*code),
            Self::Detached => Ok(0),
            Self::Outcome(outcome) => exit_code(outcome),
        }
    }
}

/// Connects the command to the terminal until either of them ends. If the command has a terminal, ours
/// is in raw mode meanwhile, and the detach keys count.
pub async fn connect(running: Running, streams: &LocalStreams, signals: &mut Signals) -> anyhow::Result<BridgeEnd> {
    let raw = if streams.tty { Raw::enter()? } else { None };
    let keyboard = if streams.stdin { Some(Keyboard::listen().context("stdin cannot be read")?) } else { None };
    let keys = streams.detach_keys.clone().filter(|_| raw.is_some()).unwrap_or_default();
    let end = forward_until_end(running, keyboard, KeyFilter::new(keys), signals).await;
    drop(raw);
    end
}

async fn forward_until_end(
    mut running: Running,
    mut keyboard: Option<Keyboard>,
    mut filter: KeyFilter,
    signals: &mut Signals,
) -> anyhow::Result<BridgeEnd> {
    let control = running.control();
    let typed = forward_stdin(&control, &mut keyboard, &mut filter);
    let shown = copy_output(&mut running);
    tokio::pin!(typed, shown);
    let (mut is_typing, mut interrupts) = (true, 0);
    loop {
        tokio::select! {
            end = &mut shown => return end,
            is_detached = &mut typed, if is_typing => {
                if is_detached {
                    return Ok(BridgeEnd::Detached);
                }
                is_typing = false;
            }
            _ = signals.window.recv() => {
                if let Some((cols, rows)) = raw_terminal::size() {
                    let _ = control.resize(cols, rows).await;
                }
            }
            _ = signals.interrupt.recv() => {
                interrupts += 1;
                if interrupts > 1 {
                    return Ok(BridgeEnd::Left(128 + SIGINT));
                }
                let _ = control.signal("INT").await;
            }
            _ = signals.terminate.recv() => return Ok(BridgeEnd::Left(128 + SIGTERM)),
            _ = signals.hangup.recv() => return Ok(BridgeEnd::Left(128 + SIGHUP)),
            _ = signals.quit.recv() => return Ok(BridgeEnd::Left(128 + SIGQUIT)),
        }
    }
}

/// Forwards our stdin, including its end. Returns whether the detach keys were pressed.
async fn forward_stdin(control: &Control, keyboard: &mut Option<Keyboard>, filter: &mut KeyFilter) -> bool {
    let Some(keyboard) = keyboard else { return false };
    while let Some(bytes) = keyboard.next().await {
        let (bytes, is_detached) = filter.feed(bytes);
        // The command no longer reads; it may still write.
        if !bytes.is_empty() && control.write_stdin(bytes).await.is_err() {
            return false;
        }
        if is_detached {
            return true;
        }
    }
    control.close_stdin();
    false
}

/// Copies the command's output to our stdout and stderr, then waits for its end.
async fn copy_output(running: &mut Running) -> anyhow::Result<BridgeEnd> {
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    while let Some((output, chunk)) = running.next().await {
        let bytes = match chunk {
            Chunk::Data(bytes) => bytes,
            Chunk::Gap { from, to } => bail!("{} bytes of the output were lost in transit", to.saturating_sub(from)),
            Chunk::Rewound { .. } => bail!("the sandbox was rolled back to an older checkpoint"),
        };
        let written = match output {
            StdStream::Stdout => write(&mut stdout, &bytes).await,
            StdStream::Stderr => write(&mut stderr, &bytes).await,
        };
        match written {
            Ok(()) => {}
            // The reader of our output has closed it.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(BridgeEnd::Left(128 + SIGPIPE)),
            Err(error) => return Err(error).context("the output cannot be written"),
        }
    }
    let outcome = running.wait().await.map_err(|error| anyhow!("{error}"))?;
    Ok(BridgeEnd::Outcome(outcome))
}

pub async fn write(to: &mut (impl tokio::io::AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}

fn exit_code(outcome: &Outcome) -> anyhow::Result<u8> {
    if outcome.timed_out {
        return Ok(TIMED_OUT);
    }
    match (outcome.exit_code, outcome.signal) {
        (Some(code), _) => Ok(u8::try_from(code).unwrap_or(u8::MAX)),
        (None, Some(number)) => Ok(u8::try_from(number.saturating_add(128)).unwrap_or(u8::MAX)),
        (None, None) => bail!("the command was lost: {}", outcome.error.as_deref().unwrap_or("for an unknown reason")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_tells_how_the_command_ended() {
        let outcome = |exit_code, signal, timed_out| Outcome { exit_code, signal, timed_out, ..Outcome::default() };
        for (outcome, code) in [
            (outcome(Some(0), None, false), 0),
            (outcome(Some(7), None, false), 7),
            (outcome(None, Some(2), false), 130),
            (outcome(None, Some(9), false), 137),
            (outcome(None, Some(9), true), 124),
        ] {
            assert_eq!(exit_code(&outcome).unwrap(), code, "{outcome:?}");
        }
        assert!(exit_code(&outcome(None, None, false)).is_err());
    }

    #[test]
    fn a_variable_has_a_name_and_may_have_an_empty_value() {
        assert_eq!(parse_variable("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(parse_variable("A="), Ok(("A".into(), String::new())));
        assert!(parse_variable("A").is_err() && parse_variable("=b").is_err());
    }
}
