//! Extracted root file systems, kept by digest and shared by the sandboxes of all servers that use
//! this directory. What a sandbox uses is held and stays; the rest goes, least used first, when all
//! of it takes more room than it may.
//!
//! ```text
//!   DIGEST.lock      held shared by who uses it, alone by who makes or drops it; never deleted
//!   DIGEST/rootfs    the tree; appears under this name only whole
//!   DIGEST/about     what it is made of and how large it is
//!   DIGEST.making    on its way; the next one who holds the lock alone wipes it
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

/// How often is looked whether another one is done with making it.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    /// Bytes in all.
    most: u64,
}

/// Keeps a root file system where it is.
#[derive(Clone, Debug)]
pub struct Held {
    pub path: PathBuf,
    pub about: About,
    _lock: Arc<File>,
}

/// What is known of an extracted tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    pub digest: Sha256Name,
    /// The root file system a layer was laid on; the digest itself if it lies on none.
    pub base_digest: Sha256Name,
    /// It can be had by its digest anywhere.
    pub is_base: bool,
    pub size: u64,
    /// A tree that was not yet on disk when the machine went down may be torn: it counts for this boot only.
    boot: String,
}

impl About {
    pub fn new(digest: &Sha256Name, base_digest: &Sha256Name, is_base: bool, size: u64) -> io::Result<Self> {
        Ok(Self { digest: digest.clone(), base_digest: base_digest.clone(), is_base, size, boot: boot()? })
    }
}

/// The right to make one, and the place for it.
#[derive(Debug)]
pub struct Making {
    cache: Cache,
    digest: Sha256Name,
    lock: File,
}

impl Cache {
    pub fn new(folder: PathBuf, most: u64) -> Self {
        Self { folder, most }
    }

    /// A tree that is here, held from now on. Does not wait for one that is being made.
    pub fn hold(&self, digest: &Sha256Name) -> io::Result<Option<Held>> {
        let Some(lock) = self.lock(digest, FlockOperation::NonBlockingLockShared)? else { return Ok(None) };
        self.held(digest, lock)
    }

    fn held(&self, digest: &Sha256Name, lock: File) -> io::Result<Option<Held>> {
        let Some(about) = self.about(digest)? else { return Ok(None) };
        // So the least used can be told.
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        rustix::fs::futimens(&lock, &Timestamps { last_access: now, last_modification: now })?;
        Ok(Some(Held { path: self.tree(digest), about, _lock: Arc::new(lock) }))
    }

    /// Held if somebody has made it, else the right to make it. Waits for whoever makes it now. Blocks.
    pub fn make(&self, digest: &Sha256Name) -> io::Result<Result<Held, Making>> {
        loop {
            if let Some(held) = self.hold(digest)? {
                return Ok(Ok(held));
            }
            if let Some(lock) = self.lock(digest, FlockOperation::NonBlockingLockExclusive)? {
                // Between the two looks another one may have made it.
                if self.about(digest)?.is_none() {
                    let making = Making { cache: self.clone(), digest: digest.clone(), lock };
                    making.wipe()?;
                    fs::create_dir_all(making.tree())?;
                    return Ok(Err(making));
                }
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Drops what nobody holds, least used first, until the rest fits. Blocks.
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
                    "a root file system is dropped from the cache"
                );
                self.drop_tree(&about.digest)?;
                sum = sum.saturating_sub(about.size);
            }
        }
        Ok(())
    }

    /// Removes what was being made when its server was killed, and what an earlier boot left. Blocks.
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
            // Another server may be making it just now, or have made it.
            if let Some(_lock) = self.lock(&digest, FlockOperation::NonBlockingLockExclusive)?
                && (is_making || self.about(&digest)?.is_none())
            {
                tracing::info!(%digest, "what is left of a root file system is removed");
                remove(&path)?;
            }
        }
        Ok(())
    }

    fn drop_tree(&self, digest: &Sha256Name) -> io::Result<()> {
        // Under its name there is never half a tree.
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

    /// `None`: there is none that can be trusted.
    fn about(&self, digest: &Sha256Name) -> io::Result<Option<About>> {
        let text = match fs::read(self.folder.join(digest.as_str()).join("about")) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let about: Option<About> = serde_json::from_slice(&text).ok();
        let boot = boot()?;
        Ok(about.filter(|about| about.digest == *digest && about.boot == boot))
    }
}

impl Making {
    /// Where to make it.
    pub fn tree(&self) -> PathBuf {
        self.folder().join("rootfs")
    }

    fn folder(&self) -> PathBuf {
        self.cache.folder.join(format!("{}.making", self.digest))
    }

    fn wipe(&self) -> io::Result<()> {
        remove(&self.folder())?;
        // What an earlier boot left does not count.
        remove(&self.cache.folder.join(self.digest.as_str()))
    }

    /// It is whole: everybody may have it. `None`: and somebody has dropped it already.
    pub fn finish(self, about: &About) -> io::Result<Option<Held>> {
        let folder = self.folder();
        fs::write(folder.join("about"), serde_json::to_vec(about)?)?;
        fs::rename(&folder, self.cache.folder.join(self.digest.as_str()))?;
        rustix::fs::flock(&self.lock, FlockOperation::LockShared)?;
        self.cache.held(&self.digest, self.lock)
    }

    /// Nothing is left of it.
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
        make(&whole).finish(&About::new(&whole, &whole, true, 1).unwrap()).unwrap().unwrap();
        drop(make(&dead));
        let making = make(&busy);
        let earlier = About { boot: "another".to_owned(), ..About::new(&old, &old, true, 1).unwrap() };
        make(&old).finish(&earlier).unwrap();
        fs::write(folder.path().join("note"), "").unwrap();
        cache.sweep().unwrap();
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut left: Vec<_> = names.filter(|name| !name.ends_with(".lock")).collect();
        left.sort();
        assert_eq!(left, [whole.to_string(), format!("{busy}.making"), "note".to_owned()]);
        assert!(cache.hold(&whole).unwrap().is_some());
        drop(making);
        Cache::new(folder.path().join("nowhere"), 0).sweep().unwrap();
    }
}
