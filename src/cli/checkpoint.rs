//! `baton checkpoint`: has the holder checkpoint a sandbox.

use std::process::ExitCode;

use anyhow::Result;
use baton_protocol::{
    id::SandboxId,
    metadata::{Answer, DesiredState, Request, Spec},
};

use super::storage_admin::{self, Rest, StorageAdmin, Verdict, Waiting};

/// Have a sandbox checkpointed: its state is kept and it runs nowhere, until somebody attaches.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton checkpoint ID\n  baton checkpoint --keep-running ID\n\n{}", storage_admin::CODES))]
pub struct Args {
    pub id: SandboxId,
    /// Do not stop it: it stands still only while its image is written.
    #[arg(long)]
    pub keep_running: bool,
    #[command(flatten)]
    pub waiting: Waiting,
}

pub fn run(args: Args) -> Result<ExitCode> {
    storage_admin::run(|admin| async move {
        if args.keep_running {
            keep_running(&admin, &args.id, args.waiting).await
        } else {
            let_go(&admin, &args.id, DesiredState::Checkpointed, args.waiting).await
        }
    })
}

/// Has the holder commit a checkpoint and release the sandbox.
pub async fn let_go(admin: &StorageAdmin, id: &SandboxId, state: DesiredState, waiting: Waiting) -> Result<Verdict> {
    admin.want(id, state).await?;
    if waiting.no_wait {
        return Ok(Verdict::Done(format!("{id} was asked to let go")));
    }
    let mut file = admin.lock_file(id)?;
    loop {
        match admin.until_free(id, &mut file, waiting.timeout).await? {
            Rest::Free => break,
            Rest::Dead => {
                admin.tell("its holder shows no sign of life: its lease is taken");
                match admin.upkeep.correct(id, &mut file).await {
                    Ok(_) => break,
                    Err(crate::storage::gc::Error::Taken) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Rest::Purged => return Ok(Verdict::Refused(format!("{id} was deleted"))),
            Rest::Refused(why) => return Ok(Verdict::Refused(format!("{id} runs on: {why}"))),
            Rest::Late => return Ok(Verdict::Late(format!("{id} was not let go within the time"))),
        }
    }
    let Some(lock) = file.lock() else {
        return Ok(Verdict::Refused(storage_admin::reason(baton_protocol::reason::Reason::LockMissing)));
    };
    Ok(match &lock.head {
        Some(head) if lock.behind => Verdict::Done(format!(
            "{id} is free; its last checkpoint is {}, and what it did since then is lost",
            head.checkpoint_id
        )),
        Some(head) => Verdict::Done(format!("{id} is checkpointed: {}", head.checkpoint_id)),
        None if lock.ran => Verdict::Refused(format!("{id} ended without a checkpoint: Lost")),
        None => Verdict::Done(format!("{id} never ran; there is nothing to keep")),
    })
}

/// Requests a checkpoint under a nonce and waits for the answer.
pub async fn keep_running(admin: &StorageAdmin, id: &SandboxId, waiting: Waiting) -> Result<Verdict> {
    admin.find(id).await?;
    if admin.lock(id).await?.is_none_or(|lock| lock.lease.is_none()) {
        return Ok(Verdict::Refused(format!("nobody runs {id}: there is nothing to checkpoint")));
    }
    let nonce = admin.clock.nonce();
    let ask = |spec: &mut Spec| spec.requests.insert(nonce.clone(), Request::Checkpoint {}).is_none();
    admin.records.wish(id, None, &ask).await?;
    if waiting.no_wait {
        return Ok(Verdict::Done(format!("{id} was asked for a checkpoint")));
    }
    let end = admin.clock.now() + waiting.timeout;
    let answer = loop {
        let found = admin.find(id).await?;
        if let Some(answer) = found.status.answers.get(&nonce) {
            break answer.clone();
        }
        if admin.clock.now() >= end {
            return Ok(Verdict::Late(format!("{id} has not answered yet; the request stays")));
        }
        admin.clock.sleep(std::time::Duration::from_millis(500)).await;
    };
    admin.records.edit(id, &|spec| spec.requests.remove(&nonce).is_some()).await?;
    Ok(match answer {
        Answer::Ok(done) => {
            let checkpoint = done.checkpoint_id.map_or_else(String::new, |id| format!(": {id}"));
            let paused = done.paused_ms.map_or_else(String::new, |paused| format!(", paused for {paused} ms"));
            Verdict::Done(format!("{id} is checkpointed and runs on{checkpoint}{paused}"))
        }
        Answer::Error { reason, message } => Verdict::Refused(format!("{id} runs on: {reason}: {message}")),
    })
}
