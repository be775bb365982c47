//! The verbs that talk to a server: each is an ordinary client. Four of them can also work
//! directly on the storage.

use std::process::ExitCode;

use clap::Subcommand;

use super::{cp, create, exec, logs, run, server_requests, view};

#[derive(Debug, Subcommand)]
pub enum Wire {
    /// Run one command in a fresh sandbox, and delete the sandbox afterwards.
    Run(run::RunArgs),
    /// Create a sandbox and print its id.
    Create(create::CreateArgs),
    /// Run a command in a sandbox.
    Exec(exec::ExecArgs),
    /// Open a shell in a sandbox, on a terminal that feels local.
    #[command(visible_alias = "attach")]
    Shell(exec::ShellArgs),
    /// Copy files and directories between this machine and a sandbox.
    Cp(cp::CpArgs),
    /// Print what a command printed, as far as it is still kept.
    Logs(logs::LogsArgs),
    /// List the sandboxes in the store.
    List(view::ListArgs),
    /// Show one sandbox.
    Get(view::GetArgs),
    /// Have a sandbox checkpointed.
    Checkpoint(server_requests::CheckpointArgs),
    /// Have a sandbox leave the instance it is on.
    Handoff(server_requests::HandoffArgs),
    /// Make copies of a sandbox, each with an id and a token of its own.
    Fork(server_requests::ForkArgs),
    /// End sandboxes and delete what is stored of them.
    Kill(server_requests::KillArgs),
}

impl Wire {
    /// Runs the verb on its own runtime and returns the exit code.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match &self {
            Self::List(args) if !args.server.is_wire(None) => return args.by_storage(),
            Self::Get(args) if !args.server.is_wire(Some(&args.sandbox)) => return args.by_storage(),
            Self::Checkpoint(args) if !args.one.is_wire() => return args.by_storage(),
            Self::Handoff(args) if !args.one.is_wire() => return args.by_storage(),
            Self::Run(_)
            | Self::Create(_)
            | Self::Exec(_)
            | Self::Shell(_)
            | Self::Cp(_)
            | Self::Logs(_)
            | Self::List(_)
            | Self::Get(_)
            | Self::Checkpoint(_)
            | Self::Handoff(_)
            | Self::Fork(_)
            | Self::Kill(_) => {}
        }
        let runtime = tokio::runtime::Runtime::new()?;
        let code = runtime.block_on(async {
            match self {
                Self::Run(args) => run::run(args).await,
                Self::Create(args) => create::run(args).await,
                Self::Exec(args) => exec::run(args).await,
                Self::Shell(args) => exec::shell(args).await,
                Self::Cp(args) => cp::run(args).await,
                Self::Logs(args) => logs::run(args).await,
                Self::List(args) => view::ask_list(args).await,
                Self::Get(args) => view::ask_get(args).await,
                Self::Checkpoint(args) => server_requests::ask_checkpoint(args).await,
                Self::Handoff(args) => server_requests::ask_handoff(args).await,
                Self::Fork(args) => server_requests::fork(args).await,
                Self::Kill(args) => server_requests::kill(args).await,
            }
        });
        // A blocking read or write that never returns must not delay the exit.
        runtime.shutdown_background();
        code
    }
}
