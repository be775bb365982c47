//! `baton get`: one sandbox, as a server or the storage knows it.

use std::{fmt::Write as _, process::ExitCode};

use anyhow::{Context, Result, bail};
use baton_protocol::{id::SandboxId, lock::Lock, printable::printable, reason::Reason};
use serde_json::{Map, Value, json};

use super::{
    admin_api::{self, AdminApi},
    backend::Backend,
    context::CommandContext,
    global_options::{OutputFormat, OutputOption, ServerOptions},
    rows::{Row, ShownPhase, row, state_name},
    sandbox_name::SandboxName,
    screen,
    server_client::ServerClient,
    server_rows,
    storage_admin::{self, StorageAdmin},
};
use crate::storage::{records::SandboxObjects, unresponsive::Unresponsive};

/// Show one sandbox
///
/// Shows the desired and the current state, the instance that holds the sandbox, and the checkpoint it starts from; a
/// server also shows on which ports a sandbox that runs on it listens, and how many connections its network policy
/// refused.
///
/// If the storage is configured, this command reads the storage. With --url, or without storage, it asks the server,
/// which requires its admin key. With a context that names both, it asks the server for what is not stored.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton get 0b9f\n  baton get 0b9f -o json\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct GetArgs {
    #[command(flatten)]
    pub output: OutputOption,
    #[command(flatten)]
    pub server: ServerOptions,
    /// Sandbox id, or the beginning of it
    pub sandbox: String,
}

pub async fn get(args: GetArgs, context: &CommandContext) -> Result<ExitCode> {
    match context.backend(&args.server, Some(&args.sandbox))? {
        Backend::Server(server) => get_from_server(&args, &server, context).await,
        Backend::Storage(storage) => {
            let id = storage.sandbox_id(&args.sandbox).await?;
            get_from_storage(&args, &storage, &id).await
        }
        Backend::Both(server, storage) => {
            let id = storage.locate(&SandboxName::parse(&args.sandbox)?).await?;
            match id {
                Some(id) if storage.records.objects(&id).await? != SandboxObjects::default() => {
                    get_from_storage(&args, &storage, &id).await
                }
                // It may be in the memory of the server.
                _ => get_from_server(&args, &server, context).await,
            }
        }
    }
}

async fn get_from_storage(args: &GetArgs, storage: &StorageAdmin, id: &SandboxId) -> Result<ExitCode> {
    screen::print(&describe(storage, id, args.output.format).await?)?;
    Ok(ExitCode::SUCCESS)
}

async fn get_from_server(args: &GetArgs, server: &ServerClient, context: &CommandContext) -> Result<ExitCode> {
    let saved = server.saved_token(&args.sandbox)?;
    let api = AdminApi::new(server, server.url_of(saved.as_ref()))?;
    admin_api::until_signal(&context.clock, async {
        let id = match saved {
            Some(saved) => saved.id,
            None => api.sandbox_id(&args.sandbox).await?,
        };
        let mut view = api.get(&id).await?.with_context(|| format!("there is no sandbox {id}"))?;
        if args.output.format != OutputFormat::Name
            && let (network, Some(fields)) = (api.network(&id).await?, view.as_object_mut())
        {
            fields.extend(network);
        }
        screen::print(&match args.output.format {
            OutputFormat::Table => server_rows::lines(&view),
            OutputFormat::Json => screen::json(&view),
            OutputFormat::Name => format!("{id}\n"),
        })
    })
    .await
}

/// A sandbox as its metadata and its lock show it.
pub async fn describe(storage: &StorageAdmin, id: &SandboxId, format: OutputFormat) -> Result<String> {
    let (lock, unusable) = match storage.usable_lock(id).await? {
        Ok(lock) => (lock, None),
        Err(unusable) => (None, Some(unusable)),
    };
    let raw = storage.records.raw(id).await?;
    let objects = storage.records.objects(id).await?;
    if lock.is_none() && raw.is_none() && unusable.is_none() {
        bail!("{id} does not exist");
    }
    if let Some(lock) = lock.as_ref().filter(|lock| lock.purged) {
        return Ok(format!(
            "{id} was deleted{}\n",
            lock.purged_at.as_ref().map_or(String::new(), |at| format!(" at {at}"))
        ));
    }
    let Some(mut row) = row(storage, id.clone(), objects).await else { bail!("{id} does not exist") };
    let is_unreadable =
        raw.as_ref().is_some_and(|(bytes, _)| serde_json::from_slice::<Map<String, Value>>(bytes).is_err());
    // An unusable lock comes first: until it is repaired nothing else can be done.
    let remedy = match (unusable, is_unreadable) {
        (Some(unusable), _) => {
            (row.reason, row.message) = (unusable.reason().into(), unusable.to_string());
            Some(storage_admin::unusable_remedy(id, &unusable))
        }
        (None, true) if lock.is_some() => Some(storage_admin::unreadable_remedy(id)),
        (None, _) => None,
    };
    Ok(match format {
        OutputFormat::Json => {
            let metadata = raw.and_then(|(bytes, _)| serde_json::from_slice::<Value>(&bytes).ok());
            let view = json!({
                "sandbox_id": id,
                "phase": row.phase().map(ShownPhase::name),
                "reason": row.reason,
                "message": row.message,
                "unresponsive": row.unresponsive.as_ref().map(Unresponsive::json),
                "metadata": metadata,
                "lock": lock,
            });
            screen::json(&view)
        }
        OutputFormat::Table => text(&row, lock.as_ref(), remedy),
        OutputFormat::Name => format!("{id}\n"),
    })
}

/// `remedy` is a more precise one than that of the row's reason.
fn text(row: &Row, lock: Option<&Lock>, remedy: Option<String>) -> String {
    let mut lines: Vec<(&str, String)> = vec![("sandbox", row.id.to_string())];
    if let Some(found) = &row.found {
        let (spec, status) = (&found.spec, &found.status);
        lines.push(("phase", row.phase().map_or("-", ShownPhase::name).to_owned()));
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
    if let Some(remedy) = remedy {
        lines.push(("remedy", remedy));
    } else if let Some(reason) = Reason::find(&row.reason) {
        lines.push(("remedy", storage_admin::remedy(&row.id, reason)));
    } else if row.is_orphan {
        lines.push(("remedy", format!("its metadata is gone: `baton repair {}` recreates it", row.id)));
    }
    lines.iter().fold(String::new(), |mut text, (name, value)| {
        let value = printable(value);
        let _ = writeln!(text, "{name:11} {value}");
        text
    })
}
