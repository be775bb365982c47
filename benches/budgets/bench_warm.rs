//! Row 2: a sandbox begins in a container that was ready.

use anyhow::{Result, ensure};
use serde_json::json;

use crate::{
    bench_client::{Client, Dialect},
    bench_fixture::{Place, Store},
    bench_moves::movable,
    bench_process,
    bench_table::{Line, Table, Times, show_bytes},
};

const CREATES: u32 = 15;

pub async fn measure(place: &Place, table: &mut Table) -> Result<()> {
    let server = place.server_with("warm", Store::Directory(&place.data("warm")?), &[("BATON_WARM", "1")]).await?;
    server.is_warm().await?;
    let waiting = bench_process::descendants(server.pid())?
        .into_iter()
        .filter(|pid| !bench_process::line(*pid).contains(" guard"));
    let pss: u64 = waiting.map(bench_process::pss).sum();
    let (mut ours, mut stored, mut floor) = (Times::default(), Times::default(), Times::default());
    for _ in 0..CREATES {
        let (container, took) = place.bare.run().await?;
        floor.add(took);
        place.bare.delete(container).await?;
        for (config, times) in [(&json!({}), &mut ours), (&movable(), &mut stored)] {
            server.is_warm().await?;
            let (client, took) = Client::create(&server, Dialect::V1, config).await?;
            times.add(took);
            client.kill().await?;
        }
    }
    ensure!(server.taken().await? == u64::from(2 * CREATES), "a sandbox did not begin warm");
    table.add(Line::ratio("2", "create from the warm pool", &ours, &floor, 0.2, "≤ 0.2 ×"));
    table.add(Line::ratio("2", "the same, stored", &stored, &floor, 0.2, "≤ 0.2 ×"));
    table.add(Line::bound("2", "PSS of all processes of a warm container", show_bytes(pss), "printed", None));
    server.stop().await
}
