//! `baton run`: one command in a fresh sandbox, attached to the local terminal.

use std::{process::ExitCode, sync::Arc, time::Duration};

use baton_client::{Options, Sandbox};

use baton_protocol::{id::SnapshotName, request::Config};

use super::{
    limit::{Limit, limit, limits},
    server_args::{ServerArgs, explain},
    stdio_bridge::{CommandArgs, Signals, attend, raw_terminal},
};
use crate::clock::{SharedClock, SystemClock};

/// The timeout for deleting the sandbox at the end.
const KILL_WITHIN: Duration = Duration::from_secs(5);

/// Run one command in a fresh sandbox, and delete the sandbox afterwards.
///
/// What the command writes comes out here byte for byte, and its exit code becomes ours: 128 and the
/// signal's number if a signal ended it, 124 if its time was up. Ctrl-C interrupts the command; a
/// second one kills it. A pipe or file on stdin is passed on; a terminal only with --tty.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton run -- python3 -c 'print(6 * 7)'\n  \
                  tar c . | baton run --cwd /tmp -- tar x\n  \
                  baton run --env CI=1 --timeout 30s -- sh -c 'echo $CI'\n  \
                  baton run --limit memory=256MiB --limit pids=64 -- ./untrusted\n  \
                  baton run --snapshot numpy -- python3 -c 'import numpy'\n  \
                  baton run --tty -- bash")]
pub struct RunArgs {
    #[command(flatten)]
    pub how: CommandArgs,
    /// Begin with a filesystem snapshot of this name.
    #[arg(long, value_name = "NAME")]
    pub snapshot: Option<SnapshotName>,
    /// The most it may have of memory, cpus, pids, disk or files, as in `memory=512MiB`; may be given more than once.
    #[arg(long, value_name = "NAME=VALUE", value_parser = limit)]
    pub limit: Vec<Limit>,
    /// Give the command a terminal: for shells, editors and whatever asks questions.
    #[arg(short, long)]
    pub tty: bool,
    #[command(flatten)]
    pub server: ServerArgs,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Runs the command and returns the exit code.
pub async fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let config =
        Config { filesystem_snapshot_name: args.snapshot.clone(), limits: limits(&args.limit), ..Config::default() };
    let options = Options { connection: args.server.connection(), config };
    let created = tokio::select! {
        created = Sandbox::create(args.server.url(), options) => created,
        code = signals.end() => return Ok(ExitCode::from(code)),
    };
    let sandbox = created.map_err(|error| explain(error, args.server.url()))?;
    let code = command(&sandbox, &args, &mut signals).await;
    let clock: SharedClock = Arc::new(SystemClock);
    tokio::select! {
        // If this fails, the sandbox ends at its idle timeout.
        _ = clock.timeout(KILL_WITHIN, sandbox.kill()) => {}
        _ = signals.end() => {}
    }
    code.map(ExitCode::from)
}

async fn command(sandbox: &Sandbox, args: &RunArgs, signals: &mut Signals) -> anyhow::Result<u8> {
    let stdin = args.tty || !raw_terminal::is_stdin();
    let exec = args.how.exec(&args.command, args.tty, stdin);
    let running = tokio::select! {
        started = sandbox.exec(exec) => started.map_err(|error| explain(error, args.server.url()))?,
        code = signals.end() => return Ok(code),
    };
    attend(running, args.tty, stdin, signals).await?.code()
}
