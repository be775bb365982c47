//! Sandboxes of which nothing is stored: a client makes one on an instance, and comes back to it there.

use std::{sync::Arc, time::Duration};

use baton::api::token;
use baton_protocol::{event::Status, id::SandboxId, metadata::Spec};

use crate::{
    kinds::ScenarioKind,
    oracle::SandboxFate,
    rng::Rng,
    sim_faults::MACHINES,
    sim_session::{self, OutputReader, TOKEN},
    sim_world::World,
    time::{Instant, sleep},
};

/// How long its last client reads.
const READS_FOR: Duration = Duration::from_secs(90);

/// Makes it on one machine, comes and goes, and looks for it elsewhere now and then.
pub async fn live(world: Arc<World>, id: SandboxId, home: usize, rng: Rng) {
    let mut reader = OutputReader::new("f".to_owned());
    let maker = loop {
        sleep(rng.seconds(1, 60)).await;
        if let Some(process) = world.process(home).filter(|process| process.is_up()) {
            break process;
        }
    };
    let tools = &maker.tools;
    let mut spec = Spec::new(id.clone(), token::sha256(TOKEN), tools.clock.timestamp(), tools.who.me.clone());
    spec.idle_timeout = world.shared.faults.has(ScenarioKind::Idle).then(|| 20 + rng.below(60));
    let session = tools.bus.attach(&id);
    let lease = tools.bus.lease(&id);
    if tools.records.create(&spec, &tools.who.me, &lease).await.is_err() {
        return tools.bus.unlease(&id);
    }
    tools.bus.wake(&id);
    drop(session);
    world.shared.faults.tally.count(ScenarioKind::Ephemeral);
    world.shared.oracle.made(&id, home, maker.name(), spec.idle_timeout.is_some());
    let mut at = home;
    loop {
        if let Some(process) = world.process(at) {
            let stay = Instant::now() + rng.seconds(1, 150);
            sim_session::visit(&world, &process, &id, &rng, &mut reader, stay).await;
        }
        sleep(rng.seconds(0, 45)).await;
        at = if rng.falls(80) { home } else { rng.below(MACHINES as u64) as usize };
    }
}

/// One last client where it should be, or anywhere if its instance is gone.
pub async fn ask_at_the_end(world: Arc<World>, id: SandboxId, anywhere: usize) {
    let oracle = &world.shared.oracle;
    let fate = oracle.fate(&id);
    let at = match fate {
        SandboxFate::Unborn => return,
        SandboxFate::Lives(at) | SandboxFate::MayLive(at) => at,
        SandboxFate::Gone => anywhere,
    };
    let process = world.process(at).expect("all are up");
    let mut reader = OutputReader::new("last".to_owned());
    let stay = Instant::now() + READS_FOR;
    while Instant::now() < stay && reader.bytes() == 0 && reader.told != Some(Status::NotFound) {
        sim_session::read(&world, &process, &id, &mut reader, stay.min(Instant::now() + Duration::from_secs(10))).await;
    }
    let (bytes, told) = (reader.bytes(), reader.told);
    oracle.note(format!("the last client of what is not stored has {bytes} bytes and heard {told:?}"));
    let expected = match fate {
        SandboxFate::Unborn => true,
        SandboxFate::Lives(_) => bytes > 0,
        SandboxFate::MayLive(_) => bytes > 0 || told == Some(Status::NotFound),
        SandboxFate::Gone => bytes == 0 && told == Some(Status::NotFound),
    };
    if !expected {
        oracle.wrong(format!("a minute and a half after the last fault {fate:?}, but {bytes} bytes and {told:?}"));
    }
}
