//! Copies: a sandbox that begins with a committed checkpoint of another, and lives by itself from then on.

use std::sync::Arc;

use baton::api::{intent, token};
use baton_protocol::id::SandboxId;

use crate::{
    kinds::ScenarioKind, rng::Rng, sim_client, sim_faults::MACHINES, sim_session::TOKEN, sim_world::World, words::short,
};

/// Makes the copy `id` of `source`, if there is something to copy, and comes to it like any other client.
pub async fn live(world: Arc<World>, source: SandboxId, id: SandboxId, rng: Rng) {
    let oracle = &world.shared.oracle;
    let at = rng.below(MACHINES as u64) as usize;
    let Some(process) = world.process(at).filter(|process| process.is_up()) else { return };
    let Some(lock) = oracle.lock(&source).filter(|lock| !lock.purged) else { return };
    let older = lock.prev_head.filter(|_| rng.falls(30));
    let Some(head) = older.or(lock.head).filter(|_| world.begins_copy(&id)) else { return };
    let Ok(Some(found)) = process.tools.records.find(&source).await else { return };
    let (digest, created) = (token::sha256(TOKEN), process.tools.clock.timestamp());
    let spec = intent::copy(&found.spec, &head.checkpoint_id, id.clone(), digest, created);
    let forked = process.tools.records.fork(&head.checkpoint_id, &spec).await;
    oracle.note(format!("{at} copies {} as {}: {forked:?}", short(&source), short(&id)));
    if forked.is_ok() {
        world.shared.faults.tally.count(ScenarioKind::Fork);
        oracle.copied(&id);
        world.copied(&id);
        sim_client::live(world.clone(), id, "k".to_owned(), rng).await;
    }
}
