//! How fast each store is: small writes, polls, large transfers, and the memory they take.
//!
//! `cargo bench --bench storage [MiB]`. The fake Cloud Storage runs in a process of its own, so that
//! the objects it keeps are not counted.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use baton::{
    clock::{SharedClock, SystemClock},
    storage::{
        directory::Directory,
        gcs::{Gcs, GcsConnection},
        gcsfuse::Mounted,
        local_files::Sum,
        memory::Memory,
        store::{Digest, PollResult, Precondition, Store},
    },
};
use baton_fake_gcs::{FakeGcs, FakeGcsOptions};

const MIB: u64 = 1 << 20;
const SMALL_CALLS: u32 = 300;
const SERVE: &str = "serve-fake-gcs";

fn main() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.iter().any(|argument| argument == SERVE) {
        runtime.block_on(serve());
        return;
    }
    let size = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(256) * MIB;
    runtime.block_on(measure(size));
}

async fn serve() {
    let fake = FakeGcs::start(([127, 0, 0, 1], 0).into(), FakeGcsOptions::default()).await.unwrap();
    println!("{}", fake.url());
    // Until the one who started it lets go.
    drop(tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await);
}

/// The fake in its own process, which ends with this value.
struct Server(Child, String);

impl Server {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let mut child = command.arg(SERVE).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        Self(child, url.trim().to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        drop(self.0.wait());
    }
}

async fn measure(size: u64) {
    let clock: SharedClock = Arc::new(SystemClock);
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start();
    let connection = Arc::new(GcsConnection::new(Some(server.1.clone())));
    let patience = Duration::from_secs(60);
    let gcs = Gcs::new(connection, "bench", clock.clone()).with_timeouts(patience, patience).with_write_rate(1e9, 1e9);
    let stores: [(&str, Arc<dyn Store>); 4] = [
        ("memory", Arc::new(Memory::new(clock.clone()))),
        ("directory", Arc::new(Directory::new(folder.path().join("directory"), clock.clone()))),
        ("mounted", Arc::new(Mounted::new(folder.path().join("mounted"), clock.clone()))),
        ("gcs (fake)", Arc::new(gcs)),
    ];
    let source = folder.path().join("source");
    let digest = make_file(&source, size);
    let copied = copy_rate(&source, &folder.path().join("copy"), size);
    println!("a file of {} MiB; plain copy {copied:.0} MB/s", size / MIB);
    println!(
        "| store | create | change | poll, unchanged | poll, changed | up MB/s | down MB/s | take MB/s | lend MB/s | memory on top |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for (name, store) in stores {
        println!("| {name} | {} |", row(&*store, name != "mounted", folder.path(), &source, &digest).await);
    }
}

async fn row(store: &dyn Store, compares: bool, folder: &Path, source: &Path, digest: &Digest) -> String {
    store.put("warm", "1".into(), Precondition::Any).await.unwrap();
    let create = per_call(async |call| {
        store.put(&format!("created/{call}"), "{}".into(), Precondition::Absent).await.unwrap();
    })
    .await;
    let mut known = store.put("lock.json", "{}".into(), Precondition::Any).await.unwrap().version;
    let mut change = "-".to_owned();
    if compares {
        let start = Instant::now();
        for call in 0..SMALL_CALLS {
            known = store.put("lock.json", call.to_string().into(), Precondition::Is(known)).await.unwrap().version;
        }
        change = micros(start.elapsed() / SMALL_CALLS);
    }
    let unchanged = per_call(async |_| {
        assert_eq!(store.get_if_changed("lock.json", Some(&known)).await.unwrap(), PollResult::Unchanged);
    })
    .await;
    let changed = per_call(async |_| drop(store.get_if_changed("lock.json", None).await.unwrap())).await;
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory("VmRSS");
    let start = Instant::now();
    store.upload("pages.img", source, Precondition::Absent, digest, &|_| {}).await.unwrap();
    let up = rate(digest.size, start.elapsed());
    let start = Instant::now();
    store.download("pages.img", &folder.join("target"), digest, &|_| {}).await.unwrap();
    let down = rate(digest.size, start.elapsed());
    let start = Instant::now();
    let (mut take, mut lend) = ("-".to_owned(), "-".to_owned());
    // The downloaded file is ours to give away.
    if store.upload_owned("taken.img", &folder.join("target"), &|_| {}).await.transpose().unwrap().is_some() {
        take = format!("{:.0}", rate(digest.size, start.elapsed()));
        let start = Instant::now();
        store.download_linked("taken.img", &folder.join("lent"), digest, &|_| {}).await.unwrap();
        lend = format!("{:.0}", rate(digest.size, start.elapsed()));
        std::fs::remove_file(folder.join("lent")).unwrap();
        store.delete("taken.img", Precondition::Any).await.unwrap();
    }
    let grown = memory("VmHWM").saturating_sub(before) / MIB;
    store.delete("pages.img", Precondition::Any).await.unwrap();
    std::fs::remove_file(folder.join("target")).unwrap();
    format!("{create} | {change} | {unchanged} | {changed} | {up:.0} | {down:.0} | {take} | {lend} | {grown} MiB")
}

async fn per_call(work: impl AsyncFn(u32)) -> String {
    let start = Instant::now();
    for call in 0..SMALL_CALLS {
        work(call).await;
    }
    micros(start.elapsed() / SMALL_CALLS)
}

fn micros(span: Duration) -> String {
    format!("{} µs", span.as_micros())
}

fn rate(size: u64, span: Duration) -> f64 {
    size as f64 / 1e6 / span.as_secs_f64()
}

fn make_file(path: &Path, size: u64) -> Digest {
    let mut piece = vec![0; MIB as usize];
    let (mut file, mut sum) = (std::fs::File::create(path).unwrap(), Sum::default());
    for number in 0..size / MIB {
        piece[..8].copy_from_slice(&number.to_le_bytes());
        file.write_all(&piece).unwrap();
        sum.add(&piece);
    }
    file.sync_all().unwrap();
    sum.finish()
}

/// The floor beside which the rest is read: the same bytes once more on the same disk, synced.
fn copy_rate(source: &Path, target: &Path, size: u64) -> f64 {
    let start = Instant::now();
    std::fs::copy(source, target).unwrap();
    std::fs::File::open(target).unwrap().sync_all().unwrap();
    let copied = rate(size, start.elapsed());
    std::fs::remove_file(target).unwrap();
    copied
}

/// One number of this process's memory, in bytes.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}
