//! A store that fails on demand, around any other.

use std::{
    collections::VecDeque,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use baton::{
    clock::SharedClock,
    storage::store::{Digest, Error, Page, PollResult, Precondition, ProgressFn, Result, Store, Version, Written},
};
use bytes::Bytes;

/// What happens to the next call of a verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails and nothing was done.
    Refused,
    /// It was done, and the answer was lost.
    AnswerLost,
    /// It was done, and the answer says that the condition did not hold.
    AnswerTwisted,
    /// It never answers, and nothing was done.
    Hangs,
    /// It never answers; it is done when `deliver` is called.
    Late,
    /// It was done, and never answers.
    Silent,
}

#[derive(Debug)]
pub struct Stage {
    inner: Arc<dyn Store>,
    puts: Mutex<VecDeque<Fault>>,
    polls: Mutex<VecDeque<Fault>>,
    lock_puts: Mutex<VecDeque<Fault>>,
    late: Mutex<Vec<(String, Bytes, Precondition)>>,
    named: Mutex<Vec<(String, Fault)>>,
    hung: Mutex<Option<String>>,
    ahead: Mutex<Duration>,
    cut: AtomicBool,
    brought: Mutex<Vec<String>>,
    crawl: Mutex<Option<SharedClock>>,
    calls: Mutex<Calls>,
}

/// Calls as they are billed: a listing counts as a write, a deletion costs nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    pub writes: u64,
    pub reads: u64,
}

impl Stage {
    pub fn new(inner: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            puts: Mutex::default(),
            polls: Mutex::default(),
            lock_puts: Mutex::default(),
            late: Mutex::default(),
            named: Mutex::default(),
            hung: Mutex::default(),
            ahead: Mutex::default(),
            cut: AtomicBool::new(false),
            brought: Mutex::default(),
            crawl: Mutex::default(),
            calls: Mutex::default(),
        })
    }

    /// What was asked of it so far.
    pub fn calls(&self) -> Calls {
        *self.calls.lock().unwrap()
    }

    fn wrote(&self) {
        self.calls.lock().unwrap().writes += 1;
    }

    fn has_read(&self) {
        self.calls.lock().unwrap().reads += 1;
    }

    pub fn next_put(&self, fault: Fault) {
        self.puts.lock().unwrap().push_back(fault);
    }

    /// As `next_put`, for writes of a lock alone.
    pub fn next_lock_put(&self, fault: Fault) {
        self.lock_puts.lock().unwrap().push_back(fault);
    }

    /// Nothing that was to go wrong does.
    pub fn clear(&self) {
        for faults in [&self.puts, &self.polls, &self.lock_puts] {
            faults.lock().unwrap().clear();
        }
    }

    /// As `next_put`, for writes of objects whose name ends with this.
    pub fn next_put_of(&self, name: &str, fault: Fault) {
        self.named.lock().unwrap().push((name.to_owned(), fault));
    }

    /// Every call for an object whose name contains this hangs.
    pub fn hang(&self, name: &str) {
        *self.hung.lock().unwrap() = Some(name.to_owned());
    }

    /// From now on every file takes three seconds.
    pub fn crawl(&self, clock: &SharedClock) {
        *self.crawl.lock().unwrap() = Some(clock.clone());
    }

    async fn crawls(&self, size: u64, progress: ProgressFn<'_>) {
        let clock = self.crawl.lock().unwrap().clone();
        let Some(clock) = clock else { return };
        for quarter in 1..4 {
            clock.sleep(Duration::from_secs(1)).await;
            progress(size * quarter / 4);
        }
    }

    /// From now on the store's own clock shows this much more.
    pub fn set_ahead(&self, ahead: Duration) {
        *self.ahead.lock().unwrap() = ahead;
    }

    /// The keys of all files that were fetched from it, one for each time, in order.
    pub fn brought(&self) -> Vec<String> {
        let mut brought = self.brought.lock().unwrap().clone();
        brought.sort();
        brought
    }

    async fn hangs(&self, key: &str) {
        if self.hung.lock().unwrap().as_ref().is_some_and(|hung| key.contains(hung)) {
            std::future::pending::<()>().await;
        }
    }

    fn dated(&self, written: Result<Written>) -> Result<Written> {
        let ahead = *self.ahead.lock().unwrap();
        written.map(|written| Written { updated: written.updated.map(|updated| updated + ahead), ..written })
    }

    /// Nothing reaches the store any more, or everything does again.
    pub fn cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::SeqCst);
    }

    fn reach(&self, key: &str) -> Result<()> {
        if self.cut.load(Ordering::SeqCst) { Err(lost(key)) } else { Ok(()) }
    }

    pub fn next_poll(&self, fault: Fault) {
        self.polls.lock().unwrap().push_back(fault);
    }

    /// The late writes reach the store now; how many of them were applied.
    pub async fn deliver(&self) -> usize {
        let late = std::mem::take(&mut *self.late.lock().unwrap());
        let mut applied = 0;
        for (key, bytes, condition) in late {
            applied += usize::from(self.inner.put(&key, bytes, condition).await.is_ok());
        }
        applied
    }
}

fn lost(key: &str) -> Error {
    Error::Unavailable { key: key.to_owned(), why: "on stage".to_owned() }
}

#[async_trait]
impl Store for Stage {
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> Result<PollResult> {
        self.has_read();
        self.reach(key)?;
        self.hangs(key).await;
        let fault = self.polls.lock().unwrap().pop_front();
        match fault {
            None => self.inner.get_if_changed(key, known).await,
            Some(Fault::Hangs | Fault::Late | Fault::Silent) => std::future::pending().await,
            Some(Fault::Refused | Fault::AnswerLost | Fault::AnswerTwisted) => Err(lost(key)),
        }
    }

    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> Result<Written> {
        self.wrote();
        self.reach(key)?;
        self.hangs(key).await;
        let named = {
            let mut named = self.named.lock().unwrap();
            let at = named.iter().position(|(name, _)| key.ends_with(name));
            at.map(|at| named.remove(at).1)
        };
        let queue = if key.ends_with("lock.json") && !self.lock_puts.lock().unwrap().is_empty() {
            &self.lock_puts
        } else {
            &self.puts
        };
        let fault = named.or_else(|| queue.lock().unwrap().pop_front());
        match fault {
            None => self.dated(self.inner.put(key, bytes, condition).await),
            Some(Fault::Silent) => {
                self.inner.put(key, bytes, condition).await?;
                std::future::pending().await
            }
            Some(Fault::Refused) => Err(lost(key)),
            Some(Fault::AnswerLost) => {
                self.inner.put(key, bytes, condition).await?;
                Err(lost(key))
            }
            Some(Fault::AnswerTwisted) => {
                self.inner.put(key, bytes, condition).await?;
                Err(Error::Conflict(key.to_owned()))
            }
            Some(Fault::Hangs) => std::future::pending().await,
            Some(Fault::Late) => {
                self.late.lock().unwrap().push((key.to_owned(), bytes, condition));
                std::future::pending().await
            }
        }
    }

    async fn delete(&self, key: &str, condition: Precondition) -> Result<()> {
        self.reach(key)?;
        self.inner.delete(key, condition).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        self.wrote();
        self.reach(prefix)?;
        self.inner.list(prefix, after).await
    }

    async fn upload(
        &self,
        key: &str,
        file: &Path,
        condition: Precondition,
        digest: &Digest,
        progress: ProgressFn<'_>,
    ) -> Result<Written> {
        self.wrote();
        self.reach(key)?;
        self.hangs(key).await;
        self.crawls(digest.size, progress).await;
        self.inner.upload(key, file, condition, digest, progress).await
    }

    async fn download(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()> {
        self.has_read();
        self.reach(key)?;
        self.brought.lock().unwrap().push(key.to_owned());
        self.crawls(digest.size, progress).await;
        self.inner.download(key, file, digest, progress).await
    }

    async fn download_unverified(&self, key: &str, file: &Path, most: u64, progress: ProgressFn<'_>) -> Result<Digest> {
        self.has_read();
        self.reach(key)?;
        self.brought.lock().unwrap().push(key.to_owned());
        self.inner.download_unverified(key, file, most, progress).await
    }
}
