//! Several instances on one store, each with its own bus, containers and reconciler.

use std::{sync::Arc, time::Duration};

use baton::{
    bus::{AttachGuard, Bus, LifecycleEvent, Subscription},
    clock::{Moment, SharedClock},
    config::{LeaseTimes, Quotas},
    fair_watch::FairWatch,
    reconciler::{self, AllowedRuntimes, BaseUpload, Housekeeping, ReconcilerContext, desired::Drain},
    runtime::{Container, Lifecycle},
    storage::{
        checkpoints::Checkpoints,
        lease::lease_rules::Identity,
        memory::Memory,
        records::{Durable, Records},
        signature::Seals,
        snapshots::Snapshots,
        store::{PollResult, Precondition, Store},
    },
};
use baton_protocol::{
    id::SandboxId,
    lock::{Claim, Lock},
    metadata::{Claimed, DesiredState, Metadata, Spec},
};
use baton_testkit::{FakeContainers, TestClock};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::faulty_store::Stage;

/// One store, one time, any number of instances.
pub struct World {
    pub clock: SharedClock,
    store: Arc<dyn Store>,
    staging: tempfile::TempDir,
    /// Of the instances that start from now on.
    pub housekeeping: Housekeeping,
    pub quotas: Quotas,
    /// What these call the bucket of their artifacts; `None` is a mount that nobody has named.
    pub bucket: Option<String>,
    /// The keys that these have.
    pub seals: Seals,
}

impl World {
    pub fn new() -> Self {
        let clock: SharedClock = Arc::new(TestClock::new(3));
        let store = Arc::new(Memory::new(clock.clone()));
        Self {
            clock,
            store,
            staging: tempfile::tempdir().unwrap(),
            housekeeping: Housekeeping::OFF,
            quotas: Quotas::default(),
            bucket: None,
            seals: Seals::default(),
        }
    }

    pub fn instance(&self) -> Instance {
        self.heir_of(None)
    }

    /// An instance on the state directory of another, which is gone.
    pub fn heir_of(&self, predecessor: Option<&Instance>) -> Instance {
        let clock = self.clock.clone();
        let who = Identity {
            me: clock.instance_id(),
            predecessor: predecessor.map(|instance| instance.tools.who.me.clone()),
        };
        let bus = Bus::new(clock.clone());
        let stage = Stage::new(self.store.clone());
        let store: Arc<dyn Store> = stage.clone();
        let durable = Durable { locks: store.clone(), metadata: store.clone(), lock_bucket: None };
        let memory = Arc::new(Memory::new(clock.clone()));
        let checkpoints = Checkpoints::new(store.clone(), self.bucket.clone(), clock.clone());
        let checkpoints = checkpoints.sealed_by(self.seals.clone());
        let records = Records::new(clock.clone(), memory, Some(durable), true, LeaseTimes::DEFAULT);
        let records = records.forking_from(checkpoints.clone()).sealed_by(self.seals.clone());
        let containers = Arc::new(FakeContainers::new(clock.clone()));
        let tools = Arc::new(ReconcilerContext {
            staging: self.staging.path().join(who.me.as_str()),
            who,
            checkpoints: Some(checkpoints),
            snapshots: Some(Snapshots::new(store, self.bucket.clone(), clock.clone()).sealed_by(self.seals.clone())),
            quotas: self.quotas.clone(),
            egress: Default::default(),
            archive_size: 1 << 30,
            base_upload: BaseUpload::default(),
            runtimes: AllowedRuntimes::default(),
            clock,
            records,
            bus: bus.clone(),
            lifecycle: containers.clone(),
            times: LeaseTimes::DEFAULT,
            drain: Arc::new(FairWatch::new(Drain::No)),
            metrics: Default::default(),
            traces: Default::default(),
            housekeeping: self.housekeeping,
        });
        let (mut tasks, stop) = (JoinSet::new(), CancellationToken::new());
        tasks.spawn(reconciler::run(tools.clone(), stop.clone()));
        Instance { tools, store: stage, bus, containers, stop, tasks }
    }

    /// The lock as it lies in the store.
    pub async fn lock(&self, id: &SandboxId) -> Option<Lock> {
        match self.store.get_if_changed(&format!("sandboxes/{id}/lock.json"), None).await.unwrap() {
            PollResult::Changed(bytes, _) => Some(serde_json::from_slice(&bytes).unwrap()),
            PollResult::Unchanged | PollResult::Missing => None,
        }
    }

    /// Instances that start from now on sweep, as they do by default.
    pub fn sweeping(mut self) -> Self {
        self.housekeeping.sweep = Some(Duration::from_secs(60));
        self
    }

    /// The store itself, for whoever reaches it without an instance.
    pub fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    /// Every key in the store.
    pub async fn keys(&self) -> Vec<String> {
        let (mut keys, mut after) = (Vec::new(), None);
        loop {
            let page = self.store.list("", after.as_deref()).await.unwrap();
            keys.extend(page.entries.into_iter().map(|entry| entry.key));
            after = keys.last().cloned();
            if !page.more {
                return keys;
            }
        }
    }

    /// Puts an object there as an operator would, without asking anybody.
    pub async fn put(&self, key: &str, text: &str) {
        self.store.put(key, text.to_owned().into(), Precondition::Any).await.unwrap();
    }

    pub async fn text(&self, key: &str) -> Option<String> {
        match self.store.get_if_changed(key, None).await.unwrap() {
            PollResult::Changed(bytes, _) => Some(String::from_utf8(bytes.to_vec()).unwrap()),
            PollResult::Unchanged | PollResult::Missing => None,
        }
    }

    pub async fn remove(&self, key: &str) {
        self.store.delete(key, Precondition::Any).await.unwrap();
    }

    /// Changes the metadata as an operator would, without a word to any instance.
    pub async fn edit(&self, id: &SandboxId, change: impl Fn(&mut serde_json::Value)) {
        let key = format!("sandboxes/{id}/metadata.json");
        let mut record = serde_json::from_str(&self.text(&key).await.expect("it is there")).unwrap();
        change(&mut record);
        self.put(&key, &record.to_string()).await;
    }

    pub async fn after(&self, seconds: u64) {
        self.clock.sleep(Duration::from_secs(seconds)).await;
    }
}

pub struct Instance {
    pub tools: Arc<ReconcilerContext>,
    /// Its own way to the store, which can be broken.
    pub store: Arc<Stage>,
    pub bus: Arc<Bus>,
    pub containers: Arc<FakeContainers>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

/// A session's place in the world, without a socket.
pub struct Visit {
    pub id: SandboxId,
    pub began: Moment,
    follower: Subscription,
    _attached: AttachGuard,
}

impl Instance {
    /// What `/create` does, up to the wake-up.
    pub async fn create(&self, change: impl Fn(&mut Spec)) -> Visit {
        let tools = &self.tools;
        let id = tools.clock.sandbox_id();
        let mut spec = Spec::new(id, String::new(), tools.clock.timestamp(), tools.who.me.clone());
        change(&mut spec);
        let lease = tools.bus.lease(&spec.sandbox_id);
        tools.records.create(&spec, &tools.who.me, &lease).await.unwrap();
        self.visit(&spec.sandbox_id)
    }

    /// One that was made here, ran, and lies in the store.
    pub async fn stored(&self, change: impl Fn(&mut Spec)) -> SandboxId {
        let mut visit = self.create(change).await;
        visit.until_running().await;
        self.edit(&visit.id, |spec| spec.desired_state = DesiredState::Checkpointed).await;
        visit.until_left().await;
        visit.id.clone()
    }

    /// What `/attach` does after the token was found right.
    pub async fn attach(&self, id: &SandboxId) -> Visit {
        self.attach_with(id, Claim::Preempt).await
    }

    /// As `attach`, by a client that gets the sandbox only if the one that has it is not alive.
    pub async fn ask_for(&self, id: &SandboxId) -> Visit {
        self.attach_with(id, Claim::Ask).await
    }

    async fn attach_with(&self, id: &SandboxId, kind: Claim) -> Visit {
        let me = self.tools.who.me.clone();
        self.edit(id, |spec| {
            spec.desired_state = DesiredState::Running;
            spec.placement = Some(me.clone());
            spec.claim = Some(Claimed { instance: me.clone(), kind });
        })
        .await;
        let visit = self.visit(id);
        self.bus.placed(id);
        visit
    }

    /// A session that is here for a sandbox, and wants nothing of it that is not wanted already.
    pub fn visit(&self, id: &SandboxId) -> Visit {
        let (follower, attached) = (self.bus.follow(id), self.bus.attach(id));
        self.bus.wake(id);
        Visit { id: id.clone(), began: self.tools.clock.now(), follower, _attached: attached }
    }

    pub async fn edit(&self, id: &SandboxId, change: impl Fn(&mut Spec) + Send + Sync) {
        let change = |spec: &mut Spec| {
            change(spec);
            true
        };
        self.tools.records.edit(id, &change).await.unwrap().expect("it exists");
        self.bus.wake(id);
    }

    pub async fn metadata(&self, id: &SandboxId) -> Option<Metadata> {
        self.tools.records.find(id).await.unwrap()
    }

    pub fn container(&self, id: &SandboxId) -> Container {
        self.containers.watch(id).borrow().container
    }

    /// `kill -9`: the containers die with it, and nothing is told to anybody.
    pub async fn die(mut self) -> Self {
        self.containers.kill();
        self.tasks.shutdown().await;
        self
    }

    /// Ends the loops of an instance whose test is over.
    pub async fn stop(mut self) {
        self.stop.cancel();
        self.tasks.shutdown().await;
    }

    /// The reconciler came to its end by itself, as it does when it has drained.
    pub async fn drained(&mut self) {
        self.tasks.join_next().await.expect("it ran").unwrap();
    }
}

impl Visit {
    pub async fn next(&mut self) -> LifecycleEvent {
        self.follower.next().await.passing
    }

    /// Everything told up to and with the first that `last` accepts; each wait is bounded.
    pub async fn until(&mut self, last: impl Fn(&LifecycleEvent) -> bool) -> Vec<LifecycleEvent> {
        let mut told = Vec::new();
        loop {
            let next = tokio::time::timeout(Duration::from_secs(600), self.next()).await;
            told.push(next.unwrap_or_else(|_| panic!("nothing more was told after {told:?}")));
            if told.last().is_some_and(&last) {
                return told;
            }
        }
    }

    pub async fn until_running(&mut self) -> Vec<LifecycleEvent> {
        self.until(|passing| matches!(passing, LifecycleEvent::Running { .. })).await
    }

    pub async fn until_left(&mut self) -> Vec<LifecycleEvent> {
        self.until(|passing| matches!(passing, LifecycleEvent::Left { .. })).await
    }
}

/// Makes it one that outlives its instance.
pub fn persistent(spec: &mut Spec) {
    spec.enable_sandbox_checkpoint = true;
}

/// … and that may move while it runs.
pub fn movable(spec: &mut Spec) {
    persistent(spec);
    spec.enable_sandbox_handoff = true;
}
