//! `baton checkpoints`: the stored checkpoints of one sandbox, and what each is for.

use std::{fmt::Write as _, process::ExitCode};

use anyhow::{Result, bail};
use baton_protocol::{id::SandboxId, manifest::CheckpointManifest, printable::printable};
use serde_json::{Value, json};

use super::{
    context::CommandContext,
    global_options::{ContextOption, OutputFormat, OutputOption},
    screen,
    storage_admin::{self, StorageAdmin},
};

/// List the checkpoints of a sandbox
///
/// The newest checkpoint comes first.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton checkpoints ID\n  baton checkpoints ID -o json\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct CheckpointsArgs {
    /// Sandbox id, or the beginning of it
    pub sandbox: String,
    #[command(flatten)]
    pub output: OutputOption,
    #[command(flatten)]
    pub context: ContextOption,
}

pub async fn checkpoints(args: CheckpointsArgs, context: &CommandContext) -> Result<ExitCode> {
    let storage = context.storage(&args.context)?;
    let id = storage.sandbox_id(&args.sandbox).await?;
    screen::print(&describe(&storage, &id, args.output.format).await?)?;
    Ok(ExitCode::SUCCESS)
}

/// The stored checkpoints of a sandbox, and what each of them is for.
pub async fn describe(storage: &StorageAdmin, sandbox: &SandboxId, format: OutputFormat) -> Result<String> {
    let store = storage.checkpoints()?;
    let lock = storage.lock(sandbox).await?;
    let mut stored: Vec<_> = store.list(sandbox).await?.into_iter().collect();
    if lock.is_none() && stored.is_empty() {
        bail!("{sandbox} does not exist");
    }
    stored.sort_by_key(|id| std::cmp::Reverse((id.seq(), id.epoch())));
    if format == OutputFormat::Name {
        return Ok(stored.iter().map(|id| format!("{id}\n")).collect());
    }
    let named = |head: Option<&baton_protocol::lock::Head>| head.map(|head| head.checkpoint_id.clone());
    let head = named(lock.as_ref().and_then(|lock| lock.head.as_ref()));
    let previous = named(lock.as_ref().and_then(|lock| lock.prev_head.as_ref()));
    let mut views: Vec<Value> = Vec::new();
    for id in stored {
        let manifest = store.manifest_of(&id).await.ok().flatten().map(|(manifest, _)| manifest);
        let is = if Some(&id) == head.as_ref() {
            "head"
        } else if Some(&id) == previous.as_ref() {
            "before it"
        } else if manifest.is_none() {
            "unfinished"
        } else {
            "older"
        };
        let size = manifest.as_ref().map(CheckpointManifest::size);
        views.push(json!({
            "checkpoint_id": id,
            "is": is,
            "pinned": store.is_pinned(&id).await?,
            "created": manifest.as_ref().map(|manifest| &manifest.created),
            "size": size,
            "runsc": manifest.as_ref().map(|manifest| &manifest.runsc.version),
        }));
    }
    if format == OutputFormat::Json {
        return Ok(screen::json(&Value::Array(views)));
    }
    let mut text = format!("{:10}  {:6}  {:>10}  {:24}  CHECKPOINT\n", "IS", "PINNED", "SIZE", "CREATED");
    for view in views {
        let word = |key: &str| printable(view[key].as_str().unwrap_or("-"));
        let size = view["size"].as_u64().map_or("-".to_owned(), |size| format!("{} KiB", size.div_ceil(1024)));
        let pinned = if view["pinned"] == true { "yes" } else { "-" };
        let (is, created, id) = (word("is"), word("created"), word("checkpoint_id"));
        let _ = writeln!(text, "{is:10}  {pinned:6}  {size:>10}  {created:24}  {id}");
    }
    Ok(text)
}
