//! Sees everything that happens and says at once what must not have happened.
//!
//! I1–I4 are the promises of `docs/lease.md`; each check names its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    sync::{Arc, Mutex},
    time::Duration,
};

use baton::{
    runtime::{Container, Seen},
    storage::{
        board::{Boot, Passing},
        layout, records,
    },
};
use baton_protocol::{
    id::{CheckpointId, SandboxId},
    lock::Lock,
    metadata::{DesiredState, Status},
};
use bytes::Bytes;
use tokio::{sync::watch, time::Instant};

use crate::{
    bucket::Bucket,
    clock::Machine,
    words::{brief, committed, last, lock_of, sandbox_of_checkpoint, short},
};

/// One instance's calls for its few sandboxes in one minute; contending costs four looks a second each.
pub const MOST_CALLS: u64 = 1_500;
/// A waiter's entry counts as fresh for this long on the fastest clock.
const FRESH: Duration = Duration::from_secs(48);

#[derive(Debug)]
struct Place {
    name: String,
    machine: Arc<Machine>,
    seen: BTreeMap<SandboxId, watch::Receiver<Seen>>,
    minute: u64,
    calls: u64,
}

#[derive(Debug, Default)]
struct Story {
    lock: Option<Lock>,
    /// As it was when somebody deleted it.
    former: Option<Lock>,
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
    ends_idle: bool,
    shown: BTreeMap<usize, Container>,
    /// Who acquired which epoch.
    owners: BTreeMap<u64, String>,
    status: Option<Status>,
}

#[derive(Debug, Default)]
struct Told {
    trace: Vec<String>,
    hash: u64,
    wrong: Option<String>,
    places: BTreeMap<usize, Place>,
    stories: BTreeMap<SandboxId, Story>,
    most_calls: u64,
    commits: u64,
    epochs: u64,
}

#[derive(Debug)]
pub struct Oracle {
    start: Instant,
    told: Mutex<Told>,
}

/// What one run was worth.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    pub wrong: Option<String>,
    pub trace: Vec<String>,
    pub hash: u64,
    pub most_calls: u64,
    pub commits: u64,
    pub epochs: u64,
}

impl Told {
    fn note(&mut self, at: Duration, line: &str) {
        let line = format!("{:>9.3}  {line}", at.as_secs_f64());
        // Who follows one board is woken in no fixed order: within a moment the order of lines does not count.
        let hash = line.bytes().fold(0, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        self.hash = self.hash.wrapping_add(hash);
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

    pub fn verdict(&self) -> Verdict {
        let mut told = self.told.lock().unwrap();
        Verdict {
            wrong: told.wrong.clone(),
            trace: std::mem::take(&mut told.trace),
            hash: told.hash,
            most_calls: told.most_calls,
            commits: told.commits,
            epochs: told.epochs,
        }
    }

    /// An instance begins on a machine; what was there before is over, unless it survives by mistake.
    pub fn begins(
        &self,
        at: usize,
        name: &str,
        machine: &Arc<Machine>,
        seen: BTreeMap<SandboxId, watch::Receiver<Seen>>,
    ) {
        let mut told = self.told.lock().unwrap();
        let place = Place { name: name.to_owned(), machine: machine.clone(), seen, minute: 0, calls: 0 };
        told.places.insert(at, place);
        told.note(self.start.elapsed(), &format!("{} begins", letter(at)));
    }

    pub fn ends(&self, at: usize) {
        let mut told = self.told.lock().unwrap();
        told.places.remove(&at);
        for story in told.stories.values_mut() {
            story.shown.remove(&at);
        }
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
        self.told.lock().unwrap().stories.insert(id.clone(), Story { ends_idle, ..Story::default() });
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
    }

    /// [I3] A container has changed somewhere.
    pub fn look(&self, id: &SandboxId) {
        let mut told = self.told.lock().unwrap();
        let now = self.start.elapsed();
        let states: Vec<(usize, Container, bool)> = told
            .places
            .iter()
            .filter_map(|(at, place)| {
                let seen = place.seen.get(id)?.borrow().container;
                let counts = !place.machine.is_still() && !place.machine.is_excused();
                Some((*at, seen, counts))
            })
            .collect();
        for (at, container, _) in &states {
            let name = told.places[at].name.clone();
            let story = told.stories.get_mut(id).expect("it is expected");
            // What another still has, frozen, counts for nothing.
            let owner = story.lock.as_ref().and_then(|lock| Some(lock.lease.as_ref()?.owner.as_str() == name));
            if *container == Container::Running && owner == Some(true) {
                (story.ran_on, story.ever_ran) = (true, true);
            }
            let before = story.shown.insert(*at, *container).unwrap_or(Container::Absent);
            // What its holder starts again after this starts from the head.
            if owner == Some(true) && matches!(container, Container::Stopped | Container::Absent) {
                story.behind |= story.ran_on && !story.chain.is_empty();
                story.gone_back |= story.ran_on;
            }
            if before != *container {
                told.note(now, &format!("{} {} is {container:?}", letter(*at), short(id)));
            }
        }
        let running: Vec<_> = states.iter().filter(|(_, c, counts)| *c == Container::Running && *counts).collect();
        if running.len() > 1 {
            let at: Vec<_> = running.iter().map(|(at, ..)| letter(*at)).collect();
            told.wrong(now, &format!("I3: {} executes on {}", short(id), at.join(" and ")));
        }
    }

    /// What a session was told.
    pub fn heard(&self, at: usize, name: &str, id: &SandboxId, passing: &Passing) {
        let mut told = self.told.lock().unwrap();
        let now = self.start.elapsed();
        told.note(now, &format!("{} {} tells {}", letter(at), short(id), brief(passing)));
        let story = told.stories.get(id).expect("it is expected");
        let owns = story.lock.as_ref().and_then(|lock| lock.lease.as_ref()).is_some_and(|l| l.owner.as_str() == name);
        let complaint = match passing {
            Passing::Left { checkpoint_id: Some(checkpoint), .. } if !story.chain.contains(checkpoint) => {
                Some(format!("I1: {checkpoint} was told and never committed"))
            }
            Passing::Running { boot: Boot::Fresh } if story.ran_before || !story.chain.is_empty() => {
                Some(format!("{} started over although it had run", short(id)))
            }
            Passing::Running { boot: Boot::Restored { checkpoint_id, rolled_back, .. } } if owns => {
                if story.chain.last() != Some(checkpoint_id) {
                    Some(format!("I1: {} was restored from {checkpoint_id}, which is not its head", short(id)))
                } else if story.behind && !rolled_back {
                    Some(format!("{} went back in time and nobody was told", short(id)))
                } else {
                    None
                }
            }
            Passing::Left { .. }
            | Passing::Running { .. }
            | Passing::Acquiring
            | Passing::Acquired
            | Passing::Failed { .. }
            | Passing::ReleaseRequested
            | Passing::Checkpointing { .. }
            | Passing::CheckpointFailed { .. }
            | Passing::Fenced { .. }
            | Passing::Unfenced
            | Passing::LeaseLost { .. }
            | Passing::Progress { .. } => None,
        };
        if let Some(complaint) = complaint {
            told.wrong(now, &complaint);
        }
    }

    pub fn deleted(&self, key: &str, who: &str) {
        let mut told = self.told.lock().unwrap();
        let now = self.start.elapsed();
        let name = told.name(who);
        told.note(now, &format!("{name} deletes {}", last(key)));
        if who == "operator" {
            if let Some(story) = lock_of(key).and_then(|id| told.stories.get_mut(&id)) {
                story.lock_gone = true;
                story.former = story.lock.take();
            }
            return;
        }
        let id = layout::sandbox_of(key).or_else(|| sandbox_of_checkpoint(key));
        let story = id.and_then(|id| told.stories.get(&id));
        let purging = story.is_some_and(|story| {
            story.may_be_purged && story.lock.as_ref().is_some_and(|lock| lock.purging || lock.purged)
        });
        // What no head names may go, unless it may still be committed: by this epoch, with a number to come.
        let outdated = layout::checkpoint_of(key).is_some_and(|checkpoint| {
            // A lock that an operator deletes while its holder tidies up says what it said.
            story.and_then(|story| story.lock.as_ref().or(story.former.as_ref())).is_some_and(|lock| {
                let named = [&lock.head, &lock.prev_head].into_iter().flatten();
                let over = lock.head.as_ref().is_some_and(|head| checkpoint.seq() <= head.seq);
                (checkpoint.epoch() < lock.epoch || over)
                    && named.into_iter().all(|head| head.checkpoint_id != checkpoint)
            })
        });
        if !purging && !outdated {
            told.wrong(now, &format!("I6: {name} deletes {key}, and nobody wanted it deleted"));
        }
    }

    pub fn written(&self, key: &str, before: Option<&Bytes>, bytes: &Bytes, who: &str, bucket: &Bucket) {
        let mut told = self.told.lock().unwrap();
        let now = self.start.elapsed();
        if let Some(id) = lock_of(key) {
            let Ok(lock) = serde_json::from_slice::<Lock>(bytes) else {
                let line = format!("{} writes garbage over the lock of {}", told.name(who), short(&id));
                told.note(now, &line);
                if who != "operator" {
                    told.wrong(now, "a lock was written that is none");
                }
                return;
            };
            let line = format!("{} writes {} {}", told.name(who), short(&id), picture(&lock, &told));
            told.note(now, &line);
            for complaint in self.judge(&mut told, &id, &lock, who, bucket) {
                told.wrong(now, &complaint);
            }
        } else if let Some(id) = layout::sandbox_of(key) {
            let metadata = records::parse(&id, bytes);
            let line = match &metadata {
                Ok(metadata) => format!(
                    "{} wants {} {:?} on {}, status {:?} {}",
                    told.name(who),
                    short(&id),
                    metadata.spec.desired_state,
                    metadata.spec.placement.as_ref().map_or("none".to_owned(), |at| told.name(at.as_str())),
                    metadata.status.phase,
                    metadata.status.reason
                ),
                Err(error) => format!("{} writes garbage: {error}", told.name(who)),
            };
            told.note(now, &line);
            let story = told.stories.get_mut(&id).expect("it is expected");
            if let Ok(metadata) = metadata {
                let status = story.status.replace(metadata.status.clone());
                let epoch = metadata.status.epoch;
                if status.is_some_and(|status| status != metadata.status)
                    && who != "operator"
                    && story.owners.get(&epoch).is_none_or(|owner| owner != who)
                {
                    told.wrong(now, "somebody who did not hold that epoch wrote the status");
                    return;
                }
                story.may_be_purged |= metadata.spec.desired_state == DesiredState::Deleted;
                let committed = |path: &str| story.chain.iter().any(|at| layout::checkpoint_prefix(at) == path);
                if metadata.latest_sandbox_checkpoint.is_some_and(|latest| !committed(&latest.path)) {
                    told.wrong(now, "the status names a checkpoint that is not committed");
                }
            }
        } else if before.is_some_and(|before| before != bytes) {
            told.wrong(now, &format!("{key} is immutable and was written again"));
        }
    }

    /// What is wrong with a write of a lock.
    fn judge(&self, told: &mut Told, id: &SandboxId, new: &Lock, who: &str, bucket: &Bucket) -> Vec<String> {
        let mut wrong = Vec::new();
        let now = Instant::now();
        let running: BTreeSet<String> = told
            .places
            .values()
            .filter(|place| !place.machine.is_still() && !place.machine.is_excused())
            .filter(|place| place.seen.get(id).is_some_and(|seen| seen.borrow().container == Container::Running))
            .map(|place| place.name.clone())
            .collect();
        let story = told.stories.get_mut(id).expect("it is expected");
        let Some(old) = story.lock.replace(new.clone()) else {
            if story.lock_gone {
                wrong.push("[14] a lock that was gone was made anew".to_owned());
            }
            return wrong;
        };
        let owner = |lock: &Lock| lock.lease.as_ref().map(|lease| lease.owner.as_str().to_owned());
        if new.epoch < old.epoch || new.epoch > old.epoch + 1 {
            wrong.push(format!("I1: the epoch went from {} to {}", old.epoch, new.epoch));
        } else if new.epoch == old.epoch + 1 {
            told.epochs += 1;
            story.owners.insert(new.epoch, who.to_owned());
            (story.behind, story.ran_before) = (story.ran_on && !story.chain.is_empty(), story.ever_ran);
            story.gone_back |= story.ran_on;
            if owner(new).as_deref() != Some(who) || new.head != old.head || old.purged {
                wrong.push("[9] an acquisition that is none".to_owned());
            }
            let fresh = story.waiter_since.is_some_and(|since| now - since < FRESH);
            if old.waiter.as_ref().is_some_and(|waiter| waiter.instance.as_str() != who) && fresh {
                wrong.push("I4: acquired past a fresh waiter".to_owned());
            }
        } else if owner(new).is_some() && owner(new) != owner(&old) {
            wrong.push("I2: another owner in the same epoch".to_owned());
        } else if new.lease != old.lease && owner(&old).as_deref() != Some(who) {
            wrong.push("[2] somebody wrote another's lease".to_owned());
        }
        if let Some(former) = owner(&old).filter(|former| owner(new).as_ref() != Some(former))
            && running.contains(&former)
        {
            wrong.push(format!("[4] {} lost or freed the lease and still executes", &former[..9]));
        }
        if new.head != old.head && !new.purged {
            told.commits += 1;
            wrong.extend(committed(&old, new, who, bucket));
            if let Some(head) = &new.head {
                story.chain.push(head.checkpoint_id.clone());
                // What keeps the lease runs on.
                story.ran_on = new.lease.is_some();
            }
        }
        if (new.purging || new.purged) && !old.purging && !old.purged {
            story.may_be_purged |= story.ends_idle && old.head.is_none();
            if !story.may_be_purged {
                wrong.push("I6: a purge began, and nobody wanted it".to_owned());
            }
        }
        let beat = |lock: &Lock| lock.waiter.as_ref().map(|waiter| (waiter.op.clone(), waiter.beat));
        if beat(new) != beat(&old) {
            story.waiter_since = new.waiter.as_ref().map(|_| now);
        }
        wrong
    }

    /// The lock as it lies in the bucket.
    pub fn lock(&self, id: &SandboxId) -> Option<Lock> {
        self.told.lock().unwrap().stories.get(id)?.lock.clone()
    }

    /// Whether it ever was put back to an older state.
    pub fn has_gone_back(&self, id: &SandboxId) -> bool {
        self.told.lock().unwrap().stories.get(id).is_some_and(|story| story.gone_back)
    }

    /// Where it executes now.
    pub fn running(&self, id: &SandboxId) -> Vec<usize> {
        let told = self.told.lock().unwrap();
        let here = |place: &Place| place.seen.get(id).is_some_and(|seen| seen.borrow().container == Container::Running);
        told.places.iter().filter(|(_, place)| here(place)).map(|(at, _)| *at).collect()
    }
}

fn picture(lock: &Lock, told: &Told) -> String {
    let mut text = format!("epoch {}", lock.epoch);
    match &lock.lease {
        Some(lease) => {
            let _ = write!(text, " held by {} renew {}", told.name(lease.owner.as_str()), lease.renew);
        }
        None => text.push_str(" free"),
    }
    if let Some(waiter) = &lock.waiter {
        let _ = write!(text, ", {} waits ({})", told.name(waiter.instance.as_str()), waiter.beat);
    }
    if let Some(head) = &lock.head {
        let _ = write!(text, ", head {}", head.seq);
    }
    for (so, word) in [(lock.purging, ", purging"), (lock.purged, ", purged")] {
        if so {
            text.push_str(word);
        }
    }
    text
}
