//! `baton list`: every sandbox in the store, printed as it is read, in constant time per row.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Result;
use baton_protocol::printable::escape_json;
use futures::StreamExt;

use super::{
    config::Output,
    rows::{self, Filter, HEADER},
    storage_admin::{self, StorageAdmin},
};

/// List the sandboxes in the store.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  baton list --phase running\n  baton list --label team=blue -o json\n  baton list --orphans\n\n{}", storage_admin::CODES))]
pub struct Args {
    /// How to print.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub output: Output,
    #[command(flatten)]
    pub filter: Filter,
}

pub fn run(args: Args) -> Result<ExitCode> {
    storage_admin::block_on(|admin| async move {
        let mut out = io::BufWriter::new(io::stdout());
        match list(&admin, &args, &mut out).await {
            // The reader closed the pipe.
            Err(error) if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) => {}
            listed => listed?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

pub async fn list(admin: &StorageAdmin, args: &Args, out: &mut (impl Write + Send)) -> Result<()> {
    let rows = rows::rows(admin, &args.filter).await?;
    let mut rows = std::pin::pin!(rows);
    let mut count = 0_usize;
    while let Some(row) = rows.next().await {
        match args.output {
            Output::Table => {
                if count == 0 {
                    writeln!(out, "{HEADER}")?;
                }
                writeln!(out, "{}", row.line(admin.clock.wall()))?;
            }
            Output::Json => {
                write!(out, "{}{}", if count == 0 { "[\n" } else { ",\n" }, escape_json(&row.json().to_string()))?
            }
        }
        count += 1;
    }
    match args.output {
        Output::Table if count == 0 => admin.tell("no sandboxes"),
        Output::Table => {}
        Output::Json => writeln!(out, "{}", if count == 0 { "[]" } else { "\n]" })?,
    }
    Ok(out.flush()?)
}
