//! `baton delete`: erases a sandbox. Its holder does it; without a holder, this command does.

use std::process::ExitCode;

use anyhow::{Result, bail};
use baton_protocol::{id::SandboxId, metadata::DesiredState};

use super::{
    context::CommandContext,
    global_options::ContextOption,
    storage_admin::{self, AdminResult, Release, StorageAdmin, WaitArgs},
};
use crate::storage::garbage_collector::Error;

/// Delete a sandbox with its checkpoints and metadata
///
/// The instance that runs the sandbox stops it and erases its objects. If no instance runs it, this command erases
/// them. Checkpoints that a fork still needs are kept.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton delete ID\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct DeleteArgs {
    /// Sandbox id, or the beginning of it
    pub sandbox: String,
    #[command(flatten)]
    pub wait: WaitArgs,
    #[command(flatten)]
    pub context: ContextOption,
}

pub async fn delete(args: DeleteArgs, context: &CommandContext) -> Result<ExitCode> {
    let storage = context.storage(&args.context)?;
    let id = storage.sandbox_id(&args.sandbox).await?;
    delete_sandbox(&storage, &id, args.wait).await?.report()
}

pub async fn delete_sandbox(storage: &StorageAdmin, id: &SandboxId, wait: WaitArgs) -> Result<AdminResult> {
    let lock = storage.lock(id).await?;
    if lock.as_ref().is_some_and(|lock| lock.purged) {
        return Ok(AdminResult::Done(format!("{id} was deleted before")));
    }
    match (storage.records.raw(id).await?, &lock) {
        (None, None) => bail!("{id} does not exist"),
        (Some(_), _) => drop(storage.set_desired_state(id, DesiredState::Deleted).await?),
        // The metadata was deleted by hand; the lock is enough.
        (None, Some(_)) => {}
    }
    if wait.no_wait {
        return Ok(AdminResult::Done(format!("{id} is marked for deletion")));
    }
    let mut file = storage.lease_handle(id)?;
    loop {
        match storage.wait_for_release(id, &mut file, wait.timeout).await? {
            Release::Purged => return Ok(AdminResult::Done(format!("{id} is deleted"))),
            Release::Released | Release::HolderDead => match storage.upkeep.purge(id, &mut file).await {
                Ok(()) => return Ok(AdminResult::Done(format!("{id} is deleted"))),
                // Another instance was faster; it has read the same spec.
                Err(Error::Taken | Error::Lease(crate::storage::lease::Error::Changed)) => {}
                Err(error) => return Err(error.into()),
            },
            Release::Refused(why) => return Ok(AdminResult::Refused(format!("{id} is not deleted: {why}"))),
            Release::TimedOut => {
                return Ok(AdminResult::Late(format!("{id} is marked for deletion, but is not deleted yet")));
            }
        }
    }
}
