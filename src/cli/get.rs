//! `baton get`: one sandbox, its metadata and its lock.

use std::{fmt::Write as _, process::ExitCode};

use anyhow::{Result, bail};
use baton_protocol::{id::SandboxId, lock::Lock, printable::printable, reason::Reason};
use serde_json::{Value, json};

use super::{
    config::Output,
    rows::{Row, Shown, row, state_name},
    screen,
    storage_admin::{self, StorageAdmin},
};
use crate::storage::unresponsive::Unresponsive;

/// Show one sandbox: what is wanted, what is so, who holds it and what it starts from.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton get ID\n  baton get ID -o json\n\n{}", storage_admin::CODES))]
pub struct Args {
    pub id: SandboxId,
    /// How to print.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
}

pub fn run(args: Args) -> Result<ExitCode> {
    storage_admin::block_on(|admin| async move {
        screen::print(&get(&admin, &args).await?)?;
        Ok(ExitCode::SUCCESS)
    })
}

pub async fn get(admin: &StorageAdmin, args: &Args) -> Result<String> {
    let id = &args.id;
    let (lock, unusable) = match admin.usable_lock(id).await? {
        Ok(lock) => (lock, None),
        Err(unusable) => (None, Some(unusable)),
    };
    let raw = admin.records.raw(id).await?;
    let objects = admin.records.objects(id).await?;
    if lock.is_none() && raw.is_none() && unusable.is_none() {
        bail!("{id} does not exist");
    }
    if let Some(lock) = lock.as_ref().filter(|lock| lock.purged) {
        return Ok(format!(
            "{id} was deleted{}\n",
            lock.purged_at.as_ref().map_or(String::new(), |at| format!(" at {at}"))
        ));
    }
    let Some(mut row) = row(admin, id.clone(), objects).await else { bail!("{id} does not exist") };
    // An unusable lock comes first: until it is repaired nothing else can be done.
    if let Some(unusable) = unusable {
        (row.reason, row.message) = (unusable.reason().into(), unusable.to_string());
    }
    Ok(match args.output {
        Output::Json => {
            let metadata = raw.and_then(|(bytes, _)| serde_json::from_slice::<Value>(&bytes).ok());
            let view = json!({
                "sandbox_id": id,
                "phase": row.phase().map(Shown::name),
                "reason": row.reason,
                "message": row.message,
                "unresponsive": row.unresponsive.as_ref().map(Unresponsive::json),
                "metadata": metadata,
                "lock": lock,
            });
            screen::json(&view)
        }
        Output::Table => text(&row, lock.as_ref()),
    })
}

fn text(row: &Row, lock: Option<&Lock>) -> String {
    let mut lines: Vec<(&str, String)> = vec![("sandbox", row.id.to_string())];
    if let Some(found) = &row.found {
        let (spec, status) = (&found.spec, &found.status);
        lines.push(("phase", row.phase().map_or("-", Shown::name).to_owned()));
        lines.push(("wanted", state_name(spec.desired_state).to_owned()));
        lines.push(("placement", spec.placement.as_ref().map_or("anywhere".to_owned(), ToString::to_string)));
        lines.push(("created", spec.created_timestamp.clone()));
        lines.push(("reported", status.updated.clone()));
        let enabled = [("checkpoint", spec.enable_sandbox_checkpoint), ("handoff", spec.enable_sandbox_handoff)];
        let enabled: Vec<_> = enabled.iter().filter(|(_, is)| *is).map(|(name, _)| *name).collect();
        lines.push(("enabled", enabled.join(", ")));
        for (name, value) in &spec.labels {
            lines.push(("label", format!("{name}={value}")));
        }
    }
    if let Some(lock) = lock {
        lines.push(("holder", lock.lease.as_ref().map_or("nobody".to_owned(), |lease| lease.owner.to_string())));
        if let Some(silent) = &row.unresponsive {
            let silence = format!("for {} s, since {}", silent.silent_for.as_secs(), silent.since_text());
            lines.push(("silent", silence));
        }
        lines.push(("epoch", lock.epoch.to_string()));
        if let Some(waiter) = &lock.waiter {
            lines.push(("waiter", waiter.instance.to_string()));
        }
        for (name, head) in [("checkpoint", &lock.head), ("before it", &lock.prev_head)] {
            if let Some(head) = head {
                lines.push((name, head.checkpoint_id.to_string()));
            }
        }
    }
    if !row.reason.is_empty() {
        lines.push(("reason", row.reason.clone()));
    }
    if !row.message.is_empty() {
        lines.push(("message", row.message.clone()));
    }
    if let Some(reason) = Reason::find(&row.reason) {
        lines.push(("remedy", reason.remedy().to_owned()));
    } else if row.is_orphan {
        lines.push(("remedy", format!("its metadata is gone: `baton repair {}` makes it anew", row.id)));
    }
    lines.iter().fold(String::new(), |mut text, (name, value)| {
        let value = printable(value);
        let _ = writeln!(text, "{name:11} {value}");
        text
    })
}
