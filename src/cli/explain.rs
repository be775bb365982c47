//! `baton explain`: what a reason means, and what to do about it.

use std::process::ExitCode;

use anyhow::anyhow;
use baton_protocol::reason::Reason;

use super::screen;

/// A reason is what `status.reason` in metadata.json says, and what `baton list` shows.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton explain LockMissing\n  baton explain            every reason there is")]
pub struct Args {
    /// The reason; without it, all of them.
    pub reason: Option<String>,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let reasons = match &args.reason {
        None => Reason::ALL.to_vec(),
        Some(name) => {
            vec![Reason::find(name).ok_or_else(|| anyhow!("there is no such reason; `baton explain` lists them"))?]
        }
    };
    let texts: Vec<_> = reasons.into_iter().map(text).collect();
    screen::print(&texts.join("\n"))?;
    Ok(ExitCode::SUCCESS)
}

fn text(reason: Reason) -> String {
    format!("{reason}\n  Cause:  {}\n  Remedy: {}\n", reason.cause(), reason.remedy())
}
