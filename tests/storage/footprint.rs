//! Large files cost no memory: each store carries one in a process of its own, which counts.

use std::{
    io::Write,
    path::Path,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use baton::storage::{
    directory::Directory,
    gcs::{Gcs, GcsConnection},
    gcsfuse::Mounted,
    local_files::Sum,
    store::{Digest, Precondition, Store},
};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};

use crate::{
    store_cases::noise,
    store_suite::{BUCKET, clock, fake_gcs},
};

const MIB: u64 = 1 << 20;
/// What a transfer of any size may cost on top.
const BUDGET: u64 = 64 * MIB;

fn size() -> u64 {
    let is_proof = std::env::var("BATON_TIER").is_ok_and(|tier| tier == "proof");
    if is_proof { 1024 * MIB } else { 256 * MIB }
}

/// One number of this process's memory, in bytes.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// A file of any size, written and summed in pieces.
fn make_file(path: &Path, size: u64) -> Digest {
    let piece = noise(size, MIB as usize);
    let (mut file, mut sum) = (std::fs::File::create(path).unwrap(), Sum::default());
    while sum.size() < size {
        let part = &piece[..(size - sum.size()).min(MIB) as usize];
        file.write_all(part).unwrap();
        sum.add(part);
    }
    sum.finish()
}

async fn carry(store: &dyn Store, folder: &Path, size: u64) {
    let (source, target) = (folder.join("source"), folder.join("target"));
    let digest = make_file(&source, size);
    let told = AtomicU64::new(0);
    let progress = |done| told.store(done, Ordering::Relaxed);
    store.upload("pages.img", &source, Precondition::Any, &digest, &progress).await.unwrap();
    store.download("pages.img", &target, &digest, &progress).await.unwrap();
    assert_eq!(told.load(Ordering::Relaxed), size);
    std::fs::remove_file(target).unwrap();
}

/// A process of its own: carries a small file, then a large one, and compares.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by a_large_file_costs_no_memory"]
async fn carry_a_large_file() {
    let given = |name: &str| std::env::var(name).expect("it is given");
    let folder = tempfile::tempdir_in(given("BATON_TEST_ROOT")).unwrap();
    let root = folder.path().join("store");
    let store: Arc<dyn Store> = match given("BATON_TEST_STORE").as_str() {
        "directory" => Arc::new(Directory::new(root, clock())),
        "mounted" => Arc::new(Mounted::new(root, clock())),
        endpoint => {
            let connection = Arc::new(GcsConnection::new(Some(endpoint.to_owned())));
            let patience = Duration::from_secs(60);
            Arc::new(Gcs::new(connection, BUCKET, clock()).with_timeouts(patience, patience))
        }
    };
    carry(&*store, folder.path(), 20 * MIB).await;
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory("VmRSS");
    carry(&*store, folder.path(), size()).await;
    let grown = memory("VmHWM").saturating_sub(before);
    println!("grown {} MiB", grown / MIB);
    assert!(grown < BUDGET, "{} MiB more for a file of {} MiB", grown / MIB, size() / MIB);
}

/// A process of its own, so that the objects it keeps are not counted.
#[tokio::test]
#[ignore = "started by a_large_file_costs_no_memory"]
async fn keep_objects() {
    let fake = fake_gcs().await;
    println!("serving {}", fake.url());
    // Until the one who started it lets go.
    let mut stdin = tokio::io::stdin();
    drop(tokio::io::copy(&mut stdin, &mut tokio::io::sink()).await);
}

type Output = Lines<BufReader<tokio::process::ChildStdout>>;

fn start(test: &str, environment: &[(&str, &str)]) -> (tokio::process::Child, Output) {
    let mut command = tokio::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).envs(environment.iter().copied());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

#[tokio::test]
async fn a_large_file_costs_no_memory() {
    let root = tempfile::tempdir().unwrap();
    let (mut keeper, mut said) = start("footprint::keep_objects", &[]);
    let endpoint = loop {
        let line = said.next_line().await.unwrap().expect("it says where it serves");
        if let Some((_, url)) = line.split_once("serving ") {
            break url.to_owned();
        }
    };
    for store in ["directory", "mounted", endpoint.as_str()] {
        let environment = [("BATON_TEST_ROOT", root.path().to_str().unwrap()), ("BATON_TEST_STORE", store)];
        let (mut child, mut said) = start("footprint::carry_a_large_file", &environment);
        let mut output = String::new();
        let ended = tokio::time::timeout(Duration::from_secs(600), async {
            while let Some(line) = said.next_line().await.unwrap() {
                output += &line;
                output.push('\n');
            }
            child.wait().await.unwrap()
        });
        assert!(ended.await.expect("it ends").success(), "{store}: {output}");
        assert!(output.contains("grown"), "{store}: {output}");
    }
    drop(keeper.stdin.take());
    keeper.wait().await.unwrap();
}
