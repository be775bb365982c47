//! Rows 5 to 9 and 13: sandboxes are stored, restored, handed off and taken over.

use std::{
    net::Ipv4Addr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use baton_fake_gcs::{FakeGcs, FakeGcsOptions};
use baton_protocol::lock::Lock;
use serde_json::{Value, json};

use crate::{
    bench_client::{Client, Dialect, Ticket},
    bench_fixture::{Place, Server, Store},
    bench_table::{Line, Table, Times, show},
};

const ROUNDS: u32 = 12;
const BUCKET_ROUNDS: u32 = 6;
const LATENCY: Duration = Duration::from_millis(30);
const IDLE: [&str; 3] = ["python3", "-c", "import time; time.sleep(1e6)"];

pub fn movable() -> Value {
    json!({"enable_checkpoint": true, "enable_sandbox_handoff": true, "idle_timeout": null})
}

pub async fn store_and_restore(place: &Place, table: &mut Table) -> Result<()> {
    let data = place.data("store")?;
    let server = place.server("store", Store::Directory(&data)).await?;
    let (mut client, _) = Client::create(&server, Dialect::V1, &movable()).await?;
    let ticket = client.ticket.clone();
    let [mut saved, mut saved_floor, mut restored, mut restored_floor] = [const { Times::empty() }; 4];
    for number in 0..ROUNDS {
        client.exec_true(number).await?;
        let (_, took) = client.checkpoint().await?;
        saved.add(took);
        let floor = floor(place, &data, &ticket).await?;
        restored_floor.add(floor.restore);
        saved_floor.add(floor.checkpoint);
        let took;
        (client, took) = Client::attach(&server, Dialect::V1, &ticket).await?;
        restored.add(took);
    }
    client.kill().await?;
    table.add(Line::ratio("5", "checkpoint, request → CHECKPOINTED", &saved, &saved_floor, 2.0, "≤ 2 ×"));
    table.add(Line::ratio("6", "restore, attach → RUNNING", &restored, &restored_floor, 1.2, "≤ 1.2 ×"));
    server.stop().await
}

pub async fn handoff(place: &Place, table: &mut Table) -> Result<()> {
    let data = place.data("handoff")?;
    let servers = pair(place, "h", Store::Directory(&data)).await?;
    let (mut client, _) = Client::create(&servers[0], Dialect::V1, &movable()).await?;
    let ticket = client.ticket.clone();
    client.start("idle", &IDLE).await?;
    let [mut ours, mut floors] = [const { Times::empty() }; 2];
    for number in 0..ROUNDS as usize {
        drop(client);
        let took;
        (client, took) = Client::attach(&servers[(number + 1) % 2], Dialect::V1, &ticket).await?;
        ours.add(took);
        let floor = floor(place, &data, &ticket).await?;
        floors.add(floor.checkpoint + floor.restore);
        client.exec_true(number as u32).await?;
    }
    client.kill().await?;
    table.add(Line::ratio("7", "handoff, attach → RUNNING, idle python", &ours, &floors, 1.5, "≤ 1.5 ×"));
    stop(servers).await
}

pub async fn handoff_over_a_bucket(place: &Place, table: &mut Table) -> Result<()> {
    let options = FakeGcsOptions { latency: LATENCY, ..FakeGcsOptions::default() };
    let fake = FakeGcs::start((Ipv4Addr::LOCALHOST, 0).into(), options).await?;
    let servers = pair(place, "g", Store::Bucket(&fake)).await?;
    let (mut client, _) = Client::create(&servers[0], Dialect::V1, &movable()).await?;
    let ticket = client.ticket.clone();
    client.start("idle", &IDLE).await?;
    let mut number = 0;
    for (what, interval, most, budget) in [
        ("handoff, store calls + 30 ms", None, 1.0, "< 1 s"),
        ("and one write per second and object", Some(Duration::from_secs(1)), 3.0, "< 3 s"),
    ] {
        fake.set_write_interval(interval);
        let mut ours = Times::default();
        for _ in 0..BUCKET_ROUNDS {
            // A sandbox that moves has lived for a while; otherwise this measures the store's limit alone.
            tokio::time::sleep(Duration::from_secs(2)).await;
            drop(client);
            number += 1;
            let took;
            (client, took) = Client::attach(&servers[number % 2], Dialect::V1, &ticket).await?;
            ours.add(took);
            client.exec_true(number as u32).await?;
        }
        let is_met = ours.median().as_secs_f64() < most;
        table.add(Line::bound("8", what, ours.show(), budget, Some(is_met)));
    }
    client.kill().await?;
    stop(servers).await
}

/// After `kill -9` of the owner. Once: it takes as long as it takes.
pub async fn takeover(place: &Place, table: &mut Table) -> Result<()> {
    let data = place.data("takeover")?;
    let [mut owner, other] = pair(place, "k", Store::Directory(&data)).await?;
    let (client, _) = Client::create(&owner, Dialect::V1, &movable()).await?;
    let ticket = client.ticket.clone();
    client.checkpoint().await?;
    let (client, _) = Client::attach(&owner, Dialect::V1, &ticket).await?;
    owner.kill().await?;
    drop(client);
    let (mut client, took) = Client::attach(&other, Dialect::V1, &ticket).await?;
    client.exec_true(0).await?;
    client.kill().await?;
    let is_met = took <= Duration::from_secs(33);
    table.add(Line::bound("13", "owner killed, attach elsewhere → RUNNING", show(took), "≤ 33 s", Some(is_met)));
    other.stop().await
}

pub async fn pair(place: &Place, name: &str, store: Store<'_>) -> Result<[Server; 2]> {
    Ok([place.server(&format!("{name}a"), store).await?, place.server(&format!("{name}b"), store).await?])
}

pub async fn stop(servers: [Server; 2]) -> Result<()> {
    for server in servers {
        server.stop().await?;
    }
    Ok(())
}

/// What bare runsc takes for the very image that a sandbox's head names.
struct Floor {
    checkpoint: Duration,
    restore: Duration,
}

async fn floor(place: &Place, data: &Path, ticket: &Ticket) -> Result<Floor> {
    let (container, restore) = place.bare.restore(&image(data, ticket)?).await?;
    let checkpoint = place.bare.checkpoint(&container).await?;
    place.bare.delete(container).await?;
    Ok(Floor { checkpoint, restore })
}

/// Where the image lies that a sandbox's head names.
pub fn image(data: &Path, ticket: &Ticket) -> Result<PathBuf> {
    let lock: Lock = serde_json::from_slice(&std::fs::read(data.join(format!("sandboxes/{}/lock.json", ticket.id)))?)?;
    let head = lock.head.context("the sandbox has no checkpoint")?;
    let image = data.join(format!("sandbox_checkpoints/{}", head.checkpoint_id));
    ensure!(image.join("pages.img").exists(), "the checkpoint has no pages");
    Ok(image)
}
