//! `baton kill`: ends sandboxes through a server.

use std::process::ExitCode;

use anyhow::Result;

use super::{
    context::CommandContext, sandbox_client::SandboxOptions, screen, server_client::describe_error,
    stdio_bridge::Signals,
};

/// End sandboxes and delete their stored state
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton kill 0b9f\n  baton kill 0b9f 77aa")]
pub struct KillArgs {
    #[command(flatten)]
    pub options: SandboxOptions,
    /// Sandbox ids, or the beginnings of them if their tokens are saved here
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
}

pub async fn kill(args: KillArgs, context: &CommandContext) -> Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let client = context.sandbox(&args.options)?;
    let tokens = client.server.tokens()?;
    let mut has_failed = false;
    for text in &args.sandboxes {
        let killed = async {
            let saved = client.find(text)?;
            let sandbox = client.attach(text).await?;
            sandbox.kill().await.map_err(|error| describe_error(error, &saved.url))?;
            tokens.forget(&saved.id)
        };
        tokio::select! {
            killed = killed => if let Err(error) = killed {
                screen::report(format_args!("baton: {text}: {error:#}"));
                has_failed = true;
            },
            code = signals.end() => return Ok(ExitCode::from(code)),
        }
    }
    Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
