//! `baton repair`: recreates the lock or the metadata of a sandbox from what is left of it, or from what an operator
//! has put there by hand.

mod choose;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::Lock,
    metadata::{DesiredState, Metadata, Spec, Status},
    reason::Reason,
};

use self::choose::{Choice, Start, Stored, choose};
use super::storage_admin::{self, StorageAdmin, Verdict};
use crate::{
    api::token,
    storage::{
        gc::Resting,
        lock_object::Unusable,
        records::{self, Draft, Place},
        store::{self, Precondition, Version},
    },
};

/// How often to retry signing a lock that changes concurrently.
const SIGN_TRIES: usize = 5;

/// Make the lock or the metadata of a sandbox anew.
///
/// Without its metadata a sandbox gets new ones, with a new token, which is printed once; so do metadata that have no
/// token. Without its lock a new one is made from what is stored, above every epoch that was ever seen; that is safe
/// only when no instance runs the sandbox, so it must be said: --nobody-runs-it. If the bucket can undelete the
/// object, do that instead.
///
/// A sandbox is restored by hand in the same way: put its checkpoint and a metadata.json that names it into the
/// store. What that leaves out gets a default, and the sandbox a lock and a token.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton list --orphans\n  baton repair ID\n  baton repair ID --nobody-runs-it\n  BATON_HMAC_KEY=… baton repair ID --sign\n\n{}", storage_admin::CODES))]
pub struct Args {
    pub id: SandboxId,
    /// I have made sure that no instance runs it: each was stopped, or was looked at.
    #[arg(long)]
    pub nobody_runs_it: bool,
    /// The checkpoint to start from, where the metadata do not name one.
    #[arg(long, value_name = "CHECKPOINT")]
    pub head: Option<CheckpointId>,
    /// Sign the lock and the checkpoints that it names with the first key of BATON_HMAC_KEY, as they are: I know who
    /// wrote them.
    #[arg(long, conflicts_with_all = ["nobody_runs_it", "head"])]
    pub sign: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    storage_admin::run(|admin| async move { repair(&admin, &args).await })
}

pub async fn repair(admin: &StorageAdmin, args: &Args) -> Result<Verdict> {
    let id = &args.id;
    if args.sign {
        return sign(admin, id).await;
    }
    let raw = admin.records.raw(id).await?;
    let lock = match admin.usable_lock(id).await? {
        Ok(lock) => lock,
        Err(unusable) => return unusable_lock(admin, args, &unusable, raw.is_some()).await,
    };
    match (lock, raw) {
        (Some(lock), _) if lock.purged => Ok(Verdict::Refused(format!("{id} was deleted"))),
        (Some(lock), None) => new_metadata(admin, id, &lock).await,
        (None, Some(_)) => new_lock(admin, args, None).await,
        (Some(lock), Some(_)) => match admin.records.draft(id).await {
            Ok(Some((draft, version))) if !draft.has_token => {
                let taken = admin.upkeep.taken(&lock).await;
                finish(admin, draft, version, &lock, taken, format!("{id} can be attached to")).await
            }
            Ok(_) => Ok(Verdict::Done(format!("{id} needs no repair"))),
            Err(error) => Ok(unusable(id, &error)),
        },
        (None, None) => bail!("{id} does not exist"),
    }
}

/// Signs the checkpoints that the lock names, then the lock itself, all unchanged.
async fn sign(admin: &StorageAdmin, id: &SandboxId) -> Result<Verdict> {
    let shelf = admin.upkeep.checkpoints.as_ref().context("there is no place for checkpoints")?;
    if !admin.records.signs() {
        bail!("BATON_HMAC_KEY is not set: there is nothing to sign with");
    }
    for _ in 0..SIGN_TRIES {
        let found = admin.records.unverified_lock(id).await?;
        let (lock, version) = found.with_context(|| format!("{id} has no lock, which says what counts"))?;
        let lock = match lock {
            Ok(lock) if lock.purged => return Ok(Verdict::Refused(format!("{id} was deleted"))),
            Ok(lock) => lock,
            Err(unusable) => return Ok(Verdict::Refused(format!("{}: {unusable}", unusable.reason()))),
        };
        let heads: Vec<_> = lock.head.iter().chain(&lock.prev_head).collect();
        for head in &heads {
            shelf.sign(head).await.with_context(|| format!("{} is not signed", head.checkpoint_id))?;
        }
        match admin.records.replace_lock(&lock, &version).await {
            Ok(()) => return Ok(Verdict::Done(format!("the lock and {} checkpoints of {id} are signed", heads.len()))),
            // The lease was renewed concurrently: sign the current version instead.
            Err(records::Error::Store(store::Error::Conflict(_))) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Verdict::Late(format!("the lock of {id} changes all the time: sign it when nobody runs the sandbox")))
}

/// What can be done about an unusable lock, without `--sign`.
async fn unusable_lock(admin: &StorageAdmin, args: &Args, unusable: &Unusable, has_metadata: bool) -> Result<Verdict> {
    let (id, reason) = (&args.id, unusable.reason());
    match unusable {
        Unusable::Unsigned => Ok(Verdict::Refused(format!(
            "{reason}: {unusable}: if an instance of yours wrote it, `baton repair {id} --sign` signs it as it is"
        ))),
        Unusable::Garbled(_) | Unusable::Older if !has_metadata => {
            Ok(Verdict::Refused(format!("{reason}: {unusable}, and there is no metadata: bring both objects back")))
        }
        Unusable::Garbled(_) | Unusable::Older => {
            let seen = admin.records.unverified_lock(id).await?.map(|(_, version)| version);
            new_lock(admin, args, Some((unusable, seen.with_context(|| format!("the lock of {id} is gone"))?))).await
        }
    }
}

async fn new_metadata(admin: &StorageAdmin, id: &SandboxId, lock: &Lock) -> Result<Verdict> {
    let secret = token::fresh(&*admin.clock);
    let mut spec = Spec::new(id.clone(), token::sha256(&secret.0), admin.clock.timestamp(), admin.who.me.clone());
    (spec.enable_sandbox_checkpoint, spec.enable_sandbox_handoff) = (true, true);
    (spec.desired_state, spec.placement, spec.claim) = (DesiredState::Checkpointed, None, None);
    spec.lock_bucket = admin.records.lock_bucket(Place::Durable);
    let status = Status::default();
    let mut record = Metadata { spec, latest_sandbox_checkpoint: None, last_checkpointed: None, status };
    show_resting(admin, &mut record, lock, admin.upkeep.taken(lock).await);
    admin.records.recreate(&record, Place::Durable).await?;
    let there = admin.find(id).await?;
    if there.spec.token_sha256 != record.spec.token_sha256 {
        return Ok(Verdict::Done(format!("{id} has metadata again; somebody else put them there")));
    }
    Ok(Verdict::Done(format!("{id} has new metadata; its new token is {}", secret.0)))
}

/// Sets the status that the lock implies for a sandbox that no instance runs.
fn show_resting(admin: &StorageAdmin, record: &mut Metadata, lock: &Lock, taken: Option<String>) {
    let Resting { phase, reason, message, committed } = Resting::of(lock, taken);
    record.status = Status {
        phase,
        reason: reason.map(String::from).unwrap_or_default(),
        message: message.to_owned(),
        epoch: lock.epoch,
        updated: admin.clock.timestamp(),
        ..Status::default()
    };
    (record.latest_sandbox_checkpoint, record.last_checkpointed) = (committed.latest, committed.at);
}

/// `over` is the unusable lock, and the version of it to replace.
async fn new_lock(admin: &StorageAdmin, args: &Args, over: Option<(&Unusable, Version)>) -> Result<Verdict> {
    let id = &args.id;
    if !args.nobody_runs_it {
        let why = match &over {
            Some((unusable, _)) => format!("{}: {unusable}: bring the last good lock.json back", unusable.reason()),
            None => format!("{}: undelete lock.json", Reason::LockMissing),
        };
        return Ok(Verdict::Refused(format!(
            "{why} if the bucket can; otherwise make sure that no instance runs {id} and say --nobody-runs-it"
        )));
    }
    let (draft, version) = match admin.records.draft(id).await {
        Ok(found) => found.with_context(|| format!("{id} does not exist"))?,
        Err(error) if error.reason().is_some() => return Ok(unusable(id, &error)),
        Err(error) => return Err(error.into()),
    };
    let shelf = admin.upkeep.checkpoints.as_ref().context("there is no place for checkpoints")?;
    let stored = Stored::of(shelf, id).await?;
    let start = match choose(shelf, &stored, args.head.as_ref(), &draft.metadata).await? {
        Choice::Nothing => None,
        Choice::Start(start) => Some(*start),
        Choice::Refused(why) => return Ok(Verdict::Refused(why)),
    };
    let (head, taken) = start.map(|Start { head, taken }| (head, taken)).unzip();
    let source = head.as_ref().map(|head| head.checkpoint_id.clone()).filter(|source| source.sandbox() != *id);
    if let Some(source) = &source {
        shelf.pin(source, id).await?;
    }
    let lock = Lock {
        epoch: draft.metadata.status.epoch.max(stored.epoch) + 1,
        ran: true,
        // It may have kept running after this checkpoint. What another sandbox did since does not count as its own.
        behind: source.is_none(),
        forked_from: source,
        head,
        ..Lock::new(id.clone())
    };
    match &over {
        Some((_, version)) => admin.records.replace_lock(&lock, version).await?,
        None => admin.records.new_lock(&lock).await?,
    }
    let from = lock.head.as_ref().map_or("has no checkpoint: its state is lost".to_owned(), |head| {
        format!("starts from {}", head.checkpoint_id)
    });
    let news = format!("{id} has a new lock, epoch {}, and {from}", lock.epoch);
    if draft.has_token && !draft.is_by_hand {
        return Ok(Verdict::Done(news));
    }
    finish(admin, draft, version, &lock, taken, news).await
}

/// Completes metadata: adds a token, and the status that an instance would have written for a resting sandbox.
async fn finish(
    admin: &StorageAdmin,
    draft: Draft,
    version: Version,
    lock: &Lock,
    taken: Option<String>,
    news: String,
) -> Result<Verdict> {
    let Draft { metadata: mut record, has_token, is_by_hand } = draft;
    let id = record.spec.sandbox_id.clone();
    let secret = (!has_token).then(|| token::fresh(&*admin.clock));
    if let Some(secret) = &secret {
        record.spec.token_sha256 = token::sha256(&secret.0);
    }
    if is_by_hand {
        show_resting(admin, &mut record, lock, taken);
    }
    let text = serde_json::to_vec_pretty(&record)?;
    if !admin.records.put_raw(&id, text.into(), Precondition::Is(version)).await? {
        return Ok(Verdict::Refused(format!("{news}; its metadata changed meanwhile: `baton repair {id}` once more")));
    }
    Ok(Verdict::Done(match secret {
        Some(secret) => format!("{news}; its new token is {}", secret.0),
        None => news,
    }))
}

fn unusable(id: &SandboxId, error: &records::Error) -> Verdict {
    Verdict::Refused(format!("{error}: mend it with `baton edit {id}`"))
}
