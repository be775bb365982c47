//! Ten thousand sandboxes, listed as the sweep lists them.

use std::{collections::BTreeSet, path::Path};

use baton::storage::{
    directory::Directory,
    layout::{self, Object},
    memory::Memory,
    store::{Precondition, Store},
};
use baton_protocol::id::SandboxId;

use crate::store_suite::{BUCKET, clock, fake_gcs};

const SANDBOXES: usize = 10_000;

fn ids() -> impl Iterator<Item = SandboxId> {
    // Spread over the alphabet, as random ones are.
    (0..SANDBOXES).map(|number| {
        let mixed = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let uuid = format!("{:08x}-{number:04x}-4000-8000-000000000000", mixed >> 32);
        SandboxId::from_uuid(&uuid).unwrap()
    })
}

fn keys() -> impl Iterator<Item = String> {
    ids().flat_map(|id| [Object::Lock(&id).key(), Object::Metadata(&id).key()])
}

/// Page by page; returns how many there were.
async fn sweep(store: &dyn Store) -> usize {
    let (mut found, mut pages) = (BTreeSet::new(), 0);
    let mut after: Option<String> = None;
    loop {
        let page = store.list(layout::SANDBOXES, after.as_deref()).await.unwrap();
        assert!(page.entries.is_sorted_by(|a, b| a.key < b.key));
        found.extend(page.entries.iter().map(|entry| layout::sandbox_of(&entry.key).unwrap()));
        after = page.entries.last().map(|entry| entry.key.clone()).or(after);
        pages += 1;
        if !page.more {
            break;
        }
    }
    assert!(found.into_iter().eq(ids().collect::<BTreeSet<_>>()));
    pages
}

#[tokio::test]
async fn ten_thousand_sandboxes_are_listed_from_memory() {
    let store = Memory::new(clock());
    for key in keys() {
        store.put(&key, "{}".into(), Precondition::Absent).await.unwrap();
    }
    assert_eq!(sweep(&store).await, 20);
}

#[tokio::test]
async fn ten_thousand_sandboxes_are_listed_from_a_directory() {
    // Twenty thousand files are a burden for a busy disk and say nothing about the listing.
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    for key in keys() {
        let path = root.path().join(key);
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).unwrap();
        std::fs::write(path, "{}").unwrap();
    }
    assert_eq!(sweep(&Directory::new(root.path(), clock())).await, 20);
}

#[tokio::test]
async fn ten_thousand_sandboxes_are_listed_from_a_bucket_with_one_request_per_page() {
    let fake = fake_gcs().await;
    for key in keys() {
        fake.put(BUCKET, &key, "{}");
    }
    let connection = std::sync::Arc::new(baton::storage::gcs::GcsConnection::new(Some(fake.url().to_owned())));
    let store = baton::storage::gcs::Gcs::new(connection, BUCKET, clock())
        .with_timeouts(std::time::Duration::from_secs(20), std::time::Duration::from_secs(20));
    let pages = sweep(&store).await;
    assert_eq!(fake.requests(), pages as u64);
}
