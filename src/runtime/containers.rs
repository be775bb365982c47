//! The real containers: the local state of each sandbox, and the two traits implemented on it.
//!
//! Every action runs to completion in its own task, even if its caller is gone, and only one at a time per
//! sandbox. A fence does not wait for other actions.

use std::{
    collections::BTreeMap,
    fs::File,
    future::Future,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use baton_protocol::{
    id::{SandboxId, Sha256Name},
    sandbox_network::Egress,
};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    AgentLinks, Container, ContainerView, Error, Extract, Facts, FrameLink, Lifecycle, Result, RootfsGuard, Shape,
    StartSpec, WrittenSnapshot,
    cache::Cache,
    cgroup::{self, Cgroups, Group, Shares},
    container::Live,
    container_actions,
    disk_space::Reservations,
    guard_link::GuardLink,
    pool::{Pool, PoolSlot},
    rootfs_cache::{self, CachedRootfs},
    runsc::Runsc,
    runtime_settings::RuntimeSettings,
    startup,
};
use crate::{
    clock::{Moment, SharedClock},
    network::{NetworkView, PortError, PortLinks, PortStream},
};

/// Everything an action needs.
#[derive(Debug)]
pub(super) struct RuntimeContext {
    pub settings: Arc<RuntimeSettings>,
    pub clock: SharedClock,
    pub runsc: Runsc,
    pub guard: GuardLink,
    pub cache: Cache,
    pub runsc_sha256: Sha256Name,
    pub tasks: TaskTracker,
    /// Disk space reserved for checkpoints being written.
    pub promised: Reservations,
    /// The error says why there are no cgroups.
    pub cgroups: std::result::Result<Box<dyn Cgroups>, String>,
    pub pool: Arc<Pool>,
}

/// The slot of one sandbox.
#[derive(Debug)]
pub(super) struct Slot {
    pub id: SandboxId,
    pub seen: watch::Sender<ContainerView>,
    turn: tokio::sync::Mutex<()>,
    /// Cancelled when the current or next start is no longer wanted.
    pub starting: Mutex<CancellationToken>,
    /// The container's name in runsc, set from the first file created for it until the last one is deleted.
    pub name: Mutex<Option<String>>,
    pub live: Mutex<Option<Arc<Live>>>,
    /// The latest deadline received during a start, which may take longer than a lease.
    pub renewed: Mutex<Option<Moment>>,
    /// The root file system of the container, held as long as anything of the container is left.
    pub root: Mutex<Option<CachedRootfs>>,
    /// The cgroup that enforces its limits, if any; held as long as `root`.
    pub group: Mutex<Option<Group>>,
    /// Its slot in the capacity of this instance; held as long as `root`.
    pub pool_slot: Mutex<Option<PoolSlot>>,
}

impl Slot {
    fn new(id: SandboxId) -> Self {
        let (seen, _) = watch::channel(ContainerView::NOTHING);
        Self {
            id,
            seen,
            turn: tokio::sync::Mutex::default(),
            starting: Mutex::default(),
            name: Mutex::default(),
            live: Mutex::default(),
            renewed: Mutex::default(),
            root: Mutex::default(),
            group: Mutex::default(),
            pool_slot: Mutex::default(),
        }
    }

    pub fn live(&self) -> Option<Arc<Live>> {
        self.live.lock().clone()
    }

    pub fn show(&self, container: Container) {
        self.seen.send_modify(|seen| *seen = ContainerView { container, running_execs: 0 });
    }
}

/// runsc starts in another working directory than its caller.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| Error::Failed { what: "naming a file", why: error.to_string() })
}

/// With this many slots, unused ones are removed before a new one is added.
const PRUNE_SLOTS_AT: usize = 128;

/// The sandbox has no local state and no watchers.
fn is_forgettable(slot: &Arc<Slot>) -> bool {
    Arc::strong_count(slot) == 1 && slot.seen.receiver_count() == 0 && slot.name.lock().is_none()
}

/// The containers of this instance. They die with the process.
#[derive(Debug)]
pub struct Containers {
    context: Arc<RuntimeContext>,
    facts: Facts,
    slots: Mutex<BTreeMap<SandboxId, Arc<Slot>>>,
    /// Locked for the lifetime of this value: one server per state directory.
    _state_dir: File,
}

impl Containers {
    /// Locks the state directory, wipes what a predecessor left in it, probes runsc and starts the guard.
    /// `clock` must be the machine's: the guard reads the same one.
    pub async fn open(settings: RuntimeSettings, clock: SharedClock) -> Result<Self> {
        let (settings, state_dir) = startup::prepare_state_dir(settings).await?;
        let place = settings.state_dir.clone();
        let cgroups = tokio::task::spawn_blocking(move || cgroup::open(&place)).await;
        let cgroups = cgroups.map_err(|error| error.to_string()).flatten();
        let (runsc, facts) = startup::probe(&settings, &clock).await?;
        let tasks = TaskTracker::new();
        let guard = GuardLink::start(settings.clone(), clock.clone(), &tasks);
        let guard = guard.map_err(|error| Error::Failed { what: "guard", why: error.to_string() })?;
        let cache = Cache::new(settings.rootfs_cache.clone(), settings.rootfs_cache_size);
        rootfs_cache::sweep(cache.clone(), settings.runtimes.clone()).await;
        let holds_cpus = cgroups.as_ref().is_ok_and(|cgroups| cgroups.holds_cpus());
        let pool = Pool::new(&settings, &facts.runsc_sha256, holds_cpus, clock.clone());
        let context = Arc::new(RuntimeContext {
            settings,
            clock,
            runsc,
            guard,
            cache,
            runsc_sha256: facts.runsc_sha256.clone(),
            tasks,
            promised: Reservations::default(),
            cgroups,
            pool,
        });
        if context.settings.warm.count > 0 {
            context.tasks.spawn(context.pool.clone().refill(context.clone()));
        }
        Ok(Self { context, facts, slots: Mutex::default(), _state_dir: state_dir })
    }

    /// Removes every container and mount. What cannot be removed dies with the process or is wiped at the next
    /// start.
    pub async fn close(&self) {
        self.context.pool.close().await;
        for id in self.local_sandboxes() {
            if let Err(error) = self.remove(&id).await {
                tracing::warn!(sandbox = %id, %error, "a container could not be removed");
            }
        }
        // A start that was still running may have added to the pool.
        self.context.pool.empty(&self.context).await;
        let context = self.context.clone();
        let cleared = tokio::task::spawn_blocking(move || context.cgroups.as_ref().map_or(Ok(()), |all| all.clear()));
        if let Ok(Err(error)) = cleared.await {
            tracing::warn!(%error, "a cgroup could not be removed");
        }
        startup::give_back(self.context.settings.clone()).await;
    }

    /// Stops keeping warm containers: this instance is draining.
    pub fn drain(&self) {
        self.context.pool.drain();
    }

    /// How containers are limited to their share of the machine, or why they are not.
    pub fn cgroups(&self) -> std::result::Result<Shares, String> {
        self.context.cgroups.as_ref().map(|cgroups| Shares::of(&**cgroups)).map_err(Clone::clone)
    }

    fn slot(&self, id: &SandboxId) -> Arc<Slot> {
        let mut slots = self.slots.lock();
        if slots.len() >= PRUNE_SLOTS_AT && !slots.contains_key(id) {
            slots.retain(|_, slot| !is_forgettable(slot));
        }
        slots.entry(id.clone()).or_insert_with(|| Arc::new(Slot::new(id.clone()))).clone()
    }

    fn known(&self, id: &SandboxId) -> Option<Arc<Slot>> {
        self.slots.lock().get(id).cloned()
    }

    /// Runs an action once earlier ones are done, and to completion even if the caller is gone.
    async fn act<F, T>(&self, id: &SandboxId, action: impl FnOnce(Arc<RuntimeContext>, Arc<Slot>) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
        T: Send + 'static,
    {
        let slot = self.slot(id);
        let action = action(self.context.clone(), slot.clone());
        let task = self.context.tasks.spawn(async move {
            let _turn = slot.turn.lock().await;
            action.await
        });
        task.await.unwrap_or_else(|error| Err(Error::Failed { what: "an action", why: error.to_string() }))
    }

    /// Marks a start as wanted. A start in progress keeps its token.
    fn begin(&self, id: &SandboxId) {
        let slot = self.slot(id);
        let mut starting = slot.starting.lock();
        if starting.is_cancelled() {
            *starting = CancellationToken::new();
        }
    }

    fn forget(&self, id: &SandboxId) {
        let mut slots = self.slots.lock();
        if slots.get(id).is_some_and(is_forgettable) {
            slots.remove(id);
        }
    }
}

impl Drop for Containers {
    /// Ends the containers even if [`close`](Self::close) was not called first.
    fn drop(&mut self) {
        self.context.pool.drain();
        for slot in self.slots.lock().values() {
            if let Some(live) = slot.live() {
                live.doomed.cancel();
            }
        }
    }
}

#[async_trait]
impl Lifecycle for Containers {
    fn watch(&self, id: &SandboxId) -> watch::Receiver<ContainerView> {
        self.slot(id).seen.subscribe()
    }

    fn local_sandboxes(&self) -> Vec<SandboxId> {
        let slots = self.slots.lock();
        slots.values().filter(|slot| slot.name.lock().is_some()).map(|slot| slot.id.clone()).collect()
    }

    fn facts(&self) -> Facts {
        self.facts.clone()
    }

    async fn create(&self, id: &SandboxId, start: &StartSpec) -> Result<()> {
        let start = start.clone();
        self.begin(id);
        self.act(id, |context, slot| async move { container_actions::start(&context, &slot, &start, None).await }).await
    }

    async fn restore(&self, id: &SandboxId, start: &StartSpec, image: &Path) -> Result<()> {
        let (start, image) = (start.clone(), absolute(image)?);
        self.begin(id);
        self.act(
            id,
            |context, slot| async move { container_actions::start(&context, &slot, &start, Some(&image)).await },
        )
        .await
    }

    async fn pause(&self, id: &SandboxId) -> Result<()> {
        self.act(id, |context, slot| async move { container_actions::pause(&context, &slot).await }).await
    }

    async fn resume(&self, id: &SandboxId) -> Result<()> {
        self.act(id, |context, slot| async move { container_actions::resume(&context, &slot).await }).await
    }

    async fn checkpoint(&self, id: &SandboxId, image: &Path) -> Result<()> {
        let image = absolute(image)?;
        self.act(id, |context, slot| async move { container_actions::checkpoint(&context, &slot, &image).await }).await
    }

    async fn snapshot(&self, id: &SandboxId, archive: &Path, shape: Shape) -> Result<WrittenSnapshot> {
        let archive = absolute(archive)?;
        self.act(id, move |context, slot| async move { rootfs_cache::snapshot(&context, &slot, &archive, shape).await })
            .await
    }

    async fn count_entries(&self, archive: &Path) -> Result<u64> {
        rootfs_cache::count_entries(archive).await
    }

    fn acquire_rootfs(&self, digest: &Sha256Name) -> Option<RootfsGuard> {
        rootfs_cache::find(&self.context, Some(digest)).ok().map(RootfsGuard::from)
    }

    async fn extract(&self, archive: &Path, wanted: &Extract) -> Result<RootfsGuard> {
        let (context, archive, wanted) = (self.context.clone(), absolute(archive)?, wanted.clone());
        // Runs to completion even if the caller is gone, so that nothing is left half made.
        let task = self.context.tasks.spawn(async move { rootfs_cache::extract(&context, &archive, &wanted).await });
        task.await.unwrap_or_else(|error| Err(Error::Failed { what: "an action", why: error.to_string() }))
    }

    fn has_runtime(&self, sha256: &Sha256Name) -> bool {
        rootfs_cache::binary(&self.context, Some(sha256)).is_ok()
    }

    async fn add_runtime(&self, file: &Path, sha256: &Sha256Name) -> Result<()> {
        rootfs_cache::add_runtime(&self.context, file, sha256).await
    }

    fn runtime_file(&self) -> PathBuf {
        self.context.settings.runsc.clone()
    }

    async fn pack(&self, archive: &Path) -> Result<()> {
        rootfs_cache::pack(&self.context, archive).await
    }

    async fn remove(&self, id: &SandboxId) -> Result<()> {
        // A start that hangs would block this action until its timeout.
        if let Some(slot) = self.known(id) {
            slot.starting.lock().cancel();
        }
        let removed =
            self.act(id, |context, slot| async move { container_actions::remove(&context, &slot).await }).await;
        self.forget(id);
        removed
    }

    async fn extend(&self, id: &SandboxId, deadline: Moment) -> Result<()> {
        let slot = self.known(id).ok_or(Error::NotIn("here"))?;
        if let Some(live) = slot.live() {
            live.extend(&self.context, deadline);
            return Ok(());
        }
        let name = slot.name.lock().clone().ok_or(Error::NotIn("here"))?;
        *slot.renewed.lock() = Some(deadline);
        self.context.guard.extend(&name, deadline);
        Ok(())
    }

    async fn fence(&self, id: &SandboxId) -> Result<()> {
        let live = self.known(id).and_then(|slot| slot.live()).ok_or(Error::NotIn("here"))?;
        self.context.guard.fence(&live.name, live.fence.clone()).await.map(drop)
    }

    async fn set_egress(&self, id: &SandboxId, egress: &Egress) -> Result<()> {
        // No turn is needed: the frames wait while another action has paused the container.
        let slot = self.known(id).ok_or(Error::NotIn("here"))?;
        container_actions::set_egress(&self.context, &slot, egress)
    }

    async fn reset_connections(&self, id: &SandboxId) {
        let live = self.known(id).and_then(|slot| slot.live()).filter(|live| !live.has_ended());
        if let Some(connections) = live.as_ref().and_then(|live| live.connections.as_ref()) {
            connections.leave().await;
        }
    }
}

#[async_trait]
impl PortLinks for Containers {
    async fn connect(&self, id: &SandboxId, port: u16) -> std::result::Result<PortStream, PortError> {
        let live = self.known(id).and_then(|slot| slot.live()).filter(|live| !live.has_ended());
        let live = live.ok_or(PortError::NotRunning)?;
        live.connections.as_ref().ok_or(PortError::Unsupported)?.connect(port).await
    }

    async fn view(&self, id: &SandboxId) -> std::result::Result<NetworkView, PortError> {
        let live = self.known(id).and_then(|slot| slot.live()).filter(|live| !live.has_ended());
        let live = live.ok_or(PortError::NotRunning)?;
        live.connections.as_ref().ok_or(PortError::Unsupported)?.view().await
    }
}

impl AgentLinks for Containers {
    fn open(&self, id: &SandboxId) -> Option<FrameLink> {
        let live = self.known(id)?.live()?;
        if live.has_ended() { None } else { live.channel.open() }
    }
}
