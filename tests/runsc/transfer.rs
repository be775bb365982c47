//! Files into a sandbox and out of it, with the real runsc: exact, also when the sandbox moves in the middle.

use baton::runtime::Lifecycle;
use baton_protocol::{
    agent::Exec,
    file::{Entry, Work},
};

use crate::{
    client::{Client, command},
    place::{Place, clock, sandbox, start},
};

fn asked(work: Work) -> Exec {
    Exec { stdin: work.has_stdin(), file: Some(work), ..command(&["baton-agent"]) }
}

fn read(path: &str) -> Work {
    Work::ReadFile { path: path.into(), offset: 0, length: None, archive: false }
}

fn write(path: &str, size: u64) -> Work {
    Work::WriteFile {
        path: path.into(),
        mode: Some(0o640),
        mtime_ms: Some(1_600_000_000_250),
        size: Some(size),
        archive: false,
    }
}

/// Bytes that are the same nowhere twice.
fn bytes(count: u64) -> Vec<u8> {
    (0..count / 8).flat_map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_goes_on_after_a_move() {
    let place = Place::new().await;
    let (containers, id, start) = (&*place.containers, sandbox(), start());
    containers.create(&id, &start).await.unwrap();
    let mut client = Client::attached(clock(), containers, &id);
    let content = bytes(1 << 20);
    let put = client.exec(asked(write("/data/new/file", content.len() as u64)), None).await;
    for (number, part) in content.chunks(100_000).enumerate() {
        client.stdin(put, part).await;
        if number == 5 {
            let image = place.path("image");
            containers.pause(&id).await.unwrap();
            containers.checkpoint(&id, &image).await.unwrap();
            containers.remove(&id).await.unwrap();
            containers.restore(&id, &start, &image).await.unwrap();
            client.reconnect(containers, &id).await;
        }
    }
    client.stdin_eof(put).await;
    let done = client.done(put).await;
    assert_eq!((done.exit.as_ref().unwrap().code, String::from_utf8_lossy(&done.stderr.bytes)), (Some(0), "".into()));
    let get = client.exec(asked(read("/data/new/file")), None).await;
    client.until("a part of it", |client| client.execs[&get].stdout.at > 300_000).await;
    let image = place.path("image-2");
    containers.pause(&id).await.unwrap();
    containers.checkpoint(&id, &image).await.unwrap();
    containers.remove(&id).await.unwrap();
    containers.restore(&id, &start, &image).await.unwrap();
    client.reconnect(containers, &id).await;
    let done = client.done(get).await;
    assert!(done.stdout.bytes == content, "{} bytes", done.stdout.bytes.len());
    // The agent's program is found after two moves, also by another user.
    let list = Work::ListFiles { path: "/data".into(), depth: 2 };
    let list = client.exec(Exec { user: Some("65534".into()), ..asked(list) }, None).await;
    let lines = String::from_utf8(client.done(list).await.stdout.bytes.clone()).unwrap();
    let entries: Vec<Entry> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let seen: Vec<_> = entries.iter().map(|entry| (entry.name.as_str(), entry.mode, entry.mtime_ms)).collect();
    assert_eq!(seen[1], ("new/file", 0o640, 1_600_000_000_250), "{seen:?}");
    let denied = client.exec(Exec { user: Some("65534".into()), ..asked(read("/data/new/file")) }, None).await;
    assert!(client.done(denied).await.stderr.bytes.starts_with(b"EACCES: "));
    place.close().await;
}
