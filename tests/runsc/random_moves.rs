//! The proof of the product: commands go through twenty moves at random moments, and not a
//! byte of theirs is lost, doubled or changed.

use std::time::Duration;

use baton::runtime::Lifecycle;
use baton_protocol::agent::{AgentExec, Pty};

use crate::{
    fixture::{Place, clock, sandbox, start},
    plain_session::{Client, command},
};

const MOVES: u64 = 20;

const TICKER: &str = "i=0; while :; do echo tick $i; i=$((i+1)); sleep 0.005; done";
const PIPES: &str = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.005; done | while read x; do echo pipe $x; done";
const TYPIST: &str = "while read -r line; do echo \"<$line>\"; done";
/// Keeps a file, an unlinked one and a pipe to itself open, and reads back all it wrote.
const KEEPER: &str = r#"
import os, time
os.makedirs('/srv/kept', exist_ok=True)
kept = open('/srv/kept/file', 'w+')
lost = open('/tmp/unlinked', 'w+b', buffering=0)
os.unlink('/tmp/unlinked')
back, forth = os.pipe()
n = 0
while True:
    kept.write('%08d\n' % n); kept.flush()
    lost.write(b'%08d' % n)
    os.write(forth, b'%08d' % n)
    a = os.pread(kept.fileno(), 9, 9 * n).decode().strip()
    b = os.pread(lost.fileno(), 8, 8 * n).decode()
    c = os.read(back, 8).decode()
    first = open('/srv/kept/file').readline().strip()
    print(n, a, b, c, first, os.fstat(kept.fileno()).st_size, os.fstat(lost.fileno()).st_nlink, flush=True)
    n += 1
    time.sleep(0.003)
"#;

fn shell(code: &str) -> AgentExec {
    command(&["bash", "-c", code])
}

fn kept(n: u64) -> String {
    format!("{n} {n:08} {n:08} {n:08} 00000000 {} 0\n", 9 * (n + 1))
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_moves_at_random_moments_lose_and_double_nothing() {
    let place = Place::new().await;
    let (containers, id, start) = (&*place.containers, sandbox(), start());
    let seed = u64::from_le_bytes(clock().bits()[..8].try_into().unwrap());
    println!("seed {seed}");
    let mut rng = Rng(seed);
    containers.create(&id, &start).await.unwrap();
    let mut client = Client::attached(clock(), containers, &id);
    let mut steady = Vec::new();
    steady.push(client.exec(shell(TICKER), Some(|n| format!("tick {n}\n"))).await);
    steady.push(client.exec(shell(PIPES), Some(|n| format!("pipe {n}\n"))).await);
    steady.push(client.exec(command(&["python3", "-c", KEEPER]), Some(kept)).await);
    // As fast as it is read, so that a cut falls into the middle of frames.
    steady.push(client.exec(command(&["seq", "0", "1000000000000"]), Some(|n| format!("{n}\n"))).await);
    let terminal = AgentExec { stdin: true, pty: Some(Pty { cols: 80, rows: 24 }), ..shell(TYPIST) };
    let typed = client.exec(terminal, Some(|n| format!("{n}\r\n<{n}>\r\n"))).await;
    let mut keys = 0;
    let mut took: [Vec<Duration>; 3] = Default::default();
    for number in 0..MOVES {
        let before: Vec<_> = steady.iter().map(|exec| client.execs[exec].stdout.at).collect();
        client
            .until("every command goes on", |client| {
                steady.iter().zip(&before).all(|(exec, at)| client.execs[exec].stdout.at > *at)
            })
            .await;
        for _ in 0..1 + rng.below(3) {
            client.until("the line typed before", |client| client.execs[&typed].stdout.lines() == keys).await;
            client.stdin(typed, format!("{keys}\n").as_bytes()).await;
            keys += 1;
        }
        client.read_for(Duration::from_millis(rng.below(200))).await;
        let image = place.path(&format!("image-{number}"));
        let began = clock().now();
        containers.pause(&id).await.unwrap();
        containers.checkpoint(&id, &image).await.unwrap();
        took[0].push(clock().now() - began);
        // What the old server had read may reach the client, or not.
        if rng.below(2) == 0 {
            client.read_for(Duration::from_millis(20)).await;
        }
        let began = clock().now();
        containers.remove(&id).await.unwrap();
        took[1].push(clock().now() - began);
        if rng.below(2) == 0 {
            while client.step().await {}
        }
        let began = clock().now();
        containers.restore(&id, &start, &image).await.unwrap();
        took[2].push(clock().now() - began);
        let running = containers.watch(&id).borrow().running_execs;
        assert_eq!(running, 5, "every command is alive after move {number}");
        client.reconnect(containers, &id).await;
        std::fs::remove_dir_all(&image).unwrap();
    }
    client.until("the last line typed", |client| client.execs[&typed].stdout.lines() == keys).await;
    for (exec, command) in &client.execs {
        assert!(command.exit.is_none() && command.stderr.at == 0, "exec {exec}");
        println!("exec {exec}: {} lines, {} bytes", command.stdout.lines(), command.stdout.at);
    }
    for (what, mut took) in ["pause and checkpoint", "remove", "restore and resync"].into_iter().zip(took) {
        took.sort_unstable();
        println!("{what}: median {:?}, longest {:?}", took[took.len() / 2], took[took.len() - 1]);
    }
    place.close().await;
}
