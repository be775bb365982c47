//! `baton handoff`: has the instance that runs a sandbox let it go; the next attach takes it anywhere.

use std::process::ExitCode;

use anyhow::Result;
use baton_protocol::{id::SandboxId, metadata::DesiredState};

use super::{
    checkpoint::let_go,
    desk::{self, Waiting},
};

/// Have a sandbox leave the instance it is on; the next attach takes it anywhere.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton handoff ID\n  baton handoff --no-wait ID\n\n{}", desk::CODES))]
pub struct Args {
    pub id: SandboxId,
    #[command(flatten)]
    pub waiting: Waiting,
}

pub fn run(args: Args) -> Result<ExitCode> {
    desk::run(|desk| async move { let_go(&desk, &args.id, DesiredState::HandedOff, args.waiting).await })
}
