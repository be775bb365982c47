//! What the life of a sandbox costs in calls on the store, counted, as `docs/deploy.md` says it.

use std::time::Duration;

use baton_protocol::metadata::DesiredState;

use crate::{
    faulty_store::Calls,
    instances::{Instance, World, movable},
};

const PAGE: &str = include_str!("../../docs/deploy.md");

/// What one and the other instance did since the last time.
struct Meter<'a> {
    world: &'a World,
    instances: [&'a Instance; 2],
    before: Calls,
    rows: Vec<String>,
}

impl Meter<'_> {
    fn now(&self) -> Calls {
        let [one, other] = self.instances.map(|instance| instance.store.calls());
        Calls { writes: one.writes + other.writes, reads: one.reads + other.reads }
    }

    /// Also counts what comes right behind: the status, and what was stored and is not needed any more.
    async fn note(&mut self, what: &str) {
        self.world.clock.sleep(Duration::from_millis(100)).await;
        let now = self.now();
        let (writes, reads) = (now.writes - self.before.writes, now.reads - self.before.reads);
        self.rows.push(format!("| {what} | {writes} | {reads} |"));
        self.before = now;
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_sandbox_costs_in_calls_is_what_the_page_says() {
    let world = World::new();
    let (one, two) = (world.instance(), world.instance());
    let mut meter = Meter { world: &world, instances: [&one, &two], before: Calls::default(), rows: Vec::new() };

    let mut visit = one.create(movable).await;
    visit.until_running().await;
    meter.note("create").await;

    world.after(60).await;
    meter.note("a minute with a client").await;

    one.edit(&visit.id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
    visit.until_left().await;
    meter.note("checkpoint and stop").await;
    let id = visit.id.clone();
    drop(visit);

    let mut visit = two.attach(&id).await;
    visit.until_running().await;
    meter.note("restore").await;

    let mut moved = one.attach(&id).await;
    moved.until_running().await;
    meter.note("handoff").await;

    for row in &meter.rows {
        assert!(PAGE.lines().any(|line| line.starts_with(row)), "docs/deploy.md has not:\n{}", meter.rows.join("\n"));
    }
    drop((visit, moved));
    one.stop().await;
    two.stop().await;
}
