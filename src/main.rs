//! Parses the command line and runs the verb.

use std::process::ExitCode;

use baton::cli::{
    Cli,
    context::{self, CommandContext},
};
use clap::Parser;

fn main() -> ExitCode {
    // These become small processes of their own, before anything else is initialized.
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next().as_deref().and_then(|verb| verb.to_str()) {
        Some("guard") => return baton::guard::main(),
        Some(baton::runtime::spawner::VERB) => return baton::runtime::spawner::die_with(arguments),
        Some(baton::runtime::archive::VERB) => return baton::runtime::archive::main(arguments),
        Some(_) | None => {}
    }
    let cli = Cli::parse();
    cli.verb.run(&CommandContext::of_process()).unwrap_or_else(|error| context::report_error(&error))
}
