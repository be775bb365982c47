//! `baton create`: creates a sandbox that stays, and saves its token.

use std::{process::ExitCode, time::Duration};

use baton_client::{Egress, Idle, Options, Persistence, Sandbox, SandboxConfig, SandboxNetwork, SnapshotName};
use serde_json::json;

use super::{
    context::CommandContext,
    global_options::{OutputFormat, OutputOption, ServerOptions},
    limit::{Limit, limits, parse_egress, parse_limit},
    screen,
    server_client::describe_error,
    stdio_bridge::{Signals, parse_variable},
    time_value::parse_time,
    token_file::SavedToken,
};

/// Create a sandbox and print its id
///
/// The sandbox's token is saved in a file that only you can read, so that the other verbs find the sandbox by its id or
/// the beginning of it.
///
/// How long it lives: where the server has storage, the sandbox is persistent. When no client is attached and no command
/// runs for its idle time (5 minutes unless --idle says otherwise), it is checkpointed with its memory and its files,
/// and the next verb that uses it restores it, on any instance of the server. It moves when its instance ends, and stays
/// until `baton kill`, its --ttl or the server's retention time. Without storage, or with --ephemeral, it is deleted
/// after its idle time, and ends with its instance.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton create\n  \
                  baton create --persistent --idle 1h --label team=red\n  \
                  baton create --ephemeral --ttl 10m\n  \
                  baton create --limit memory=512MiB --limit cpus=1.5\n  \
                  baton create --egress index.example.org:443,files.example.org:443\n  \
                  id=$(baton create) && baton exec $id -- uname -a\n  \
                  baton create -o json | jq -r .sandbox_token")]
pub struct CreateArgs {
    /// Fail if the server has no storage to keep the sandbox in
    #[arg(long, conflicts_with = "ephemeral")]
    pub persistent: bool,
    /// Do not store the sandbox: it ends with its instance, or after its idle time
    #[arg(long, conflicts_with_all = ["checkpoint", "handoff", "auto_checkpoint"])]
    pub ephemeral: bool,
    /// Allow checkpoints and moves between instances, as --persistent does
    #[arg(long, hide_short_help = true)]
    pub checkpoint: bool,
    /// Allow moves between instances; implied by --checkpoint
    #[arg(long, requires = "checkpoint", hide_short_help = true)]
    pub handoff: bool,
    /// Checkpoint the sandbox when it is idle; implied by --checkpoint
    #[arg(long, requires = "checkpoint", hide_short_help = true)]
    pub auto_checkpoint: bool,
    /// Idle time after which the sandbox ends, as in `5m`, or `never`
    #[arg(long, value_name = "TIME", value_parser = parse_idle)]
    pub idle: Option<Idle>,
    /// Delete the sandbox after this time in any case
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub ttl: Option<Duration>,
    /// Label to find the sandbox by; repeatable
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = parse_variable)]
    pub label: Vec<(String, String)>,
    /// Environment variable for all commands; repeatable
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = parse_variable)]
    pub env: Vec<(String, String)>,
    /// Limit of memory, cpus, pids, disk or files, as in `memory=512MiB`; repeatable
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_limit)]
    pub limit: Vec<Limit>,
    /// Where programs inside may connect to: `none`, `any`, or destinations separated by commas, as in
    /// `index.example.org:443,*.example.net`; without it the server's default applies
    #[arg(long, value_name = "DESTINATIONS", value_parser = parse_egress)]
    pub egress: Option<Egress>,
    /// Working directory of all commands
    #[arg(short = 'w', long, value_name = "DIRECTORY")]
    pub cwd: Option<String>,
    /// Start from this filesystem snapshot
    #[arg(long, value_name = "NAME", value_parser = parse_snapshot)]
    pub snapshot: Option<SnapshotName>,
    #[command(flatten)]
    pub output: OutputOption,
    #[command(flatten)]
    pub server: ServerOptions,
}

fn parse_idle(text: &str) -> Result<Idle, String> {
    match text {
        "never" => Ok(Idle::Never),
        text => parse_time(text).map(Idle::After),
    }
}

fn parse_snapshot(text: &str) -> Result<SnapshotName, String> {
    SnapshotName::parse(text).map_err(|invalid| format!("it is {invalid}"))
}

pub async fn create(args: CreateArgs, context: &CommandContext) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let server = context.server(&args.server)?;
    // Checked before anything is created: a sandbox whose token is lost is useless.
    let tokens = server.tokens()?;
    let persistent = match (args.persistent, args.ephemeral, args.checkpoint) {
        (true, ..) => Some(Persistence::Yes),
        (_, true, _) => Some(Persistence::No),
        // The older flags say it all.
        (.., true) => None,
        (false, false, false) => Some(Persistence::Auto),
    };
    let config = SandboxConfig {
        persistent,
        idle_timeout: args.idle,
        enable_checkpoint: args.checkpoint,
        enable_sandbox_handoff: args.handoff.then_some(true),
        enable_idle_timeout_auto_checkpoint: args.auto_checkpoint.then_some(true),
        filesystem_snapshot_name: args.snapshot.clone(),
        labels: args.label.iter().cloned().collect(),
        env: args.env.iter().cloned().collect(),
        cwd: args.cwd.clone(),
        limits: limits(&args.limit),
        network: SandboxNetwork { egress: args.egress.clone(), ..SandboxNetwork::default() },
        ttl: args.ttl,
        ..SandboxConfig::default()
    };
    let options = Options { config, connection: server.connection(server.url()) };
    let url = server.url();
    let created = tokio::select! {
        created = Sandbox::create(url, options) => created,
        code = signals.end() => return Ok(ExitCode::from(code)),
    };
    let sandbox = created.map_err(|error| describe_error(error, url))?;
    let saved = SavedToken { id: sandbox.id().clone(), token: sandbox.token().clone(), url: url.to_owned() };
    if let Err(error) = tokens.keep(&saved) {
        let _ = sandbox.kill().await;
        return Err(error);
    }
    let is_persistent = sandbox.is_persistent();
    sandbox.close().await;
    if is_persistent == Some(false) && persistent == Some(Persistence::Auto) {
        screen::report("baton: the server has no storage: this sandbox ends with its instance, or after its idle time");
    }
    screen::print(&match args.output.format {
        OutputFormat::Table | OutputFormat::Name => format!("{}\n", saved.id),
        OutputFormat::Json => {
            let token = &saved.token.0;
            screen::json(
                &json!({"sandbox_id": saved.id, "sandbox_token": token, "url": saved.url, "persistent": is_persistent}),
            )
        }
    })?;
    Ok(ExitCode::SUCCESS)
}
