//! `baton watch`: shows phases live as they change.

use std::{collections::BTreeMap, io::IsTerminal, process::ExitCode, time::Duration};

use anyhow::Result;
use baton_protocol::id::SandboxId;
use futures::StreamExt;
use serde_json::Value;

use super::{
    admin_api::AdminApi,
    backend::Backend,
    context::CommandContext,
    global_options::ServerOptions,
    rows::{self, Filter, HEADER},
    screen, server_rows,
    storage_admin::{self, StorageAdmin},
    time_value::parse_time,
};
use crate::clock::SharedClock;

/// Show sandboxes as they change
///
/// Shows a live table on a terminal, otherwise a line whenever a sandbox changes. Ends with Ctrl-C. Sandboxes come from
/// the storage or from a server, as with `baton list`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton watch\n  baton watch 0b9f\n  baton watch --phase failed --for 1m\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct WatchArgs {
    /// Show only this sandbox: its id, or the beginning of it
    pub sandbox: Option<String>,
    #[command(flatten)]
    pub filter: Filter,
    /// Polling interval
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_time)]
    pub every: Duration,
    /// Stop after this time
    #[arg(id = "for", long = "for", value_name = "TIME", value_parser = parse_time)]
    pub duration: Option<Duration>,
    #[command(flatten)]
    pub server: ServerOptions,
}

/// What is watched, and how often it is polled.
#[derive(Clone, Debug)]
pub struct Watched {
    /// `None`: all that the filter selects.
    pub id: Option<SandboxId>,
    pub filter: Filter,
    pub every: Duration,
}

/// Where rows come from.
#[derive(Debug)]
pub enum RowSource {
    Storage(Box<StorageAdmin>),
    Server(Box<AdminApi>, SharedClock),
}

pub async fn watch(args: WatchArgs, context: &CommandContext) -> Result<ExitCode> {
    let (source, id) = match context.backend(&args.server, args.sandbox.as_deref())? {
        Backend::Storage(storage) => (RowSource::Storage(storage), None),
        Backend::Both(_, storage) if args.filter.orphans => (RowSource::Storage(storage), None),
        Backend::Server(server) | Backend::Both(server, _) => {
            let saved = args.sandbox.as_deref().map(|text| server.saved_token(text)).transpose()?.flatten();
            let api = AdminApi::new(&server, server.url_of(saved.as_ref()))?;
            (RowSource::Server(Box::new(api), context.clock.clone()), saved.map(|saved| saved.id))
        }
    };
    let id = match (id, &args.sandbox) {
        (None, Some(text)) => Some(source.sandbox_id(text).await?),
        (id, _) => id,
    };
    let watched = Watched { id, filter: args.filter, every: args.every };
    let is_live = std::io::stdout().is_terminal();
    let mut out = |text: &str| {
        if is_live {
            screen::clear()?;
        }
        screen::print(text)
    };
    let watching = watch_rows(&source, &watched, is_live, &mut out);
    match args.duration {
        Some(duration) => context.clock.timeout(duration, watching).await.unwrap_or(Ok(()))?,
        None => watching.await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Polls forever; `out` gets the whole table if `is_live`, otherwise the lines that changed.
pub async fn watch_rows(
    source: &RowSource,
    watched: &Watched,
    is_live: bool,
    out: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<()> {
    let mut shown: BTreeMap<SandboxId, String> = BTreeMap::new();
    let clock = source.clock();
    loop {
        match source.poll(watched).await {
            Ok(seen) => {
                let text = if is_live { table(&seen) } else { changes(&shown, &seen) };
                if shown != seen && !text.is_empty() {
                    out(&text)?;
                }
                shown = seen;
            }
            // A store or a server that is unreachable now may recover soon.
            Err(error) => source.notify(&format!("{error:#}")),
        }
        clock.sleep(watched.every.max(Duration::from_millis(100))).await;
    }
}

impl RowSource {
    fn clock(&self) -> SharedClock {
        match self {
            Self::Storage(storage) => storage.clock.clone(),
            Self::Server(_, clock) => clock.clone(),
        }
    }

    fn notify(&self, text: &str) {
        match self {
            Self::Storage(storage) => storage.notify(text),
            Self::Server(..) => screen::report(text),
        }
    }

    async fn sandbox_id(&self, text: &str) -> Result<SandboxId> {
        match self {
            Self::Storage(storage) => storage.sandbox_id(text).await,
            Self::Server(api, _) => api.sandbox_id(text).await,
        }
    }

    async fn poll(&self, watched: &Watched) -> Result<BTreeMap<SandboxId, String>> {
        match self {
            Self::Storage(storage) => poll_storage(storage, watched).await,
            Self::Server(api, _) => {
                let views = match &watched.id {
                    Some(id) => api.get(id).await?.into_iter().collect(),
                    None => api.selected(&watched.filter).await?,
                };
                let named = |view: &Value| SandboxId::parse(view.get("sandbox_id")?.as_str()?).ok();
                Ok(views.iter().filter_map(|view| Some((named(view)?, server_rows::line(view)))).collect())
            }
        }
    }
}

async fn poll_storage(storage: &StorageAdmin, watched: &Watched) -> Result<BTreeMap<SandboxId, String>> {
    let now = storage.clock.wall();
    let mut seen = BTreeMap::new();
    if let Some(id) = &watched.id {
        let objects = storage.records.objects(id).await?;
        if let Some(row) = rows::row(storage, id.clone(), objects).await {
            seen.insert(id.clone(), row.line(now));
        }
        return Ok(seen);
    }
    let rows = rows::rows(storage, &watched.filter).await?;
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
