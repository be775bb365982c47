//! `baton run`: one command in a fresh sandbox, attached to the local terminal.

use std::{process::ExitCode, time::Duration};

use baton_client::{Egress, Options, Sandbox, SandboxNetwork};

use baton_protocol::{
    id::SnapshotName,
    request::{Persistence, SandboxConfig},
};

use super::{
    context::CommandContext,
    global_options::ServerOptions,
    limit::{Limit, limits, parse_egress, parse_limit},
    screen,
    server_client::{ServerClient, describe_error},
    stdio_bridge::{BridgeEnd, CommandArgs, DetachOption, LocalStreams, Signals, connect, raw_terminal},
    token_file::SavedToken,
};

/// The timeout for deleting the sandbox at the end.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Run one command in a new sandbox, then delete the sandbox
///
/// The output of the command is passed through unchanged, and so is its exit code: 128 plus the signal number if a
/// signal ended the command, 124 if it timed out. Ctrl-C interrupts the command; a second Ctrl-C kills it. A pipe or a
/// file on stdin is passed to the command; a terminal is passed only with --interactive or --tty.
///
/// The sandbox is not stored: it ends with the command, or with its server. On a terminal, Ctrl-P Ctrl-Q leaves the
/// command running and keeps the sandbox, until it has been idle for its idle time.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton run -- python3 -c 'print(6 * 7)'\n  \
                  tar c . | baton run --cwd /tmp -- tar x\n  \
                  baton run --env CI=1 --timeout 30s -- sh -c 'echo $CI'\n  \
                  baton run --limit memory=256MiB --limit pids=64 -- ./untrusted\n  \
                  baton run --egress any -- curl https://example.org\n  \
                  baton run --snapshot numpy -- python3 -c 'import numpy'\n  \
                  baton run -it -- bash")]
pub struct RunArgs {
    #[command(flatten)]
    pub exec: CommandArgs,
    /// Start from this filesystem snapshot
    #[arg(long, value_name = "NAME")]
    pub snapshot: Option<SnapshotName>,
    /// Limit of memory, cpus, pids, disk or files, as in `memory=512MiB`; repeatable
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_limit)]
    pub limit: Vec<Limit>,
    /// Where programs inside may connect to: `none`, `any`, or destinations separated by commas, as in
    /// `index.example.org:443,*.example.net`; without it the server's default applies
    #[arg(long, value_name = "DESTINATIONS", value_parser = parse_egress)]
    pub egress: Option<Egress>,
    /// Pass stdin to the command even if it is a terminal
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the command a terminal, for shells, editors and prompts
    #[arg(short, long)]
    pub tty: bool,
    #[command(flatten)]
    pub leave: DetachOption,
    #[command(flatten)]
    pub server: ServerOptions,
    /// Command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

pub async fn run(args: RunArgs, context: &CommandContext) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let server = context.server(&args.server)?;
    let config = SandboxConfig {
        persistent: Some(Persistence::No),
        filesystem_snapshot_name: args.snapshot.clone(),
        limits: limits(&args.limit),
        network: SandboxNetwork { egress: args.egress.clone(), ..SandboxNetwork::default() },
        ..SandboxConfig::default()
    };
    let options = Options { connection: server.connection(server.url()), config };
    let created = tokio::select! {
        created = Sandbox::create(server.url(), options) => created,
        code = signals.end() => return Ok(ExitCode::from(code)),
    };
    let sandbox = created.map_err(|error| describe_error(error, server.url()))?;
    let end = run_command(&sandbox, &args, &server, &mut signals).await;
    if let Ok(BridgeEnd::Detached) = &end {
        return leave(sandbox, &server).await;
    }
    let code = end.and_then(|end| end.code());
    tokio::select! {
        // If this fails, the sandbox ends at its idle timeout.
        _ = context.clock.timeout(KILL_TIMEOUT, sandbox.kill()) => {}
        _ = signals.end() => {}
    }
    code.map(ExitCode::from)
}

async fn run_command(
    sandbox: &Sandbox,
    args: &RunArgs,
    server: &ServerClient,
    signals: &mut Signals,
) -> anyhow::Result<BridgeEnd> {
    let stdin = args.tty || args.interactive || !raw_terminal::is_stdin();
    let exec = args.exec.to_exec(&args.command, args.tty, stdin);
    let running = tokio::select! {
        started = sandbox.exec(exec) => started.map_err(|error| describe_error(error, server.url()))?,
        code = signals.end() => return Ok(BridgeEnd::Left(code)),
    };
    let streams = LocalStreams { tty: args.tty, stdin, detach_keys: Some(args.leave.keys.clone()) };
    connect(running, &streams, signals).await
}

/// Keeps the sandbox, with its token, for the other verbs.
async fn leave(sandbox: Sandbox, server: &ServerClient) -> anyhow::Result<ExitCode> {
    let url = server.url().to_owned();
    let saved = SavedToken { id: sandbox.id().clone(), token: sandbox.token().clone(), url };
    server.tokens()?.keep(&saved)?;
    sandbox.close().await;
    screen::report(format_args!(
        "baton: {0} keeps running: `baton logs -f {0}` follows it, `baton kill {0}` ends it",
        saved.id
    ));
    Ok(ExitCode::SUCCESS)
}
