//! A runtime without containers: the two traits on simulated sandboxes, with injectable faults.
//!
//! Time comes only from the given clock, so a paused clock makes it deterministic, and a sandbox costs one task.
//! Its sandboxes answer with the frames of the real agent ([`machine`] lists the supported commands), are fenced
//! at their deadline, and their checkpoints are files that another fake can restore.

mod fake_output;
mod fake_sandbox;
pub mod machine;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use self::fake_sandbox::{FakeSandbox, Order, Orders};
use async_trait::async_trait;
use baton_protocol::{
    id::{SandboxId, Sha256Name, hex},
    reason::Reason,
};
use machine::Machine;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    AgentLinks, Behind, Container, Error, Extract, Facts, IMAGE_FILES, Lifecycle, Link, Result, RootfsGuard, Seen,
    Shape, Start, Taken, channel::LINK_FRAMES,
};
use crate::clock::{Moment, SharedClock};

/// A fault for the next call of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
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

/// The timeout of an action that hangs.
pub const GIVEN_UP_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Slot {
    seen: Arc<watch::Sender<Seen>>,
    turn: Arc<tokio::sync::Mutex<()>>,
    orders: Option<Orders>,
    /// The latest deadline received during a start.
    renewed: Option<Moment>,
}

#[derive(Debug)]
pub struct FakeContainers {
    clock: SharedClock,
    facts: Facts,
    detach_grace: Duration,
    slots: Mutex<BTreeMap<SandboxId, Slot>>,
    faults: Mutex<BTreeMap<&'static str, VecDeque<Fault>>>,
    /// Root file systems and runtimes that were added.
    roots: Mutex<BTreeSet<Sha256Name>>,
    tasks: TaskTracker,
    ended: CancellationToken,
}

impl FakeContainers {
    pub fn new(clock: SharedClock) -> Self {
        let text = |text: &str| text.to_owned();
        let facts = Facts {
            runsc_version: text("fake-1"),
            runsc_sha256: Sha256Name::from_bits([0xfa; 32]),
            platform: text("fake"),
            flags: Vec::new(),
            cpu_features: vec![text("fpu")],
            oci_sha256: text("fake"),
            rootfs_digest: Sha256Name::from_bits([0xfb; 32]),
        };
        Self {
            clock,
            facts,
            detach_grace: Duration::from_secs(60),
            slots: Mutex::default(),
            faults: Mutex::default(),
            roots: Mutex::default(),
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
    pub fn inject(&self, action: &'static str, fault: Fault) {
        lock(&self.faults).entry(action).or_default().push_back(fault);
    }

    /// Ends the container unexpectedly, as when its agent crashes.
    pub fn end(&self, id: &SandboxId) {
        if let Some(orders) = lock(&self.slots).get(id).and_then(|slot| slot.orders.clone()) {
            let _ = orders.send(Order::End);
        }
    }

    /// Kills the instance: every sandbox is gone at once and nothing answers any more.
    pub fn kill(&self) {
        self.ended.cancel();
    }

    async fn meet(&self, action: &'static str) -> Result<()> {
        let fault = lock(&self.faults).get_mut(action).and_then(VecDeque::pop_front);
        match fault {
            None => Ok(()),
            Some(Fault::Fail) => Err(Error::Failed { what: action, why: "a fault was injected".to_owned() }),
            Some(Fault::Refuse) => {
                Err(Error::Refused { reason: Reason::NotSupported, message: "a fault was injected".to_owned() })
            }
            Some(Fault::NoSpace) => Err(Error::NoSpace { what: action }),
            Some(Fault::Hang) => {
                self.clock.sleep(GIVEN_UP_AFTER).await;
                Err(Error::TimedOut { what: action, after: GIVEN_UP_AFTER })
            }
            Some(Fault::Delay(span)) => {
                self.clock.sleep(span).await;
                Ok(())
            }
        }
    }

    fn with_slot<T>(&self, id: &SandboxId, look: impl FnOnce(&mut Slot) -> T) -> T {
        let mut slots = lock(&self.slots);
        look(slots.entry(id.clone()).or_insert_with(|| Slot {
            seen: Arc::new(watch::channel(Seen::NOTHING).0),
            turn: Arc::default(),
            orders: None,
            renewed: None,
        }))
    }

    async fn turn(&self, id: &SandboxId) -> tokio::sync::OwnedMutexGuard<()> {
        let turn = self.with_slot(id, |slot| slot.turn.clone());
        turn.lock_owned().await
    }

    fn start(&self, id: &SandboxId, machine: Machine, deadline: Moment) {
        self.with_slot(id, |slot| {
            let deadline = slot.renewed.take().map_or(deadline, |renewed| renewed.max(deadline));
            let (orders, queue) = mpsc::unbounded_channel();
            let sandbox = FakeSandbox::new(machine, deadline, self.clock.clone(), slot.seen.clone(), self.detach_grace);
            let run = sandbox.run(queue);
            let ended = self.ended.clone();
            slot.orders = Some(orders);
            self.tasks.spawn(async move {
                tokio::select! {
                    biased;
                    () = ended.cancelled() => {}
                    () = run => {}
                }
            });
        });
    }

    /// Sends an order to the sandbox's task, if there is one.
    async fn order<T>(&self, id: &SandboxId, order: impl FnOnce(oneshot::Sender<Result<T>>) -> Order) -> Result<T> {
        let orders = self.with_slot(id, |slot| slot.orders.clone()).ok_or(Error::NotIn("here"))?;
        let (answer, answered) = oneshot::channel();
        orders.send(order(answer)).map_err(|_| Error::NotIn("here"))?;
        answered.await.map_err(|_| Error::NotIn("here"))?
    }

    fn has_root(&self, start: &Start) -> Result<()> {
        match &start.rootfs {
            Some(digest) if self.hold(digest).is_none() => Err(Error::Refused {
                reason: Reason::RootfsMissing,
                message: "there is no such root file system".to_owned(),
            }),
            Some(_) | None => Ok(()),
        }
    }

    fn is_absent(&self, id: &SandboxId) -> Result<()> {
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

fn failed(what: &'static str, why: impl ToString) -> Error {
    Error::Failed { what, why: why.to_string() }
}

#[async_trait]
impl Lifecycle for FakeContainers {
    fn watch(&self, id: &SandboxId) -> watch::Receiver<Seen> {
        self.with_slot(id, |slot| slot.seen.subscribe())
    }

    fn here(&self) -> Vec<SandboxId> {
        let slots = lock(&self.slots);
        let here = slots.iter().filter(|(_, slot)| slot.seen.borrow().container != Container::Absent);
        here.map(|(id, _)| id.clone()).collect()
    }

    fn facts(&self) -> Facts {
        self.facts.clone()
    }

    async fn create(&self, id: &SandboxId, start: &Start) -> Result<()> {
        let _turn = self.turn(id).await;
        self.is_absent(id)?;
        self.has_root(start)?;
        self.meet("create").await?;
        self.start(id, Machine::new(start), start.deadline);
        self.order(id, Order::Look).await
    }

    async fn restore(&self, id: &SandboxId, start: &Start, image: &Path) -> Result<()> {
        let _turn = self.turn(id).await;
        self.is_absent(id)?;
        self.has_root(start)?;
        self.meet("restore").await?;
        let saved = std::fs::read(image.join(IMAGE_FILES[0])).map_err(|error| failed("restore", error))?;
        let machine: Machine = serde_json::from_slice(&saved).map_err(|error| failed("restore", error))?;
        if machine.marker != hex(&start.marker) {
            return Err(Error::TimedOut { what: "restore", after: GIVEN_UP_AFTER });
        }
        self.start(id, machine.restored(), start.deadline);
        self.order(id, Order::Look).await
    }

    async fn pause(&self, id: &SandboxId) -> Result<()> {
        let _turn = self.turn(id).await;
        self.meet("pause").await?;
        self.order(id, Order::Pause).await
    }

    async fn resume(&self, id: &SandboxId) -> Result<()> {
        let _turn = self.turn(id).await;
        self.meet("resume").await?;
        self.order(id, Order::Resume).await
    }

    async fn checkpoint(&self, id: &SandboxId, image: &Path) -> Result<()> {
        let _turn = self.turn(id).await;
        self.meet("checkpoint").await?;
        let saved = self.order(id, Order::Save).await?;
        let write = || {
            std::fs::create_dir_all(image)?;
            IMAGE_FILES
                .iter()
                .zip([&saved[..], b"meta", b"pages"])
                .try_for_each(|(name, bytes)| std::fs::write(image.join(name), bytes))
        };
        write().map_err(|error: std::io::Error| failed("checkpoint", error))
    }

    async fn snapshot(&self, id: &SandboxId, archive: &Path, shape: Shape) -> Result<Taken> {
        let _turn = self.turn(id).await;
        self.meet("snapshot").await?;
        self.order(id, Order::Look).await?;
        // An empty archive: two blocks of zeros.
        std::fs::write(archive, [0; 1024]).map_err(|error| failed("snapshot", error))?;
        let base_digest = (shape == Shape::Layer).then(|| self.facts.rootfs_digest.clone());
        Ok(Taken { base_digest, paused: Duration::from_millis(1) })
    }

    async fn count_entries(&self, archive: &Path) -> Result<u64> {
        std::fs::metadata(archive).map(|about| about.len() / 512).map_err(|error| failed("snapshot", error))
    }

    fn hold(&self, digest: &Sha256Name) -> Option<RootfsGuard> {
        let here = *digest == self.facts.rootfs_digest || lock(&self.roots).contains(digest);
        here.then(RootfsGuard::default)
    }

    fn has_runtime(&self, sha256: &Sha256Name) -> bool {
        *sha256 == self.facts.runsc_sha256 || lock(&self.roots).contains(sha256)
    }

    async fn add_runtime(&self, _file: &Path, sha256: &Sha256Name) -> Result<()> {
        lock(&self.roots).insert(sha256.clone());
        Ok(())
    }

    fn runtime_file(&self) -> PathBuf {
        PathBuf::from("/proc/self/exe")
    }

    async fn pack(&self, archive: &Path) -> Result<()> {
        std::fs::write(archive, [0; 1024]).map_err(|error| failed("pack", error))
    }

    async fn extract(&self, archive: &Path, wanted: &Extract) -> Result<RootfsGuard> {
        self.meet("extract").await?;
        std::fs::metadata(archive).map_err(|error| failed("extract", error))?;
        lock(&self.roots).insert(wanted.digest.clone());
        Ok(RootfsGuard::default())
    }

    async fn remove(&self, id: &SandboxId) -> Result<()> {
        let _turn = self.turn(id).await;
        self.meet("remove").await?;
        if let Some(orders) = self.with_slot(id, |slot| slot.orders.take()) {
            let _ = orders.send(Order::End);
            // The task drops the queue when it ends.
            orders.closed().await;
        }
        self.with_slot(id, |slot| slot.seen.send_replace(Seen::NOTHING));
        let mut slots = lock(&self.slots);
        if slots.get(id).is_some_and(|slot| slot.seen.receiver_count() == 0 && Arc::strong_count(&slot.turn) <= 2) {
            slots.remove(id);
        }
        Ok(())
    }

    async fn extend(&self, id: &SandboxId, deadline: Moment) -> Result<()> {
        // If the lock is taken and there is no sandbox, a start is in progress.
        let starts = self.with_slot(id, |slot| {
            let starts = slot.orders.is_none() && slot.turn.try_lock().is_err();
            slot.renewed = starts.then_some(deadline);
            starts
        });
        if starts {
            return Ok(());
        }
        self.order(id, |answer| Order::Extend(deadline, answer)).await
    }

    async fn fence(&self, id: &SandboxId) -> Result<()> {
        self.meet("fence").await?;
        self.order(id, Order::Fence).await
    }
}

impl AgentLinks for FakeContainers {
    fn open(&self, id: &SandboxId) -> Option<Link> {
        let orders = lock(&self.slots).get(id)?.orders.clone()?;
        let (to_agent, frames) = mpsc::channel(LINK_FRAMES);
        let (output, from_agent) = mpsc::channel(LINK_FRAMES);
        orders.send(Order::Link(frames, output)).ok()?;
        Some(Link { to_agent, from_agent, behind: Behind::default() })
    }
}
