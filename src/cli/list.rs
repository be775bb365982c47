//! `baton list`: every sandbox, as a server or the storage knows it.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::{Result, bail};
use baton_protocol::printable::escape_json;
use futures::StreamExt;
use serde_json::Value;

use super::{
    admin_api::{self, AdminApi},
    backend::Backend,
    context::CommandContext,
    global_options::{OutputFormat, OutputOption, ServerOptions},
    rows::{self, Filter, HEADER},
    screen,
    server_client::ServerClient,
    server_rows,
    storage_admin::{self, StorageAdmin},
};

/// List sandboxes
///
/// If the storage is configured, this command reads the storage. With --url, or without storage, it asks the server,
/// which requires its admin key and also knows the sandboxes in its memory. With a context that names both, it asks the
/// server, and reads the storage if the server does not answer.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton list --phase running\n  baton list --label team=red -o json\n  \
                  baton list -o name\n  BATON_API_KEY=… baton list --url wss://…\n  baton list --orphans\n\n{}", storage_admin::EXIT_CODES_HELP))]
pub struct ListArgs {
    #[command(flatten)]
    pub filter: Filter,
    #[command(flatten)]
    pub output: OutputOption,
    #[command(flatten)]
    pub server: ServerOptions,
}

pub async fn list(args: ListArgs, context: &CommandContext) -> Result<ExitCode> {
    let storage = match context.backend(&args.server, None)? {
        Backend::Storage(storage) => storage,
        // Only the storage has orphans.
        Backend::Both(_, storage) if args.filter.orphans => storage,
        Backend::Both(server, storage) => match list_from_server(&args, &server, context).await {
            Ok(code) => return Ok(code),
            Err(error) => {
                storage.notify(&format!("baton: {error:#}; this is what is stored:"));
                storage
            }
        },
        Backend::Server(server) => {
            if args.filter.orphans {
                bail!("--orphans needs the storage: set its variables, or use a context that has one");
            }
            return list_from_server(&args, &server, context).await;
        }
    };
    let mut out = io::BufWriter::new(io::stdout());
    match write_list(&storage, &args.filter, args.output.format, &mut out).await {
        // The reader closed the pipe.
        Err(error) if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) => {}
        listed => listed?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn list_from_server(args: &ListArgs, server: &ServerClient, context: &CommandContext) -> Result<ExitCode> {
    let api = AdminApi::new(server, server.url())?;
    admin_api::until_signal(&context.clock, async {
        let found = api.selected(&args.filter).await?;
        screen::print(&match args.output.format {
            OutputFormat::Table if found.is_empty() => {
                screen::report("no sandboxes");
                String::new()
            }
            OutputFormat::Table => server_rows::table(&found),
            OutputFormat::Json => screen::json(&Value::Array(found)),
            OutputFormat::Name => {
                let ids = found.iter().filter_map(|view| view.get("sandbox_id")?.as_str());
                ids.map(|id| format!("{id}\n")).collect()
            }
        })
    })
    .await
}

/// Writes each row as soon as it is read.
pub async fn write_list(
    storage: &StorageAdmin,
    filter: &Filter,
    format: OutputFormat,
    out: &mut (impl Write + Send),
) -> Result<()> {
    let rows = rows::rows(storage, filter).await?;
    let mut rows = std::pin::pin!(rows);
    let mut count = 0_usize;
    while let Some(row) = rows.next().await {
        match format {
            OutputFormat::Name => writeln!(out, "{}", row.id)?,
            OutputFormat::Table => {
                if count == 0 {
                    writeln!(out, "{HEADER}")?;
                }
                writeln!(out, "{}", row.line(storage.clock.wall()))?;
            }
            OutputFormat::Json => {
                write!(out, "{}{}", if count == 0 { "[\n" } else { ",\n" }, escape_json(&row.json().to_string()))?
            }
        }
        count += 1;
    }
    match format {
        OutputFormat::Table if count == 0 => storage.notify("no sandboxes"),
        OutputFormat::Table | OutputFormat::Name => {}
        OutputFormat::Json => writeln!(out, "{}", if count == 0 { "[]" } else { "\n]" })?,
    }
    Ok(out.flush()?)
}
