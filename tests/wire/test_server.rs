//! A server on a real socket, with a memory store, a double that plays the reconciler on the
//! bus, and a clock that tests can move forward.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use baton::{
    api::{self, Api, ApiSettings},
    bus::{Bus, Evictability, LeaveReason, LifecycleEvent, StartKind},
    clock::{Clock, Moment, SharedClock, SystemClock},
    config::{Config, LeaseTimes},
    network::PortLinks,
    runtime::{AgentLinks, Lifecycle},
    storage::{
        memory::Memory,
        records::{Durable, Records},
        store::{self, Digest, Page, PollResult, Precondition, ProgressFn, Store, Version, Written},
    },
};
use baton_protocol::{
    id::{CheckpointId, InstanceId, Nonce, SandboxId},
    metadata::{DesiredState, PlainWords},
    reason::Reason,
    sandbox_network::Egress,
};
use baton_testkit::{FakeContainers, FakePorts};
use bytes::Bytes;
use tokio::{
    net::TcpListener,
    sync::{oneshot, watch},
};

use super::{
    scripted_agent::{Agent, Container, Containers},
    wire_halves::{self, Joined},
};

/// Real time, and what tests add to it.
#[derive(Debug)]
pub struct SkipClock(watch::Sender<Duration>);

impl SkipClock {
    pub fn skip(&self, span: Duration) {
        self.0.send_modify(|ahead| *ahead += span);
    }
}

#[async_trait]
impl Clock for SkipClock {
    fn now(&self) -> Moment {
        SystemClock.now() + *self.0.borrow()
    }
    fn wall(&self) -> SystemTime {
        SystemClock.wall() + *self.0.borrow()
    }
    async fn sleep_until(&self, moment: Moment) {
        let mut ahead = self.0.subscribe();
        loop {
            ahead.mark_unchanged();
            let left = moment - self.now();
            if left.is_zero() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(left) => {}
                _ = ahead.changed() => {}
            }
        }
    }
    fn fill(&self, bytes: &mut [u8]) {
        SystemClock.fill(bytes);
    }
}

/// A store that counts what is read and written.
#[derive(Debug)]
struct Counted {
    store: Memory,
    reads: Arc<AtomicU64>,
    writes: Arc<AtomicU64>,
}

#[async_trait]
impl Store for Counted {
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> store::Result<PollResult> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.store.get_if_changed(key, known).await
    }
    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> store::Result<Written> {
        self.writes.fetch_add(1, Ordering::SeqCst);
        self.store.put(key, bytes, condition).await
    }
    async fn delete(&self, key: &str, condition: Precondition) -> store::Result<()> {
        self.writes.fetch_add(1, Ordering::SeqCst);
        self.store.delete(key, condition).await
    }
    async fn list(&self, prefix: &str, after: Option<&str>) -> store::Result<Page> {
        self.store.list(prefix, after).await
    }
    async fn upload(
        &self,
        key: &str,
        file: &std::path::Path,
        condition: Precondition,
        digest: &Digest,
        progress: ProgressFn<'_>,
    ) -> store::Result<Written> {
        self.store.upload(key, file, condition, digest, progress).await
    }
    async fn download(
        &self,
        key: &str,
        file: &std::path::Path,
        digest: &Digest,
        progress: ProgressFn<'_>,
    ) -> store::Result<()> {
        self.store.download(key, file, digest, progress).await
    }
    async fn download_unverified(
        &self,
        key: &str,
        file: &std::path::Path,
        most: u64,
        progress: ProgressFn<'_>,
    ) -> store::Result<Digest> {
        self.store.download_unverified(key, file, most, progress).await
    }
}

/// How the reconciler's double behaves.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// Starts fail with this text.
    pub start_fails: Option<&'static str>,
    /// Nudges for a start are left alone.
    pub start_waits: bool,
    pub checkpoint_fails: bool,
    /// A checkpoint takes until this is taken back.
    pub checkpoint_waits: bool,
    /// Nudges to make room are left alone.
    pub room_waits: bool,
}

pub struct World {
    pub address: SocketAddr,
    pub clock: Arc<SkipClock>,
    pub bus: Arc<Bus>,
    /// Where sessions read: the same one, unless a socket lies between.
    pub front_board: Arc<Bus>,
    pub records: Records,
    pub containers: Arc<Containers>,
    pub ports: Arc<FakePorts>,
    pub instance: InstanceId,
    pub script: Arc<Mutex<Script>>,
    pub reads: Arc<AtomicU64>,
    pub writes: Arc<AtomicU64>,
    pub drain: watch::Sender<bool>,
    lives: Arc<FakeContainers>,
    shared: SharedClock,
    stop: Option<oneshot::Sender<()>>,
    _joined: Option<Joined>,
    server: tokio::task::JoinHandle<()>,
    reconciler: tokio::task::JoinHandle<()>,
}

/// What a world is made with, beside the defaults.
pub struct Plan {
    pub has_storage: bool,
    pub can_snapshot: bool,
    pub change: fn(&mut ApiSettings),
}

impl World {
    /// Everything ephemeral.
    pub async fn new() -> Self {
        Self::with(Plan { has_storage: false, can_snapshot: false, change: |_| {} }).await
    }

    pub async fn with_storage() -> Self {
        Self::with(Plan { has_storage: true, can_snapshot: true, change: |_| {} }).await
    }

    pub async fn with(plan: Plan) -> Self {
        let clock = Arc::new(SkipClock(watch::Sender::new(Duration::ZERO)));
        let shared: SharedClock = clock.clone();
        let bus = Bus::new(shared.clone());
        let (reads, writes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let store = || -> Arc<dyn Store> {
            let store = Memory::new(shared.clone());
            Arc::new(Counted { store, reads: reads.clone(), writes: writes.clone() })
        };
        let durable = plan.has_storage.then(|| Durable { locks: store(), metadata: store(), lock_bucket: None });
        let memory = store();
        let records =
            Records::new(shared.clone(), memory.clone(), durable.clone(), plan.can_snapshot, LeaseTimes::DEFAULT);
        let (containers, lives) = (Arc::new(Containers::default()), Arc::new(FakeContainers::new(shared.clone())));
        let ports = Arc::new(FakePorts::default());
        let instance = shared.instance_id();
        let (drain, draining) = watch::channel(false);
        let joined = if wire_halves::are_wanted() {
            Some(wire_halves::join(&shared, &instance, &bus, (&containers, &lives, &ports), &memory, &draining).await)
        } else {
            None
        };
        let (front_board, front_records, execs, front_ports): (_, _, Arc<dyn AgentLinks>, Arc<dyn PortLinks>) =
            match &joined {
                None => (bus.clone(), records.clone(), containers.clone(), ports.clone()),
                Some(Joined { front, .. }) => {
                    let memory = front.memory.clone();
                    let records = Records::new(shared.clone(), memory, durable, plan.can_snapshot, LeaseTimes::DEFAULT);
                    (front.bus.clone(), records, front.execs.clone(), front.ports.clone())
                }
            };
        let mut settings = ApiSettings {
            egress_max: Egress::Any,
            instance: instance.clone(),
            version: "0.0.0",
            runsc_version: "none".into(),
            idle_timeout: Config::from_env(|_| None).unwrap().idle_timeout.map(api::intent::whole_seconds),
            max_sandboxes: 100,
            limits: Default::default(),
            cgroups: Err("none".to_owned()),
            connections: Default::default(),
            inbound_memory: 64 << 20,
            plain: PlainWords::Documents,
            is_token_optional: false,
            api_keys: vec![],
            quotas: Default::default(),
            admin_key: None,
            origins: vec![],
            rate_limit: None,
            proxies: 0,
            hosts: api::hosts::Hosts::Any,
            domain: Some(api::PortDomain::new("preview.example")),
            drain: draining,
            handoff_wait: LeaseTimes::DEFAULT.handoff_wait,
            traces: Default::default(),
        };
        (plan.change)(&mut settings);
        let api = Api::new(settings, shared.clone(), front_records, front_board.clone(), execs, front_ports);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let server = tokio::spawn(async move {
            api::serve(listener, api, async move { drop(stopped.await) }).await;
        });
        let script = Arc::new(Mutex::new(Script::default()));
        let double = Reconciler {
            bus: bus.clone(),
            records: records.clone(),
            containers: containers.clone(),
            ports: ports.clone(),
            lives: lives.clone(),
            clock: shared.clone(),
            instance: instance.clone(),
            script: script.clone(),
        };
        let reconciler = tokio::spawn(double.run());
        Self {
            address,
            clock,
            bus,
            front_board,
            records,
            containers,
            ports,
            instance,
            script,
            reads,
            writes,
            drain,
            lives,
            shared,
            stop: Some(stop),
            _joined: joined,
            server,
            reconciler,
        }
    }

    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::SeqCst)
    }

    pub fn set(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.script.lock().unwrap());
    }

    /// The agent of the only sandbox here.
    pub fn agent(&self) -> Arc<Mutex<Agent>> {
        self.containers.0.lock().unwrap().values().next().expect("a sandbox").agent.clone()
    }

    pub fn count(&self) -> usize {
        self.containers.0.lock().unwrap().len()
    }

    /// Another container takes the place of the one that runs.
    pub async fn replace(&self, id: &SandboxId) {
        self.lives.remove(id).await.unwrap();
        self.containers.0.lock().unwrap().insert(id.clone(), Container::start(Arc::default()));
        wire_halves::begin(&self.lives, &self.shared, id).await;
        self.bus.post(id, LifecycleEvent::Running { boot: StartKind::Fresh });
    }

    /// It leaves, for a reason of the reconciler's own.
    pub fn leave(&self, id: &SandboxId, why: LeaveReason, checkpointed: bool) {
        self.containers.0.lock().unwrap().remove(id);
        self.ports.set_running(id, false);
        self.bus.set_held(id, false);
        let checkpoint_id = checkpointed.then(|| checkpoint_id(id));
        self.bus.post(id, LifecycleEvent::Left { why, checkpoint_id });
    }

    /// The server ends, its sessions with it.
    pub async fn stop(mut self) {
        self.reconciler.abort();
        drop(self.stop.take());
        (&mut self.server).await.unwrap();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.server.abort();
        self.reconciler.abort();
    }
}

/// Waits until `holds`, looking every few milliseconds.
pub async fn until(mut holds: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waiting).await.expect("it never came to be");
}

pub fn checkpoint_id(id: &SandboxId) -> CheckpointId {
    CheckpointId::new(id, 1, 1, &Nonce::from_bits([7; 16]))
}

struct Reconciler {
    bus: Arc<Bus>,
    records: Records,
    containers: Arc<Containers>,
    ports: Arc<FakePorts>,
    /// Which of them run.
    lives: Arc<FakeContainers>,
    clock: SharedClock,
    instance: InstanceId,
    script: Arc<Mutex<Script>>,
}

impl Reconciler {
    async fn run(self) {
        // What lies in checkpoints.
        let mut stored = std::collections::BTreeMap::new();
        loop {
            let id = self.bus.next_wakeup().await;
            let Ok(Some(found)) = self.records.find(&id).await else { continue };
            let script = self.script.lock().unwrap().clone();
            let here = self.containers.0.lock().unwrap().contains_key(&id);
            let is_unused = self.bus.is_wanted(&id) && !self.bus.presence(&id).attached;
            let makes_room = here && is_unused && !script.room_waits;
            match found.spec.desired_state {
                DesiredState::Deleted => {
                    let removed = self.containers.0.lock().unwrap().remove(&id);
                    self.ports.set_running(&id, false);
                    self.bus.set_held(&id, false);
                    let _ = self.records.erase(&id, place(found.spec.enable_sandbox_checkpoint)).await;
                    if removed.is_some() {
                        self.bus.post(&id, LifecycleEvent::Left { why: LeaveReason::Deleted, checkpoint_id: None });
                    }
                }
                DesiredState::Running if !here && found.spec.placement.as_ref() == Some(&self.instance) => {
                    if script.start_waits || !self.bus.presence(&id).attached {
                        continue;
                    }
                    self.bus.post(&id, LifecycleEvent::Acquiring);
                    self.bus.post(&id, LifecycleEvent::Acquired);
                    if let Some(message) = script.start_fails {
                        let (reason, message) = (Reason::CreateFailed, message.into());
                        self.bus.post(&id, LifecycleEvent::Failed { reason, message });
                        continue;
                    }
                    self.bus.set_held(&id, true);
                    if found.spec.enable_sandbox_checkpoint {
                        self.bus.set_tenure(&id, Evictability::Spare { since: self.clock.now() });
                    }
                    let agent = stored.remove(&id).unwrap_or_default();
                    self.lives.remove(&id).await.unwrap();
                    wire_halves::begin(&self.lives, &self.clock, &id).await;
                    self.containers.0.lock().unwrap().insert(id.clone(), Container::start(agent));
                    self.ports.set_running(&id, true);
                    self.bus.post(&id, LifecycleEvent::Running { boot: StartKind::Fresh });
                }
                DesiredState::Running | DesiredState::Checkpointed | DesiredState::HandedOff
                    if here && (makes_room || found.spec.desired_state != DesiredState::Running) =>
                {
                    let why = match found.spec.desired_state {
                        DesiredState::Checkpointed => LeaveReason::Checkpointed,
                        DesiredState::HandedOff => LeaveReason::HandedOff,
                        DesiredState::Running | DesiredState::Deleted => LeaveReason::Room,
                    };
                    self.bus.post(&id, LifecycleEvent::Checkpointing { why });
                    if script.checkpoint_fails {
                        self.bus.set_tenure(&id, Evictability::Stays);
                        let (reason, message) = (Reason::NoSpace, "There is no space left.".into());
                        self.bus.post(&id, LifecycleEvent::CheckpointFailed { why, reason, message });
                        continue;
                    }
                    let returned = || why == LeaveReason::Room && self.bus.presence(&id).attached;
                    while self.script.lock().unwrap().checkpoint_waits && !returned() {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    if returned() {
                        continue;
                    }
                    if let Some(container) = self.containers.0.lock().unwrap().remove(&id) {
                        stored.insert(id.clone(), container.agent.clone());
                    }
                    self.ports.set_running(&id, false);
                    self.bus.set_held(&id, false);
                    self.bus.post(&id, LifecycleEvent::Left { why, checkpoint_id: Some(checkpoint_id(&id)) });
                    // Somebody may want it back already.
                    self.bus.wake(&id);
                }
                DesiredState::Running | DesiredState::Checkpointed | DesiredState::HandedOff => {}
            }
        }
    }
}

fn place(is_durable: bool) -> baton::storage::records::StoreKind {
    use baton::storage::records::StoreKind;
    if is_durable { StoreKind::Durable } else { StoreKind::Memory }
}
