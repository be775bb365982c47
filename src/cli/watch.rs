//! `baton watch`: shows phases live as they change.

use std::{collections::BTreeMap, io::IsTerminal, process::ExitCode, time::Duration};

use anyhow::Result;
use baton_protocol::id::SandboxId;
use futures::StreamExt;

use super::{
    context::CommandContext,
    rows::{self, Filter, HEADER},
    screen,
    storage_admin::{self, StorageAdmin},
};

/// Show sandboxes as they change
///
/// Shows a live table on a terminal, otherwise a line whenever a sandbox changes. Ends with Ctrl-C.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton watch\n  baton watch ID\n  baton watch --phase failed --for 1m\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct WatchArgs {
    /// Show only this sandbox
    pub id: Option<SandboxId>,
    #[command(flatten)]
    pub filter: Filter,
    /// Polling interval
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = humantime::parse_duration)]
    pub every: Duration,
    /// Stop after this time
    #[arg(id = "for", long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
    pub duration: Option<Duration>,
}

pub async fn watch(args: WatchArgs, context: &CommandContext) -> Result<ExitCode> {
    let storage = context.storage()?;
    let is_live = std::io::stdout().is_terminal();
    let mut out = |text: &str| {
        if is_live {
            screen::clear()?;
        }
        screen::print(text)
    };
    let watching = watch_rows(&storage, &args, is_live, &mut out);
    match args.duration {
        Some(duration) => context.clock.timeout(duration, watching).await.unwrap_or(Ok(()))?,
        None => watching.await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Polls forever; `out` gets the whole table if `is_live`, otherwise the lines that changed.
pub async fn watch_rows(
    storage: &StorageAdmin,
    args: &WatchArgs,
    is_live: bool,
    out: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<()> {
    let mut shown: BTreeMap<SandboxId, String> = BTreeMap::new();
    loop {
        match poll(storage, args).await {
            Ok(seen) => {
                let text = if is_live { table(&seen) } else { changes(&shown, &seen) };
                if shown != seen && !text.is_empty() {
                    out(&text)?;
                }
                shown = seen;
            }
            // A store that is unreachable now may recover soon.
            Err(error) => storage.notify(&format!("{error}")),
        }
        storage.clock.sleep(args.every.max(Duration::from_millis(100))).await;
    }
}

async fn poll(storage: &StorageAdmin, args: &WatchArgs) -> Result<BTreeMap<SandboxId, String>> {
    let now = storage.clock.wall();
    let mut seen = BTreeMap::new();
    if let Some(id) = &args.id {
        let objects = storage.records.objects(id).await?;
        if let Some(row) = rows::row(storage, id.clone(), objects).await {
            seen.insert(id.clone(), row.line(now));
        }
        return Ok(seen);
    }
    let rows = rows::rows(storage, &args.filter).await?;
    let mut rows = std::pin::pin!(rows);
    while let Some(row) = rows.next().await {
        seen.insert(row.id.clone(), row.line(now));
    }
    Ok(seen)
}

fn table(seen: &BTreeMap<SandboxId, String>) -> String {
    let lines: Vec<_> = seen.values().map(String::as_str).collect();
    format!("{HEADER}\n{}\n", lines.join("\n"))
}

/// The lines that are new or differ in more than the age, and those that are gone.
fn changes(before: &BTreeMap<SandboxId, String>, now: &BTreeMap<SandboxId, String>) -> String {
    let key = |line: &String| {
        line.split_whitespace()
            .enumerate()
            .filter(|(at, _)| *at != 3)
            .map(|(_, word)| word.to_owned())
            .collect::<Vec<_>>()
    };
    let changed = now.iter().filter(|(id, line)| before.get(*id).map(key) != Some(key(line)));
    let gone = before.keys().filter(|id| !now.contains_key(*id));
    changed.map(|(_, line)| format!("{line}\n")).chain(gone.map(|id| format!("{id}  gone\n"))).collect()
}
