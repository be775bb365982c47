//! The bucket all instances share, and each instance's unreliable way to it.

use std::{
    collections::BTreeMap,
    ops::Bound,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use baton::storage::{
    layout,
    store::{Digest, Error, ObjectEntry, Page, PollResult, Precondition, ProgressFn, Result, Store, Version, Written},
};
use baton_protocol::id::{CheckpointId, SandboxId};
use bytes::Bytes;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

use crate::{
    kinds::ScenarioKind,
    life::Life,
    machine_clock::SetBack,
    oracle::Oracle,
    rng::Rng,
    runtime::Runtime,
    sim_mistakes::{SimMistake, frees, op_of, with_head},
    time::{Instant, sleep},
};

#[derive(Clone, Debug)]
struct Object {
    bytes: Bytes,
    version: u64,
    written: Instant,
    before: Option<Bytes>,
}

/// What the service holds. Every change is shown to the oracle as it happens.
#[derive(Debug)]
pub struct Bucket {
    objects: Mutex<BTreeMap<String, Object>>,
    count: AtomicU64,
    oracle: Arc<Oracle>,
    /// Requests on their way: they arrive even if whoever sent them has died.
    under_way: TaskTracker,
    start: Instant,
}

impl Bucket {
    pub fn new(oracle: Arc<Oracle>) -> Arc<Self> {
        let (start, count) = (Instant::now(), AtomicU64::new(0));
        Arc::new(Self { objects: Mutex::default(), count, oracle, under_way: TaskTracker::new(), start })
    }

    pub fn get(&self, key: &str) -> Option<Bytes> {
        self.objects.lock().unwrap().get(key).map(|object| object.bytes.clone())
    }

    /// As an operator writes: whatever is there.
    pub fn overwrite(&self, key: &str, bytes: Bytes) {
        self.put(key, bytes, &Precondition::Any, "operator").unwrap();
    }

    pub fn delete(&self, key: &str, condition: &Precondition, who: &str) -> Result<()> {
        let mut objects = self.objects.lock().unwrap();
        let Some(object) = objects.get(key) else { return Err(Error::NotFound(key.to_owned())) };
        if !condition.holds(Some(&version(object.version))) {
            return Err(Error::Conflict(key.to_owned()));
        }
        objects.remove(key);
        drop(objects);
        self.oracle.deleted(key, who);
        Ok(())
    }

    fn put(&self, key: &str, bytes: Bytes, condition: &Precondition, who: &str) -> Result<Written> {
        let mut objects = self.objects.lock().unwrap();
        let there = objects.get(key).cloned();
        if !condition.holds(there.as_ref().map(|object| version(object.version)).as_ref()) {
            return Err(Error::Conflict(key.to_owned()));
        }
        let number = self.count.fetch_add(1, Ordering::SeqCst) + 1;
        let before = there.as_ref().map(|object| object.bytes.clone());
        let object = Object { bytes: bytes.clone(), version: number, written: Instant::now(), before: before.clone() };
        objects.insert(key.to_owned(), object);
        drop(objects);
        self.oracle.written(key, before.as_ref(), &bytes, who, self);
        Ok(Written { version: version(number), updated: Some(self.wall()) })
    }

    pub fn newest_checkpoint(&self, id: &SandboxId) -> Option<CheckpointId> {
        let objects = self.objects.lock().unwrap();
        let all = objects.keys().filter_map(|key| layout::checkpoint_of(key));
        all.filter(|checkpoint| checkpoint.sandbox() == *id).max_by_key(CheckpointId::seq)
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_900_000_000) + self.start.elapsed()
    }

    fn written_lately(&self, key: &str) -> bool {
        let objects = self.objects.lock().unwrap();
        objects.get(key).is_some_and(|object| object.written.elapsed() < Duration::from_secs(1))
    }
}

fn version(number: u64) -> Version {
    Version(number.to_string())
}

/// Polls ask this all the time: nothing is written down for it.
fn is_version(known: &Version, number: u64) -> bool {
    known.0.parse() == Ok(number)
}

/// One process's way to the bucket.
#[derive(Debug)]
pub struct Way {
    pub bucket: Arc<Bucket>,
    pub life: Arc<Life>,
    /// The instance, as the oracle knows it.
    pub name: String,
    pub rng: Rng,
    pub runtime: Arc<Runtime>,
    pub mistake: Option<SimMistake>,
    /// Of the process's clock, by mistake.
    pub set_back: Option<Arc<SetBack>>,
}

/// What becomes of one request.
#[derive(Clone, Copy, Debug)]
struct Fate {
    /// Until it reaches the bucket; `None`: it never does.
    arrives: Option<Duration>,
    answer: Answer,
    answered: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    True,
    Busy,
    Silence,
    Twisted,
}

impl Way {
    fn strikes(&self, kind: ScenarioKind) -> bool {
        self.life.strikes(kind, &self.rng)
    }

    fn fate(&self) -> Fate {
        let latency = if self.strikes(ScenarioKind::Slow) { self.rng.millis(5, 8_000) } else { self.rng.millis(5, 60) };
        let latency = self.life.faults.at_most(latency);
        let (there, answered) = (Some(latency / 2), latency);
        if self.strikes(ScenarioKind::Cut) {
            let arrives = there.filter(|_| self.rng.falls(25));
            let answered = self.life.faults.at_most(self.rng.millis(5, 10_000));
            return Fate { arrives, answer: Answer::Silence, answered };
        }
        if self.strikes(ScenarioKind::Busy) {
            return Fate { arrives: None, answer: Answer::Busy, answered };
        }
        if self.strikes(ScenarioKind::Down) {
            return Fate { arrives: None, answer: Answer::Silence, answered };
        }
        if self.strikes(ScenarioKind::ReplyLost) {
            return Fate { arrives: there, answer: Answer::Silence, answered };
        }
        if self.strikes(ScenarioKind::ReplyTwisted) {
            return Fate { arrives: there, answer: Answer::Twisted, answered };
        }
        if self.strikes(ScenarioKind::Late) {
            let arrives = Some(self.life.faults.at_most(self.rng.millis(500, 30_000)));
            return Fate {
                arrives,
                answer: Answer::Silence,
                answered: self.life.faults.at_most(self.rng.seconds(1, 8)),
            };
        }
        Fate { arrives: there, answer: Answer::True, answered }
    }

    /// One step of the process, if it goes on at all.
    async fn step(&self) {
        self.life.step(|| self.runtime.kill()).await;
    }

    async fn leave(&self) {
        self.step().await;
        self.bucket.oracle.called(&self.name);
    }

    /// Rule 3: With a deadline that counts from the answer it is as if the clock were set back to when it was sent.
    fn heard(&self, key: &str, bytes: Option<&Bytes>) {
        if let Some(set_back) = &self.set_back
            && let Some(op) = bytes.and_then(|bytes| op_of(key, bytes, &self.name))
        {
            set_back.answered(&op, self.life.machine.now());
        }
    }

    /// A change on its way: it arrives by itself.
    async fn send<T: Send + 'static>(
        &self,
        key: &str,
        change: impl FnOnce(&Bucket) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.leave().await;
        let mut fate = self.fate();
        if self.strikes(ScenarioKind::ReadOnly) {
            (fate.arrives, fate.answer) = (None, Answer::Silence);
        }
        if self.bucket.written_lately(key) && self.strikes(ScenarioKind::Paced) {
            sleep(fate.answered).await;
            self.step().await;
            return Err(Error::RateLimited(key.to_owned()));
        }
        let (answer, mut answered) = oneshot::channel();
        if let Some(arrives) = fate.arrives {
            let bucket = self.bucket.clone();
            self.bucket.under_way.spawn(async move {
                sleep(arrives).await;
                let _ = answer.send(change(&bucket));
            });
        }
        sleep(fate.answered).await;
        self.step().await;
        match fate.answer {
            Answer::Busy => Err(Error::RateLimited(key.to_owned())),
            Answer::Silence => Err(silent(key)),
            Answer::Twisted => Err(Error::Conflict(key.to_owned())),
            Answer::True => answered.try_recv().unwrap_or_else(|_| Err(silent(key))),
        }
    }

    /// A question: it changes nothing. The answer is as old as its way was long, or fresh.
    async fn ask<T>(&self, key: &str, question: impl FnOnce(&Bucket) -> Result<T>) -> Result<T> {
        self.leave().await;
        let fate = self.fate();
        let found = if self.rng.falls(50) {
            let found = question(&self.bucket);
            sleep(fate.answered).await;
            found
        } else {
            sleep(fate.answered).await;
            question(&self.bucket)
        };
        self.step().await;
        match fate.answer {
            Answer::True | Answer::Twisted => found,
            Answer::Busy => Err(Error::RateLimited(key.to_owned())),
            Answer::Silence => Err(silent(key)),
        }
    }
}

fn silent(key: &str) -> Error {
    Error::Unavailable { key: key.to_owned(), why: "silence".to_owned() }
}

#[async_trait]
impl Store for Way {
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> Result<PollResult> {
        let mistake = self.mistake;
        let object = self.ask(key, |bucket| Ok(bucket.objects.lock().unwrap().get(key).cloned())).await?;
        let Some(object) = object else { return Ok(PollResult::Missing) };
        self.heard(key, Some(&object.bytes));
        if known.is_some_and(|known| is_version(known, object.version)) {
            return Ok(PollResult::Unchanged);
        }
        let bytes = match mistake {
            Some(mistake) => mistake.read(key, &object.bytes, object.before.as_ref(), &self.name, &self.rng),
            None => object.bytes,
        };
        Ok(PollResult::Changed(bytes, version(object.version)))
    }

    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> Result<Written> {
        let (name, at, mistake) = (self.name.clone(), key.to_owned(), self.mistake);
        let condition = if mistake == Some(SimMistake::NoConditions) { Precondition::Any } else { condition };
        let bytes = mistake.map_or_else(|| bytes.clone(), |mistake| mistake.write(key, &bytes, &self.bucket));
        let freed = if mistake == Some(SimMistake::RunsAfterRelease) { frees(key, &bytes) } else { None };
        if let Some(set_back) = &self.set_back
            && let Some(op) = op_of(key, &bytes, &self.name)
        {
            set_back.sent(op, self.life.machine.now());
        }
        let content = bytes.clone();
        let sent = self.send(key, move |bucket| {
            let written = bucket.put(&at, bytes.clone(), &condition, &name);
            if mistake == Some(SimMistake::CommitElsewhere)
                && matches!(written, Err(Error::Conflict(_)))
                && let Some(lock) = bucket.get(&at).and_then(|there| with_head(&there, &bytes))
            {
                let _ = bucket.put(&at, lock, &Precondition::Any, &name);
            }
            written
        });
        let sent = sent.await;
        self.heard(key, sent.is_ok().then_some(&content));
        if let Some(id) = freed.filter(|_| sent.is_err()) {
            self.runtime.run_again(&id).await;
        }
        sent
    }

    async fn delete(&self, key: &str, condition: Precondition) -> Result<()> {
        let (name, at) = (self.name.clone(), key.to_owned());
        self.send(key, move |bucket| bucket.delete(&at, &condition, &name)).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        let from = after.map_or(Bound::Included(prefix), Bound::Excluded);
        self.ask(prefix, |bucket| {
            let objects = bucket.objects.lock().unwrap();
            let found = objects.range::<str, _>((from, Bound::Unbounded)).filter(|(key, _)| key.starts_with(prefix));
            let entry = |(key, object): (&String, &Object)| ObjectEntry {
                key: key.clone(),
                version: version(object.version),
                size: object.bytes.len() as u64,
                updated: None,
            };
            Ok(Page { entries: found.map(entry).collect(), ..Page::default() })
        })
        .await
    }

    async fn upload(
        &self,
        key: &str,
        file: &Path,
        condition: Precondition,
        digest: &Digest,
        _: ProgressFn<'_>,
    ) -> Result<Written> {
        let bytes =
            std::fs::read(file).map_err(|error| Error::Other { key: key.to_owned(), why: error.to_string() })?;
        digest.verify(key, &Digest::of(&bytes))?;
        let (name, at, digest) = (self.name.clone(), key.to_owned(), digest.clone());
        if self.mistake == Some(SimMistake::UploadsNothing) && self.rng.falls(30) {
            return Ok(Written { version: version(0), updated: None });
        }
        self.send(key, move |bucket| match bucket.put(&at, bytes.into(), &condition, &name) {
            Err(Error::Conflict(key)) => match bucket.get(&key) {
                Some(there) if Digest::of(&there) == digest => Ok(Written { version: version(0), updated: None }),
                Some(_) | None => Err(Error::Conflict(key)),
            },
            written => written,
        })
        .await
    }

    async fn download(&self, key: &str, file: &Path, digest: &Digest, _: ProgressFn<'_>) -> Result<()> {
        let bytes = self.ask(key, |bucket| bucket.get(key).ok_or_else(|| Error::NotFound(key.to_owned()))).await?;
        digest.verify(key, &Digest::of(&bytes))?;
        std::fs::write(file, bytes).map_err(|error| Error::Other { key: key.to_owned(), why: error.to_string() })
    }

    async fn download_unverified(&self, key: &str, file: &Path, _: u64, _: ProgressFn<'_>) -> Result<Digest> {
        let bytes = self.ask(key, |bucket| bucket.get(key).ok_or_else(|| Error::NotFound(key.to_owned()))).await?;
        let digest = Digest::of(&bytes);
        let written = std::fs::write(file, bytes);
        written.map_err(|error| Error::Other { key: key.to_owned(), why: error.to_string() })?;
        Ok(digest)
    }
}
