//! `baton checkpoint`, `handoff`, `fork`, `kill`: one request to a sandbox over the wire, and its answer.

use std::{process::ExitCode, sync::Arc, time::Duration};

use baton_client::{Checkpoint, Error, Sandbox, SandboxId};
use serde_json::{Value, json};

use super::{
    checkpoint,
    config::Output,
    handoff, screen,
    server_args::{SandboxArgs, explain},
    stdio_bridge::Signals,
    storage_admin::{self, Waiting},
    token_file::SavedToken,
};
use crate::clock::{SharedClock, SystemClock};

const LEAVE_WITHIN: Duration = Duration::from_secs(5);

/// Have a sandbox checkpointed: its state is kept and it runs nowhere, until somebody attaches.
///
/// With storage variables set it works on the storage, without a server; with --url, or without
/// storage, it asks the server.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton checkpoint 0b9f\n  baton checkpoint --live --keep-running 0b9f\n\n{}", storage_admin::CODES))]
pub struct CheckpointArgs {
    /// Running commands are part of it; a server refuses without this while one runs, storage never does.
    #[arg(long)]
    pub live: bool,
    /// Do not stop it: it stands still only while its image is written.
    #[arg(long)]
    pub keep_running: bool,
    #[command(flatten)]
    pub waiting: Waiting,
    #[command(flatten)]
    pub one: OneArgs,
}

/// Have a sandbox leave the instance it is on, with all that runs in it; the next attach takes it anywhere, or the
/// instance that is named takes it.
///
/// With storage variables set it works on the storage, without a server; with --url, or without
/// storage, it asks the server.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton handoff 0b9f\n  baton handoff --no-wait 0b9f\n  baton handoff 0b9f --to inst-5f3a\n\n{}", storage_admin::CODES))]
pub struct HandoffArgs {
    #[command(flatten)]
    pub target: handoff::Target,
    #[command(flatten)]
    pub waiting: Waiting,
    #[command(flatten)]
    pub one: OneArgs,
}

/// Make copies of a sandbox, each with an id and a token of its own.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton fork 0b9f\n  baton fork --count 3 -o json 0b9f")]
pub struct ForkArgs {
    /// How many.
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub count: u32,
    #[command(flatten)]
    pub one: OneArgs,
}

/// End sandboxes and delete what is stored of them.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton kill 0b9f\n  baton kill 0b9f 77aa")]
pub struct KillArgs {
    #[command(flatten)]
    pub link: SandboxArgs,
    /// Their ids, or the beginnings of them if their tokens are kept here.
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
}

#[derive(Clone, Debug, clap::Args)]
pub struct OneArgs {
    /// How to print.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    #[command(flatten)]
    pub link: SandboxArgs,
    /// Its id, or the beginning of it if its token is kept here.
    pub sandbox: String,
}

pub async fn ask_checkpoint(args: CheckpointArgs) -> anyhow::Result<ExitCode> {
    let how = Checkpoint { live: args.live, keep_running: args.keep_running };
    args.one
        .ask(async |sandbox, _| {
            let id = sandbox.checkpoint_with(how).await?;
            Ok((format!("{id}\n"), json!({"sandbox_id": sandbox.id(), "checkpoint_id": id})))
        })
        .await
}

pub async fn ask_handoff(args: HandoffArgs) -> anyhow::Result<ExitCode> {
    if args.target.to.is_some() {
        anyhow::bail!("--to works on the storage alone: set its variables (`baton config`), and leave --url out");
    }
    args.one
        .ask(async |sandbox, _| {
            let before = sandbox.instance();
            sandbox.handoff().await?;
            let after = sandbox.instance();
            let told = after.as_ref().map_or_else(String::new, |after| format!("{after}\n"));
            Ok((told, json!({"sandbox_id": sandbox.id(), "from": before, "to": after})))
        })
        .await
}

pub async fn fork(args: ForkArgs) -> anyhow::Result<ExitCode> {
    let count = args.count;
    let tokens = args.one.link.server.tokens()?;
    args.one
        .ask(async |sandbox, url| {
            let copies = sandbox.fork(count).await?;
            let mut told = (String::new(), Vec::new());
            for copy in copies {
                let kept = SavedToken { id: copy.id, token: copy.token, url: url.to_owned() };
                if let Err(error) = tokens.keep(&kept) {
                    // The copies exist: the user can still use them.
                    screen::say(format_args!("baton: {error:#}"));
                }
                told.0 += &format!("{}\n", kept.id);
                told.1.push(json!({"sandbox_id": kept.id, "sandbox_token": kept.token.0, "url": kept.url}));
            }
            Ok((told.0, Value::Array(told.1)))
        })
        .await
}

/// Text that cannot be a sandbox id is a command-line error.
pub fn no_id(text: &str) -> ExitCode {
    screen::say(format_args!("baton: `{}` is no sandbox's id", baton_files::plain(text)));
    ExitCode::from(2)
}

pub async fn kill(args: KillArgs) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let tokens = args.link.server.tokens()?;
    let mut failed = false;
    for text in &args.sandboxes {
        let killed = async {
            let kept = args.link.find(text)?;
            let sandbox = args.link.attach(text).await?;
            sandbox.kill().await.map_err(|error| explain(error, &kept.url))?;
            tokens.forget(&kept.id)
        };
        tokio::select! {
            killed = killed => if let Err(error) = killed {
                screen::say(format_args!("baton: {text}: {error:#}"));
                failed = true;
            },
            code = signals.end() => return Ok(ExitCode::from(code)),
        }
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

impl CheckpointArgs {
    /// Works on the storage, without a server.
    pub fn by_storage(&self) -> anyhow::Result<ExitCode> {
        let Self { keep_running, waiting, .. } = *self;
        self.one.by_storage(|id| checkpoint::run(checkpoint::Args { id, keep_running, waiting }))
    }
}

impl HandoffArgs {
    /// Works on the storage, without a server.
    pub fn by_storage(&self) -> anyhow::Result<ExitCode> {
        let Self { target, waiting, .. } = self.clone();
        self.one.by_storage(|id| handoff::run(handoff::Args { id, target, waiting }))
    }
}

impl OneArgs {
    pub fn is_wire(&self) -> bool {
        self.link.server.is_wire(Some(&self.sandbox))
    }

    fn by_storage(&self, work: impl FnOnce(SandboxId) -> anyhow::Result<ExitCode>) -> anyhow::Result<ExitCode> {
        match self.link.server.id_of(&self.sandbox)? {
            Some(id) => work(id),
            None => Ok(no_id(&self.sandbox)),
        }
    }

    /// Attaches, sends the request, prints the answer and disconnects.
    async fn ask(
        &self,
        question: impl AsyncFnOnce(&Sandbox, &str) -> Result<(String, Value), Error>,
    ) -> anyhow::Result<ExitCode> {
        let mut signals = Signals::listen()?;
        let url = self.link.find(&self.sandbox)?.url;
        let asked = async {
            let sandbox = self.link.attach_to_ask(&self.sandbox).await?;
            let answer = question(&sandbox, &url).await.map_err(|error| explain(error, &url));
            let clock: SharedClock = Arc::new(SystemClock);
            let _ = clock.timeout(LEAVE_WITHIN, sandbox.close()).await;
            answer
        };
        let (text, json) = tokio::select! {
            answer = asked => answer?,
            code = signals.end() => return Ok(ExitCode::from(code)),
        };
        match self.output {
            Output::Table => screen::print(&text)?,
            Output::Json => screen::print(&screen::json(&json))?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
