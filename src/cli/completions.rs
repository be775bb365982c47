//! `baton completions`: a script for a shell.

use std::process::ExitCode;

use clap_complete::Shell;

use super::{Cli, screen};

/// Print a completion script for a shell
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  source <(baton completions bash)\n  \
                  baton completions zsh > ~/.zfunc/_baton\n  \
                  baton completions fish > ~/.config/fish/completions/baton.fish")]
pub struct CompletionsArgs {
    /// Shell
    pub shell: Shell,
}

pub fn completions(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command_for_completion(), "baton", &mut script);
    screen::print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}
