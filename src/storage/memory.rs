//! The in-memory store of ephemeral sandboxes and of tests.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Write,
    ops::Bound,
    path::Path,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;

use super::{
    local_files::{self, Wanted},
    store::{
        Digest, Error, ObjectEntry, Page, PollResult, Precondition, ProgressFn, Result, Store, Version, Written,
        check_key, check_small,
    },
};
use crate::{clock::SharedClock, fair_watch::FairWatch};

const PAGE: usize = 1000;
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct Memory {
    clock: SharedClock,
    page: usize,
    objects: Mutex<BTreeMap<String, Object>>,
    /// The number of writes and deletions so far: the source of versions, and the value that watchers wait on.
    count: FairWatch<u64>,
}

#[derive(Clone, Debug)]
struct Object {
    bytes: Bytes,
    version: Version,
    updated: SystemTime,
}

impl Memory {
    pub fn new(clock: SharedClock) -> Self {
        Self { clock, page: PAGE, objects: Mutex::default(), count: FairWatch::new(0) }
    }

    /// Lists in pages of `page` entries.
    pub fn with_page(mut self, page: usize) -> Self {
        self.page = page;
        self
    }

    /// Must be called with the objects locked, so that versions are unique.
    fn next(&self) -> u64 {
        let next = self.count.read() + 1;
        self.count.post(next);
        next
    }

    fn version(&self, key: &str) -> Option<Version> {
        self.objects.lock().get(key).map(|object| object.version.clone())
    }

    /// The existing object, if it has the same content.
    fn same(&self, key: &str, digest: &Digest) -> Result<Written> {
        let there = self.objects.lock().get(key).cloned();
        let same = there.filter(|object| Digest::of(&object.bytes) == *digest);
        let same = same.ok_or_else(|| Error::Conflict(key.to_owned()))?;
        Ok(Written { version: same.version, updated: None })
    }

    fn write(&self, key: &str, bytes: Bytes, condition: &Precondition) -> Result<Written> {
        let mut objects = self.objects.lock();
        if !condition.holds(objects.get(key).map(|object| &object.version)) {
            return Err(Error::Conflict(key.to_owned()));
        }
        let version = Version(self.next().to_string());
        let updated = self.clock.wall();
        objects.insert(key.to_owned(), Object { bytes, version: version.clone(), updated });
        Ok(Written { version, updated: Some(updated) })
    }
}

impl Memory {
    async fn bring(&self, key: &str, file: &Path, wanted: Wanted, progress: ProgressFn<'_>) -> Result<Digest> {
        check_key(key)?;
        let Some(bytes) = self.objects.lock().get(key).map(|object| object.bytes.clone()) else {
            return Err(Error::NotFound(key.to_owned()));
        };
        let (name, target) = (key.to_owned(), file.to_owned());
        local_files::run_blocking(&self.clock, key, STALL_TIMEOUT, progress, move |reporter| {
            let mut draft = local_files::draft(&name, &target)?;
            let mut sum = local_files::Sum::default();
            for chunk in bytes.chunks(local_files::CHUNK) {
                reporter.check_cancelled(&name)?;
                sum.add(chunk);
                draft.write_all(chunk).map_err(|error| local_files::local_error(&name, &error))?;
                reporter.report(sum.size());
            }
            local_files::verify_and_rename(&name, draft, &target, &wanted, sum.finish(), reporter)
        })
        .await
    }
}

#[async_trait]
impl Store for Memory {
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> Result<PollResult> {
        check_key(key)?;
        let Some(Object { bytes, version, .. }) = self.objects.lock().get(key).cloned() else {
            return Ok(PollResult::Missing);
        };
        if known == Some(&version) {
            return Ok(PollResult::Unchanged);
        }
        check_small(key, bytes.len() as u64)?;
        Ok(PollResult::Changed(bytes, version))
    }

    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> Result<Written> {
        check_key(key)?;
        check_small(key, bytes.len() as u64)?;
        self.write(key, bytes, &condition)
    }

    async fn delete(&self, key: &str, condition: Precondition) -> Result<()> {
        check_key(key)?;
        let mut objects = self.objects.lock();
        let Some(object) = objects.get(key) else { return Err(Error::NotFound(key.to_owned())) };
        if !condition.holds(Some(&object.version)) {
            return Err(Error::Conflict(key.to_owned()));
        }
        objects.remove(key);
        self.next();
        Ok(())
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        let objects = self.objects.lock();
        let from = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            Some(_) | None => Bound::Included(prefix),
        };
        let mut found = objects
            .range::<str, _>((from, Bound::Unbounded))
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(key, object)| ObjectEntry {
                key: key.clone(),
                version: object.version.clone(),
                size: object.bytes.len() as u64,
                updated: Some(object.updated),
            });
        let entries = found.by_ref().take(self.page).collect();
        Ok(Page { entries, more: found.next().is_some(), ..Page::default() })
    }

    async fn upload(
        &self,
        key: &str,
        file: &Path,
        condition: Precondition,
        digest: &Digest,
        progress: ProgressFn<'_>,
    ) -> Result<Written> {
        check_key(key)?;
        let (name, path, digest) = (key.to_owned(), file.to_owned(), digest.clone());
        let wanted = digest.clone();
        let bytes = local_files::run_blocking(&self.clock, key, STALL_TIMEOUT, progress, move |reporter| {
            let mut bytes = Vec::new();
            let mut source = File::open(path).map_err(|error| local_files::local_error(&name, &error))?;
            digest.verify(&name, &local_files::copy(&name, &mut source, &mut bytes, reporter)?)?;
            Ok(Bytes::from(bytes))
        })
        .await?;
        match self.write(key, bytes, &condition) {
            Err(Error::Conflict(_)) if condition == Precondition::Absent => self.same(key, &wanted),
            written => written,
        }
    }

    async fn download(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()> {
        self.bring(key, file, Wanted::This(digest.clone()), progress).await.map(drop)
    }

    async fn download_unverified(&self, key: &str, file: &Path, most: u64, progress: ProgressFn<'_>) -> Result<Digest> {
        self.bring(key, file, Wanted::AtMost(most), progress).await
    }

    async fn changed(&self, key: &str) {
        let known = self.version(key);
        loop {
            let count = self.count.read();
            if self.version(key) != known {
                return;
            }
            self.count.until(|now| *now != count).await;
        }
    }
}
