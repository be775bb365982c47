//! Row 12: forty sandboxes and two hundred sockets on one instance, over a slow store.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use baton_fake_gcs::{FakeGcs, FakeGcsOptions};
use baton_protocol::{event::Status, id::Nonce, lock::Lock};
use tokio::task::JoinSet;

use crate::{
    bench_client::{Client, Dialect, Heard, Ticket},
    bench_fixture::{BUCKET, Place, Server, Store},
    bench_moves::movable,
    bench_table::{Line, Table, Times, show},
};

const SANDBOXES: usize = 40;
/// Beside the one that has it, so many sockets ask for each sandbox again and again.
const REFUSED_PER_SANDBOX: usize = 4;
const WATCHED: Duration = Duration::from_secs(30);
const LATENCY: Duration = Duration::from_millis(50);
/// A renewal is due five seconds after the last, and up to a fifth of that later.
const DUE: Duration = Duration::from_secs(6);

pub async fn measure(place: &Place, table: &mut Table) -> Result<()> {
    let options = FakeGcsOptions { latency: LATENCY, ..FakeGcsOptions::default() };
    let fake = FakeGcs::start((Ipv4Addr::LOCALHOST, 0).into(), options).await?;
    let server = Arc::new(place.server("crowd", Store::Bucket(&fake)).await?);
    let (mut sessions, mut tickets) = (JoinSet::new(), Vec::new());
    for _ in 0..SANDBOXES {
        let (client, _) = Client::create(&server, Dialect::V1, &movable()).await?;
        tickets.push(client.ticket.clone());
        sessions.spawn(work(client));
    }
    for ticket in &tickets {
        for _ in 0..REFUSED_PER_SANDBOX {
            sessions.spawn(attach_repeatedly(server.clone(), ticket.clone()));
        }
    }
    let watched = tokio::select! {
        watched = watch(&fake, &tickets) => watched?,
        Some(ended) = sessions.join_next() => bail!("a session ended: {:?}", ended?.err()),
    };
    sessions.shutdown().await;
    let Watched { gaps, lost } = watched;
    let lag = |gap: Duration| gap.saturating_sub(DUE);
    let text = format!(
        "{lost} lost, lag p99 {}, between renewals {} to {}",
        show(lag(gaps.p99())),
        show(gaps.median()),
        show(gaps.longest())
    );
    let is_met = lost == 0 && lag(gaps.p99()) < Duration::from_secs(1);
    let what = "40 sandboxes, 200 sockets, store calls 50 ms";
    table.add(Line::bound("12", what, text, "none lost, p99 < 1 s", Some(is_met)));
    Arc::into_inner(server).context("a session outlived its end")?.stop().await
}

/// A small command now and then, its output compared.
async fn work(mut client: Client) -> Result<()> {
    for number in 0_u64.. {
        let word = format!("{} {number}", client.ticket.id);
        let request = serde_json::json!({"action": "exec", "exec_id": format!("w{number}"), "argv": ["echo", word]});
        let mut output = Vec::new();
        let take = |bytes: &[u8]| {
            output.extend_from_slice(bytes);
            Ok(())
        };
        client.run(&request, take).await?;
        ensure!(output == format!("{word}\n").as_bytes(), "wrong output");
        let rest = tokio::time::sleep(Duration::from_secs(4));
        tokio::pin!(rest);
        loop {
            // Pings want an answer.
            tokio::select! {
                () = &mut rest => break,
                heard = client.hear() => if let Heard::Closed(code) = heard? { bail!("closed with {code:?}") },
            }
        }
    }
    Ok(())
}

/// Is told each time that somebody else has it.
async fn attach_repeatedly(server: Arc<Server>, ticket: Ticket) -> Result<()> {
    loop {
        let mut client = Client::request_attach(&server, Dialect::V1, &ticket).await?;
        client.until(Status::InUse).await?;
        while !matches!(client.hear().await?, Heard::Closed(_)) {}
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

struct Watched {
    gaps: Times,
    lost: usize,
}

/// Looks at every lock, past the store's slowness, and notes when it changes.
async fn watch(fake: &FakeGcs, tickets: &[Ticket]) -> Result<Watched> {
    let mut seen: BTreeMap<&str, (Nonce, u64, Instant)> = BTreeMap::new();
    let (mut gaps, mut lost) = (Times::default(), 0);
    let began = Instant::now();
    while began.elapsed() < WATCHED {
        for ticket in tickets {
            let name = format!("sandboxes/{}/lock.json", ticket.id);
            let lock: Lock = serde_json::from_slice(&fake.content(BUCKET, &name).context("a lock is gone")?)?;
            let Some(lease) = lock.lease else {
                lost += 1;
                continue;
            };
            let now = Instant::now();
            match seen.get_mut(ticket.id.as_str()) {
                None => drop(seen.insert(&ticket.id, (lease.op, lock.epoch, now))),
                Some((op, epoch, at)) => {
                    lost += usize::from(*epoch != lock.epoch);
                    if *op != lease.op {
                        gaps.add(now - *at);
                        (*op, *epoch, *at) = (lease.op, lock.epoch, now);
                    }
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // What is overdue at the end counts as well.
    seen.values().map(|(_, _, at)| at.elapsed()).filter(|gap| *gap > DUE).for_each(|gap| gaps.add(gap));
    Ok(Watched { gaps, lost })
}
