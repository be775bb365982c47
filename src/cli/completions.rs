//! `baton completions`: a script for a shell.

use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;

use super::{Cli, screen};

/// Print a script that completes baton's verbs and flags in a shell.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  source <(baton completions bash)\n  \
                  baton completions zsh > ~/.zfunc/_baton\n  \
                  baton completions fish > ~/.config/fish/completions/baton.fish")]
pub struct Args {
    /// The shell.
    pub shell: Shell,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "baton", &mut script);
    screen::print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}
