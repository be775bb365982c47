//! `baton explain`: what a reason means, and what to do about it.

use std::process::ExitCode;

use anyhow::anyhow;
use baton_protocol::reason::Reason;

use super::screen;

/// Explain a reason and how to resolve it
///
/// A reason is the value of `status.reason` in metadata.json; `baton list` shows it.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  baton explain LockMissing\n  baton explain            every reason")]
pub struct ExplainArgs {
    /// Reason to explain [default: all]
    pub reason: Option<String>,
}

pub fn explain(args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    let reasons = match &args.reason {
        None => Reason::ALL.to_vec(),
        Some(name) => {
            vec![Reason::find(name).ok_or_else(|| anyhow!("there is no such reason; `baton explain` lists them"))?]
        }
    };
    let texts: Vec<_> = reasons.into_iter().map(describe).collect();
    screen::print(&texts.join("\n"))?;
    Ok(ExitCode::SUCCESS)
}

fn describe(reason: Reason) -> String {
    format!("{reason}\n  Cause:  {}\n  Remedy: {}\n", reason.cause(), reason.remedy())
}
