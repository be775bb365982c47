//! One seed: three machines, their clients, an operator, and everything that happens to them.

mod happen;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use baton::{
    api::token,
    storage::{layout::Object, records},
};
use baton_protocol::{
    id::{InstanceId, SandboxId},
    metadata::{PlainWords, Spec},
};
use bytes::Bytes;
use tokio::task::JoinSet;

use crate::{
    ephemeral,
    kinds::ScenarioKind,
    machine_clock::Machine,
    oracle::{Oracle, RunVerdict},
    plain_client,
    rng::Rng,
    sim_bucket::Bucket,
    sim_client,
    sim_faults::{FaultSchedule, MACHINES},
    sim_mistakes::SimMistake,
    sim_process::{SimContext, SimProcess},
    sim_session::TOKEN,
    time::{self, Instant, sleep},
};

#[derive(Debug)]
pub struct World {
    pub shared: SimContext,
    pub rng: Rng,
    /// For what only some seeds have, so that all others are what they would be without.
    pub own: Rng,
    pub start: Instant,
    processes: Mutex<Vec<Option<Arc<SimProcess>>>>,
    /// Who ran on each machine last.
    last: Mutex<Vec<Option<InstanceId>>>,
    /// Old copies an operator may have lying about.
    pub copies: Mutex<BTreeMap<SandboxId, Vec<Bytes>>>,
    ghosts: Mutex<Vec<Arc<SimProcess>>>,
    /// Locks that garbage was written over.
    pub locks: Mutex<BTreeMap<SandboxId, Bytes>>,
    /// Copies that were begun, and those that were made.
    begun: Mutex<Vec<SandboxId>>,
    made: Mutex<Vec<SandboxId>>,
    /// Who comes in a storm.
    crowd: Mutex<JoinSet<()>>,
}

/// In so many seeds of a hundred there is little room.
const CROWDED: u64 = 6;
const DOCUMENTS: u64 = 25;
const ORDERS: u64 = 15;

/// Images lie in memory where that can be had.
fn staging() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Runs one seed to its end.
pub fn run(seed: u64, mistake: Option<SimMistake>) -> (RunVerdict, Arc<FaultSchedule>) {
    time::begin();
    let runtime = tokio::runtime::Builder::new_current_thread().on_thread_park(time::move_on).build().unwrap();
    let rng = Rng::new(seed);
    let start = Instant::now();
    // From a generator of their own, so that all other seeds stay the same.
    let is_crowded = Rng::new(!seed).falls(CROWDED);
    let own = Rng::new(!seed).fork();
    let more = [(ScenarioKind::Documents, DOCUMENTS), (ScenarioKind::Orders, ORDERS)];
    let more: Vec<_> = more.into_iter().filter(|(_, percent)| own.falls(*percent)).map(|(kind, _)| kind).collect();
    let faults = Arc::new(FaultSchedule::new(&rng, start, is_crowded, (&more, &own)));
    let world = World::new(rng, own, start, faults.clone(), mistake);
    // Its life is a task: when the runtime's own future has something to do, time does not know it.
    let live = world.clone();
    let life = runtime.spawn(async move { live.live().await });
    runtime.block_on(async {
        tokio::select! {
            biased;
            ended = life => ended.unwrap(),
            () = time::is_over() => world.shared.oracle.wrong("everybody waits, and nobody for a moment"),
        }
    });
    (world.shared.oracle.verdict(), faults)
}

impl World {
    fn new(rng: Rng, own: Rng, start: Instant, faults: Arc<FaultSchedule>, mistake: Option<SimMistake>) -> Arc<Self> {
        let oracle = Oracle::new();
        let rate = |n: u64| match mistake {
            Some(SimMistake::WildClocks) => [500, 1_000, 2_000][n as usize],
            _ if faults.has(ScenarioKind::Rates) => {
                faults.tally.count(ScenarioKind::Rates);
                // What holds within the bounds must hold at them.
                if rng.falls(60) { *rng.pick(&[850, 1_200]) } else { 850 + rng.below(351) }
            }
            _ => 1_000,
        };
        faults.tally.count(ScenarioKind::Offset);
        let machines = (0..MACHINES as u64).map(|n| Machine::new(start, rng.seconds(0, 9_000), rate(n))).collect();
        let id = || {
            let mut bits = [0; 16];
            rng.fill(&mut bits);
            let uuid = uuid::Builder::from_random_bytes(bits).into_uuid();
            SandboxId::from_uuid(&uuid.to_string()).unwrap()
        };
        let (stored, fleeting) = match (faults.has(ScenarioKind::Crowded), faults.has(ScenarioKind::Ephemeral)) {
            (true, _) => (3, 0),
            (false, false) => (1 + rng.below(2), 0),
            (false, true) => (1 + rng.below(2), 1 + rng.below(3)),
        };
        let ids = (0..stored).map(|_| id()).collect();
        let fleeting = (0..fleeting).map(|_| id()).collect();
        let copies = (0..u32::from(faults.has(ScenarioKind::Fork))).map(|_| id()).collect();
        let room = faults.has(ScenarioKind::Crowded).then(|| *rng.pick(&[1, 1, 1, 2]));
        let shared = SimContext {
            room,
            bucket: Bucket::new(oracle.clone()),
            oracle,
            faults,
            machines,
            staging: staging(),
            ids,
            fleeting,
            copies,
            mistake,
        };
        Arc::new(Self {
            shared,
            rng,
            own,
            start,
            processes: Mutex::new(vec![None; MACHINES]),
            last: Mutex::new(vec![None; MACHINES]),
            copies: Mutex::default(),
            ghosts: Mutex::default(),
            locks: Mutex::default(),
            begun: Mutex::default(),
            made: Mutex::default(),
            crowd: Mutex::default(),
        })
    }

    /// Who runs on a machine, or ran there last.
    pub fn last_on(&self, at: usize) -> Option<InstanceId> {
        self.last.lock().unwrap()[at].clone()
    }

    pub fn process(&self, at: usize) -> Option<Arc<SimProcess>> {
        self.processes.lock().unwrap()[at].clone()
    }

    fn note(&self, line: impl AsRef<str>) {
        self.shared.oracle.note(line);
    }

    async fn live(self: &Arc<Self>) {
        for at in 0..MACHINES {
            self.begin(at, false);
        }
        let mut clients = JoinSet::new();
        // Where there is little room there are more sandboxes.
        let most = if self.shared.room.is_some() { 2 } else { 3 };
        for id in &self.shared.ids {
            self.create(id).await;
            for number in 0..=self.rng.below(most) {
                clients.spawn(sim_client::live(self.clone(), id.clone(), format!("c{number}"), self.rng.fork()));
            }
            if self.shared.faults.has(ScenarioKind::Documents) {
                for number in 0..=self.own.below(2) {
                    clients.spawn(plain_client::live(self.clone(), id.clone(), format!("p{number}"), self.own.fork()));
                }
            }
        }
        for id in &self.shared.copies {
            self.shared.oracle.expects(id, self.shared.faults.has(ScenarioKind::Idle));
        }
        let first = self.rng.below(MACHINES as u64) as usize;
        // A clock that is set back for what is stored is wrong for what is not.
        let lives = self.shared.mistake != Some(SimMistake::DeadlineFromAnswer);
        for (number, id) in self.shared.fleeting.iter().enumerate() {
            // Often two on one machine.
            let home = (first + number / 2) % MACHINES;
            self.shared.oracle.expects(id, false);
            if lives {
                clients.spawn(ephemeral::live(self.clone(), id.clone(), home, self.rng.fork()));
            }
        }
        self.let_it_happen().await;
        clients.abort_all();
        self.crowd.lock().unwrap().abort_all();
        self.end_all_faults();
        sleep(self.rng.millis(500, 3_000)).await;
        sim_client::ask_at_the_end(self).await;
        for process in self.processes.lock().unwrap().iter().flatten() {
            process.kill();
        }
    }

    async fn create(&self, id: &SandboxId) {
        let process = self.process(self.rng.below(MACHINES as u64) as usize).unwrap();
        let tools = &process.tools;
        let mut spec = Spec::new(id.clone(), token::sha256(TOKEN), tools.clock.timestamp(), tools.who.me.clone());
        spec.enable_sandbox_checkpoint = true;
        // Who hears nothing is taken over rather than asked, if what it has cannot move.
        let movable = if self.shared.faults.has(ScenarioKind::Muffled) { 35 } else { 75 };
        spec.enable_sandbox_handoff = self.rng.falls(movable);
        if self.shared.faults.has(ScenarioKind::Documents) {
            self.count(ScenarioKind::Documents);
            spec.enable_sandbox_handoff = true;
            spec.plain = Some(PlainWords::Documents);
        } else {
            spec.plain = Some(PlainWords::Predecessor);
        }
        spec.enable_idle_timeout_auto_checkpoint = self.rng.falls(50);
        spec.idle_timeout = self.shared.faults.has(ScenarioKind::Idle).then(|| 20 + self.rng.below(60));
        if spec.idle_timeout.is_some() {
            self.count(ScenarioKind::Idle);
        }
        self.shared.oracle.expects(id, spec.idle_timeout.is_some());
        // As a session that ends at once: its clients come later, and wherever they like.
        let session = tools.bus.attach(id);
        let lease = tools.bus.lease(id);
        tools.records.create(&spec, &tools.who.me, &lease).await.unwrap();
        tools.bus.wake(id);
        drop(session);
        self.keep_copy(id);
    }

    /// Whether this is the first try at that copy.
    pub fn begins_copy(&self, id: &SandboxId) -> bool {
        let mut begun = self.begun.lock().unwrap();
        let is_first = !begun.contains(id);
        begun.push(id.clone());
        is_first
    }

    pub fn copied(&self, id: &SandboxId) {
        self.made.lock().unwrap().push(id.clone());
    }

    /// All that are stored, as far as anybody knows.
    pub fn stored(&self) -> Vec<SandboxId> {
        self.shared.ids.iter().cloned().chain(self.made.lock().unwrap().clone()).collect()
    }

    fn count(&self, kind: ScenarioKind) {
        self.shared.faults.tally.count(kind);
    }

    /// One of the sandboxes that are stored from the start.
    pub fn pick(&self) -> &SandboxId {
        self.rng.pick(&self.shared.ids)
    }

    pub fn keep_copy(&self, id: &SandboxId) {
        if let Some(bytes) = self.shared.bucket.get(&Object::Metadata(id).key())
            && records::parse(id, &bytes).is_ok()
        {
            self.copies.lock().unwrap().entry(id.clone()).or_default().push(bytes);
        }
    }

    fn begin(&self, at: usize, same_directory: bool) {
        let predecessor = self.last.lock().unwrap()[at].clone().filter(|_| same_directory);
        let process = SimProcess::start(&self.shared, at, predecessor, &self.rng.fork());
        self.last.lock().unwrap()[at] = Some(process.tools.who.me.clone());
        self.processes.lock().unwrap()[at] = Some(process);
    }

    /// Whether there was a process to end.
    fn end(&self, at: usize) -> bool {
        let Some(process) = self.processes.lock().unwrap()[at].take() else { return false };
        process.kill();
        if self.shared.mistake == Some(SimMistake::ContainersSurvive) {
            self.shared.oracle.haunts(at);
            self.ghosts.lock().unwrap().push(process);
        } else {
            self.shared.oracle.ends(at);
        }
        true
    }

    fn thaw(&self, at: usize) {
        self.note(format!("{at} moves"));
        self.shared.oracle.shaken(at);
        self.shared.machines[at].thaw();
    }

    fn end_all_faults(&self) {
        self.note("all faults are over");
        self.mend_locks();
        for at in 0..MACHINES {
            self.thaw(at);
            if let Some(process) = self.process(at) {
                process.life.spare();
                if !process.is_up() {
                    self.end(at);
                }
            }
            if self.process(at).is_none() {
                self.begin(at, self.rng.falls(50));
            }
        }
        for id in &self.shared.ids {
            let key = Object::Metadata(id).key();
            let broken = self.shared.bucket.get(&key).is_some_and(|bytes| records::parse(id, &bytes).is_err());
            let copy = self.copies.lock().unwrap().get(id).and_then(|copies| copies.last().cloned());
            if let Some(copy) = copy.filter(|_| broken) {
                self.shared.bucket.overwrite(&key, copy);
            }
        }
    }
}
