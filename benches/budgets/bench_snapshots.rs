//! Rows 15 to 17: snapshots beside `tar`, forks beside bare restores.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use baton_protocol::event::Status;
use serde_json::json;
use tokio::process::Command;

use crate::{
    bench_client::{Client, Dialect},
    bench_fixture::{Place, Store},
    bench_moves::{image, movable},
    bench_table::{Line, Table, Times},
};

const ROUNDS: u32 = 5;
const FORKS: usize = 10;
/// As a package manager leaves it: many small files.
const FILL: &str = "import os\nfor n in range(20000):\n d=f'/opt/tree/p{n%200}'\n os.makedirs(d,exist_ok=True)\n open(f'{d}/f{n}','w').write('line\\n'*(n%700))";

pub async fn snapshots(place: &Place, table: &mut Table) -> Result<()> {
    let data = place.data("snapshots")?;
    let server = place.server("snap", Store::Directory(&data)).await?;
    let (mut client, _) = Client::create(&server, Dialect::V1, &json!({"idle_timeout": null})).await?;
    let nothing = |_: &[u8]| Ok(());
    let fill = json!({"action": "exec", "exec_id": "fill", "argv": ["python3", "-c", FILL]});
    client.run(&fill, nothing).await?;
    let [mut taken, mut packed, mut synced, mut begun, mut unpacked] = [const { Times::empty() }; 5];
    for round in 0..ROUNDS {
        // Another content each time: nothing is found in the cache.
        let touch = format!("echo {round} >/opt/tree/round");
        let touch = json!({"action": "exec", "exec_id": format!("touch{round}"), "argv": ["sh", "-c", touch]});
        client.run(&touch, nothing).await?;
        settle(&data).await?;
        let name = format!("s{round}");
        // None is removed before the end: ext4 is in no hurry to use an inode again, and looks at each for it.
        let tree = data.join(format!("floor{round}"));
        let began = Instant::now();
        client.send(&json!({"action": "snapshot_filesystem", "name": name})).await?;
        client.until(Status::FilesystemSnapshotCreated).await?;
        taken.add(began.elapsed());
        let archive = data.join(format!("filesystem_snapshots/{name}/{name}.tar"));
        let others = async {
            tokio::fs::create_dir(&tree).await?;
            settle(&data).await?;
            unpacked.add(tar(&["-xf"], &archive, &tree).await?);
            settle(&data).await?;
            let (began, floor) = (Instant::now(), data.join("floor.tar"));
            packed.add(tar(&["-cf"], &floor, &tree).await?);
            tokio::fs::File::open(&floor).await?.sync_all().await?;
            synced.add(began.elapsed());
            settle(&data).await?;
            let asked = json!({"filesystem_snapshot_name": name});
            let (copy, took) = Client::create(&server, Dialect::V1, &asked).await?;
            begun.add(took);
            copy.kill().await
        };
        client.beside(others).await??;
    }
    client.kill().await?;
    table.add(Line::ratio("15", "snapshot of 20,000 files compared with `tar -c`", &taken, &packed, 1.5, "≤ 1.5 ×"));
    let beside = "the same, compared with one with a sync, like ours";
    let line = Line::ratio("15", beside, &taken, &synced, 1.5, "printed");
    table.add(Line { is_met: None, ..line });
    table.add(Line::ratio("16", "create from it compared with `tar -x`", &begun, &unpacked, 1.5, "≤ 1.5 ×"));
    server.stop().await
}

/// What was written before is on the disk: nobody pays for another's files.
async fn settle(data: &Path) -> Result<()> {
    let folder = std::fs::File::open(data)?;
    Ok(tokio::task::spawn_blocking(move || rustix::fs::syncfs(folder)).await??)
}

async fn tar(flag: &[&str], archive: &Path, tree: &Path) -> Result<Duration> {
    let began = Instant::now();
    let status = Command::new("tar").args(flag).arg(archive).arg("-C").arg(tree).arg(".").status();
    let status = status.await.context("tar does not start")?;
    ensure!(status.success(), "tar ended with {status}");
    Ok(began.elapsed())
}

pub async fn forks(place: &Place, table: &mut Table) -> Result<()> {
    let data = place.data("forks")?;
    let server = place.server("fork", Store::Directory(&data)).await?;
    let (mut client, _) = Client::create(&server, Dialect::V1, &movable()).await?;
    client.start("idle", &["python3", "-c", "import time; time.sleep(1e6)"]).await?;
    let [mut ours, mut floors] = [const { Times::empty() }; 2];
    for _ in 0..3 {
        let began = Instant::now();
        client.send(&json!({"action": "fork", "count": FORKS})).await?;
        let tickets = client.copies().await?;
        ensure!(tickets.len() == FORKS, "{} copies", tickets.len());
        let image = image(&data, &client.ticket)?;
        let others = async {
            let mut copies = Vec::new();
            for ticket in tickets {
                copies.push(Client::attach(&server, Dialect::V1, &ticket).await?.0);
            }
            ours.add(began.elapsed());
            for copy in copies {
                copy.kill().await?;
            }
            let mut floor = Duration::ZERO;
            for _ in 0..FORKS {
                let (container, took) = place.bare.restore(&image).await?;
                floor += took;
                place.bare.delete(container).await?;
            }
            floors.add(floor);
            anyhow::Ok(())
        };
        client.beside(others).await??;
    }
    client.kill().await?;
    table.add(Line::ratio("17", "fork of 10, each attached", &ours, &floors, 2.0, "≤ 2 ×"));
    server.stop().await
}
