//! The fake containers of one instance, with actions that fail, hang and take long.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use baton::{
    clock::{Moment, SharedClock},
    runtime::{
        AgentLinks, ContainerView, Error, Extract, Facts, FrameLink, Lifecycle, Result, RootfsGuard, Shape, StartSpec,
        WrittenSnapshot,
    },
};
use baton_protocol::{
    frame,
    id::{SandboxId, Sha256Name},
    sandbox_network::Egress,
};
use baton_testkit::{ACTION_TIMEOUT, FakeContainers};
use tokio::sync::{mpsc, watch};

use crate::{kinds::ScenarioKind, life::Life, machine_clock::SetBack, rng::Rng, sim_mistakes::SimMistake, time::sleep};

#[derive(Debug)]
pub struct Runtime {
    containers: FakeContainers,
    life: Arc<Life>,
    rng: Rng,
    mistake: Option<SimMistake>,
    set_back: Option<Arc<SetBack>>,
    /// What the reconciler sees: the truth, passed on by one task, since a watch wakes many in no fixed order.
    shown: Mutex<BTreeMap<SandboxId, watch::Sender<ContainerView>>>,
    /// What came after the start of each was asked for: it may take long to come to the guard.
    deadlines: Mutex<BTreeMap<SandboxId, Moment>>,
}

/// Long enough to matter never.
const FOR_EVER: Duration = Duration::from_secs(100_000);

impl Runtime {
    pub fn new(
        guard: SharedClock,
        life: Arc<Life>,
        rng: Rng,
        mistake: Option<SimMistake>,
        set_back: Option<Arc<SetBack>>,
    ) -> Self {
        let containers = FakeContainers::new(guard);
        Self { containers, life, rng, mistake, set_back, shown: Mutex::default(), deadlines: Mutex::default() }
    }

    pub fn kill(&self) {
        if self.mistake != Some(SimMistake::ContainersSurvive) {
            self.containers.kill();
        }
    }

    /// What is so.
    pub fn truth(&self, id: &SandboxId) -> watch::Receiver<ContainerView> {
        self.containers.watch(id)
    }

    /// Shows the reconciler what is so.
    pub fn show(&self, id: &SandboxId) {
        let seen = *self.truth(id).borrow();
        let mut shown = self.shown.lock().unwrap();
        match shown.get(id) {
            Some(shown) => drop(shown.send_if_modified(|shown| std::mem::replace(shown, seen) != seen)),
            None => drop(shown.insert(id.clone(), watch::Sender::new(seen))),
        }
    }

    /// One step of the process, if it goes on at all.
    async fn step(&self) {
        self.life.step(|| self.kill()).await;
    }

    /// After each action: whether the truth is told about it.
    async fn done(&self, id: &SandboxId, what: &'static str, done: Result<()>) -> Result<()> {
        self.show(id);
        self.step().await;
        if done.is_ok() && self.life.strikes(ScenarioKind::ActionLies, &self.rng) {
            if what == "create" {
                // What is not stored and could not be made is not kept.
                self.life.oracle.may_end(id);
            }
            return Err(Error::Failed { what, why: "it is done, and says it is not".to_owned() });
        }
        done
    }

    /// Its server has everything stand still and starts a new guard.
    pub async fn lose_guard(&self) {
        for id in self.containers.local_sandboxes() {
            // What ends meanwhile needs no guard.
            let _ = self.containers.fence(&id).await;
        }
    }

    /// As a server that believes an unanswered release to have failed.
    pub async fn run_again(&self, id: &SandboxId) {
        let _ = self.containers.resume(id).await;
    }

    pub fn has(&self, id: &SandboxId) -> bool {
        self.containers.local_sandboxes().contains(id)
    }

    /// A container ends by itself.
    pub fn end(&self, id: &SandboxId) {
        self.containers.end(id);
    }

    /// Before each action: whether it happens at all.
    async fn begin(&self, what: &'static str) -> Result<()> {
        self.step().await;
        let strikes = |kind| self.life.strikes(kind, &self.rng);
        if strikes(ScenarioKind::ActionFails) {
            return Err(Error::Failed { what, why: "by chance".to_owned() });
        }
        if matches!(what, "create" | "checkpoint" | "restore") && strikes(ScenarioKind::NoSpace) {
            return Err(Error::NoSpace { what });
        }
        if strikes(ScenarioKind::ActionHangs) {
            sleep(self.life.faults.at_most(ACTION_TIMEOUT)).await;
            self.life.machine.process_moves().await;
            return Err(Error::TimedOut { what, after: ACTION_TIMEOUT });
        }
        let takes =
            if strikes(ScenarioKind::ActionSlow) { self.rng.millis(100, 20_000) } else { self.rng.millis(1, 400) };
        sleep(self.life.faults.at_most(takes)).await;
        self.life.machine.process_moves().await;
        Ok(())
    }

    fn deadline(&self, deadline: Moment) -> Moment {
        let set_back = self.set_back.as_ref().map_or(Duration::ZERO, |set_back| set_back.by());
        if self.mistake == Some(SimMistake::NoFence) { deadline + FOR_EVER } else { deadline + set_back }
    }

    /// A start as it comes to the guard.
    async fn start(&self, what: &'static str, id: &SandboxId, start: &StartSpec) -> Result<StartSpec> {
        self.deadlines.lock().unwrap().remove(id);
        self.begin(what).await?;
        let newest = self.deadlines.lock().unwrap().get(id).copied();
        Ok(StartSpec { deadline: self.deadline(newest.unwrap_or(start.deadline)), ..start.clone() })
    }
}

#[async_trait]
impl Lifecycle for Runtime {
    fn watch(&self, id: &SandboxId) -> watch::Receiver<ContainerView> {
        self.show(id);
        self.shown.lock().unwrap()[id].subscribe()
    }

    fn local_sandboxes(&self) -> Vec<SandboxId> {
        self.containers.local_sandboxes()
    }

    fn facts(&self) -> Facts {
        self.containers.facts()
    }

    async fn create(&self, id: &SandboxId, start: &StartSpec) -> Result<()> {
        let start = self.start("create", id, start).await?;
        self.done(id, "create", self.containers.create(id, &start).await).await
    }

    async fn restore(&self, id: &SandboxId, start: &StartSpec, image: &Path) -> Result<()> {
        let start = self.start("restore", id, start).await?;
        self.done(id, "restore", self.containers.restore(id, &start, image).await).await
    }

    async fn pause(&self, id: &SandboxId) -> Result<()> {
        self.begin("pause").await?;
        self.done(id, "pause", self.containers.pause(id).await).await
    }

    async fn resume(&self, id: &SandboxId) -> Result<()> {
        self.begin("resume").await?;
        self.done(id, "resume", self.containers.resume(id).await).await
    }

    async fn checkpoint(&self, id: &SandboxId, image: &Path) -> Result<()> {
        self.begin("checkpoint").await?;
        self.containers.checkpoint(id, image).await?;
        if self.mistake == Some(SimMistake::PauseLies) {
            self.containers.resume(id).await?;
        }
        self.done(id, "checkpoint", Ok(())).await
    }

    async fn snapshot(&self, id: &SandboxId, archive: &Path, shape: Shape) -> Result<WrittenSnapshot> {
        self.begin("snapshot").await?;
        self.containers.snapshot(id, archive, shape).await
    }

    async fn count_entries(&self, archive: &Path) -> Result<u64> {
        self.containers.count_entries(archive).await
    }

    fn acquire_rootfs(&self, digest: &Sha256Name) -> Option<RootfsGuard> {
        self.containers.acquire_rootfs(digest)
    }

    fn has_runtime(&self, sha256: &Sha256Name) -> bool {
        self.containers.has_runtime(sha256)
    }

    async fn add_runtime(&self, file: &Path, sha256: &Sha256Name) -> Result<()> {
        self.containers.add_runtime(file, sha256).await
    }

    fn runtime_file(&self) -> PathBuf {
        self.containers.runtime_file()
    }

    async fn pack(&self, archive: &Path) -> Result<()> {
        self.containers.pack(archive).await
    }

    async fn extract(&self, archive: &Path, wanted: &Extract) -> Result<RootfsGuard> {
        self.begin("extract").await?;
        self.containers.extract(archive, wanted).await
    }

    async fn remove(&self, id: &SandboxId) -> Result<()> {
        self.begin("remove").await?;
        if self.mistake == Some(SimMistake::RemoveLies) {
            return Ok(());
        }
        self.done(id, "remove", self.containers.remove(id).await).await
    }

    async fn extend(&self, id: &SandboxId, deadline: Moment) -> Result<()> {
        self.life.machine.process_moves().await;
        self.deadlines.lock().unwrap().insert(id.clone(), deadline);
        self.containers.extend(id, self.deadline(deadline)).await
    }

    async fn fence(&self, id: &SandboxId) -> Result<()> {
        self.begin("fence").await?;
        if self.mistake == Some(SimMistake::NoFence) {
            return Ok(());
        }
        self.done(id, "fence", self.containers.fence(id).await).await
    }

    async fn set_egress(&self, id: &SandboxId, egress: &Egress) -> Result<()> {
        self.begin("set_egress").await?;
        self.done(id, "set_egress", self.containers.set_egress(id, egress).await).await
    }

    async fn reset_connections(&self, id: &SandboxId) {
        self.containers.reset_connections(id).await;
    }
}

impl AgentLinks for Runtime {
    fn open(&self, id: &SandboxId) -> Option<FrameLink> {
        let FrameLink { to_agent, from_agent, behind } = self.containers.open(id)?;
        if self.mistake != Some(SimMistake::WrongReplay) {
            return Some(FrameLink { to_agent, from_agent, behind });
        }
        let (from_session, mut frames) = mpsc::channel::<frame::Frame>(8);
        tokio::spawn(async move {
            while let Some(mut frame) = frames.recv().await {
                if frame.kind == frame::FrameKind::Replay {
                    frame.offset += 2;
                }
                if to_agent.send(frame).await.is_err() {
                    return;
                }
            }
        });
        Some(FrameLink { to_agent: from_session, from_agent, behind })
    }
}
