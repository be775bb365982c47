//! Extracted root file systems, kept by digest and shared by the sandboxes of all servers that use this
//! directory. Trees in use are held and stay; the others are evicted, least recently used first, when the total
//! exceeds the maximum size.
//!
//! ```text
//!   DIGEST.lock      locked shared by users, exclusively to make or drop the tree; never deleted
//!   DIGEST/rootfs    the tree; appears under this name atomically
//!   DIGEST/about     what it is made of and how large it is
//!   DIGEST.making    incomplete; the next exclusive holder of the lock wipes it
//! ```

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use baton_protocol::id::Sha256Name;
use rustix::fs::{FlockOperation, Timespec, Timestamps, UTIME_NOW};
use serde::{Deserialize, Serialize};

/// How often to poll for a tree that another process is making.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    /// Maximum total size in bytes.
    most: u64,
}

/// Holds a root file system in the cache.
#[derive(Clone, Debug)]
pub struct RootfsHold {
    pub path: PathBuf,
    pub about: ExtractedTree,
    _lock: Arc<File>,
}

/// The record of an extracted tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtractedTree {
    pub digest: Sha256Name,
    /// The root file system below a layer; the tree's own digest if there is none.
    pub base_digest: Sha256Name,
    /// Any instance can get it by its digest.
    pub is_base: bool,
    pub size: u64,
    /// The boot that made the tree, the only one it is valid for: a crash of the machine may leave a tree half
    /// on disk.
    boot: String,
}

impl ExtractedTree {
    pub fn new(digest: &Sha256Name, base_digest: &Sha256Name, is_base: bool, size: u64) -> io::Result<Self> {
        Ok(Self { digest: digest.clone(), base_digest: base_digest.clone(), is_base, size, boot: boot()? })
    }
}

/// The exclusive right to make a tree, and the directory for it.
#[derive(Debug)]
pub struct PendingTree {
    cache: Cache,
    digest: Sha256Name,
    lock: File,
}

impl Cache {
    pub fn new(folder: PathBuf, most: u64) -> Self {
        Self { folder, most }
    }

    /// Holds a tree that is present. Does not wait for one that is being made.
    pub fn acquire(&self, digest: &Sha256Name) -> io::Result<Option<RootfsHold>> {
        let Some(lock) = self.lock(digest, FlockOperation::NonBlockingLockShared)? else { return Ok(None) };
        self.held(digest, lock)
    }

    fn held(&self, digest: &Sha256Name, lock: File) -> io::Result<Option<RootfsHold>> {
        let Some(about) = self.about(digest)? else { return Ok(None) };
        // Records the use for least-recently-used eviction.
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        rustix::fs::futimens(&lock, &Timestamps { last_access: now, last_modification: now })?;
        Ok(Some(RootfsHold { path: self.tree(digest), about, _lock: Arc::new(lock) }))
    }

    /// Returns the tree if it exists, else the right to make it. Waits if it is being made now. Blocks.
    pub fn make(&self, digest: &Sha256Name) -> io::Result<Result<RootfsHold, PendingTree>> {
        loop {
            if let Some(held) = self.acquire(digest)? {
                return Ok(Ok(held));
            }
            if let Some(lock) = self.lock(digest, FlockOperation::NonBlockingLockExclusive)? {
                // Another process may have made it between the two checks.
                if self.about(digest)?.is_none() {
                    let making = PendingTree { cache: self.clone(), digest: digest.clone(), lock };
                    making.wipe()?;
                    fs::create_dir_all(making.tree())?;
                    return Ok(Err(making));
                }
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Evicts trees that are not held, least recently used first, until the rest fits. Blocks.
    pub fn shrink(&self) -> io::Result<()> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".lock"));
            let Some(digest) = name.and_then(|name| Sha256Name::parse(name).ok()) else { continue };
            if let Ok(Some(about)) = self.about(&digest) {
                all.push((fs::metadata(&path)?.modified()?, about));
            }
        }
        all.sort_by_key(|(used, _)| *used);
        let mut sum: u64 = all.iter().map(|(_, about)| about.size).fold(0, u64::saturating_add);
        for (_, about) in all {
            if sum <= self.most {
                return Ok(());
            }
            if let Some(_lock) = self.lock(&about.digest, FlockOperation::NonBlockingLockExclusive)? {
                tracing::info!(
                    digest = %about.digest,
                    size = about.size,
                    "evicting a root file system from the cache"
                );
                self.drop_tree(&about.digest)?;
                sum = sum.saturating_sub(about.size);
            }
        }
        Ok(())
    }

    /// Removes trees left incomplete by a killed server, and those of an earlier boot. Blocks.
    pub fn sweep(&self) -> io::Result<()> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let (whole, is_making) = name.strip_suffix(".making").map_or((name, false), |whole| (whole, true));
            let Ok(digest) = Sha256Name::parse(whole) else { continue };
            if !is_making && self.about(&digest)?.is_some() {
                continue;
            }
            // Another server may be making it, or have made it.
            if let Some(_lock) = self.lock(&digest, FlockOperation::NonBlockingLockExclusive)?
                && (is_making || self.about(&digest)?.is_none())
            {
                tracing::info!(%digest, "removing an incomplete root file system");
                remove(&path)?;
            }
        }
        Ok(())
    }

    fn drop_tree(&self, digest: &Sha256Name) -> io::Result<()> {
        // Rename first: no partial tree may ever exist under its final name.
        let doomed = self.folder.join(format!("{digest}.making"));
        remove(&doomed)?;
        fs::rename(self.folder.join(digest.as_str()), &doomed)?;
        remove(&doomed)
    }

    fn lock(&self, digest: &Sha256Name, how: FlockOperation) -> io::Result<Option<File>> {
        fs::create_dir_all(&self.folder)?;
        let path = self.folder.join(format!("{digest}.lock"));
        let file = File::options().create(true).truncate(false).read(true).write(true).open(path)?;
        match rustix::fs::flock(&file, how) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn tree(&self, digest: &Sha256Name) -> PathBuf {
        self.folder.join(digest.as_str()).join("rootfs")
    }

    /// Returns `None` if there is no valid tree.
    fn about(&self, digest: &Sha256Name) -> io::Result<Option<ExtractedTree>> {
        let text = match fs::read(self.folder.join(digest.as_str()).join("about")) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let about: Option<ExtractedTree> = serde_json::from_slice(&text).ok();
        let boot = boot()?;
        Ok(about.filter(|about| about.digest == *digest && about.boot == boot))
    }
}

impl PendingTree {
    /// The directory to fill.
    pub fn tree(&self) -> PathBuf {
        self.folder().join("rootfs")
    }

    fn folder(&self) -> PathBuf {
        self.cache.folder.join(format!("{}.making", self.digest))
    }

    fn wipe(&self) -> io::Result<()> {
        remove(&self.folder())?;
        // The tree of an earlier boot is not valid.
        remove(&self.cache.folder.join(self.digest.as_str()))
    }

    /// Publishes the complete tree. Returns `None` if it has already been evicted.
    pub fn finish(self, about: &ExtractedTree) -> io::Result<Option<RootfsHold>> {
        let folder = self.folder();
        fs::write(folder.join("about"), serde_json::to_vec(about)?)?;
        fs::rename(&folder, self.cache.folder.join(self.digest.as_str()))?;
        rustix::fs::flock(&self.lock, FlockOperation::LockShared)?;
        self.cache.held(&self.digest, self.lock)
    }

    /// Deletes the incomplete tree.
    pub fn give_up(self) -> io::Result<()> {
        self.wipe()
    }
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn boot() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_being_made_when_its_server_died_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().to_owned(), u64::MAX);
        let [whole, dead, busy, old] = ["a", "b", "c", "d"].map(|digit| Sha256Name::parse(&digit.repeat(64)).unwrap());
        let make = |digest: &Sha256Name| cache.make(digest).unwrap().unwrap_err();
        make(&whole).finish(&ExtractedTree::new(&whole, &whole, true, 1).unwrap()).unwrap().unwrap();
        drop(make(&dead));
        let making = make(&busy);
        let earlier = ExtractedTree { boot: "another".to_owned(), ..ExtractedTree::new(&old, &old, true, 1).unwrap() };
        make(&old).finish(&earlier).unwrap();
        fs::write(folder.path().join("note"), "").unwrap();
        cache.sweep().unwrap();
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut left: Vec<_> = names.filter(|name| !name.ends_with(".lock")).collect();
        left.sort();
        assert_eq!(left, [whole.to_string(), format!("{busy}.making"), "note".to_owned()]);
        assert!(cache.acquire(&whole).unwrap().is_some());
        drop(making);
        Cache::new(folder.path().join("nowhere"), 0).sweep().unwrap();
    }
}
