//! `baton repair`: recreates the lock or the metadata of a sandbox from what is left of it, or from what an operator
//! has put there by hand.

mod choose;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::Lock,
    metadata::{DesiredState, Metadata, SandboxStatus, Spec},
    reason::Reason,
};

use self::choose::{Choice, RestorePoint, StoredSandbox, choose};
use super::{
    context::CommandContext,
    global_options::ContextOption,
    storage_admin::{self, AdminResult, StorageAdmin},
};
use crate::{
    api::token,
    config::variables::HMAC_KEY,
    storage::{
        garbage_collector::Resting,
        lock_object::Unusable,
        records::{self, Draft, StoreKind},
        store::{self, Precondition, Version},
    },
};

/// How often to retry signing a lock that changes concurrently.
const SIGN_ATTEMPTS: usize = 5;

/// Recreate the lock or the metadata of a sandbox
///
/// A sandbox without metadata gets new metadata with a new token, which is printed once. Metadata without a token gets
/// a new token. A sandbox without a lock gets a new lock from its stored checkpoints, with an epoch above every epoch
/// that was ever seen. A new lock is safe only if no instance runs the sandbox; confirm that with --nobody-runs-it. If
/// the bucket can undelete the object, do that instead.
///
/// To restore a sandbox by hand, put its checkpoint and a metadata.json that names it into the storage, then run this
/// command. Fields that the file omits get their defaults, and the sandbox gets a lock and a token.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(after_help = format!("Examples:\n  baton list --orphans\n  baton repair 0b9f\n  baton repair 0b9f --nobody-runs-it\n  baton repair 0b9f --replace-metadata\n  BATON_HMAC_KEY=… baton repair 0b9f --sign\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct RepairArgs {
    /// Sandbox id, or the beginning of it
    pub sandbox: String,
    /// Confirm that no instance runs the sandbox: each was stopped or checked
    #[arg(long)]
    pub nobody_runs_it: bool,
    /// Checkpoint to start from, if the metadata names none
    #[arg(long, value_name = "CHECKPOINT")]
    pub head: Option<CheckpointId>,
    /// Replace metadata that are no JSON object: the sandbox gets a new token, and loses its labels, limits and env
    #[arg(long)]
    pub replace_metadata: bool,
    /// Sign the lock and its checkpoints as they are with the first key of BATON_HMAC_KEY; only if you know who wrote
    /// them
    #[arg(long, conflicts_with_all = ["nobody_runs_it", "head", "replace_metadata"])]
    pub sign: bool,
    #[command(flatten)]
    pub context: ContextOption,
}

pub async fn repair(args: RepairArgs, context: &CommandContext) -> Result<ExitCode> {
    let storage = context.storage(&args.context)?;
    let id = storage.sandbox_id(&args.sandbox).await?;
    repair_sandbox(&storage, &id, &args).await?.report()
}

pub async fn repair_sandbox(storage: &StorageAdmin, id: &SandboxId, args: &RepairArgs) -> Result<AdminResult> {
    if args.sign {
        return sign(storage, id).await;
    }
    let raw = storage.records.raw(id).await?;
    let lock = match storage.usable_lock(id).await? {
        Ok(lock) => lock,
        Err(unusable) => return unusable_lock(storage, id, args, &unusable, raw.is_some()).await,
    };
    match (lock, raw) {
        (Some(lock), _) if lock.purged => Ok(AdminResult::Refused(format!("{id} was deleted"))),
        (Some(lock), None) => new_metadata(storage, id, &lock).await,
        (None, Some(_)) => new_lock(storage, id, args, None).await,
        (Some(lock), Some(_)) => match draft(storage, id, args).await? {
            Ok((draft, version)) if !draft.has_token => {
                let taken = storage.upkeep.taken(&lock).await;
                finish(storage, draft, version, &lock, taken, format!("{id} accepts clients again")).await
            }
            Ok(_) => Ok(AdminResult::Done(format!("{id} needs no repair"))),
            Err(refused) => Ok(refused),
        },
        (None, None) => bail!("{id} does not exist"),
    }
}

/// Signs the checkpoints that the lock names, then the lock itself, all unchanged.
async fn sign(storage: &StorageAdmin, id: &SandboxId) -> Result<AdminResult> {
    let store = storage.checkpoints()?;
    if !storage.records.signs() {
        bail!("{HMAC_KEY} is not set: there is nothing to sign with");
    }
    for _ in 0..SIGN_ATTEMPTS {
        let found = storage.records.unverified_lock(id).await?;
        let (lock, version) =
            found.with_context(|| format!("{id} has no lock, which names the checkpoints to sign"))?;
        let lock = match lock {
            Ok(lock) if lock.purged => return Ok(AdminResult::Refused(format!("{id} was deleted"))),
            Ok(lock) => lock,
            Err(unusable) => return Ok(AdminResult::Refused(format!("{}: {unusable}", unusable.reason()))),
        };
        let heads: Vec<_> = lock.head.iter().chain(&lock.prev_head).collect();
        for head in &heads {
            store.sign(head).await.with_context(|| format!("{} is not signed", head.checkpoint_id))?;
        }
        match storage.records.replace_lock(&lock, &version).await {
            Ok(()) => {
                return Ok(AdminResult::Done(format!("the lock and {} checkpoints of {id} are signed", heads.len())));
            }
            // The lease was renewed concurrently: sign the current version instead.
            Err(records::Error::Store(store::Error::Conflict(_))) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(AdminResult::Late(format!("the lock of {id} changes too often: sign it when no instance runs the sandbox")))
}

/// What can be done about an unusable lock, without `--sign`.
async fn unusable_lock(
    storage: &StorageAdmin,
    id: &SandboxId,
    args: &RepairArgs,
    unusable: &Unusable,
    has_metadata: bool,
) -> Result<AdminResult> {
    let reason = unusable.reason();
    match unusable {
        Unusable::Unsigned => Ok(AdminResult::Refused(storage_admin::describe_unusable(id, unusable))),
        Unusable::Garbled(_) | Unusable::Older if !has_metadata => {
            Ok(AdminResult::Refused(format!("{reason}: {unusable}, and there is no metadata: restore both objects")))
        }
        Unusable::Garbled(_) | Unusable::Older => {
            let seen = storage.records.unverified_lock(id).await?.map(|(_, version)| version);
            new_lock(storage, id, args, Some((unusable, seen.with_context(|| format!("the lock of {id} is gone"))?)))
                .await
        }
    }
}

async fn new_metadata(storage: &StorageAdmin, id: &SandboxId, lock: &Lock) -> Result<AdminResult> {
    let secret = token::fresh(&*storage.clock);
    let mut record = fresh_record(storage, id);
    record.spec.token_sha256 = token::sha256(&secret.0);
    show_resting(storage, &mut record, lock, storage.upkeep.taken(lock).await);
    storage.records.recreate(&record, StoreKind::Durable).await?;
    let there = storage.find(id).await?;
    if there.spec.token_sha256 != record.spec.token_sha256 {
        return Ok(AdminResult::Done(format!("{id} has metadata again; another writer created it")));
    }
    Ok(AdminResult::Done(format!("{id} has new metadata; its new token is {}", secret.0)))
}

/// The metadata of a sandbox of which nothing but the id is known, without a token.
fn fresh_record(storage: &StorageAdmin, id: &SandboxId) -> Metadata {
    let mut spec = Spec::new(id.clone(), String::new(), storage.clock.timestamp(), storage.identity.me.clone());
    (spec.enable_sandbox_checkpoint, spec.enable_sandbox_handoff) = (true, true);
    (spec.desired_state, spec.placement, spec.claim) = (DesiredState::Checkpointed, None, None);
    spec.lock_bucket = storage.records.lock_bucket(StoreKind::Durable);
    let status = SandboxStatus::default();
    Metadata { spec, latest_sandbox_checkpoint: None, last_checkpointed: None, status }
}

/// The metadata, valid but for its token. What is no JSON object is replaced if the operator says so. Otherwise returns
/// the command that helps.
async fn draft(
    storage: &StorageAdmin,
    id: &SandboxId,
    args: &RepairArgs,
) -> Result<std::result::Result<(Draft, Version), AdminResult>> {
    let (bytes, version) = storage.records.raw(id).await?.with_context(|| format!("{id} does not exist"))?;
    if let Err(error) = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&bytes) {
        if !args.replace_metadata {
            return Ok(Err(AdminResult::Refused(storage_admin::describe_unreadable(id, &error.to_string()))));
        }
        let draft = Draft { metadata: fresh_record(storage, id), has_token: false, is_by_hand: true };
        return Ok(Ok((draft, version)));
    }
    match storage.records.draft(id).await {
        Ok(found) => Ok(Ok(found.with_context(|| format!("{id} does not exist"))?)),
        Err(error @ records::Error::InvalidSpec(_)) => {
            Ok(Err(AdminResult::Refused(format!("{error}: `baton edit {id}` shows it and checks the correction"))))
        }
        Err(error) => match error.reason() {
            Some(reason) => {
                let remedy = storage_admin::remedy(id, reason);
                Ok(Err(AdminResult::Refused(format!("{error}. {remedy}"))))
            }
            None => Err(error.into()),
        },
    }
}

/// Sets the status that the lock implies for a sandbox that no instance runs.
fn show_resting(storage: &StorageAdmin, record: &mut Metadata, lock: &Lock, taken: Option<String>) {
    let Resting { phase, reason, message, committed } = Resting::of(lock, taken);
    record.status = SandboxStatus {
        phase,
        reason: reason.map(String::from).unwrap_or_default(),
        message: message.to_owned(),
        epoch: lock.epoch,
        updated: storage.clock.timestamp(),
        ..SandboxStatus::default()
    };
    (record.latest_sandbox_checkpoint, record.last_checkpointed) = (committed.latest, committed.at);
}

/// `over` is the unusable lock, and the version of it to replace.
async fn new_lock(
    storage: &StorageAdmin,
    id: &SandboxId,
    args: &RepairArgs,
    over: Option<(&Unusable, Version)>,
) -> Result<AdminResult> {
    if !args.nobody_runs_it {
        return Ok(AdminResult::Refused(match &over {
            Some((unusable, _)) => storage_admin::describe_unusable(id, unusable),
            None => storage_admin::describe_reason(id, Reason::LockMissing),
        }));
    }
    let (draft, version) = match draft(storage, id, args).await? {
        Ok(found) => found,
        Err(refused) => return Ok(refused),
    };
    let store = storage.checkpoints()?;
    let stored = StoredSandbox::of(store, id).await?;
    let start = match choose(store, &stored, args.head.as_ref(), &draft.metadata).await? {
        Choice::Nothing => None,
        Choice::Start(start) => Some(*start),
        Choice::Refused(why) => return Ok(AdminResult::Refused(why)),
    };
    let (head, taken) = start.map(|RestorePoint { head, taken }| (head, taken)).unzip();
    let source = head.as_ref().map(|head| head.checkpoint_id.clone()).filter(|source| source.sandbox() != *id);
    if let Some(source) = &source {
        store.pin(source, id).await?;
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
        Some((_, version)) => storage.records.replace_lock(&lock, version).await?,
        None => storage.records.new_lock(&lock).await?,
    }
    let from = lock.head.as_ref().map_or("has no checkpoint: its state is lost".to_owned(), |head| {
        format!("starts from {}", head.checkpoint_id)
    });
    let summary = format!("{id} has a new lock, epoch {}, and {from}", lock.epoch);
    if draft.has_token && !draft.is_by_hand {
        return Ok(AdminResult::Done(summary));
    }
    finish(storage, draft, version, &lock, taken, summary).await
}

/// Completes metadata: adds a token, and the status that an instance would have written for a resting sandbox.
async fn finish(
    storage: &StorageAdmin,
    draft: Draft,
    version: Version,
    lock: &Lock,
    taken: Option<String>,
    summary: String,
) -> Result<AdminResult> {
    let Draft { metadata: mut record, has_token, is_by_hand } = draft;
    let id = record.spec.sandbox_id.clone();
    let secret = (!has_token).then(|| token::fresh(&*storage.clock));
    if let Some(secret) = &secret {
        record.spec.token_sha256 = token::sha256(&secret.0);
    }
    if is_by_hand {
        show_resting(storage, &mut record, lock, taken);
    }
    let text = serde_json::to_vec_pretty(&record)?;
    if !storage.records.put_raw(&id, text.into(), Precondition::Is(version)).await? {
        return Ok(AdminResult::Refused(format!(
            "{summary}; its metadata changed meanwhile: run `baton repair {id}` again"
        )));
    }
    Ok(AdminResult::Done(match secret {
        Some(secret) => format!("{summary}; its new token is {}", secret.0),
        None => summary,
    }))
}
