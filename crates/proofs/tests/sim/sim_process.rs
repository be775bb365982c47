//! One run of the server on a machine: the real reconciler with everything around it simulated.

use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use axum::{Extension, extract::ConnectInfo};
use baton::{
    api::{self, Api, Peer},
    bus::Bus,
    clock::SharedClock,
    config::LeaseTimes,
    fair_watch::FairWatch,
    reconciler::{self, AllowedRuntimes, BaseUpload, Housekeeping, ReconcilerContext, desired::Drain},
    storage::{
        checkpoints::Checkpoints,
        lease::lease_rules::Identity,
        memory::Memory,
        records::{Durable, Records},
        snapshots::Snapshots,
        store::Store,
    },
};
use baton_protocol::{
    id::{InstanceId, SandboxId},
    metadata::PlainWords,
};
use baton_testkit::FakePorts;
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    kinds::ScenarioKind,
    life::Life,
    machine_clock::{Machine, ProcessClock, SetBack},
    oracle::Oracle,
    rng::Rng,
    runtime::Runtime,
    sim_bucket::{Bucket, Way},
    sim_faults::FaultSchedule,
    sim_mistakes::SimMistake,
    sim_socket::{ADDRESS, SimConnector, SimListener},
};

/// Often enough that what is left over is seen, watched and seen to within the two minutes after the last fault.
const SWEEP: std::time::Duration = std::time::Duration::from_secs(20);

#[derive(Debug)]
pub struct SimProcess {
    pub at: usize,
    pub tools: Arc<ReconcilerContext>,
    pub runtime: Arc<Runtime>,
    pub life: Arc<Life>,
    /// It is dead.
    pub gone: CancellationToken,
    tasks: Mutex<JoinSet<()>>,
    /// Where clients connect.
    pub connector: SimConnector,
    turned_away: watch::Sender<bool>,
}

/// What every process of a world is given.
#[derive(Debug)]
pub struct SimContext {
    pub oracle: Arc<Oracle>,
    pub faults: Arc<FaultSchedule>,
    pub bucket: Arc<Bucket>,
    pub machines: Vec<Arc<Machine>>,
    pub staging: tempfile::TempDir,
    pub ids: Vec<SandboxId>,
    /// Sandboxes of which nothing is stored.
    pub fleeting: Vec<SandboxId>,
    /// So many places has each instance, if there is little room.
    pub room: Option<usize>,
    /// What a copy is called, if one is made.
    pub copies: Vec<SandboxId>,
    pub mistake: Option<SimMistake>,
}

impl SimContext {
    pub fn all(&self) -> impl Iterator<Item = &SandboxId> {
        self.ids.iter().chain(&self.fleeting).chain(&self.copies)
    }
}

impl SimProcess {
    pub fn start(shared: &SimContext, at: usize, predecessor: Option<InstanceId>, rng: &Rng) -> Arc<Self> {
        let mistake = shared.mistake;
        let machine = shared.machines[at].clone();
        let set_back = (mistake == Some(SimMistake::DeadlineFromAnswer)).then(Arc::<SetBack>::default);
        let view = |is_guard, counter, set_back| ProcessClock {
            machine: machine.clone(),
            is_guard,
            rng: rng.fork(),
            counter,
            set_back,
        };
        let counted = (mistake == Some(SimMistake::CountedNonces)).then(|| Mutex::new(0));
        let me = InstanceId::from_bits(<dyn baton::clock::Clock>::bits(&view(false, None, None)));
        let clock: SharedClock = Arc::new(view(false, counted, set_back.clone()));
        let guard: SharedClock = Arc::new(view(mistake != Some(SimMistake::GuardHangsToo), None, None));
        let life = Life::new(at, machine.clone(), shared.faults.clone(), shared.oracle.clone());
        let runtime = Arc::new(Runtime::new(guard, life.clone(), rng.fork(), mistake, set_back.clone()));
        let way: Arc<dyn Store> = Arc::new(Way {
            bucket: shared.bucket.clone(),
            life: life.clone(),
            name: me.as_str().to_owned(),
            rng: rng.fork(),
            runtime: runtime.clone(),
            mistake,
            set_back,
        });
        let times = mistake.map_or(LeaseTimes::DEFAULT, SimMistake::times);
        let durable = Durable { locks: way.clone(), metadata: way.clone(), lock_bucket: None };
        let memory = Arc::new(Memory::new(clock.clone()));
        let room = shared.room.unwrap_or(Housekeeping::OFF.room);
        let housekeeping = Housekeeping { sweep: Some(SWEEP), room, ..Housekeeping::OFF };
        let checkpoints = Checkpoints::new(way.clone(), None, clock.clone());
        let tools = Arc::new(ReconcilerContext {
            who: Identity { me: me.clone(), predecessor },
            records: Records::new(clock.clone(), memory, Some(durable), true, times).forking_from(checkpoints.clone()),
            bus: Bus::new(clock.clone()),
            lifecycle: runtime.clone(),
            checkpoints: Some(checkpoints),
            snapshots: Some(Snapshots::new(way, None, clock.clone())),
            quotas: Default::default(),
            egress: Default::default(),
            archive_size: 1 << 30,
            base_upload: BaseUpload::default(),
            runtimes: AllowedRuntimes::default(),
            staging: staging(shared.staging.path(), at),
            clock,
            times,
            drain: Arc::new(FairWatch::new(Drain::No)),
            metrics: Default::default(),
            traces: Default::default(),
            housekeeping,
        });
        let gone = life.gone.clone();
        let watched = shared.all().map(|id| (id.clone(), runtime.truth(id))).collect();
        shared.oracle.begins(at, me.as_str(), &machine, watched);
        let mut tasks = JoinSet::new();
        for id in shared.all() {
            let (mut seen, id, oracle, runtime) =
                (runtime.truth(id), id.clone(), shared.oracle.clone(), runtime.clone());
            tasks.spawn(async move {
                while seen.changed().await.is_ok() {
                    oracle.look(&id);
                    runtime.show(&id);
                }
            });
        }
        tasks.spawn(reconciler::run(tools.clone(), CancellationToken::new()));
        let (turned_away, drain_told) = watch::channel(false);
        let (door, connector) = SimListener::new(machine, gone.clone());
        let settings = settings(&tools, drain_told, room);
        let api = Api::new(
            settings,
            tools.clock.clone(),
            tools.records.clone(),
            tools.bus.clone(),
            runtime.clone(),
            Arc::new(FakePorts::default()),
        );
        let router = api::router(api).layer(Extension(ConnectInfo(Peer(ADDRESS))));
        tasks.spawn(async move {
            // It ends with its process.
            let _ = axum::serve(door, router).await;
        });
        Arc::new(Self { at, tools, runtime, life, gone, tasks: Mutex::new(tasks), connector, turned_away })
    }

    pub fn drain(&self, drain: Drain) {
        self.turned_away.send_replace(true);
        self.tools.drain.post(drain);
    }

    pub fn name(&self) -> &str {
        self.tools.who.me.as_str()
    }

    /// It lives, moves and is not on its way out.
    pub fn is_up(&self) -> bool {
        !self.gone.is_cancelled() && self.life.machine.moves() && self.tools.drain.read() == Drain::No
    }

    fn count_made_room(&self) {
        let faults = &self.life.faults;
        if faults.has(ScenarioKind::Crowded) {
            faults.tally.add(ScenarioKind::Crowded, made_room(&self.tools.metrics.page(0, 0)));
        }
    }

    /// `kill -9`: its containers die with it, and nothing is told to anybody.
    pub fn kill(&self) {
        self.count_made_room();
        self.gone.cancel();
        self.runtime.kill();
        self.tasks.lock().unwrap().abort_all();
    }
}

/// How many sandboxes were let go for another, as a page of figures has it.
fn made_room(page: &str) -> u64 {
    let line = |line: &str| line.strip_prefix("baton_sandboxes_left_total{why=\"room\"} ")?.parse().ok();
    page.lines().find_map(line).unwrap_or(0)
}

fn settings(tools: &ReconcilerContext, drain: watch::Receiver<bool>, room: usize) -> api::ApiSettings {
    api::ApiSettings {
        instance: tools.who.me.clone(),
        version: "simulated",
        runsc_version: String::new(),
        idle_timeout: None,
        max_sandboxes: room,
        limits: Default::default(),
        cgroups: Err("none".to_owned()),
        connections: Default::default(),
        inbound_memory: 64 << 20,
        plain: PlainWords::Documents,
        is_token_optional: false,
        api_keys: Vec::new(),
        quotas: Default::default(),
        egress_max: Default::default(),
        admin_key: None,
        origins: Vec::new(),
        rate_limit: None,
        proxies: 0,
        hosts: api::hosts::Hosts::Any,
        domain: None,
        drain,
        handoff_wait: tools.times.handoff_wait,
        traces: Default::default(),
    }
}

fn staging(root: &Path, at: usize) -> std::path::PathBuf {
    root.join(at.to_string())
}
