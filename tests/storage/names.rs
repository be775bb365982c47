//! Sandboxes whose names begin alike: neither is ever taken for the other.

use std::{collections::BTreeSet, sync::Arc};

use baton::config::LeaseTimes;
use baton::storage::{
    checkpoints::Checkpoints,
    garbage_collector::GarbageCollector,
    layout::{Image, Object},
    memory::Memory,
    records::{Durable, Records},
    store::{Precondition, Store},
};
use baton_protocol::id::{CheckpointId, Nonce, SandboxId};

use crate::store_suite::clock;

const NAMES: [&str; 5] = ["sandbox-a", "sandbox-a-1", "sandbox-a-1-2", "sandbox-ab", "sandbox-a-b"];

fn ids() -> BTreeSet<SandboxId> {
    NAMES.map(|name| SandboxId::parse(name).unwrap()).into()
}

#[tokio::test]
async fn the_checkpoints_of_one_are_not_listed_or_erased_with_those_of_the_other() {
    let store: Arc<dyn Store> = Arc::new(Memory::new(clock()));
    let of = |id: &SandboxId| CheckpointId::new(id, 3, 4, &Nonce::from_bits([7; 16]));
    for id in ids() {
        store.put(&Object::Image(&of(&id), Image::Pages).key(), "x".into(), Precondition::Absent).await.unwrap();
    }
    let checkpoints = Checkpoints::new(store.clone(), None, clock());
    for id in ids() {
        assert_eq!(checkpoints.list(&id).await.unwrap(), BTreeSet::from([of(&id)]), "{id}");
    }
    let records = Records::new(clock(), store, None, false, LeaseTimes::DEFAULT);
    let upkeep = GarbageCollector { records, checkpoints: Some(checkpoints.clone()), clock: clock(), keep: 2 };
    let gone = SandboxId::parse(NAMES[0]).unwrap();
    upkeep.erase_checkpoints(&gone).await.unwrap();
    for id in ids() {
        assert_eq!(checkpoints.list(&id).await.unwrap().is_empty(), id == gone, "{id}");
    }
}

#[tokio::test]
async fn a_listing_in_pages_passes_over_none_of_them() {
    // A lock and the metadata beside it: each page has one sandbox at least.
    for page in 2..8 {
        let durable: Arc<dyn Store> = Arc::new(Memory::new(clock()).with_page(page));
        let memory: Arc<dyn Store> = Arc::new(Memory::new(clock()).with_page(page));
        for (at, id) in ids().iter().enumerate() {
            let store = if at % 2 == 0 { &durable } else { &memory };
            for object in [Object::Lock(id), Object::Metadata(id)] {
                store.put(&object.key(), "{}".into(), Precondition::Absent).await.unwrap();
            }
        }
        let place = Durable { locks: durable.clone(), metadata: durable, lock_bucket: None };
        let records = Records::new(clock(), memory, Some(place), false, LeaseTimes::DEFAULT);
        let (mut found, mut after) = (Vec::new(), None::<SandboxId>);
        loop {
            let (listed, more) = records.list(after.as_ref(), page).await.unwrap();
            found.extend(listed);
            after = found.last().cloned();
            if !more {
                break;
            }
        }
        assert_eq!(found.len(), NAMES.len(), "pages of {page}: {found:?}");
        assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), ids(), "pages of {page}");
    }
}
