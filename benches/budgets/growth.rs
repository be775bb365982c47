//! Rows 10 and 14: what a sandbox costs, and whether many slow one down.

use anyhow::{Context, Result};
use tokio::task::JoinSet;

use crate::{
    bench_client::{Client, Dialect, Heard},
    bench_fixture::{Place, Server, Store},
    bench_moves::movable,
    bench_process,
    bench_table::{Line, Table, Times, show, show_bytes},
};

const LEVELS: [usize; 3] = [1, 10, 40];
const ROUNDS: u32 = 7;

/// Create, exec, checkpoint and restore with others present.
type Level = [Times; 4];

pub async fn measure(place: &Place, rows: &[u32], table: &mut Table) -> Result<()> {
    let server = place.server("many", Store::Directory(&place.data("many")?)).await?;
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let idle_rss = bench_process::rss(server.pid())?;
    let mut present = JoinSet::new();
    let (mut levels, mut rss) = (Vec::new(), Vec::new());
    for count in LEVELS {
        while present.len() < count {
            let (client, _) = Client::create(&server, Dialect::V1, &movable()).await?;
            present.spawn(sit(client));
        }
        rss.push(bench_process::rss(server.pid())?);
        if rows.contains(&14) {
            levels.push(level(&server).await?);
        }
    }
    if rows.contains(&10) {
        cost(&server, idle_rss, &rss, table)?;
    }
    if let [one, ten, forty] = levels.as_slice() {
        let names = ["create at 40 sandboxes", "exec at 40", "checkpoint at 40", "restore at 40"];
        for (at, what) in names.into_iter().enumerate() {
            let ratio = forty[at].ratio(&one[at]);
            let floor = format!("{} at 1, {} at 10", show(one[at].median()), show(ten[at].median()));
            let ours = forty[at].show();
            let is_met = Some(ratio <= 1.5);
            table.add(Line { row: "14", what, ours, floor, ratio: Some(ratio), budget: "≤ 1.5 ×", is_met });
        }
    }
    if let Some(left) = present.try_join_next() {
        left?.context("a sandbox that only sat there was lost")?;
    }
    present.shutdown().await;
    server.stop().await
}

fn cost(server: &Server, idle: u64, rss: &[u64], table: &mut Table) -> Result<()> {
    let few = LEVELS[1];
    let many = LEVELS[2];
    let each = rss[2].saturating_sub(rss[1]) / (many - few) as u64;
    let (mut guard, mut sandboxes) = (0, 0);
    for pid in bench_process::descendants(server.pid())? {
        let is_guard = bench_process::line(pid).contains(" guard");
        *(if is_guard { &mut guard } else { &mut sandboxes }) += bench_process::pss(pid);
    }
    let megabyte = 1_000_000;
    let text = format!("{}, guard {} PSS", show_bytes(idle), show_bytes(guard));
    table.add(Line::bound("10", "server RSS, idle", text, "≤ 25 MB", Some(idle <= 25 * megabyte)));
    let text = format!("{:.2} MB", each as f64 / 1e6);
    table.add(Line::bound("10", "server RSS per idle sandbox, attached", text, "≤ 1 MB", Some(each <= megabyte)));
    let text = show_bytes(sandboxes / many as u64);
    table.add(Line::bound("10", "PSS of all processes of a sandbox", text, "printed", None));
    Ok(())
}

/// Attached and silent, for as long as the server wants it.
async fn sit(mut client: Client) -> Result<()> {
    loop {
        if let Heard::Closed(code) = client.hear().await? {
            anyhow::bail!("closed with {code:?}");
        }
    }
}

async fn level(server: &Server) -> Result<Level> {
    let mut level = [const { Times::empty() }; 4];
    for number in 0..ROUNDS {
        let (mut client, created) = Client::create(server, Dialect::V1, &movable()).await?;
        let ticket = client.ticket.clone();
        client.exec_true(number).await?;
        let exec = client.exec_true(number + ROUNDS).await?;
        let (_, saved) = client.checkpoint().await?;
        let (client, restored) = Client::attach(server, Dialect::V1, &ticket).await?;
        client.kill().await?;
        for (times, took) in level.iter_mut().zip([created, exec, saved, restored]) {
            times.add(took);
        }
    }
    Ok(level)
}
