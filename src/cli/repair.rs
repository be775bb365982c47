//! `baton repair`: makes the lock or the metadata of a sandbox anew from what is left of it.

use std::{collections::BTreeMap, process::ExitCode};

use anyhow::{Context, Result, bail};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::{Head, Lock},
    manifest::Checkpoint,
    metadata::{Committed, DesiredState, Metadata, Spec, Status},
    reason::Reason,
};

use super::desk::{self, Desk, Verdict};
use crate::{
    api::token,
    storage::{records::Place, upkeep::Resting},
};

/// Make the lock or the metadata of a sandbox anew.
///
/// Without its metadata a sandbox gets new ones, with a new token, which is printed once. Without its lock a new
/// one is made from what is stored, above every epoch that was ever seen; that is safe only when no instance runs
/// the sandbox, so it must be said: --nobody-runs-it. If the bucket can undelete the object, do that instead.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton list --orphans\n  baton repair ID\n  baton repair ID --nobody-runs-it\n  BATON_HMAC_KEY=… baton repair ID --sign\n\n{}", desk::CODES))]
pub struct Args {
    pub id: SandboxId,
    /// I have made sure that no instance runs it: each was stopped, or was looked at.
    #[arg(long)]
    pub nobody_runs_it: bool,
    /// The checkpoint to start from, where the metadata do not name one.
    #[arg(long, value_name = "CHECKPOINT")]
    pub head: Option<CheckpointId>,
    /// Sign the checkpoints that count with the first key of BATON_HMAC_KEY, as they are: I know who made them.
    #[arg(long, conflicts_with_all = ["nobody_runs_it", "head"])]
    pub sign: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    desk::run(|desk| async move { repair(&desk, &args).await })
}

pub async fn repair(desk: &Desk, args: &Args) -> Result<Verdict> {
    let id = &args.id;
    let lock = desk.lock(id).await?;
    let raw = desk.records.raw(id).await?;
    match (lock, raw) {
        (Some(lock), _) if lock.purged => Ok(Verdict::Refused(format!("{id} was deleted"))),
        (lock, _) if args.sign => sign(desk, id, lock.as_ref()).await,
        (Some(lock), None) => new_metadata(desk, id, &lock).await,
        (None, Some(_)) => new_lock(desk, args).await,
        (Some(_), Some(_)) => match desk.records.find(id).await {
            Ok(_) => Ok(Verdict::Done(format!("{id} needs no repair"))),
            Err(error) => Ok(Verdict::Refused(format!("{error}: mend it with `baton edit {id}`"))),
        },
        (None, None) => bail!("{id} does not exist"),
    }
}

async fn sign(desk: &Desk, id: &SandboxId, lock: Option<&Lock>) -> Result<Verdict> {
    let shelf = desk.upkeep.checkpoints.as_ref().context("there is no place for checkpoints")?;
    let lock = lock.with_context(|| format!("{id} has no lock, which says what counts"))?;
    let heads: Vec<_> = lock.head.iter().chain(&lock.prev_head).collect();
    for head in &heads {
        let signed = shelf.sign(head).await.with_context(|| format!("{} is not signed", head.checkpoint_id))?;
        if !signed {
            bail!("BATON_HMAC_KEY is not set: there is nothing to sign with");
        }
    }
    Ok(Verdict::Done(format!("{} checkpoints of {id} are signed", heads.len())))
}

async fn new_metadata(desk: &Desk, id: &SandboxId, lock: &Lock) -> Result<Verdict> {
    let secret = token::fresh(&*desk.clock);
    let mut spec = Spec::new(id.clone(), token::sha256(&secret.0), desk.clock.timestamp(), desk.who.me.clone());
    (spec.enable_sandbox_checkpoint, spec.enable_sandbox_handoff) = (true, true);
    (spec.desired_state, spec.placement) = (DesiredState::Checkpointed, None);
    spec.lock_bucket = desk.records.lock_bucket(Place::Durable);
    let rest = Resting::of(lock, desk.upkeep.taken(lock).await);
    let status = Status {
        phase: rest.phase,
        reason: rest.reason.map(String::from).unwrap_or_default(),
        message: rest.message.to_owned(),
        epoch: lock.epoch,
        updated: desk.clock.timestamp(),
        ..Status::default()
    };
    let Committed { latest, at } = rest.committed;
    let record = Metadata { spec, latest_sandbox_checkpoint: latest, last_checkpointed: at, status };
    desk.records.recreate(&record, Place::Durable).await?;
    let there = desk.find(id).await?;
    if there.spec.token_sha256 != record.spec.token_sha256 {
        return Ok(Verdict::Done(format!("{id} has metadata again; somebody else put them there")));
    }
    Ok(Verdict::Done(format!("{id} has new metadata; its new token is {}", secret.0)))
}

async fn new_lock(desk: &Desk, args: &Args) -> Result<Verdict> {
    let id = &args.id;
    if !args.nobody_runs_it {
        return Ok(Verdict::Refused(format!(
            "{}: undelete lock.json if the bucket can; otherwise make sure that no instance runs {id} and say --nobody-runs-it",
            Reason::LockMissing
        )));
    }
    let found = desk.find(id).await?;
    let shelf = desk.upkeep.checkpoints.as_ref().context("there is no place for checkpoints")?;
    let mut manifests = BTreeMap::new();
    let mut epochs = vec![found.status.epoch];
    for checkpoint in shelf.list(id).await? {
        epochs.push(checkpoint.epoch());
        if let Some(manifest) = shelf.manifest_of(&checkpoint).await? {
            manifests.insert(checkpoint, manifest);
        }
    }
    let latest = found
        .latest_sandbox_checkpoint
        .as_ref()
        .and_then(|latest| crate::storage::layout::checkpoint_of(&format!("{}/", latest.path.trim_end_matches('/'))));
    let head = match args.head.as_ref().or(latest.as_ref()) {
        Some(from) => {
            let newest = newest_from(from, &manifests);
            Some(newest.with_context(|| {
                format!("{from} is not there: choose one with --head; `baton checkpoints {id}` lists them")
            })?)
        }
        None if manifests.is_empty() => None,
        None => {
            bail!("nothing says which checkpoint counts: choose one with --head; `baton checkpoints {id}` lists them")
        }
    };
    let head = head.map(|checkpoint_id| {
        let (manifest, manifest_sha256) = &manifests[&checkpoint_id];
        Head {
            seq: manifest.seq,
            epoch: manifest.epoch,
            checkpoint_id,
            bucket: shelf.bucket().cloned(),
            manifest_sha256: manifest_sha256.clone(),
        }
    });
    // Nobody knows whether it ran on after that.
    let lock = Lock {
        epoch: epochs.into_iter().max().unwrap_or(0) + 1,
        ran: true,
        behind: true,
        head,
        ..Lock::new(id.clone())
    };
    desk.records.new_lock(&lock).await?;
    let from = lock.head.map_or("has no checkpoint: its state is lost".to_owned(), |head| {
        format!("starts from {}", head.checkpoint_id)
    });
    Ok(Verdict::Done(format!("{id} has a new lock, epoch {}, and {from}", lock.epoch)))
}

/// The newest whole checkpoint that `from` leads to, and that is `from` itself if nothing newer came of it.
fn newest_from(from: &CheckpointId, manifests: &BTreeMap<CheckpointId, (Checkpoint, String)>) -> Option<CheckpointId> {
    let descends = |id: &CheckpointId| {
        let mut at = id;
        for _ in 0..=manifests.len() {
            if at == from {
                return true;
            }
            match manifests.get(at).and_then(|(manifest, _)| manifest.parent.as_ref()) {
                Some(parent) => at = parent,
                None => return false,
            }
        }
        false
    };
    let found = manifests.keys().filter(|id| descends(id));
    found.max_by_key(|id| (id.seq(), id.epoch())).cloned()
}
