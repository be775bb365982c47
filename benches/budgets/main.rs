//! `make bench`: what the server costs, with bare `runsc` timed beside it in the same run.
//! One module per group of rows of `docs/budgets.md`; `BATON_BENCH_ROWS="1 3 4"` chooses rows.

#![expect(clippy::disallowed_methods, reason = "a stopwatch and a client in their own right, not an instance")]

mod bare;
mod basics;
mod bench_client;
mod bench_fixture;
mod bench_moves;
mod bench_network;
mod bench_process;
mod bench_snapshots;
mod bench_table;
mod bench_warm;
mod blackout;
mod crowd;
mod growth;
mod large;
mod tape;

use anyhow::{Context, Result, bail};

use crate::{bench_fixture::Place, bench_table::Table};

const ROWS: [u32; 19] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19];

fn main() -> Result<()> {
    let rows = wanted()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        tokio::select! {
            measured = measure(&rows) => measured,
            _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        }
    })
}

/// What `cargo bench` adds of its own (`--bench`) says nothing here.
fn wanted() -> Result<Vec<u32>> {
    let text = std::env::var("BATON_BENCH_ROWS").unwrap_or_default();
    let words: Vec<_> = text.split([' ', ',']).filter(|word| !word.is_empty()).collect();
    if words.is_empty() {
        return Ok(ROWS.to_vec());
    }
    let read = |word: &&str| match word.parse() {
        Ok(row) if ROWS.contains(&row) => Ok(row),
        Ok(_) | Err(_) => bail!("BATON_BENCH_ROWS names {word}, and the rows are {ROWS:?}"),
    };
    words.iter().map(read).collect()
}

async fn measure(rows: &[u32]) -> Result<()> {
    let mut table = Table::default();
    println!("{}", bench_fixture::machine());
    let place = Place::open().await?;
    let measured = all(&place, rows, &mut table).await;
    let closed = place.close().await;
    table.print();
    measured?;
    closed
}

async fn all(place: &Place, rows: &[u32], table: &mut Table) -> Result<()> {
    let any = |of: &[u32]| rows.iter().any(|row| of.contains(row));
    if any(&[1, 3, 4]) {
        basics::measure(place, rows, table).await.context("rows 1, 3 and 4")?;
    }
    if any(&[2]) {
        bench_warm::measure(place, table).await.context("row 2")?;
    }
    if any(&[5, 6]) {
        bench_moves::store_and_restore(place, table).await.context("rows 5 and 6")?;
    }
    if any(&[7]) {
        bench_moves::handoff(place, table).await.context("row 7")?;
    }
    if any(&[8]) {
        bench_moves::handoff_over_a_bucket(place, table).await.context("row 8")?;
    }
    if any(&[9]) {
        blackout::measure(place, table).await.context("row 9")?;
    }
    if any(&[10, 14]) {
        growth::measure(place, rows, table).await.context("rows 10 and 14")?;
    }
    if any(&[11]) {
        large::measure(place, table).await.context("row 11")?;
    }
    if any(&[12]) {
        crowd::measure(place, table).await.context("row 12")?;
    }
    if any(&[13]) {
        bench_moves::takeover(place, table).await.context("row 13")?;
    }
    if any(&[15, 16]) {
        bench_snapshots::snapshots(place, table).await.context("rows 15 and 16")?;
    }
    if any(&[17]) {
        bench_snapshots::forks(place, table).await.context("row 17")?;
    }
    if any(&[18, 19]) {
        bench_network::measure(place, rows, table).await.context("rows 18 and 19")?;
    }
    Ok(())
}
