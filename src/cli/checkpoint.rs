//! `baton checkpoint`: has the instance that runs a sandbox checkpoint it, through a server or through the storage.

use std::process::ExitCode;

use anyhow::Result;
use baton_client::CheckpointOptions;
use baton_protocol::{
    id::SandboxId,
    metadata::{Answer as MetadataAnswer, DesiredState, Spec, SpecRequest},
    reason::Reason,
};
use serde_json::json;

use super::{
    backend::ServerOrStorage,
    context::CommandContext,
    global_options::OutputOption,
    sandbox_client::{SandboxOptions, VerbOutput},
    storage_admin::{self, AdminResult, POLL_INTERVAL, Release, StorageAdmin, WaitArgs},
};
use crate::storage::garbage_collector;

/// Checkpoint a sandbox
///
/// The state of the sandbox is saved and the sandbox stops, until a client attaches to it.
///
/// If the storage is configured, this command works on the storage and prints one line in any output format. With
/// --url, or without storage, it asks the server, and always waits for the answer. With a context that names both, it
/// asks the server if the sandbox's token is saved here.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton checkpoint 0b9f\n  baton checkpoint --live --keep-running 0b9f\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct CheckpointArgs {
    /// Include running commands; without this, a server refuses while a command runs
    #[arg(long)]
    pub live: bool,
    /// Keep the sandbox running: it is paused only while its memory is written
    #[arg(long)]
    pub keep_running: bool,
    #[command(flatten)]
    pub wait: WaitArgs,
    #[command(flatten)]
    pub output: OutputOption,
    #[command(flatten)]
    pub options: SandboxOptions,
    /// Sandbox id, or the beginning of it
    pub sandbox: String,
}

pub async fn checkpoint(args: CheckpointArgs, context: &CommandContext) -> Result<ExitCode> {
    let client = context.sandbox(&args.options)?;
    match context.backend(&args.options.server, Some(&args.sandbox))?.preferring_server(&client, &args.sandbox)? {
        ServerOrStorage::Server => {
            let kind = CheckpointOptions { live: args.live, keep_running: args.keep_running };
            client
                .request(&args.sandbox, args.output.format, async |sandbox, _| {
                    let id = sandbox.checkpoint_with(kind).await?;
                    let json = json!({"sandbox_id": sandbox.id(), "checkpoint_id": id});
                    Ok(VerbOutput { text: format!("{id}\n"), json })
                })
                .await
        }
        ServerOrStorage::Storage(storage) => {
            storage.warn_of_output("baton checkpoint", args.output.format);
            let id = storage.sandbox_id(&args.sandbox).await?;
            let verdict = if args.keep_running {
                checkpoint_running(&storage, &id, args.wait).await?
            } else {
                release(&storage, &id, DesiredState::Checkpointed, args.wait).await?
            };
            verdict.report()
        }
    }
}

/// Has the holder commit a checkpoint and release the sandbox.
pub async fn release(
    storage: &StorageAdmin,
    id: &SandboxId,
    state: DesiredState,
    wait: WaitArgs,
) -> Result<AdminResult> {
    storage.set_desired_state(id, state).await?;
    if wait.no_wait {
        return Ok(AdminResult::Done(format!("{id} was asked to stop")));
    }
    let mut file = storage.lease_handle(id)?;
    loop {
        match storage.wait_for_release(id, &mut file, wait.timeout).await? {
            Release::Released => break,
            Release::HolderDead => {
                storage.notify("its holder is unresponsive: taking over its lease");
                match storage.upkeep.correct(id, &mut file).await {
                    Ok(_) => break,
                    Err(garbage_collector::Error::Taken) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Release::Purged => return Ok(AdminResult::Refused(format!("{id} was deleted"))),
            Release::Refused(why) => return Ok(AdminResult::Refused(format!("{id} keeps running: {why}"))),
            Release::TimedOut => return Ok(AdminResult::Late(format!("{id} was not released in time"))),
        }
    }
    let Some(lock) = file.lock() else {
        return Ok(AdminResult::Refused(storage_admin::describe_reason(id, Reason::LockMissing)));
    };
    Ok(match &lock.head {
        Some(head) if lock.behind => AdminResult::Done(format!(
            "{id} is released; its last checkpoint is {}, and what it did since then is lost",
            head.checkpoint_id
        )),
        Some(head) => AdminResult::Done(format!("{id} is checkpointed: {}", head.checkpoint_id)),
        None if lock.ran => AdminResult::Refused(format!("{id} ended without a checkpoint: Lost")),
        None => AdminResult::Done(format!("{id} never ran; there is nothing to checkpoint")),
    })
}

/// Requests a checkpoint under a nonce and waits for the answer.
pub async fn checkpoint_running(storage: &StorageAdmin, id: &SandboxId, wait: WaitArgs) -> Result<AdminResult> {
    storage.find(id).await?;
    if storage.lock(id).await?.is_none_or(|lock| lock.lease.is_none()) {
        return Ok(AdminResult::Refused(format!("no instance runs {id}: there is nothing to checkpoint")));
    }
    let nonce = storage.clock.nonce();
    let ask = |spec: &mut Spec| spec.requests.insert(nonce.clone(), SpecRequest::Checkpoint {}).is_none();
    storage.records.edit_for_request(id, None, &ask).await?;
    if wait.no_wait {
        return Ok(AdminResult::Done(format!("{id} was asked for a checkpoint")));
    }
    let end = storage.clock.now() + wait.timeout;
    let answer = loop {
        let found = storage.find(id).await?;
        if let Some(answer) = found.status.answers.get(&nonce) {
            break answer.clone();
        }
        if storage.clock.now() >= end {
            return Ok(AdminResult::Late(format!("{id} has not answered yet; the request stays")));
        }
        storage.clock.sleep(POLL_INTERVAL).await;
    };
    storage.records.edit(id, &|spec| spec.requests.remove(&nonce).is_some()).await?;
    Ok(match answer {
        MetadataAnswer::Ok(done) => {
            let checkpoint = done.checkpoint_id.map_or_else(String::new, |id| format!(": {id}"));
            let paused = done.paused_ms.map_or_else(String::new, |paused| format!(", paused for {paused} ms"));
            AdminResult::Done(format!("{id} is checkpointed and keeps running{checkpoint}{paused}"))
        }
        MetadataAnswer::Error { reason, message } => {
            AdminResult::Refused(format!("{id} keeps running: {reason}: {message}"))
        }
    })
}
