//! One seed: three machines, their clients, an operator, and everything that happens to them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use baton::{
    api::token,
    reconciler::desired::Drain,
    storage::{layout::Object, records},
};
use baton_protocol::{
    id::{InstanceId, SandboxId},
    metadata::{DesiredState, Spec},
};
use bytes::Bytes;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    bucket::Bucket,
    client,
    clock::{Machine, TICK},
    dice::Dice,
    mistakes::Mistake,
    oracle::{Oracle, Verdict},
    process::{Ground, Process},
    session::TOKEN,
    weather::{Event, FAULTS_END, Kind, MACHINES, Weather},
};

#[derive(Debug)]
pub struct World {
    pub ground: Ground,
    pub dice: Dice,
    pub start: Instant,
    processes: Mutex<Vec<Option<Arc<Process>>>>,
    /// Who ran on each machine last.
    last: Mutex<Vec<Option<InstanceId>>>,
    /// Old copies an operator may have lying about.
    copies: Mutex<BTreeMap<SandboxId, Vec<Bytes>>>,
    ghosts: Mutex<Vec<Arc<Process>>>,
    /// Locks that garbage was written over.
    locks: Mutex<BTreeMap<SandboxId, Bytes>>,
}

/// Runs one seed to its end.
pub fn run(seed: u64, mistake: Option<Mistake>) -> (Verdict, Vec<Kind>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let dice = Dice::new(seed);
        let start = Instant::now();
        let weather = Arc::new(Weather::new(&dice, start));
        let kinds = weather.kinds.clone();
        let world = World::new(dice, start, weather, mistake);
        world.live().await;
        (world.ground.oracle.verdict(), kinds)
    })
}

impl World {
    fn new(dice: Dice, start: Instant, weather: Arc<Weather>, mistake: Option<Mistake>) -> Arc<Self> {
        let oracle = Oracle::new();
        let rate = |n: u64| match mistake {
            Some(Mistake::WildClocks) => [0.5, 1.0, 2.0][n as usize],
            _ if weather.has(Kind::Rates) => 0.85 + dice.below(351) as f64 / 1000.0,
            _ => 1.0,
        };
        let machines = (0..MACHINES as u64).map(|n| Machine::new(start, dice.seconds(0, 9_000), rate(n))).collect();
        let id = || {
            let mut bits = [0; 16];
            dice.fill(&mut bits);
            let uuid = uuid::Builder::from_random_bytes(bits).into_uuid();
            SandboxId::from_uuid(&uuid.to_string()).unwrap()
        };
        // A drain wakes the loops of one instance in no fixed order: with one loop there is one order.
        let most = if weather.has(Kind::Drain) { 1 } else { 2 };
        let ids = (0..=dice.below(most)).map(|_| id()).collect();
        let ground = Ground {
            bucket: Bucket::new(oracle.clone()),
            oracle,
            weather,
            machines,
            staging: tempfile::tempdir().unwrap(),
            ids,
            mistake,
        };
        Arc::new(Self {
            ground,
            dice,
            start,
            processes: Mutex::new(vec![None; MACHINES]),
            last: Mutex::new(vec![None; MACHINES]),
            copies: Mutex::default(),
            ghosts: Mutex::default(),
            locks: Mutex::default(),
        })
    }

    pub fn process(&self, at: usize) -> Option<Arc<Process>> {
        self.processes.lock().unwrap()[at].clone()
    }

    /// Who is up.
    pub fn names(&self) -> Vec<InstanceId> {
        self.processes.lock().unwrap().iter().flatten().map(|process| process.tools.who.me.clone()).collect()
    }

    fn note(&self, line: impl AsRef<str>) {
        self.ground.oracle.note(line);
    }

    async fn live(self: &Arc<Self>) {
        for at in 0..MACHINES {
            self.begin(at, false);
        }
        let mut clients = JoinSet::new();
        for id in &self.ground.ids {
            self.create(id).await;
            for number in 0..=self.dice.below(3) {
                clients.spawn(client::live(self.clone(), id.clone(), format!("c{number}"), self.dice.fork()));
            }
        }
        self.let_it_happen().await;
        clients.abort_all();
        self.end_all_faults();
        sleep(self.dice.millis(500, 3_000)).await;
        client::ask_at_the_end(self).await;
        for process in self.processes.lock().unwrap().iter().flatten() {
            process.kill();
        }
    }

    async fn create(&self, id: &SandboxId) {
        let process = self.process(self.dice.below(MACHINES as u64) as usize).unwrap();
        let tools = &process.tools;
        let mut spec = Spec::new(id.clone(), token::sha256(TOKEN), tools.clock.timestamp(), tools.who.me.clone());
        spec.enable_sandbox_checkpoint = true;
        spec.enable_sandbox_handoff = self.dice.falls(75);
        spec.enable_idle_timeout_auto_checkpoint = self.dice.falls(50);
        spec.idle_timeout = self.ground.weather.has(Kind::Idle).then(|| 20 + self.dice.below(60));
        self.ground.oracle.expects(id, spec.idle_timeout.is_some());
        let created = tools.records.create(&spec).await;
        created.unwrap();
        self.keep_copy(id);
    }

    async fn let_it_happen(self: &Arc<Self>) {
        let mut queue: BTreeMap<(Duration, usize), Event> = BTreeMap::new();
        for (number, (at, event)) in self.ground.weather.events.iter().enumerate() {
            queue.insert((*at, number), *event);
        }
        while let Some(((at, number), event)) = queue.pop_first() {
            if at >= FAULTS_END {
                break;
            }
            sleep_until(self.start + at).await;
            for (after, next) in self.happen(event) {
                queue.insert((at + after, queue.len() + number + 1000), next);
            }
            if self.ground.oracle.is_wrong() {
                break;
            }
        }
        sleep_until(self.start + FAULTS_END).await;
    }

    /// Lets one thing happen; what follows from it, and how much later.
    fn happen(&self, event: Event) -> Vec<(Duration, Event)> {
        let id = self.dice.pick(&self.ground.ids).clone();
        match event {
            Event::Kill(at) => {
                if !self.end(at) {
                    return Vec::new();
                }
                let same_directory = self.dice.falls(50);
                let after = if self.dice.falls(50) { self.dice.millis(50, 2_000) } else { self.dice.seconds(1, 40) };
                vec![(after, Event::Start { machine: at, same_directory })]
            }
            Event::Start { machine, same_directory } => {
                if self.process(machine).is_none() {
                    self.begin(machine, same_directory);
                }
                Vec::new()
            }
            Event::Drain(at) => {
                let Some(process) = self.process(at) else { return Vec::new() };
                self.note(format!("{at} drains"));
                process.drain(Drain::Draining);
                let grace = Duration::from_secs(8);
                vec![(grace, Event::DrainOver(at)), (grace + Duration::from_secs(2), Event::Kill(at))]
            }
            Event::DrainOver(at) => {
                if let Some(process) = self.process(at).filter(|process| *process.drain.borrow() != Drain::No) {
                    process.drain(Drain::Over);
                }
                Vec::new()
            }
            Event::Freeze(at, still, span) => {
                self.note(format!("{at} stands still: {still:?} for {span:?}"));
                self.ground.machines[at].freeze(still);
                vec![(span, Event::Thaw(at))]
            }
            Event::Thaw(at) => {
                self.thaw(at);
                vec![(TICK + Duration::from_millis(2), Event::Look)]
            }
            Event::Look => {
                for id in &self.ground.ids {
                    self.ground.oracle.look(id);
                }
                Vec::new()
            }
            Event::ContainerEnds(at) => {
                if let Some(process) = self.process(at) {
                    self.note(format!("a container of {at} ends by itself"));
                    process.runtime.end(&id);
                }
                Vec::new()
            }
            Event::GuardDies(at) => {
                // Without its guard and hanging, a machine keeps no promise.
                if let Some(process) = self.process(at).filter(|_| self.ground.machines[at].moves()) {
                    self.note(format!("the guard of {at} dies"));
                    tokio::spawn(async move { process.runtime.lose_guard().await });
                }
                Vec::new()
            }
            Event::LockGarbage => {
                let key = Object::Lock(&id).key();
                let Some(lock) = self.ground.bucket.get(&key) else { return Vec::new() };
                let mut locks = self.locks.lock().unwrap();
                if let std::collections::btree_map::Entry::Vacant(entry) = locks.entry(id) {
                    entry.insert(lock);
                    let garbage = self.dice.pick(&["", "{", "null", "{\"v\":1,\"epoch\":-1}"]);
                    self.ground.bucket.overwrite(&key, Bytes::from(garbage.as_bytes()));
                }
                drop(locks);
                vec![(self.dice.seconds(1, 60), Event::LockMended)]
            }
            Event::LockMended => {
                self.mend_locks();
                Vec::new()
            }
            Event::StaleOverwrite => {
                let copy = self.copies.lock().unwrap().get(&id).map(|copies| self.dice.pick(copies).clone());
                if let Some(copy) = copy {
                    self.ground.bucket.overwrite(&Object::Metadata(&id).key(), copy);
                }
                Vec::new()
            }
            Event::Garbage => {
                let garbage = self.dice.pick(&["{", "[]", "{}", "null", "{\"sandbox_id\":\"sandbox-1\"}"]);
                self.keep_copy(&id);
                self.ground.bucket.overwrite(&Object::Metadata(&id).key(), Bytes::from(garbage.as_bytes()));
                Vec::new()
            }
            Event::MetadataGone => {
                let _ = self.ground.bucket.delete(
                    &Object::Metadata(&id).key(),
                    &baton::storage::store::If::Any,
                    "operator",
                );
                Vec::new()
            }
            Event::LockGone => {
                let _ =
                    self.ground.bucket.delete(&Object::Lock(&id).key(), &baton::storage::store::If::Any, "operator");
                Vec::new()
            }
            Event::Flip => {
                let states = [DesiredState::Running, DesiredState::Checkpointed, DesiredState::HandedOff];
                self.rewrite(&id, *self.dice.pick(&states));
                Vec::new()
            }
            Event::Deletion => {
                self.rewrite(&id, DesiredState::Deleted);
                Vec::new()
            }
        }
    }

    /// As an operator with an editor: read, change, write back.
    fn rewrite(&self, id: &SandboxId, state: DesiredState) {
        let key = Object::Metadata(id).key();
        let Some(mut metadata) = self.ground.bucket.get(&key).and_then(|bytes| records::parse(id, &bytes).ok()) else {
            return;
        };
        if metadata.spec.desired_state != DesiredState::Deleted {
            metadata.spec.desired_state = state;
            self.ground.bucket.overwrite(&key, serde_json::to_vec(&metadata).unwrap().into());
        }
    }

    /// Puts back what was there; what is deleted stays so.
    fn mend_locks(&self) {
        for (id, lock) in std::mem::take(&mut *self.locks.lock().unwrap()) {
            let key = Object::Lock(&id).key();
            if self.ground.bucket.get(&key).is_some() {
                self.ground.bucket.overwrite(&key, lock);
            }
        }
    }

    pub fn keep_copy(&self, id: &SandboxId) {
        if let Some(bytes) = self.ground.bucket.get(&Object::Metadata(id).key())
            && records::parse(id, &bytes).is_ok()
        {
            self.copies.lock().unwrap().entry(id.clone()).or_default().push(bytes);
        }
    }

    fn begin(&self, at: usize, same_directory: bool) {
        let predecessor = self.last.lock().unwrap()[at].clone().filter(|_| same_directory);
        let process = Process::start(&self.ground, at, predecessor, &self.dice.fork());
        self.last.lock().unwrap()[at] = Some(process.tools.who.me.clone());
        self.processes.lock().unwrap()[at] = Some(process);
    }

    /// Whether there was a process to end.
    fn end(&self, at: usize) -> bool {
        let Some(process) = self.processes.lock().unwrap()[at].take() else { return false };
        process.kill();
        if self.ground.mistake == Some(Mistake::ContainersSurvive) {
            self.ground.oracle.haunts(at);
            self.ghosts.lock().unwrap().push(process);
        } else {
            self.ground.oracle.ends(at);
        }
        true
    }

    fn thaw(&self, at: usize) {
        self.note(format!("{at} moves"));
        self.ground.machines[at].thaw();
    }

    fn end_all_faults(&self) {
        self.note("all faults are over");
        self.mend_locks();
        for at in 0..MACHINES {
            self.thaw(at);
            if self.process(at).is_some_and(|process| *process.drain.borrow() != Drain::No) {
                self.end(at);
            }
            if self.process(at).is_none() {
                self.begin(at, self.dice.falls(50));
            }
        }
        for id in &self.ground.ids {
            let key = Object::Metadata(id).key();
            let broken = self.ground.bucket.get(&key).is_some_and(|bytes| records::parse(id, &bytes).is_err());
            let copy = self.copies.lock().unwrap().get(id).and_then(|copies| copies.last().cloned());
            if let Some(copy) = copy.filter(|_| broken) {
                self.ground.bucket.overwrite(&key, copy);
            }
        }
    }
}
