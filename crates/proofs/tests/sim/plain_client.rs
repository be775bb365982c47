//! Plain clients of a sandbox that is the documents': whoever comes to another instance gets it only if the client
//! that has it is not alive. They answer pings as long as they read.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use baton::bus::LifecycleEvent;
use baton_protocol::{
    event::{Event, Status},
    id::SandboxId,
    lock::Claim,
};
use futures::StreamExt;
use tokio::io::DuplexStream;
use tokio_tungstenite::{WebSocketStream, tungstenite::Message};

use crate::{
    rng::Rng,
    sim_faults::MACHINES,
    sim_process::SimProcess,
    sim_session::{self, ClientDialect},
    sim_world::World,
    time::{Instant, sleep, sleep_until},
    words::short,
};

/// Who has read for so long has answered every ping in time.
const ALIVE_AFTER: Duration = Duration::from_secs(2);
/// A session waits for its sandbox until the holder lets go, and then for its restore: on the slowest clock.
const ANSWERED_WITHIN: Duration = Duration::from_secs(300);
/// At the end nothing is slow.
const DECLINED_WITHIN: Duration = Duration::from_secs(15);

struct Visit<'a> {
    world: &'a World,
    process: &'a SimProcess,
    id: &'a SandboxId,
    name: &'a str,
    /// Since when it has the sandbox and reads all that is sent.
    alive_since: Mutex<Option<Instant>>,
}

/// Comes and goes until it is ended.
pub async fn live(world: Arc<World>, id: SandboxId, name: String, rng: Rng) {
    loop {
        sleep(rng.seconds(0, 40)).await;
        let Some(process) = world.process(rng.below(MACHINES as u64) as usize) else { continue };
        let visit = Visit { world: &world, process: &process, id: &id, name: &name, alive_since: Mutex::default() };
        tokio::select! {
            biased;
            () = visit.overhear() => {}
            () = visit.stay(&rng) => {}
        }
    }
}

/// What becomes of a message.
fn status(message: &Message) -> Option<Status> {
    let Message::Text(text) = message else { return None };
    match Event::parse(text) {
        Ok(Event::StatusUpdate(update)) => Some(update.status),
        _ => None,
    }
}

impl Visit<'_> {
    async fn stay(&self, rng: &Rng) {
        let began = Instant::now();
        let gives_up = began + ANSWERED_WITHIN;
        let Some(mut socket) = sim_session::open(self.process, self.id, ClientDialect::Plain, gives_up).await else {
            return;
        };
        let mut until = gives_up;
        loop {
            tokio::select! {
                biased;
                () = self.process.gone.cancelled() => return,
                message = socket.next() => {
                    let Some(Ok(message)) = message else { return };
                    let Some(status) = status(&message) else { continue };
                    self.note(&format!("hears {}", status.as_str()));
                    if status == Status::Running && self.alive_since().is_none() {
                        *self.alive_since.lock().unwrap() = Some(Instant::now());
                        until = Instant::now() + rng.seconds(2, 90);
                    }
                }
                () = sleep_until(until) => break,
            }
        }
        if self.alive_since().is_none() && self.is_calm(ANSWERED_WITHIN) {
            self.world.shared.oracle.wrong(format!("the newcomer {} was left waiting", self.name));
        }
        self.stall(rng, socket).await;
    }

    /// It does not read any more, and is gone some time later.
    async fn stall(&self, rng: &Rng, socket: WebSocketStream<DuplexStream>) {
        *self.alive_since.lock().unwrap() = None;
        if rng.falls(50) {
            sleep(rng.seconds(1, 20)).await;
        }
        drop(socket);
    }

    /// What is said of its sandbox where it is attached.
    async fn overhear(&self) {
        let mut follower = self.process.tools.bus.follow(self.id);
        loop {
            let passing = follower.next().await.passing;
            let oracle = &self.world.shared.oracle;
            oracle.heard(self.process.at, self.process.name(), self.id, &passing);
            let lives = self.alive_since().is_some_and(|since| since.elapsed() >= ALIVE_AFTER);
            let is_asked = matches!(passing, LifecycleEvent::ReleaseRequested { claim: Claim::Ask, .. });
            if is_asked && lives && self.is_calm(Duration::from_secs(5)) {
                oracle.wrong(format!("the client {} is alive and lost its sandbox to one that only asks", self.name));
            }
        }
    }

    fn alive_since(&self) -> Option<Instant> {
        *self.alive_since.lock().unwrap()
    }

    /// For so long nothing has happened to the instance that would keep it from hearing a pong in time.
    fn is_calm(&self, span: Duration) -> bool {
        self.process.is_up() && !self.world.shared.oracle.is_shaken(self.process.at, span)
    }

    fn note(&self, line: &str) {
        let (name, at) = (self.name, self.process.at);
        self.world.shared.oracle.note(format!("client {name} at {at} of {}: {line}", short(self.id)));
    }
}

/// Comes for a sandbox whose client is alive elsewhere, when nothing is wrong any more: it must hear that soon.
pub async fn is_declined(world: &World, process: &SimProcess, id: &SandboxId, wait: Duration) {
    sleep(wait).await;
    let oracle = &world.shared.oracle;
    oracle.note(format!("a newcomer asks {} for {}", process.at, short(id)));
    let until = Instant::now() + DECLINED_WITHIN;
    let Some(mut socket) = sim_session::open(process, id, ClientDialect::Plain, until).await else {
        return oracle.wrong("two minutes after the last fault nobody can connect");
    };
    let mut told = None;
    loop {
        tokio::select! {
            biased;
            message = socket.next() => match message {
                Some(Ok(message)) => told = status(&message).or(told),
                Some(Err(_)) | None => break,
            },
            () = sleep_until(until) => break,
        }
        if told == Some(Status::Running) {
            break;
        }
    }
    match told {
        Some(Status::InUse) => {}
        Some(Status::Running) => oracle.wrong("a client that is alive lost its sandbox to one that only asks"),
        told => oracle.wrong(format!("a newcomer was left waiting: it heard {told:?}")),
    }
}
