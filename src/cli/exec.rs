//! `baton exec` and `baton shell`: a command in an existing sandbox, attached to the local terminal.

use std::process::ExitCode;

use baton_client::Sandbox;

use super::{
    context::CommandContext,
    sandbox_client::SandboxOptions,
    screen,
    server_client::describe_error,
    stdio_bridge::{BridgeEnd, CommandArgs, DetachOption, LocalStreams, Signals, connect, raw_terminal},
};

/// The user's own shell if one is set, else the best available.
const LOGIN_SHELL: &str = "exec \"${SHELL:-$(command -v bash || echo sh)}\" -l";

/// Run a command in a sandbox
///
/// Streams, signals and the exit code are passed through as with `baton run`, but the sandbox is kept. A sandbox that
/// is checkpointed or on another instance is restored first. If the connection breaks, the command keeps running and
/// the client reconnects. On a terminal, Ctrl-P Ctrl-Q leaves the command running and ends this process.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton exec 0b9f -- python3 -c 'print(6 * 7)'\n  \
                  baton exec -it 0b9f -- bash\n  \
                  tar c . | baton exec 0b9f --cwd /src -- tar x\n  \
                  baton exec --detach 0b9f -- make     then: baton logs 0b9f")]
pub struct ExecArgs {
    #[command(flatten)]
    pub exec: CommandArgs,
    /// Pass stdin to the command even if it is a terminal
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the command a terminal, for shells, editors and prompts
    #[arg(short, long)]
    pub tty: bool,
    /// Start the command, print its exec id and leave it running
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    pub detach: bool,
    #[command(flatten)]
    pub leave: DetachOption,
    #[command(flatten)]
    pub options: SandboxOptions,
    /// Sandbox id, or the beginning of it if its token is saved here
    pub sandbox: String,
    /// Command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Open a shell in a sandbox
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton shell 0b9f\n  baton shell --user nobody --cwd /tmp 0b9f")]
pub struct ShellArgs {
    #[command(flatten)]
    pub exec: CommandArgs,
    #[command(flatten)]
    pub leave: DetachOption,
    #[command(flatten)]
    pub options: SandboxOptions,
    /// Sandbox id, or the beginning of it if its token is saved here
    pub sandbox: String,
}

pub async fn shell(args: ShellArgs, context: &CommandContext) -> anyhow::Result<ExitCode> {
    let command = vec!["sh".to_owned(), "-c".to_owned(), LOGIN_SHELL.to_owned()];
    let ShellArgs { exec: how, leave, options, sandbox } = args;
    let args = ExecArgs { exec: how, interactive: true, tty: true, detach: false, leave, options, sandbox, command };
    exec(args, context).await
}

pub async fn exec(args: ExecArgs, context: &CommandContext) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let client = context.sandbox(&args.options)?;
    let sandbox = tokio::select! {
        attached = client.attach(&args.sandbox) => attached?,
        code = signals.end() => return Ok(ExitCode::from(code)),
    };
    let code = run_command(&sandbox, &args, &mut signals).await;
    client.close(sandbox).await;
    code.map(ExitCode::from)
}

async fn run_command(sandbox: &Sandbox, args: &ExecArgs, signals: &mut Signals) -> anyhow::Result<u8> {
    let stdin = !args.detach && (args.tty || args.interactive || !raw_terminal::is_stdin());
    let exec = args.exec.to_exec(&args.command, args.tty, stdin);
    let running = tokio::select! {
        started = sandbox.exec(exec) => started.map_err(|error| describe_error(error, ""))?,
        code = signals.end() => return Ok(code),
    };
    if args.detach {
        screen::print(&format!("{}\n", running.id()))?;
        return Ok(0);
    }
    let (control, id) = (running.control(), running.id().clone());
    let streams = LocalStreams { tty: args.tty, stdin, detach_keys: Some(args.leave.keys.clone()) };
    let end = connect(running, &streams, signals).await;
    match &end {
        Ok(BridgeEnd::Outcome(_)) => {}
        Ok(BridgeEnd::Detached) => {
            screen::report(format_args!("baton: {id} keeps running: `baton logs -f {} {id}` follows it", args.sandbox));
        }
        Ok(BridgeEnd::Left(_)) | Err(_) => {
            // The command may have ended already.
            let _ = control.kill().await;
        }
    }
    end?.code()
}
