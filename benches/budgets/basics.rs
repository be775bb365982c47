//! Rows 1, 3 and 4: a sandbox is made, a command runs, its output arrives.

use anyhow::Result;
use serde_json::json;

use crate::{
    bench_client::{Client, Dialect},
    bench_fixture::{Place, Store},
    bench_table::{Line, Table, Times},
    tape::{self, Tape},
};

const CREATES: u32 = 15;
const EXECS: u32 = 40;
const STREAMS: u32 = 3;
/// 500 MB in blocks of 64 KiB.
const BLOCKS: u64 = 7_630;

pub async fn measure(place: &Place, rows: &[u32], table: &mut Table) -> Result<()> {
    let server = place.server("basics", Store::Directory(&place.data("basics")?)).await?;
    let config = json!({"enable_checkpoint": true, "enable_sandbox_handoff": true});
    if rows.contains(&1) {
        let (mut ours, mut passing, mut floor) = (Times::default(), Times::default(), Times::default());
        for _ in 0..CREATES {
            let (container, took) = place.bare.run().await?;
            floor.add(took);
            place.bare.delete(container).await?;
            for (config, times) in [(&config, &mut ours), (&json!({}), &mut passing)] {
                let (client, took) = Client::create(&server, Dialect::V1, config).await?;
                times.add(took);
                client.kill().await?;
            }
        }
        table.add(Line::ratio("1", "create, connect → RUNNING", &ours, &floor, 1.3, "≤ 1.3 ×"));
        table.add(Line::ratio("1", "the same, nothing stored", &passing, &floor, 1.3, "≤ 1.3 ×"));
    }
    let (mut client, _) = Client::create(&server, Dialect::V1, &config).await?;
    let (container, _) = place.bare.run().await?;
    if rows.contains(&3) {
        let (mut ours, mut floor) = (Times::default(), Times::default());
        for number in 0..EXECS {
            floor.add(place.bare.exec_true(&container).await?);
            ours.add(client.exec_true(number).await?);
        }
        table.add(Line::ratio("3", "exec `true`, send → DONE", &ours, &floor, 0.5, "≤ 0.5 ×"));
    }
    if rows.contains(&4) {
        let (mut plain, _) = Client::create(&server, Dialect::Plain, &config).await?;
        let (mut ours, mut text, mut floor) = (Times::default(), Times::default(), Times::default());
        let code = tape::code(BLOCKS);
        let argv = |name: String| json!({"action": "exec", "exec_id": name, "argv": ["python3", "-c", code]});
        for number in 0..STREAMS {
            floor.add(place.bare.stream(&container, &code, Tape::new(BLOCKS)).await?);
            ours.add(stream(&mut client, &argv(format!("s{number}"))).await?);
            text.add(stream(&mut plain, &json!({"language": "python", "code": code})).await?);
        }
        table.add(throughput("stdout of 500 MB, v1", &ours, &floor, Some(1.0)));
        table.add(throughput("the same, plain", &text, &floor, None));
        plain.kill().await?;
    }
    place.bare.delete(container).await?;
    client.kill().await?;
    server.stop().await
}

async fn stream(client: &mut Client, request: &serde_json::Value) -> Result<std::time::Duration> {
    let mut tape = Tape::new(BLOCKS);
    let took = client.run(request, |bytes| tape.read(bytes)).await?;
    tape.finish()?;
    Ok(took)
}

/// More is better here.
fn throughput(what: &'static str, ours: &Times, floor: &Times, least: Option<f64>) -> Line {
    let bytes = Tape::new(BLOCKS).len() as f64;
    let speed = |times: &Times| format!("{:.0} MB/s", bytes / 1e6 / times.median().as_secs_f64());
    let ratio = floor.ratio(ours);
    Line {
        row: "4",
        what,
        ours: speed(ours),
        floor: speed(floor),
        ratio: Some(ratio),
        budget: if least.is_some() { "≥ 1.0 ×" } else { "printed" },
        is_met: least.map(|least| ratio >= least),
    }
}
