//! `baton run`: one command in a fresh sandbox, as if it ran here.
//!
//! ```text
//!   our stdin ──▶ write_stdin      Ctrl-C ──▶ INT, the second one kills
//!   our stdout, stderr ◀── chunks  window size ──▶ resize
//! ```

mod keyboard;
mod terminal;

use std::{io, process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context, anyhow, bail};
use baton_client::{Chunk, Connection, Control, Error, Exec, Options, Outcome, Output, Running, Sandbox};
use tokio::{
    io::AsyncWriteExt,
    signal::unix::{Signal, SignalKind, signal},
};

use self::{keyboard::Keyboard, terminal::Raw};
use crate::clock::{SharedClock, SystemClock};

/// The sandbox is deleted at the end; so long may that take.
const KILL_WITHIN: Duration = Duration::from_secs(5);
const TIMED_OUT: u8 = 124;
const SIGHUP: u8 = 1;
const SIGINT: u8 = 2;
const SIGPIPE: u8 = 13;
const SIGTERM: u8 = 15;

/// Run one command in a fresh sandbox, and delete the sandbox afterwards.
///
/// What the command writes comes out here byte for byte, and its exit code becomes ours: 128 and the
/// signal's number if a signal ended it, 124 if its time was up. Ctrl-C interrupts the command; a
/// second one kills it. A pipe or file on stdin is passed on; a terminal only with --tty.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton run -- python3 -c 'print(6 * 7)'\n  \
                  tar c . | baton run --cwd /tmp -- tar x\n  \
                  baton run --env CI=1 --timeout 30s -- sh -c 'echo $CI'\n  \
                  baton run --tty -- bash")]
pub struct RunArgs {
    /// Set a variable for the command; may be given more than once.
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Where the command starts.
    #[arg(short = 'w', long, value_name = "DIRECTORY")]
    pub cwd: Option<String>,
    /// Who the command is inside the sandbox: a name or a number.
    #[arg(short, long)]
    pub user: Option<String>,
    /// Kill the command after this much time, as in `30s` or `5m`.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub timeout: Option<Duration>,
    /// Give the command a terminal: for shells, editors and whatever asks questions.
    #[arg(short, long)]
    pub tty: bool,
    /// The server.
    #[arg(long, env = "BATON_URL", default_value = "ws://127.0.0.1:8080")]
    pub url: String,
    /// What the server asks for, if it does.
    #[arg(long, env = "BATON_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub api_key: Option<String>,
    /// The kind of our terminal, for the command's.
    #[arg(long, env = "TERM", hide = true)]
    pub term: Option<String>,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE".to_owned()),
    }
}

/// The signals that concern us.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    window: Signal,
}

impl Signals {
    fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            window: signal(SignalKind::window_change())?,
        })
    }

    /// Whoever sends one of these wants us to end now.
    async fn end(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => SIGINT,
            _ = self.terminate.recv() => SIGTERM,
            _ = self.hangup.recv() => SIGHUP,
        }
    }
}

/// Runs the command on a runtime of its own.
pub fn main(args: RunArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Runtime::new()?;
    let code = runtime.block_on(run(args));
    // A write that nobody takes must not keep us here.
    runtime.shutdown_background();
    code
}

/// Runs the command and says with which code to leave.
pub async fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen().context("signals cannot be received")?;
    let connection = Connection { api_key: args.api_key.clone(), ..Connection::default() };
    let options = Options { connection, ..Options::default() };
    let created = tokio::select! {
        created = Sandbox::create(&args.url, options) => created,
        number = signals.end() => return Ok(ExitCode::from(128 + number)),
    };
    let sandbox = created.map_err(|error| explain(error, &args.url))?;
    let code = command(&sandbox, &args, &mut signals).await;
    let clock: SharedClock = Arc::new(SystemClock);
    tokio::select! {
        // It ends by its idle time if this does not reach it.
        _ = clock.timeout(KILL_WITHIN, sandbox.kill()) => {}
        _ = signals.end() => {}
    }
    code.map(ExitCode::from)
}

async fn command(sandbox: &Sandbox, args: &RunArgs, signals: &mut Signals) -> anyhow::Result<u8> {
    let stdin = args.tty || !terminal::is_stdin();
    let exec = exec(args, stdin);
    let running = tokio::select! {
        started = sandbox.exec(exec) => started.map_err(|error| explain(error, &args.url))?,
        number = signals.end() => return Ok(128 + number),
    };
    let raw = if args.tty { Raw::enter()? } else { None };
    let keyboard = if stdin { Some(Keyboard::listen().context("stdin cannot be read")?) } else { None };
    let code = attend(running, keyboard, signals).await;
    drop(raw);
    match code? {
        End::Outcome(outcome) => exit_code(&outcome),
        End::Left(code) => Ok(code),
    }
}

fn exec(args: &RunArgs, stdin: bool) -> Exec {
    let mut exec = Exec::argv(args.command.clone());
    if let Some(term) = args.term.as_ref().filter(|_| args.tty) {
        exec = exec.env("TERM", term);
    }
    for (name, value) in &args.env {
        exec = exec.env(name, value);
    }
    if let Some(cwd) = &args.cwd {
        exec = exec.cwd(cwd);
    }
    if let Some(user) = &args.user {
        exec = exec.user(user);
    }
    if let Some(timeout) = args.timeout {
        exec = exec.timeout(timeout);
    }
    if args.tty {
        let (cols, rows) = terminal::size().unwrap_or((80, 24));
        exec = exec.pty(cols, rows);
    }
    if stdin { exec.stdin() } else { exec }
}

enum End {
    Outcome(Outcome),
    /// We leave before the command is over.
    Left(u8),
}

/// Stands between the command and the person until one of them has enough.
async fn attend(mut running: Running, mut keyboard: Option<Keyboard>, signals: &mut Signals) -> anyhow::Result<End> {
    let control = running.control();
    let typed = type_in(&control, &mut keyboard);
    let shown = show(&mut running);
    tokio::pin!(typed, shown);
    let (mut is_typing, mut interrupts) = (true, 0);
    loop {
        tokio::select! {
            end = &mut shown => return end,
            () = &mut typed, if is_typing => is_typing = false,
            _ = signals.window.recv() => {
                if let Some((cols, rows)) = terminal::size() {
                    let _ = control.resize(cols, rows).await;
                }
            }
            _ = signals.interrupt.recv() => {
                interrupts += 1;
                if interrupts > 1 {
                    return Ok(End::Left(128 + SIGINT));
                }
                let _ = control.signal("INT").await;
            }
            _ = signals.terminate.recv() => return Ok(End::Left(128 + SIGTERM)),
            _ = signals.hangup.recv() => return Ok(End::Left(128 + SIGHUP)),
        }
    }
}

/// Passes our stdin on, and its end.
async fn type_in(control: &Control, keyboard: &mut Option<Keyboard>) {
    let Some(keyboard) = keyboard else { return };
    while let Some(bytes) = keyboard.next().await {
        // The command reads no more; it may still write.
        if control.write_stdin(bytes).await.is_err() {
            return;
        }
    }
    control.close_stdin();
}

/// Writes everything the command writes to where it belongs, then waits for its end.
async fn show(running: &mut Running) -> anyhow::Result<End> {
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    while let Some((output, chunk)) = running.next().await {
        let bytes = match chunk {
            Chunk::Data(bytes) => bytes,
            Chunk::Gap { from, to } => bail!("{} bytes of the output were lost on the way", to - from),
            Chunk::Rewound { .. } => bail!("the sandbox went back to an older checkpoint"),
        };
        let written = match output {
            Output::Stdout => write(&mut stdout, &bytes).await,
            Output::Stderr => write(&mut stderr, &bytes).await,
        };
        match written {
            Ok(()) => {}
            // Whoever read it has seen enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(End::Left(128 + SIGPIPE)),
            Err(error) => return Err(error).context("the output cannot be written"),
        }
    }
    let outcome = running.wait().await.map_err(|error| anyhow!("{error}"))?;
    Ok(End::Outcome(outcome))
}

async fn write(to: &mut (impl tokio::io::AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}

fn exit_code(outcome: &Outcome) -> anyhow::Result<u8> {
    if outcome.timed_out {
        return Ok(TIMED_OUT);
    }
    match (outcome.exit_code, outcome.signal) {
        (Some(code), _) => Ok(u8::try_from(code).unwrap_or(u8::MAX)),
        (None, Some(number)) => Ok(u8::try_from(128 + number).unwrap_or(u8::MAX)),
        (None, None) => bail!("the command was lost: {}", outcome.error.as_deref().unwrap_or("nobody knows why")),
    }
}

/// What is wrong and what to do, in one sentence.
fn explain(error: Error, url: &str) -> anyhow::Error {
    #[expect(clippy::wildcard_enum_match_arm, reason = "the others say it themselves")]
    match error {
        Error::Connection(cause) => anyhow!(
            "no server answers at {url} ({cause}): start one with `baton serve`, or name another with --url or BATON_URL"
        ),
        Error::Protocol(cause) => anyhow!("{url} is no baton server that this client understands: {cause}"),
        Error::Permission(cause) => {
            anyhow!("the server denies it ({cause}): give its key with --api-key or BATON_API_KEY")
        }
        Error::Refused { message, .. } => anyhow!("the command did not start: {message}"),
        error => anyhow!("{error}"),
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
        assert_eq!(variable("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(variable("A="), Ok(("A".into(), String::new())));
        assert!(variable("A").is_err() && variable("=b").is_err());
    }
}
