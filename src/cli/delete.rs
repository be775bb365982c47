//! `baton delete`: erases a sandbox. Its holder does it; without a holder, this command does.

use std::process::ExitCode;

use anyhow::{Result, bail};
use baton_protocol::{id::SandboxId, metadata::DesiredState};

use super::storage_admin::{self, Rest, StorageAdmin, Verdict, Waiting};
use crate::storage::gc::Error;

/// Delete a sandbox for good: its state, its checkpoints, its metadata.
///
/// What runs it ends it and erases its objects; where nobody does, this command erases them. Checkpoints that
/// a fork still needs stay.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton delete ID\n\n{}", storage_admin::CODES))]
pub struct Args {
    pub id: SandboxId,
    #[command(flatten)]
    pub waiting: Waiting,
}

pub fn run(args: Args) -> Result<ExitCode> {
    storage_admin::run(|admin| async move { delete(&admin, &args.id, args.waiting).await })
}

pub async fn delete(admin: &StorageAdmin, id: &SandboxId, waiting: Waiting) -> Result<Verdict> {
    let lock = admin.lock(id).await?;
    if lock.as_ref().is_some_and(|lock| lock.purged) {
        return Ok(Verdict::Done(format!("{id} was deleted before")));
    }
    match (admin.records.raw(id).await?, &lock) {
        (None, None) => bail!("{id} does not exist"),
        (Some(_), _) => drop(admin.want(id, DesiredState::Deleted).await?),
        // The metadata was deleted by hand; the lock is enough.
        (None, Some(_)) => {}
    }
    if waiting.no_wait {
        return Ok(Verdict::Done(format!("{id} is to be deleted")));
    }
    let mut file = admin.lock_file(id)?;
    loop {
        match admin.until_free(id, &mut file, waiting.timeout).await? {
            Rest::Purged => return Ok(Verdict::Done(format!("{id} is deleted"))),
            Rest::Free | Rest::Dead => match admin.upkeep.purge(id, &mut file).await {
                Ok(()) => return Ok(Verdict::Done(format!("{id} is deleted"))),
                // Another instance was faster; it has read the same spec.
                Err(Error::Taken | Error::Lease(crate::storage::lease::Error::Changed)) => {}
                Err(error) => return Err(error.into()),
            },
            Rest::Refused(why) => return Ok(Verdict::Refused(format!("{id} is not deleted: {why}"))),
            Rest::Late => return Ok(Verdict::Late(format!("{id} is to be deleted, and is not yet"))),
        }
    }
}
