//! `baton exec` and `baton shell`: a command in an existing sandbox, attached to the local terminal.

use std::{process::ExitCode, sync::Arc, time::Duration};

use baton_client::Sandbox;

use super::{
    screen,
    server_args::{SandboxArgs, explain},
    stdio_bridge::{CommandArgs, End, Signals, attend, raw_terminal},
};
use crate::clock::{SharedClock, SystemClock};

/// The timeout for closing the connection.
const LEAVE_WITHIN: Duration = Duration::from_secs(5);
/// The user's own shell if one is set, else the best available.
const SHELL: &str = "exec \"${SHELL:-$(command -v bash || echo sh)}\" -l";

/// Run a command in a sandbox.
///
/// Streams, signals and exit code pass through as with `baton run`; the sandbox stays. If it is
/// stored or on another instance it is fetched first. The connection may break: the command goes on,
/// and so does this.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton exec 0b9f -- python3 -c 'print(6 * 7)'\n  \
                  baton exec -it 0b9f -- bash\n  \
                  tar c . | baton exec 0b9f --cwd /src -- tar x\n  \
                  baton exec --detach 0b9f -- make     then: baton logs 0b9f")]
pub struct ExecArgs {
    #[command(flatten)]
    pub how: CommandArgs,
    /// Pass our stdin on even if it is a terminal.
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the command a terminal: for shells, editors and whatever asks questions.
    #[arg(short, long)]
    pub tty: bool,
    /// Only start it, print its exec id and leave it running.
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    pub detach: bool,
    #[command(flatten)]
    pub link: SandboxArgs,
    /// Its id, or the beginning of it if its token is kept here.
    pub sandbox: String,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Open a shell in a sandbox, on a terminal that feels local.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton shell 0b9f\n  baton shell --user nobody --cwd /tmp 0b9f")]
pub struct ShellArgs {
    #[command(flatten)]
    pub how: CommandArgs,
    #[command(flatten)]
    pub link: SandboxArgs,
    /// Its id, or the beginning of it if its token is kept here.
    pub sandbox: String,
}

pub async fn shell(args: ShellArgs) -> anyhow::Result<ExitCode> {
    let command = vec!["sh".to_owned(), "-c".to_owned(), SHELL.to_owned()];
    let ShellArgs { how, link, sandbox } = args;
    run(ExecArgs { how, interactive: true, tty: true, detach: false, link, sandbox, command }).await
}

pub async fn run(args: ExecArgs) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let sandbox = tokio::select! {
        attached = args.link.attach(&args.sandbox) => attached?,
        code = signals.end() => return Ok(ExitCode::from(code)),
    };
    let code = command(&sandbox, &args, &mut signals).await;
    let clock: SharedClock = Arc::new(SystemClock);
    let _ = clock.timeout(LEAVE_WITHIN, sandbox.close()).await;
    code.map(ExitCode::from)
}

async fn command(sandbox: &Sandbox, args: &ExecArgs, signals: &mut Signals) -> anyhow::Result<u8> {
    let stdin = !args.detach && (args.tty || args.interactive || !raw_terminal::is_stdin());
    let exec = args.how.exec(&args.command, args.tty, stdin);
    let running = tokio::select! {
        started = sandbox.exec(exec) => started.map_err(|error| explain(error, ""))?,
        code = signals.end() => return Ok(code),
    };
    if args.detach {
        screen::print(&format!("{}\n", running.id()))?;
        return Ok(0);
    }
    let control = running.control();
    let end = attend(running, args.tty, stdin, signals).await;
    if !matches!(end, Ok(End::Outcome(_))) {
        // A failure no longer matters to anyone.
        let _ = control.kill().await;
    }
    end?.code()
}
