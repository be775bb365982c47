//! Row 9: how long a command that never stops talking is not heard while it moves.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use baton_protocol::event::Status;
use serde_json::json;

use crate::{
    bench_client::{Client, Dialect, Heard},
    bench_fixture::{Place, Store},
    bench_moves::{movable, pair, stop},
    bench_table::{Line, Table, Times, show},
};

const MOVES: usize = 8;
/// Between two moves.
const TICKS: usize = 40;
const TICKER: &str = "import sys, time\ni = 0\nwhile True:\n\tsys.stdout.write('%d %d\\n' % (i, time.time_ns()))\n\t\
                      sys.stdout.flush()\n\ti += 1\n\ttime.sleep(0.01)\n";

/// What of the ticker was heard, over all sockets.
#[derive(Debug, Default)]
struct Ticks {
    bytes: u64,
    line: String,
    next: u64,
    at: Option<Instant>,
    inside: Option<u64>,
    /// The longest silence at the client, and between two ticks as the command itself dates them.
    silence: Duration,
    pause: Duration,
}

impl Ticks {
    fn hear(&mut self, offset: Option<u64>, bytes: &[u8]) -> Result<()> {
        ensure!(offset == Some(self.bytes), "output at {offset:?} in place of {}", self.bytes);
        self.bytes += bytes.len() as u64;
        let now = Instant::now();
        if let Some(at) = self.at.replace(now) {
            self.silence = self.silence.max(now - at);
        }
        for byte in std::str::from_utf8(bytes)?.chars() {
            if byte == '\n' {
                self.tick()?;
            } else {
                self.line.push(byte);
            }
        }
        Ok(())
    }

    fn tick(&mut self) -> Result<()> {
        let line = std::mem::take(&mut self.line);
        let (number, nanos) = line.split_once(' ').context("a torn tick")?;
        ensure!(number.parse() == Ok(self.next), "tick {number} in place of {}", self.next);
        self.next += 1;
        let nanos = nanos.parse::<u64>()?;
        if let Some(before) = self.inside.replace(nanos) {
            self.pause = self.pause.max(Duration::from_nanos(nanos.saturating_sub(before)));
        }
        Ok(())
    }

    fn begin_move(&mut self) {
        (self.silence, self.pause) = (Duration::ZERO, Duration::ZERO);
    }

    async fn listen(&mut self, client: &mut Client, ticks: usize) -> Result<()> {
        let end = self.next + ticks as u64;
        while self.next < end {
            match client.hear().await? {
                Heard::Output { offset, bytes } => {
                    self.hear(offset, &bytes)?;
                    let ack = json!({"action": "ack", "exec_id": "tick", "stdout": self.bytes, "stderr": 0});
                    client.send(&ack).await?;
                }
                Heard::Closed(code) => bail!("closed with {code:?} while it ticks"),
                Heard::Update(_) | Heard::Other => {}
            }
        }
        Ok(())
    }

    /// To the last word of the instance that lets go.
    async fn listen_to_the_end(&mut self, mut client: Client) -> Result<()> {
        loop {
            match client.hear().await? {
                Heard::Output { offset, bytes } => self.hear(offset, &bytes)?,
                Heard::Closed(_) => return Ok(()),
                Heard::Update(_) | Heard::Other => {}
            }
        }
    }
}

pub async fn measure(place: &Place, table: &mut Table) -> Result<()> {
    let servers = pair(place, "t", Store::Directory(&place.data("ticks")?)).await?;
    let (mut client, _) = Client::create(&servers[0], Dialect::V1, &movable()).await?;
    let ticket = client.ticket.clone();
    client.start("tick", &["python3", "-c", TICKER]).await?;
    let (mut ticks, mut silences, mut pauses) = (Ticks::default(), Times::default(), Times::default());
    ticks.listen(&mut client, TICKS).await?;
    for number in 1..=MOVES {
        ticks.begin_move();
        let attached = Client::attach(&servers[number % 2], Dialect::V1, &ticket);
        let (left, attached) = tokio::join!(ticks.listen_to_the_end(client), attached);
        left?;
        (client, _) = attached?;
        client.send(&json!({"action": "reconnect", "offsets": {"tick": {"stdout": ticks.bytes, "stderr": 0}}})).await?;
        ticks.listen(&mut client, TICKS).await?;
        silences.add(ticks.silence);
        pauses.add(ticks.pause);
    }
    client.send(&json!({"action": "kill_process", "exec_id": "tick"})).await?;
    client.until(Status::ExecutionDone).await?;
    client.kill().await?;
    let most = Duration::from_millis(400);
    let text = format!("{}, longest {}", silences.show(), show(silences.longest()));
    let is_met = silences.median() < most;
    table.add(Line::bound("9", "blackout of a ticking command, at the client", text, "< 0.4 s", Some(is_met)));
    table.add(Line::bound("9", "the same, as the command dates it", pauses.show(), "printed", None));
    stop(servers).await
}
