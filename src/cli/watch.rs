//! `baton watch`: shows phases live as they change.

use std::{collections::BTreeMap, io::IsTerminal, process::ExitCode, time::Duration};

use anyhow::Result;
use baton_protocol::id::SandboxId;
use futures::StreamExt;

use super::{
    rows::{self, Filter, HEADER},
    screen,
    storage_admin::{self, StorageAdmin},
};

/// Watch sandboxes: a live table on a terminal, otherwise a line whenever one changes. Ends with Ctrl-C.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton watch\n  baton watch ID\n  baton watch --phase failed --for 1m\n\n{}", storage_admin::CODES))]
pub struct Args {
    /// Only this one.
    pub id: Option<SandboxId>,
    #[command(flatten)]
    pub filter: Filter,
    /// How often to look.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = humantime::parse_duration)]
    pub every: Duration,
    /// End after this time.
    #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
    pub within: Option<Duration>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    storage_admin::block_on(|admin| async move {
        let live = std::io::stdout().is_terminal();
        let mut out = |text: &str| {
            if live {
                screen::clear()?;
            }
            screen::print(text)
        };
        let watching = watch(&admin, &args, live, &mut out);
        match args.within {
            Some(within) => admin.clock.timeout(within, watching).await.unwrap_or(Ok(()))?,
            None => watching.await?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Polls forever; `out` gets the whole table, or the lines that changed.
pub async fn watch(
    admin: &StorageAdmin,
    args: &Args,
    live: bool,
    out: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<()> {
    let mut shown: BTreeMap<SandboxId, String> = BTreeMap::new();
    loop {
        match look(admin, args).await {
            Ok(seen) => {
                let text = if live { table(&seen) } else { changes(&shown, &seen) };
                if shown != seen && !text.is_empty() {
                    out(&text)?;
                }
                shown = seen;
            }
            // A store that is unreachable now may recover soon.
            Err(error) => admin.tell(&format!("{error}")),
        }
        admin.clock.sleep(args.every.max(Duration::from_millis(100))).await;
    }
}

async fn look(admin: &StorageAdmin, args: &Args) -> Result<BTreeMap<SandboxId, String>> {
    let now = admin.clock.wall();
    let mut seen = BTreeMap::new();
    if let Some(id) = &args.id {
        let objects = admin.records.objects(id).await?;
        if let Some(row) = rows::row(admin, id.clone(), objects).await {
            seen.insert(id.clone(), row.line(now));
        }
        return Ok(seen);
    }
    let rows = rows::rows(admin, &args.filter).await?;
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
