//! `baton rollback`: makes an older checkpoint the head.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::Head,
    metadata::{Committed, Status},
};

use super::storage_admin::{self, Rest, StorageAdmin, Verdict, Waiting};
use crate::storage::{gc::Resting, store};

/// Make an older checkpoint of a sandbox the one it starts from.
///
/// Only of a sandbox that nobody runs: let it go first with `baton checkpoint ID`. The checkpoint that counted
/// until now becomes the one before it, so that a rollback can be rolled back.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton checkpoints ID\n  baton rollback ID\n  baton rollback ID --to CHECKPOINT\n\n{}", storage_admin::CODES))]
pub struct Args {
    pub id: SandboxId,
    /// Which one; by default the one before the last.
    #[arg(long, value_name = "CHECKPOINT")]
    pub to: Option<CheckpointId>,
    #[command(flatten)]
    pub waiting: Waiting,
}

pub fn run(args: Args) -> Result<ExitCode> {
    storage_admin::run(|admin| async move { rollback(&admin, &args.id, args.to.as_ref(), args.waiting).await })
}

pub async fn rollback(
    admin: &StorageAdmin,
    id: &SandboxId,
    to: Option<&CheckpointId>,
    waiting: Waiting,
) -> Result<Verdict> {
    let checkpoints = admin.upkeep.checkpoints.as_ref().context("there is no place for checkpoints")?;
    let mut file = admin.lock_file(id)?;
    file.read().await.with_context(|| format!("{id} cannot be rolled back"))?;
    let lock = file.lock().cloned().context("the lock is gone")?;
    let head = lock.head.as_ref().with_context(|| format!("{id} has no checkpoint"))?;
    let target = match (to, &lock.prev_head) {
        (Some(to), _) => to.clone(),
        (None, Some(previous)) => previous.checkpoint_id.clone(),
        (None, None) => bail!("{id} has no checkpoint before its last one"),
    };
    if target == head.checkpoint_id {
        return Ok(Verdict::Done(format!("{id} starts from {target} already")));
    }
    if target.sandbox() != *id {
        bail!("{target} is a checkpoint of another sandbox");
    }
    let Some((_, manifest_sha256)) = checkpoints.manifest_of(&target).await? else {
        return Ok(Verdict::Refused(format!("{target} is not there, or was never finished: CheckpointMissing")));
    };
    let bucket = checkpoints.bucket().cloned();
    let (seq, epoch) = (head.seq.max(target.seq()), head.epoch.max(target.epoch()));
    let found = Head { seq, epoch, checkpoint_id: target.clone(), manifest_sha256, bucket };
    let taken = match checkpoints.verified(&found).await {
        Ok(manifest) => manifest.created,
        Err(store::Error::Damaged { why, .. }) => {
            return Ok(Verdict::Refused(format!("the manifest of {target} cannot be used, {why}: Damaged")));
        }
        Err(store::Error::Unsigned(_)) => {
            return Ok(Verdict::Refused(format!("{target} is not signed with a key of BATON_HMAC_KEY: Unsigned")));
        }
        Err(error) => return Err(error.into()),
    };
    // An unresponsive holder keeps the lease until the takeover time has passed.
    match admin.until_free(id, &mut file, waiting.timeout.min(admin.times.takeover * 2)).await? {
        Rest::Free | Rest::Dead => {}
        Rest::Purged => return Ok(Verdict::Refused(format!("{id} was deleted"))),
        Rest::Refused(why) => return Ok(Verdict::Refused(why)),
        Rest::Late => return Ok(Verdict::Refused(format!("{id} runs: let it go first, with `baton checkpoint {id}`"))),
    }
    admin.upkeep.acquire(&mut file).await?;
    let held = file.lock().cloned().context("the lock is gone")?;
    let seq = held.head.as_ref().map_or(0, |head| head.seq).max(target.seq()) + 1;
    let head = Head { seq, epoch: held.epoch, ..found };
    admin.upkeep.release(&mut file, Some(head)).await?;
    let rest = Resting::of(file.lock().context("the lock is gone")?, Some(taken));
    let report = |status: &mut Status, committed: &mut Committed| {
        (status.phase, status.instance) = (rest.phase, None);
        (status.reason, status.message) = (String::new(), String::new());
        committed.clone_from(&rest.committed);
    };
    admin.records.report(id, held.epoch, &report).await?;
    Ok(Verdict::Done(format!("{id} starts from {target} now")))
}
