//! Row 11: a gibibyte of memory moves, and the server does not hold it.

use std::{
    fs,
    io::Write,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use baton_protocol::id::hex;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::{
    bench_client::{Client, Dialect, Heard},
    bench_fixture::{Place, Server, Store},
    bench_moves::{image, movable, pair, stop},
    bench_process,
    bench_table::{Line, Table, Times, show_bytes},
};

const ROUNDS: usize = 2;
const MEBIBYTES: usize = 1024;
/// Fills its memory, and says what is in it whenever it reads a line.
const HOLDER: &str = "import hashlib, sys\nb = bytearray(1024 << 20)\nfor i in range(1024):\n\t\
                      b[i << 20:(i + 1) << 20] = hashlib.sha256(b'%d' % i).digest() * 32768\n\
                      print('full', flush=True)\nfor _ in sys.stdin:\n\tprint(hashlib.sha256(b).hexdigest(), flush=True)\n";

pub async fn measure(place: &Place, table: &mut Table) -> Result<()> {
    let data = place.data("large")?;
    let servers = pair(place, "l", Store::Directory(&data)).await?;
    let (mut client, _) = Client::create(&servers[0], Dialect::V1, &movable()).await?;
    let ticket = client.ticket.clone();
    let argv = ["python3", "-c", HOLDER];
    client.send(&json!({"action": "exec", "exec_id": "m", "argv": argv, "stdin": true})).await?;
    let mut read = line(&mut client, "full").await?;
    let expected = expected();
    let (mut ours, mut floor, mut unsynced, mut growth) = (Times::default(), Times::default(), Times::default(), 0);
    for number in 1..=ROUNDS {
        let before = rss(&servers)?;
        let began = Instant::now();
        client.checkpoint().await?;
        (client, _) = Client::attach(&servers[number % 2], Dialect::V1, &ticket).await?;
        ours.add(began.elapsed());
        for (server, before) in servers.iter().zip(before) {
            growth = growth.max(bench_process::peak_rss(server.pid())?.saturating_sub(before));
        }
        client.send(&json!({"action": "reconnect", "offsets": {"m": {"stdout": read, "stderr": 0}}})).await?;
        client.send(&json!({"event": "stdin", "exec_id": "m", "data": "\n"})).await?;
        read += line(&mut client, &expected).await.context("the memory is not what it was")?;
        let pages = image(&data, &ticket)?.join("pages.img");
        floor.add(copy_twice(&pages, &data, true)?);
        unsynced.add(copy_twice(&pages, &data, false)?);
    }
    client.kill().await?;
    let what = "1 GiB: checkpoint + upload + download + restore";
    table.add(Line::ratio("11", what, &ours, &floor, 3.0, "≤ 3 ×"));
    table.add(Line {
        row: "11",
        what: "the same, compared with two copies without a sync",
        ours: ours.show(),
        floor: unsynced.show(),
        ratio: Some(ours.ratio(&unsynced)),
        budget: "printed",
        is_met: None,
    });
    let is_met = growth <= 64 << 20;
    table.add(Line::bound("11", "growth of the server's RSS meanwhile", show_bytes(growth), "≤ 64 MiB", Some(is_met)));
    stop(servers).await
}

fn rss(servers: &[Server; 2]) -> Result<Vec<u64>> {
    let look = |server: &Server| {
        bench_process::reset_peak(server.pid())?;
        bench_process::rss(server.pid())
    };
    servers.iter().map(look).collect()
}

/// The digest of what the command fills its memory with.
fn expected() -> String {
    let mut sum = Sha256::new();
    for number in 0..MEBIBYTES {
        sum.update(Sha256::digest(number.to_string()).repeat(32768));
    }
    hex(&sum.finalize())
}

/// Waits for one line of output, which must be this one; its length.
async fn line(client: &mut Client, expected: &str) -> Result<u64> {
    let mut text = String::new();
    while !text.ends_with('\n') {
        match client.hear().await? {
            Heard::Output { bytes, .. } => text.push_str(std::str::from_utf8(&bytes)?),
            Heard::Closed(code) => anyhow::bail!("closed with {code:?}"),
            Heard::Update(_) | Heard::Other => {}
        }
    }
    ensure!(text.trim_end() == expected, "{text:?} in place of {expected:?}");
    Ok(text.len() as u64)
}

/// A copy to the store and one back, as plainly as can be; synced as the store is.
fn copy_twice(from: &Path, directory: &Path, sync: bool) -> Result<Duration> {
    let began = Instant::now();
    let copies = [directory.join("copy-1"), directory.join("copy-2")];
    let mut from = from;
    for to in &copies {
        let mut file = fs::File::create(to)?;
        std::io::copy(&mut fs::File::open(from)?, &mut file)?;
        file.flush()?;
        if sync {
            file.sync_all()?;
        }
        from = to;
    }
    let took = began.elapsed();
    copies.iter().try_for_each(fs::remove_file)?;
    Ok(took)
}
