//! Sees everything that happens and says at once what must not have happened.
//!
//! I1–I6 are the promises of `docs/lease.md`; each check names its own.

mod container_oracle;
mod ephemeral_sandboxes;
mod locks;
mod object_oracle;
mod sessions;
mod vacancy;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use baton::runtime::{Container, ContainerView};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::Lock,
    metadata::SandboxStatus,
};
use tokio::sync::watch;

pub use self::ephemeral_sandboxes::SandboxFate;

use self::ephemeral_sandboxes::Home;
use crate::{machine_clock::Machine, sim_faults::MACHINES, time::Instant};
use vacancy::Vacancy;

/// One instance's calls for its few sandboxes in one minute; contending costs four looks a second each.
pub const MOST_CALLS: u64 = 1_500;

#[derive(Debug)]
struct Place {
    name: String,
    machine: Arc<Machine>,
    seen: BTreeMap<SandboxId, watch::Receiver<ContainerView>>,
    minute: u64,
    calls: u64,
}

#[derive(Debug, Default)]
struct SandboxHistory {
    lock: Option<Lock>,
    /// As it was when somebody deleted it.
    former: Option<Lock>,
    /// Garbage was written over it: nobody can tell who holds it.
    garbled: bool,
    /// An operator has deleted it: nobody may make another.
    lock_gone: bool,
    waiter_since: Option<Instant>,
    chain: Vec<CheckpointId>,
    /// It executed since its last commit; and whether that was so when the lease was last acquired.
    ran_on: bool,
    behind: bool,
    /// It was started from its head after it had run on.
    gone_back: bool,
    ever_ran: bool,
    ran_before: bool,
    may_be_purged: bool,
    /// Of a copy: whoever asked for it was told that it exists.
    is_told: bool,
    /// Somebody has deleted its metadata.
    unnamed_since: Option<Instant>,
    ends_idle: bool,
    shown: BTreeMap<usize, Container>,
    /// Who acquired which epoch.
    owners: BTreeMap<u64, String>,
    status: Option<SandboxStatus>,
    vacancy: Option<Vacancy>,
    /// Of one of which nothing is stored, once it is made.
    home: Option<Home>,
}

#[derive(Debug, Default)]
struct StatusHistory {
    trace: Vec<String>,
    hash: u64,
    wrong: Option<String>,
    places: BTreeMap<usize, Place>,
    histories: BTreeMap<SandboxId, SandboxHistory>,
    most_calls: u64,
    commits: u64,
    epochs: u64,
    successions: u64,
    /// When each machine last stood still or lost its guard.
    shaken: BTreeMap<usize, Instant>,
}

#[derive(Debug)]
pub struct Oracle {
    start: Instant,
    told: Mutex<StatusHistory>,
}

/// What one run was worth.
#[derive(Clone, Debug, Default)]
pub struct RunVerdict {
    pub wrong: Option<String>,
    pub trace: Vec<String>,
    pub hash: u64,
    pub most_calls: u64,
    pub commits: u64,
    pub epochs: u64,
    /// How often a waiting instance came after one that died.
    pub successions: u64,
}

impl StatusHistory {
    fn note(&mut self, at: Duration, line: &str) {
        let line = format!("{:>5}.{:03}  {line}", at.as_secs(), at.subsec_millis());
        self.hash = line.bytes().fold(self.hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        self.trace.push(line);
    }

    fn wrong(&mut self, at: Duration, what: &str) {
        self.note(at, &format!("WRONG: {what}"));
        self.wrong.get_or_insert_with(|| what.to_owned());
    }

    /// The instance's short name in the trace.
    fn name(&self, id: &str) -> String {
        let place = self.places.iter().find(|(_, place)| place.name == id);
        place.map_or_else(|| id.chars().take(9).collect(), |(at, _)| letter(*at))
    }
}

fn letter(at: usize) -> String {
    let letter = ["A", "B", "C"][at % 3];
    if at < 3 { letter.to_owned() } else { format!("ghost of {letter}") }
}

impl Oracle {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { start: Instant::now(), told: Mutex::default() })
    }

    pub fn note(&self, line: impl AsRef<str>) {
        self.told.lock().unwrap().note(self.start.elapsed(), line.as_ref());
    }

    pub fn wrong(&self, what: impl AsRef<str>) {
        self.told.lock().unwrap().wrong(self.start.elapsed(), what.as_ref());
    }

    pub fn is_wrong(&self) -> bool {
        self.told.lock().unwrap().wrong.is_some()
    }

    pub fn verdict(&self) -> RunVerdict {
        let mut told = self.told.lock().unwrap();
        RunVerdict {
            wrong: told.wrong.clone(),
            trace: std::mem::take(&mut told.trace),
            hash: told.hash,
            most_calls: told.most_calls,
            commits: told.commits,
            epochs: told.epochs,
            successions: told.successions,
        }
    }

    /// An instance begins on a machine; what was there before is over, unless it survives by mistake.
    pub fn begins(
        &self,
        at: usize,
        name: &str,
        machine: &Arc<Machine>,
        seen: BTreeMap<SandboxId, watch::Receiver<ContainerView>>,
    ) {
        let mut told = self.told.lock().unwrap();
        let place = Place { name: name.to_owned(), machine: machine.clone(), seen, minute: 0, calls: 0 };
        told.places.insert(at, place);
        told.note(self.start.elapsed(), &format!("{} begins", letter(at)));
    }

    pub fn ends(&self, at: usize) {
        let mut told = self.told.lock().unwrap();
        let Some(place) = told.places.remove(&at) else { return };
        for history in told.histories.values_mut() {
            history.shown.remove(&at);
        }
        told.vacate(&place.name);
        told.note(self.start.elapsed(), &format!("{} is gone", letter(at)));
    }

    /// The instance is gone, its containers are not.
    pub fn haunts(&self, at: usize) {
        let mut told = self.told.lock().unwrap();
        if let Some(place) = told.places.remove(&at) {
            told.places.insert(at + 3, place);
        }
    }

    pub fn expects(&self, id: &SandboxId, ends_idle: bool) {
        self.told
            .lock()
            .unwrap()
            .histories
            .insert(id.clone(), SandboxHistory { ends_idle, ..SandboxHistory::default() });
    }

    /// A copy was made, and whoever asked for it knows.
    pub fn copied(&self, id: &SandboxId) {
        self.told.lock().unwrap().histories.entry(id.clone()).or_default().is_told = true;
    }

    /// [No tight loops] A call leaves an instance.
    pub fn called(&self, name: &str) {
        let mut told = self.told.lock().unwrap();
        let now = self.start.elapsed();
        let minute = now.as_secs() / 60;
        let Some(place) = told.places.values_mut().find(|place| place.name == name) else { return };
        if place.minute != minute {
            (place.minute, place.calls) = (minute, 0);
        }
        place.calls += 1;
        let calls = place.calls;
        told.most_calls = told.most_calls.max(calls);
        if calls == MOST_CALLS {
            told.wrong(now, &format!("{name} made {calls} calls in one minute"));
        }
        told.overdue(now, name);
    }

    /// The lock as it lies in the bucket.
    pub fn lock(&self, id: &SandboxId) -> Option<Lock> {
        self.told.lock().unwrap().histories.get(id)?.lock.clone()
    }

    /// The machine on which its lease is held.
    pub fn holder(&self, id: &SandboxId) -> Option<usize> {
        let told = self.told.lock().unwrap();
        let lock = told.histories.get(id)?.lock.as_ref()?;
        let owner = lock.lease.as_ref()?.owner.as_str();
        told.places.iter().find(|(at, place)| **at < MACHINES && place.name == owner).map(|(at, _)| *at)
    }

    /// Whether it ever was put back to an older state.
    pub fn has_gone_back(&self, id: &SandboxId) -> bool {
        self.told.lock().unwrap().histories.get(id).is_some_and(|history| history.gone_back)
    }

    /// Where it executes now.
    pub fn running(&self, id: &SandboxId) -> Vec<usize> {
        let told = self.told.lock().unwrap();
        let here = |place: &Place| place.seen.get(id).is_some_and(|seen| seen.borrow().container == Container::Running);
        told.places.iter().filter(|(_, place)| here(place)).map(|(at, _)| *at).collect()
    }
}
