//! `baton create`: creates a durable sandbox and saves its token.

use std::{process::ExitCode, time::Duration};

use baton_client::{Config, Idle, Options, Sandbox, SnapshotName};
use serde_json::json;

use super::{
    config::Output,
    limit::{Limit, limit, limits},
    screen,
    server_args::{ServerArgs, explain},
    stdio_bridge::{Signals, variable},
    token_file::SavedToken,
};

/// Create a sandbox and print its id.
///
/// Its token is kept in a file that only you can read, so that the other verbs find it by its id
/// or the beginning of that. It lives until its idle time is over; with --checkpoint it is stored
/// then, can be fetched again, and may move between instances.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton create\n  \
                  baton create --checkpoint --idle 1h --label team=red\n  \
                  baton create --limit memory=512MiB --limit cpus=1.5\n  \
                  id=$(baton create) && baton exec $id -- uname -a\n  \
                  baton create -o json | jq -r .sandbox_token")]
pub struct CreateArgs {
    /// It can be stored and may move between instances; at its idle end it is stored, not deleted.
    #[arg(long)]
    pub checkpoint: bool,
    /// It may move between instances; --checkpoint says so already.
    #[arg(long, requires = "checkpoint")]
    pub handoff: bool,
    /// At its idle end it is stored; --checkpoint says so already.
    #[arg(long, requires = "checkpoint")]
    pub auto_checkpoint: bool,
    /// End it after this much time without work, as in `5m`; or `never`.
    #[arg(long, value_name = "TIME", value_parser = idle)]
    pub idle: Option<Idle>,
    /// Delete it after this much time, whatever happens.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub ttl: Option<Duration>,
    /// A label to find it by; may be given more than once.
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = variable)]
    pub label: Vec<(String, String)>,
    /// A variable for all its commands; may be given more than once.
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// The most it may have of memory, cpus, pids, disk or files, as in `memory=512MiB`; may be given more than once.
    #[arg(long, value_name = "NAME=VALUE", value_parser = limit)]
    pub limit: Vec<Limit>,
    /// Where its commands start.
    #[arg(short = 'w', long, value_name = "DIRECTORY")]
    pub cwd: Option<String>,
    /// Begin with the files of this snapshot.
    #[arg(long, value_name = "NAME", value_parser = snapshot)]
    pub snapshot: Option<SnapshotName>,
    /// How to print.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    #[command(flatten)]
    pub server: ServerArgs,
}

fn idle(text: &str) -> Result<Idle, String> {
    match text {
        "never" => Ok(Idle::Never),
        text => humantime::parse_duration(text).map(Idle::After).map_err(|error| error.to_string()),
    }
}

fn snapshot(text: &str) -> Result<SnapshotName, String> {
    SnapshotName::parse(text).map_err(|invalid| format!("it is {invalid}"))
}

pub async fn run(args: CreateArgs) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    // Checked before anything is created: a sandbox whose token is lost is useless.
    let tokens = args.server.tokens()?;
    let config = Config {
        idle_timeout: args.idle,
        enable_checkpoint: args.checkpoint,
        enable_sandbox_handoff: args.handoff.then_some(true),
        enable_idle_timeout_auto_checkpoint: args.auto_checkpoint.then_some(true),
        filesystem_snapshot_name: args.snapshot.clone(),
        labels: args.label.iter().cloned().collect(),
        env: args.env.iter().cloned().collect(),
        cwd: args.cwd.clone(),
        limits: limits(&args.limit),
        ttl: args.ttl,
        ..Config::default()
    };
    let options = Options { config, connection: args.server.connection() };
    let url = args.server.url();
    let created = tokio::select! {
        created = Sandbox::create(url, options) => created,
        code = signals.end() => return Ok(ExitCode::from(code)),
    };
    let sandbox = created.map_err(|error| explain(error, url))?;
    let kept = SavedToken { id: sandbox.id().clone(), token: sandbox.token().clone(), url: url.to_owned() };
    if let Err(error) = tokens.keep(&kept) {
        let _ = sandbox.kill().await;
        return Err(error);
    }
    sandbox.close().await;
    screen::print(&match args.output {
        Output::Table => format!("{}\n", kept.id),
        Output::Json => {
            let told = json!({"sandbox_id": kept.id, "sandbox_token": kept.token.0, "url": kept.url});
            screen::json(&told)
        }
    })?;
    Ok(ExitCode::SUCCESS)
}
