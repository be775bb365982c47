//! A runtime without containers: both traits of the runtime over simulated sandboxes, with injectable faults.
//!
//! Time comes only from the given clock, so a paused clock makes it deterministic, and a sandbox costs one task.
//! Its sandboxes answer with the frames of the real agent ([`fake_machine`](super::fake_machine) lists the supported
//! commands), are fenced at their deadline, and their checkpoints are files that another fake can restore.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use baton::{
    clock::{Moment, SharedClock},
    runtime::{
        AgentLinks, Behind, Container, ContainerView, Error, Extract, Facts, FrameLink, IMAGE_FILES, LINK_FRAMES,
        Lifecycle, Result, RootfsGuard, Shape, StartSpec, WrittenSnapshot,
    },
};
use baton_protocol::{
    id::{SandboxId, Sha256Name, hex},
    reason::Reason,
    sandbox_network::Egress,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    fake_machine::FakeMachine,
    fake_sandbox::{CommandSender, FakeSandbox, SandboxCommand},
};

/// What goes wrong with the next call of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionFault {
    /// The action fails and changes nothing.
    Fail,
    /// The action fails permanently.
    Refuse,
    NoSpace,
    /// The action hangs until its timeout.
    Hang,
    /// The action succeeds after a delay.
    Delay(Duration),
}

/// How long an action hangs before it fails.
pub const ACTION_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Slot {
    seen: Arc<watch::Sender<ContainerView>>,
    /// Held during an action: the actions of one sandbox exclude each other.
    action: Arc<tokio::sync::Mutex<()>>,
    /// To the task of the sandbox, while there is one.
    commands: Option<CommandSender>,
    /// The latest deadline received during a start.
    renewed: Option<Moment>,
    /// The network policy that it has.
    egress: Egress,
}

#[derive(Debug)]
pub struct FakeContainers {
    clock: SharedClock,
    facts: Facts,
    detach_grace: Duration,
    slots: Mutex<BTreeMap<SandboxId, Slot>>,
    faults: Mutex<BTreeMap<&'static str, VecDeque<ActionFault>>>,
    /// Root file systems and runtimes that were added.
    added: Mutex<BTreeSet<Sha256Name>>,
    tasks: TaskTracker,
    ended: CancellationToken,
}

impl FakeContainers {
    pub fn new(clock: SharedClock) -> Self {
        let facts = Facts {
            runsc_version: "fake-1".to_owned(),
            runsc_sha256: Sha256Name::from_bits([0xfa; 32]),
            platform: "fake".to_owned(),
            cpu_features: vec!["fpu".to_owned()],
            rootfs_digest: Sha256Name::from_bits([0xfb; 32]),
        };
        Self {
            clock,
            facts,
            detach_grace: Duration::from_secs(60),
            slots: Mutex::default(),
            faults: Mutex::default(),
            added: Mutex::default(),
            tasks: TaskTracker::new(),
            ended: CancellationToken::new(),
        }
    }

    pub fn with_facts(mut self, facts: Facts) -> Self {
        self.facts = facts;
        self
    }

    pub fn with_detach_grace(mut self, detach_grace: Duration) -> Self {
        self.detach_grace = detach_grace;
        self
    }

    /// Injects a fault into the next call of `action` (`create`, `restore`, `pause`, `resume`, `checkpoint`,
    /// `snapshot`, `extract`, `remove`, `fence`). Several faults apply to consecutive calls.
    pub fn inject(&self, action: &'static str, fault: ActionFault) {
        lock(&self.faults).entry(action).or_default().push_back(fault);
    }

    /// Ends the container unexpectedly, as when its agent crashes.
    pub fn end(&self, id: &SandboxId) {
        if let Some(commands) = lock(&self.slots).get(id).and_then(|slot| slot.commands.clone()) {
            let _ = commands.send(SandboxCommand::End);
        }
    }

    /// Kills the instance: every sandbox is gone at once and nothing answers any more.
    pub fn kill(&self) {
        self.ended.cancel();
    }

    async fn apply_fault(&self, action: &'static str) -> Result<()> {
        let fault = lock(&self.faults).get_mut(action).and_then(VecDeque::pop_front);
        match fault {
            None => Ok(()),
            Some(ActionFault::Fail) => Err(Error::Failed { what: action, why: "a fault was injected".to_owned() }),
            Some(ActionFault::Refuse) => {
                Err(Error::Refused { reason: Reason::NotSupported, message: "a fault was injected".to_owned() })
            }
            Some(ActionFault::NoSpace) => Err(Error::NoSpace { what: action }),
            Some(ActionFault::Hang) => {
                self.clock.sleep(ACTION_TIMEOUT).await;
                Err(Error::TimedOut { what: action, after: ACTION_TIMEOUT })
            }
            Some(ActionFault::Delay(span)) => {
                self.clock.sleep(span).await;
                Ok(())
            }
        }
    }

    fn with_slot<T>(&self, id: &SandboxId, with: impl FnOnce(&mut Slot) -> T) -> T {
        let mut slots = lock(&self.slots);
        with(slots.entry(id.clone()).or_insert_with(|| Slot {
            seen: Arc::new(watch::channel(ContainerView::NOTHING).0),
            action: Arc::default(),
            commands: None,
            renewed: None,
            egress: Egress::None,
        }))
    }

    /// The network policy of a container.
    pub fn egress(&self, id: &SandboxId) -> Egress {
        self.with_slot(id, |slot| slot.egress.clone())
    }

    async fn lock_action(&self, id: &SandboxId) -> tokio::sync::OwnedMutexGuard<()> {
        let action = self.with_slot(id, |slot| slot.action.clone());
        action.lock_owned().await
    }

    fn start(&self, id: &SandboxId, machine: FakeMachine, deadline: Moment) {
        self.with_slot(id, |slot| {
            let deadline = slot.renewed.take().map_or(deadline, |renewed| renewed.max(deadline));
            let (commands, queue) = mpsc::unbounded_channel();
            let sandbox = FakeSandbox::new(machine, deadline, self.clock.clone(), slot.seen.clone(), self.detach_grace);
            let run = sandbox.run(queue);
            let ended = self.ended.clone();
            slot.commands = Some(commands);
            self.tasks.spawn(async move {
                tokio::select! {
                    biased;
                    () = ended.cancelled() => {}
                    () = run => {}
                }
            });
        });
    }

    /// Sends a command to the task of the sandbox and returns its reply.
    async fn call<T>(
        &self,
        id: &SandboxId,
        command: impl FnOnce(oneshot::Sender<Result<T>>) -> SandboxCommand,
    ) -> Result<T> {
        let commands = self.with_slot(id, |slot| slot.commands.clone()).ok_or(Error::NotIn("here"))?;
        let (reply, replied) = oneshot::channel();
        commands.send(command(reply)).map_err(|_| Error::NotIn("here"))?;
        replied.await.map_err(|_| Error::NotIn("here"))?
    }

    fn check_rootfs(&self, start: &StartSpec) -> Result<()> {
        match &start.rootfs {
            Some(digest) if self.acquire_rootfs(digest).is_none() => Err(Error::Refused {
                reason: Reason::RootfsMissing,
                message: "there is no such root file system".to_owned(),
            }),
            Some(_) | None => Ok(()),
        }
    }

    fn check_absent(&self, id: &SandboxId) -> Result<()> {
        match self.with_slot(id, |slot| slot.seen.borrow().container) {
            Container::Absent => Ok(()),
            Container::Partial | Container::Running | Container::Paused | Container::Fenced | Container::Stopped => {
                Err(Error::NotIn("absent"))
            }
        }
    }
}

impl Drop for FakeContainers {
    fn drop(&mut self) {
        self.ended.cancel();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn failed(what: &'static str, why: impl ToString) -> Error {
    Error::Failed { what, why: why.to_string() }
}

#[async_trait]
impl Lifecycle for FakeContainers {
    fn watch(&self, id: &SandboxId) -> watch::Receiver<ContainerView> {
        self.with_slot(id, |slot| slot.seen.subscribe())
    }

    fn local_sandboxes(&self) -> Vec<SandboxId> {
        let slots = lock(&self.slots);
        let here = slots.iter().filter(|(_, slot)| slot.seen.borrow().container != Container::Absent);
        here.map(|(id, _)| id.clone()).collect()
    }

    fn facts(&self) -> Facts {
        self.facts.clone()
    }

    async fn create(&self, id: &SandboxId, start: &StartSpec) -> Result<()> {
        let _action = self.lock_action(id).await;
        self.check_absent(id)?;
        self.check_rootfs(start)?;
        self.apply_fault("create").await?;
        self.with_slot(id, |slot| slot.egress.clone_from(&start.egress));
        self.start(id, FakeMachine::new(start), start.deadline);
        self.call(id, SandboxCommand::Ping).await
    }

    async fn restore(&self, id: &SandboxId, start: &StartSpec, image: &Path) -> Result<()> {
        let _action = self.lock_action(id).await;
        self.check_absent(id)?;
        self.check_rootfs(start)?;
        self.apply_fault("restore").await?;
        let saved = std::fs::read(image.join(IMAGE_FILES[0])).map_err(|error| failed("restore", error))?;
        let machine: FakeMachine = serde_json::from_slice(&saved).map_err(|error| failed("restore", error))?;
        if machine.marker != hex(&start.marker) {
            return Err(Error::TimedOut { what: "restore", after: ACTION_TIMEOUT });
        }
        self.with_slot(id, |slot| slot.egress.clone_from(&start.egress));
        self.start(id, machine.restored(), start.deadline);
        self.call(id, SandboxCommand::Ping).await
    }

    async fn pause(&self, id: &SandboxId) -> Result<()> {
        let _action = self.lock_action(id).await;
        self.apply_fault("pause").await?;
        self.call(id, SandboxCommand::Pause).await
    }

    async fn resume(&self, id: &SandboxId) -> Result<()> {
        let _action = self.lock_action(id).await;
        self.apply_fault("resume").await?;
        self.call(id, SandboxCommand::Resume).await
    }

    async fn checkpoint(&self, id: &SandboxId, image: &Path) -> Result<()> {
        let _action = self.lock_action(id).await;
        self.apply_fault("checkpoint").await?;
        let saved = self.call(id, SandboxCommand::Save).await?;
        let write = || {
            std::fs::create_dir_all(image)?;
            IMAGE_FILES
                .iter()
                .zip([&saved[..], b"meta", b"pages"])
                .try_for_each(|(name, bytes)| std::fs::write(image.join(name), bytes))
        };
        write().map_err(|error: std::io::Error| failed("checkpoint", error))
    }

    async fn snapshot(&self, id: &SandboxId, archive: &Path, shape: Shape) -> Result<WrittenSnapshot> {
        let _action = self.lock_action(id).await;
        self.apply_fault("snapshot").await?;
        self.call(id, SandboxCommand::Ping).await?;
        // An empty archive: two blocks of zeros.
        std::fs::write(archive, [0; 1024]).map_err(|error| failed("snapshot", error))?;
        let base_digest = (shape == Shape::Layer).then(|| self.facts.rootfs_digest.clone());
        Ok(WrittenSnapshot { base_digest, paused: Duration::from_millis(1) })
    }

    async fn count_entries(&self, archive: &Path) -> Result<u64> {
        std::fs::metadata(archive).map(|metadata| metadata.len() / 512).map_err(|error| failed("snapshot", error))
    }

    fn acquire_rootfs(&self, digest: &Sha256Name) -> Option<RootfsGuard> {
        let here = *digest == self.facts.rootfs_digest || lock(&self.added).contains(digest);
        here.then(RootfsGuard::default)
    }

    fn has_runtime(&self, sha256: &Sha256Name) -> bool {
        *sha256 == self.facts.runsc_sha256 || lock(&self.added).contains(sha256)
    }

    async fn add_runtime(&self, _file: &Path, sha256: &Sha256Name) -> Result<()> {
        lock(&self.added).insert(sha256.clone());
        Ok(())
    }

    fn runtime_file(&self) -> PathBuf {
        PathBuf::from("/proc/self/exe")
    }

    async fn pack(&self, archive: &Path) -> Result<()> {
        std::fs::write(archive, [0; 1024]).map_err(|error| failed("pack", error))
    }

    async fn extract(&self, archive: &Path, wanted: &Extract) -> Result<RootfsGuard> {
        self.apply_fault("extract").await?;
        std::fs::metadata(archive).map_err(|error| failed("extract", error))?;
        lock(&self.added).insert(wanted.digest.clone());
        Ok(RootfsGuard::default())
    }

    async fn remove(&self, id: &SandboxId) -> Result<()> {
        let _action = self.lock_action(id).await;
        self.apply_fault("remove").await?;
        if let Some(commands) = self.with_slot(id, |slot| slot.commands.take()) {
            let _ = commands.send(SandboxCommand::End);
            // The task drops the queue when it ends.
            commands.closed().await;
        }
        self.with_slot(id, |slot| slot.seen.send_replace(ContainerView::NOTHING));
        let mut slots = lock(&self.slots);
        if slots.get(id).is_some_and(|slot| slot.seen.receiver_count() == 0 && Arc::strong_count(&slot.action) <= 2) {
            slots.remove(id);
        }
        Ok(())
    }

    async fn extend(&self, id: &SandboxId, deadline: Moment) -> Result<()> {
        // If an action is in progress and there is no task yet, the action is a start.
        let is_starting = self.with_slot(id, |slot| {
            let is_starting = slot.commands.is_none() && slot.action.try_lock().is_err();
            slot.renewed = is_starting.then_some(deadline);
            is_starting
        });
        if is_starting {
            return Ok(());
        }
        self.call(id, |reply| SandboxCommand::Extend(deadline, reply)).await
    }

    async fn fence(&self, id: &SandboxId) -> Result<()> {
        self.apply_fault("fence").await?;
        self.call(id, SandboxCommand::Fence).await
    }

    async fn set_egress(&self, id: &SandboxId, egress: &Egress) -> Result<()> {
        self.apply_fault("set_egress").await?;
        self.with_slot(id, |slot| {
            let container = slot.seen.borrow().container;
            match container {
                Container::Absent | Container::Stopped => Err(Error::NotIn("here")),
                Container::Partial | Container::Running | Container::Paused | Container::Fenced => {
                    slot.egress.clone_from(egress);
                    Ok(())
                }
            }
        })
    }

    /// There are none.
    async fn reset_connections(&self, _: &SandboxId) {}
}

impl AgentLinks for FakeContainers {
    fn open(&self, id: &SandboxId) -> Option<FrameLink> {
        let commands = lock(&self.slots).get(id)?.commands.clone()?;
        let (to_agent, frames) = mpsc::channel(LINK_FRAMES);
        let (output, from_agent) = mpsc::channel(LINK_FRAMES);
        commands.send(SandboxCommand::Link(frames, output)).ok()?;
        Some(FrameLink { to_agent, from_agent, behind: Behind::default() })
    }
}
