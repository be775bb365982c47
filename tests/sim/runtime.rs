//! The fake containers of one instance, with actions that fail, hang and take long.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use baton::{
    clock::{Moment, SharedClock},
    runtime::{
        Error, Facts, Lifecycle, Result, Seen, Start,
        fake::{FakeContainers, GIVEN_UP_AFTER},
    },
};
use baton_protocol::id::SandboxId;
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

use crate::{
    clock::Machine,
    dice::Dice,
    mistakes::Mistake,
    weather::{Kind, Weather},
};

#[derive(Debug)]
pub struct Runtime {
    containers: FakeContainers,
    weather: Arc<Weather>,
    at: usize,
    machine: Arc<Machine>,
    dice: Dice,
    gone: CancellationToken,
    mistake: Option<Mistake>,
    /// What the reconciler sees: the truth, passed on by one task, since a watch wakes many in no fixed order.
    shown: Mutex<BTreeMap<SandboxId, watch::Sender<Seen>>>,
}

/// Long enough to matter never.
const FOR_EVER: Duration = Duration::from_secs(100_000);

impl Runtime {
    pub fn new(
        guard: SharedClock,
        weather: Arc<Weather>,
        at: usize,
        machine: Arc<Machine>,
        dice: Dice,
        gone: CancellationToken,
        mistake: Option<Mistake>,
    ) -> Self {
        let containers = FakeContainers::new(guard);
        Self { containers, weather, at, machine, dice, gone, mistake, shown: Mutex::default() }
    }

    pub fn kill(&self) {
        if self.mistake != Some(Mistake::ContainersSurvive) {
            self.containers.kill();
        }
    }

    /// What is so.
    pub fn truth(&self, id: &SandboxId) -> watch::Receiver<Seen> {
        self.containers.watch(id)
    }

    /// Shows the reconciler what is so.
    pub fn show(&self, id: &SandboxId) {
        let seen = *self.truth(id).borrow();
        let mut shown = self.shown.lock().unwrap();
        let shown = shown.entry(id.clone()).or_insert_with(|| watch::Sender::new(Seen::NOTHING));
        shown.send_if_modified(|shown| std::mem::replace(shown, seen) != seen);
    }

    fn done(&self, id: &SandboxId, done: Result<()>) -> Result<()> {
        self.show(id);
        done
    }

    /// A container ends by itself.
    pub fn end(&self, id: &SandboxId) {
        self.containers.end(id);
    }

    /// Before each action: whether it happens at all.
    async fn begin(&self, what: &'static str) -> Result<()> {
        self.machine.process_moves().await;
        if self.gone.is_cancelled() {
            std::future::pending::<()>().await;
        }
        let strikes = |kind| self.weather.strikes(kind, self.at, &self.dice);
        if strikes(Kind::ActionFails) {
            return Err(Error::Failed { what, why: "by chance".to_owned() });
        }
        if strikes(Kind::NoSpace) && matches!(what, "create" | "checkpoint" | "restore") {
            return Err(Error::NoSpace { what });
        }
        if strikes(Kind::ActionHangs) {
            sleep(self.weather.at_most(GIVEN_UP_AFTER)).await;
            self.machine.process_moves().await;
            return Err(Error::TimedOut { what, after: GIVEN_UP_AFTER });
        }
        let takes = if strikes(Kind::ActionSlow) { self.dice.millis(100, 20_000) } else { self.dice.millis(1, 400) };
        sleep(self.weather.at_most(takes)).await;
        self.machine.process_moves().await;
        Ok(())
    }

    fn deadline(&self, deadline: Moment) -> Moment {
        if self.mistake == Some(Mistake::NoFence) { deadline + FOR_EVER } else { deadline }
    }

    fn start(&self, start: &Start) -> Start {
        Start { deadline: self.deadline(start.deadline), ..start.clone() }
    }
}

#[async_trait]
impl Lifecycle for Runtime {
    fn watch(&self, id: &SandboxId) -> watch::Receiver<Seen> {
        self.show(id);
        self.shown.lock().unwrap()[id].subscribe()
    }

    fn here(&self) -> Vec<SandboxId> {
        self.containers.here()
    }

    fn facts(&self) -> Facts {
        self.containers.facts()
    }

    async fn create(&self, id: &SandboxId, start: &Start) -> Result<()> {
        self.begin("create").await?;
        self.done(id, self.containers.create(id, &self.start(start)).await)
    }

    async fn restore(&self, id: &SandboxId, start: &Start, image: &Path) -> Result<()> {
        self.begin("restore").await?;
        self.done(id, self.containers.restore(id, &self.start(start), image).await)
    }

    async fn pause(&self, id: &SandboxId) -> Result<()> {
        self.begin("pause").await?;
        self.done(id, self.containers.pause(id).await)
    }

    async fn resume(&self, id: &SandboxId) -> Result<()> {
        self.begin("resume").await?;
        self.done(id, self.containers.resume(id).await)
    }

    async fn checkpoint(&self, id: &SandboxId, image: &Path) -> Result<()> {
        self.begin("checkpoint").await?;
        self.containers.checkpoint(id, image).await?;
        if self.mistake == Some(Mistake::PauseLies) {
            self.containers.resume(id).await?;
        }
        Ok(())
    }

    async fn snapshot(&self, id: &SandboxId, archive: &Path) -> Result<()> {
        self.begin("snapshot").await?;
        self.containers.snapshot(id, archive).await
    }

    async fn remove(&self, id: &SandboxId) -> Result<()> {
        self.begin("remove").await?;
        if self.mistake == Some(Mistake::RemoveLies) {
            return Ok(());
        }
        self.done(id, self.containers.remove(id).await)
    }

    async fn extend(&self, id: &SandboxId, deadline: Moment) -> Result<()> {
        self.machine.process_moves().await;
        self.containers.extend(id, self.deadline(deadline)).await
    }

    async fn fence(&self, id: &SandboxId) -> Result<()> {
        self.begin("fence").await?;
        if self.mistake == Some(Mistake::NoFence) {
            return Ok(());
        }
        self.done(id, self.containers.fence(id).await)
    }
}
