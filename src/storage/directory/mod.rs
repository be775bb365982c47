//! A store in a directory of a local file system, shared by any number of processes of one machine.
//!
//! ```text
//!  <root>/<key>                     the object: plain bytes, so that an editor can change it
//!  <root>/.baton/tokens/<xx>/<hash> a random token, new with every write of ours to that key
//!  <root>/.baton/locks/<xx>         held (flock) from check to rename; never deleted
//!  <root>/.baton/drafts/            files not yet whole
//! ```
//!
//! The version of an object is the hash of its content plus its token. Our own writes change the token, so content that
//! reappears still has a new version; an editor's write changes the hash. The token is written before the object is
//! renamed into place: a reader without the lock may then see old content under a new token, which no compare-and-set
//! accepts unless that very content returns.

pub(super) mod directory_listing;
pub(super) mod directory_tree;
mod directory_watch;

use std::{fs::File, io::Read, io::Write, path::Path, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::Semaphore;

use self::{directory_tree::Tree, directory_watch::Watch};
use super::{
    local_files::{self, Wanted},
    store::{
        Digest, Error, Page, PollResult, Precondition, Priority, ProgressFn, Result, Store, Version, Written,
        check_key, check_small,
    },
};
use crate::clock::{Moment, SharedClock};

/// A sync may take a while; a disk that takes longer counts as unavailable.
const SYNC_TIMEOUT: Duration = Duration::from_secs(10);
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
const PAGE: usize = 1000;
/// The maximum number of concurrent calls, so that a hanging disk does not exhaust the shared thread pool.
const MAX_CONCURRENT_CALLS: usize = 64;

#[derive(Debug)]
pub struct Directory {
    clock: SharedClock,
    tree: Arc<Tree>,
    watch: Arc<Watch>,
    calls: Arc<Semaphore>,
    page: usize,
    patience: Duration,
}

impl Directory {
    /// Touches nothing: problems with the directory are reported on first use.
    pub fn new(root: impl Into<PathBuf>, clock: SharedClock) -> Self {
        let root = root.into();
        Self {
            watch: Arc::new(Watch::new(root.clone())),
            tree: Arc::new(Tree::new(root, clock.clone())),
            clock,
            calls: Arc::new(Semaphore::new(MAX_CONCURRENT_CALLS)),
            page: PAGE,
            patience: SYNC_TIMEOUT,
        }
    }

    /// Lists in pages of `page` entries.
    pub fn with_page(mut self, page: usize) -> Self {
        self.page = page;
        self
    }

    /// Sets the timeout of a call on a small object.
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    pub fn root(&self) -> &Path {
        self.tree.root()
    }

    fn deadline(&self) -> Moment {
        self.clock.now() + self.patience
    }

    /// Runs blocking work on the tree, off the event loop and with a timeout. It runs to its end even after the
    /// timeout.
    async fn call<T: Send + 'static>(
        &self,
        key: &str,
        work: impl FnOnce(&Tree) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (calls, tree) = (self.calls.clone(), self.tree.clone());
        let unavailable = |why: String| Error::Unavailable { key: key.to_owned(), why };
        let work = async {
            let permit = calls.acquire_owned().await.map_err(|error| unavailable(error.to_string()))?;
            let task = tokio::task::spawn_blocking(move || {
                let done = work(&tree);
                drop(permit);
                done
            });
            task.await.map_err(|error| unavailable(error.to_string()))?
        };
        self.clock.timeout(self.patience, work).await.map_err(|elapsed| unavailable(elapsed.to_string()))?
    }

    /// Runs blocking work without a limit as long as it makes progress.
    async fn transfer<T: Send + 'static>(
        &self,
        key: &str,
        progress: ProgressFn<'_>,
        work: impl FnOnce(&Tree, &local_files::Reporter) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let tree = self.tree.clone();
        local_files::run_blocking(&self.clock, key, STALL_TIMEOUT, progress, move |reporter| work(&tree, reporter))
            .await
    }
}

impl Directory {
    async fn bring(&self, key: &str, file: &Path, wanted: Wanted, progress: ProgressFn<'_>) -> Result<Digest> {
        check_key(key)?;
        let (name, target) = (key.to_owned(), file.to_owned());
        self.transfer(key, progress, move |tree, reporter| {
            let source = tree.open(&name)?;
            let mut draft = local_files::draft(&name, &target)?;
            let mut source = source.take(wanted.most().saturating_add(1));
            let found = local_files::copy(&name, &mut source, &mut draft, reporter)?;
            local_files::verify_and_rename(&name, draft, &target, &wanted, found, reporter)
        })
        .await
    }
}

#[async_trait]
impl Store for Directory {
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> Result<PollResult> {
        check_key(key)?;
        let (name, known, watch) = (key.to_owned(), known.cloned(), self.watch.clone());
        self.call(key, move |tree| {
            watch.looked(&name);
            let Some(seen) = tree.read(&name)? else { return Ok(PollResult::Missing) };
            if known.as_ref() == Some(&seen.version) {
                return Ok(PollResult::Unchanged);
            }
            check_small(&name, seen.size)?;
            Ok(PollResult::Changed(seen.bytes.into(), seen.version))
        })
        .await
    }

    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> Result<Written> {
        self.put_as(key, bytes, condition, Priority::Commit).await
    }

    async fn put_as(&self, key: &str, bytes: Bytes, condition: Precondition, urgency: Priority) -> Result<Written> {
        check_key(key)?;
        check_small(key, bytes.len() as u64)?;
        let (name, deadline) = (key.to_owned(), self.deadline());
        self.call(key, move |tree| {
            let mut draft = tree.draft(&name)?;
            draft.write_all(&bytes).map_err(|error| local_files::local_error(&name, &error))?;
            directory_tree::sync(&name, draft.as_file())?;
            let written = tree.publish(&name, draft, &condition, directory_tree::mark(&bytes), deadline)?;
            if urgency.lasts() {
                tree.seal(&name)?;
            }
            Ok(written)
        })
        .await
    }

    async fn delete(&self, key: &str, condition: Precondition) -> Result<()> {
        check_key(key)?;
        let (name, deadline) = (key.to_owned(), self.deadline());
        self.call(key, move |tree| tree.remove(&name, &condition, deadline)).await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        let (prefix, after, page) = (prefix.to_owned(), after.map(str::to_owned), self.page);
        let name = prefix.clone();
        self.call(&name, move |tree| {
            directory_listing::page(tree.root(), &prefix, after.as_deref(), page, &|key| tree.read(key))
        })
        .await
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
        let (clock, patience) = (self.clock.clone(), self.patience);
        self.transfer(key, progress, move |tree, reporter| {
            let mut source = File::open(path).map_err(|error| local_files::local_error(&name, &error))?;
            let mut draft = tree.draft(&name)?;
            digest.verify(&name, &local_files::copy(&name, &mut source, &mut draft, reporter)?)?;
            reporter.check_cancelled(&name)?;
            directory_tree::sync(&name, draft.as_file())?;
            match tree.publish(&name, draft, &condition, directory_tree::mark_of(&digest), clock.now() + patience) {
                Err(Error::Conflict(_)) if condition == Precondition::Absent => same(tree, &name, &digest, reporter),
                published => tree.seal(&name).and(published),
            }
        })
        .await
    }

    async fn upload_owned(&self, key: &str, file: &Path, progress: ProgressFn<'_>) -> Option<Result<Digest>> {
        if let Err(error) = check_key(key) {
            return Some(Err(error));
        }
        let (name, path) = (key.to_owned(), file.to_owned());
        let (clock, patience) = (self.clock.clone(), self.patience);
        let taken = self.transfer(key, progress, move |tree, reporter| {
            let (draft, digest) = tree.adopt(&name, &path, reporter)?;
            reporter.check_cancelled(&name)?;
            match tree.publish(
                &name,
                draft,
                &Precondition::Absent,
                directory_tree::mark_of(&digest),
                clock.now() + patience,
            ) {
                Err(Error::Conflict(_)) => same(tree, &name, &digest, reporter).map(|_| digest),
                published => published.map(|_| digest),
            }
        });
        Some(taken.await)
    }

    async fn download_linked(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()> {
        check_key(key)?;
        let (name, target, wanted) = (key.to_owned(), file.to_owned(), Wanted::This(digest.clone()));
        let lent = self.transfer(key, progress, move |tree, reporter| {
            let Some(mut draft) = tree.link(&name, &target)? else { return Ok(false) };
            let found = local_files::copy(&name, draft.as_file_mut(), std::io::sink(), reporter)?;
            local_files::verify_and_rename(&name, draft, &target, &wanted, found, reporter).map(|_| true)
        });
        if lent.await? { Ok(()) } else { self.download(key, file, digest, progress).await }
    }

    async fn download(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()> {
        self.bring(key, file, Wanted::This(digest.clone()), progress).await.map(drop)
    }

    async fn download_unverified(&self, key: &str, file: &Path, most: u64, progress: ProgressFn<'_>) -> Result<Digest> {
        self.bring(key, file, Wanted::AtMost(most), progress).await
    }

    async fn changed(&self, key: &str) {
        let (name, watch) = (key.to_owned(), self.watch.clone());
        let watching = self.call(key, move |_| check_key(&name).map(|()| watch.watch(&name))).await;
        match watching {
            Ok(Some(watching)) => watching.changed().await,
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }
}

/// The existing object, if it has the same content.
fn same(tree: &Tree, key: &str, digest: &Digest, reporter: &local_files::Reporter) -> Result<Written> {
    let conflict = || Error::Conflict(key.to_owned());
    let seen = tree.read(key)?.ok_or_else(conflict)?;
    if seen.size != digest.size || local_files::copy(key, &mut tree.open(key)?, std::io::sink(), reporter)? != *digest {
        return Err(conflict());
    }
    Ok(Written { version: seen.version, updated: None })
}
