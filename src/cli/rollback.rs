//! `baton rollback`: makes an older checkpoint the head.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::Head,
    metadata::{Committed, SandboxStatus},
};

use super::{
    context::CommandContext,
    global_options::ContextOption,
    storage_admin::{self, AdminResult, Release, StorageAdmin, WaitArgs},
};
use crate::{
    config::variables::HMAC_KEY,
    storage::{garbage_collector::Resting, store},
};

/// Roll a sandbox back to an older checkpoint
///
/// The sandbox must not run: stop it first with `baton checkpoint ID`. The current checkpoint becomes the previous one,
/// so that a rollback can be rolled back.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton checkpoints ID\n  baton rollback ID\n  baton rollback ID --to CHECKPOINT\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct RollbackArgs {
    /// Sandbox id, or the beginning of it
    pub sandbox: String,
    /// Checkpoint to start from [default: the previous one]
    #[arg(long, value_name = "CHECKPOINT")]
    pub to: Option<CheckpointId>,
    #[command(flatten)]
    pub wait: WaitArgs,
    #[command(flatten)]
    pub context: ContextOption,
}

pub async fn rollback(args: RollbackArgs, context: &CommandContext) -> Result<ExitCode> {
    let storage = context.storage(&args.context)?;
    let id = storage.sandbox_id(&args.sandbox).await?;
    roll_back(&storage, &id, args.to.as_ref(), args.wait).await?.report()
}

pub async fn roll_back(
    storage: &StorageAdmin,
    id: &SandboxId,
    to: Option<&CheckpointId>,
    wait: WaitArgs,
) -> Result<AdminResult> {
    let checkpoints = storage.checkpoints()?;
    let mut file = storage.lease_handle(id)?;
    file.read().await.with_context(|| format!("{id} cannot be rolled back"))?;
    let lock = file.lock().cloned().context("the lock is gone")?;
    let head = lock.head.as_ref().with_context(|| format!("{id} has no checkpoint"))?;
    let target = match (to, &lock.prev_head) {
        (Some(to), _) => to.clone(),
        (None, Some(previous)) => previous.checkpoint_id.clone(),
        (None, None) => bail!("{id} has no previous checkpoint"),
    };
    if target == head.checkpoint_id {
        return Ok(AdminResult::Done(format!("{id} starts from {target} already")));
    }
    if target.sandbox() != *id {
        bail!("{target} is a checkpoint of another sandbox");
    }
    let Some((_, manifest_sha256)) = checkpoints.manifest_of(&target).await? else {
        return Ok(AdminResult::Refused(format!("{target} does not exist or is incomplete: CheckpointMissing")));
    };
    let bucket = checkpoints.bucket().cloned();
    let (seq, epoch) = (head.seq.max(target.seq()), head.epoch.max(target.epoch()));
    let found = Head { seq, epoch, checkpoint_id: target.clone(), manifest_sha256, bucket };
    let taken = match checkpoints.verified(&found).await {
        Ok(manifest) => manifest.created,
        Err(store::Error::Damaged { why, .. }) => {
            return Ok(AdminResult::Refused(format!("the manifest of {target} cannot be used, {why}: Damaged")));
        }
        Err(store::Error::Newer { why, .. }) => {
            return Ok(AdminResult::Refused(format!("the manifest of {target} cannot be read, {why}: OtherVersion")));
        }
        Err(store::Error::Unsigned(_)) => {
            return Ok(AdminResult::Refused(format!("{target} is not signed with a key of {HMAC_KEY}: Unsigned")));
        }
        Err(error) => return Err(error.into()),
    };
    // An unresponsive holder keeps the lease until the takeover time has passed.
    match storage.wait_for_release(id, &mut file, wait.timeout.min(storage.times.takeover * 2)).await? {
        Release::Released | Release::HolderDead => {}
        Release::Purged => return Ok(AdminResult::Refused(format!("{id} was deleted"))),
        Release::Refused(why) => return Ok(AdminResult::Refused(why)),
        Release::TimedOut => {
            return Ok(AdminResult::Refused(format!("{id} is running: stop it first with `baton checkpoint {id}`")));
        }
    }
    storage.upkeep.acquire(&mut file).await?;
    let held = file.lock().cloned().context("the lock is gone")?;
    let seq = held.head.as_ref().map_or(0, |head| head.seq).max(target.seq()) + 1;
    let head = Head { seq, epoch: held.epoch, ..found };
    storage.upkeep.release(&mut file, Some(head)).await?;
    let rest = Resting::of(file.lock().context("the lock is gone")?, Some(taken));
    let report = |status: &mut SandboxStatus, committed: &mut Committed| {
        (status.phase, status.instance) = (rest.phase, None);
        (status.reason, status.message) = (String::new(), String::new());
        committed.clone_from(&rest.committed);
    };
    storage.records.report(id, held.epoch, &report).await?;
    Ok(AdminResult::Done(format!("{id} starts from {target} now")))
}
