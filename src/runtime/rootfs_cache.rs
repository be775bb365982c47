//! The root file systems of containers: the base, or one made from an archive.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use baton_protocol::{id::Sha256Name, printable::printable_start, reason::Reason};

use super::{
    ArchiveSource, Error, Extract, Result, Shape, WrittenSnapshot, archive,
    cache::{Cache, ExtractedTree, PendingTree, RootfsHold},
    container_actions,
    containers::{RuntimeContext, Slot},
    rootfs_digest,
};

/// Extracting many gigabytes may take this long.
const EXTRACT_TIMEOUT: Duration = Duration::from_secs(1800);
/// Maximum length of the child's message that is shown.
const SHOWN: usize = 300;
/// Approximate size of an entry besides its content.
const ENTRY: u64 = 512;

/// Prefix of the names of incomplete files.
const DRAFT: &str = ".draft-";
/// A draft not written to for this long is abandoned.
const ABANDONED: Duration = Duration::from_secs(3600);

/// One root file system on this machine.
#[derive(Clone, Debug)]
pub(super) struct CachedRootfs {
    pub path: PathBuf,
    pub digest: Sha256Name,
    pub base_digest: Sha256Name,
    /// Other instances can get it by its digest.
    pub is_base: bool,
    held: Option<RootfsHold>,
}

/// Keeps a root file system on this machine until it is dropped.
#[derive(Clone, Debug, Default)]
pub struct RootfsGuard(Option<RootfsHold>);

impl From<CachedRootfs> for RootfsGuard {
    fn from(root: CachedRootfs) -> Self {
        Self(root.held)
    }
}

impl RootfsGuard {
    /// The digest of the root file system below it, if that is another one.
    pub fn base_digest(&self) -> Option<&Sha256Name> {
        self.0.as_ref().map(|held| &held.about.base_digest)
    }
}

/// Finds and holds the root file system of a digest; `None` selects the base.
pub(super) fn find(context: &RuntimeContext, digest: Option<&Sha256Name>) -> Result<CachedRootfs> {
    let settings = &context.settings;
    let Some(digest) = digest.filter(|digest| **digest != settings.rootfs_digest) else {
        let digest = settings.rootfs_digest.clone();
        return Ok(CachedRootfs {
            path: settings.rootfs.clone(),
            base_digest: digest.clone(),
            digest,
            is_base: true,
            held: None,
        });
    };
    let held = context.cache.acquire(digest).map_err(|error| failed("extract", &error))?;
    let held = held.ok_or_else(|| Error::Refused {
        reason: Reason::RootfsMissing,
        message: "This instance does not have the sandbox's root file system.".to_owned(),
    })?;
    Ok(CachedRootfs {
        path: held.path.clone(),
        digest: digest.clone(),
        base_digest: held.about.base_digest.clone(),
        is_base: held.about.is_base,
        held: Some(held),
    })
}

/// The runsc binary for this digest, if it is not the default one.
pub(super) fn binary(context: &RuntimeContext, sha256: Option<&Sha256Name>) -> Result<Option<PathBuf>> {
    let Some(sha256) = sha256.filter(|sha256| **sha256 != context.runsc_sha256) else { return Ok(None) };
    let binary = context.settings.runtime(sha256);
    if !binary.is_file() {
        let message = "This instance does not have the runsc that the sandbox needs.".to_owned();
        return Err(Error::Refused { reason: Reason::OtherRuntime, message });
    }
    Ok(Some(binary))
}

/// Stores a runsc binary whose digest was verified. It appears atomically.
pub(super) async fn add_runtime(context: &Arc<RuntimeContext>, file: &Path, sha256: &Sha256Name) -> Result<()> {
    let (from, to) = (file.to_owned(), context.settings.runtime(sha256));
    run_blocking(move || {
        let folder = to.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)?;
        let draft = tempfile::Builder::new().prefix(DRAFT).tempfile_in(folder)?;
        fs::copy(&from, draft.path())?;
        fs::set_permissions(draft.path(), fs::Permissions::from_mode(0o755))?;
        // Close it first: a file that is open for writing cannot be executed.
        draft.into_temp_path().persist(&to).map_err(|error| error.error)
    })
    .await
}

/// Removes what a killed server left in the caches, which other servers may use too. Errors leave files in
/// place.
pub(super) async fn sweep(cache: Cache, runtimes: PathBuf) {
    let swept = run_blocking(move || {
        cache.sweep()?;
        for entry in fs::read_dir(&runtimes).into_iter().flatten().flatten() {
            let age = entry.metadata()?.modified()?.elapsed().unwrap_or_default();
            if entry.file_name().as_encoded_bytes().starts_with(DRAFT.as_bytes()) && age > ABANDONED {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    });
    if let Err(error) = swept.await {
        tracing::warn!(%error, "the cache could not be cleaned up");
    }
}

/// Writes the base into an archive, for later use.
pub(super) async fn pack(context: &Arc<RuntimeContext>, target: &Path) -> Result<()> {
    let (tree, target) = (context.settings.rootfs.clone(), target.to_owned());
    run_blocking(move || archive::pack(&tree, &target)).await
}

/// Makes a root file system from an archive. Concurrent requests for the same one make it once.
pub(super) async fn extract(context: &Arc<RuntimeContext>, file: &Path, wanted: &Extract) -> Result<RootfsGuard> {
    let base = match &wanted.from {
        ArchiveSource::Layer { base_digest } => Some(find(context, Some(base_digest))?),
        ArchiveSource::Complete | ArchiveSource::Base => None,
    };
    loop {
        let (cache, digest) = (context.cache.clone(), wanted.digest.clone());
        let making = match run_blocking(move || cache.make(&digest)).await? {
            Ok(held) => return Ok(RootfsGuard(Some(held))),
            Err(making) => making,
        };
        let filled = fill(context, file, wanted, base.as_ref(), &making.tree()).await;
        let about = match filled {
            Ok(about) => about,
            Err(error) => {
                if let Err(left) = run_blocking(move || making.give_up()).await {
                    tracing::warn!(error = %left, "a failed extraction could not be cleaned up");
                }
                return Err(error);
            }
        };
        if let Some(held) = finish(context, making, about).await? {
            return Ok(RootfsGuard(Some(held)));
        }
    }
}

async fn finish(
    context: &Arc<RuntimeContext>,
    making: PendingTree,
    about: ExtractedTree,
) -> Result<Option<RootfsHold>> {
    let cache = context.cache.clone();
    run_blocking(move || {
        let held = making.finish(&about)?;
        if let Err(error) = cache.shrink() {
            tracing::warn!(%error, "the rootfs cache could not be trimmed");
        }
        Ok(held)
    })
    .await
}

/// The child reads the archive; this process never parses it.
async fn fill(
    context: &RuntimeContext,
    file: &Path,
    wanted: &Extract,
    base: Option<&CachedRootfs>,
    tree: &Path,
) -> Result<ExtractedTree> {
    let limits = context.settings.archive_limits;
    let source = file.to_owned();
    let stdin = run_blocking(move || File::open(source)).await?;
    let mut words = vec![archive::VERB.into(), tree.into()];
    words.extend([limits.size.to_string(), limits.entries.to_string(), limits.depth.to_string()].map(Into::into));
    let kind = match wanted.from {
        ArchiveSource::Layer { .. } => "layer",
        ArchiveSource::Complete => "complete",
        ArchiveSource::Base => "base",
    };
    words.push(kind.into());
    words.extend(base.map(|base| base.path.clone().into_os_string()));
    let stdio = [Stdio::from(stdin), Stdio::piped(), Stdio::piped()];
    let child = context.runsc.spawner().spawn(context.settings.exe.as_os_str(), &words, &[], stdio).await;
    let child = child.map_err(|error| failed("extract", &error))?;
    let ended = context.clock.timeout(EXTRACT_TIMEOUT, child.wait_with_output()).await;
    let output = ended.map_err(|elapsed| Error::TimedOut { what: "extract", after: elapsed.0 })?;
    let output = output.map_err(|error| failed("extract", &error))?;
    if output.status.code() == Some(archive::NO_SPACE.into()) {
        return Err(Error::NoSpace { what: "the root file system" });
    }
    if !output.status.success() {
        let why = printable_start(String::from_utf8_lossy(&output.stderr).trim(), SHOWN);
        let why = if why.is_empty() { output.status.to_string() } else { why };
        return Err(Error::Refused {
            reason: Reason::BadArchive,
            message: format!("The archive cannot be extracted: {why}."),
        });
    }
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let numbers: Vec<u64> = told.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [entries, bytes] = numbers[..] else {
        return Err(Error::Failed { what: "extract", why: "the child says nothing".to_owned() });
    };
    if wanted.from == ArchiveSource::Base {
        let tree = tree.to_owned();
        let found = run_blocking(move || rootfs_digest::digest(&tree)).await?;
        if found != wanted.digest {
            let message = "The stored root file system does not match its name.".to_owned();
            return Err(Error::Refused { reason: Reason::Damaged, message });
        }
    }
    let base_digest = base.map_or(&wanted.digest, |base| &base.digest);
    let is_base = wanted.from == ArchiveSource::Base;
    let size = bytes.saturating_add(entries.saturating_mul(ENTRY));
    ExtractedTree::new(&wanted.digest, base_digest, is_base, size).map_err(|error| failed("extract", &error))
}

/// Takes a layer if the base is one that other instances have too, else a complete snapshot.
pub(super) async fn snapshot(
    context: &Arc<RuntimeContext>,
    slot: &Slot,
    target: &Path,
    shape: Shape,
) -> Result<WrittenSnapshot> {
    let root = slot.root.lock().clone().ok_or(Error::NotIn("here"))?;
    if shape == Shape::Layer && root.is_base {
        let paused = container_actions::upper(context, slot, target).await?;
        return Ok(WrittenSnapshot { base_digest: Some(root.digest), paused });
    }
    let upper = target.with_extension("upper");
    let paused = container_actions::upper(context, slot, &upper).await?;
    // A layer on a complete archive would depend on that archive forever.
    let base = if shape == Shape::Layer && root.base_digest != root.digest {
        find(context, Some(&root.base_digest)).ok()
    } else {
        None
    };
    let (from, to, under) = (upper.clone(), target.to_owned(), base.clone());
    let limits = context.settings.archive_limits;
    let composed = tokio::task::spawn_blocking(move || match &under {
        Some(base) => archive::layer(&root.path, &base.path, &from, &to, limits),
        None => archive::complete(&root.path, &from, &to, limits),
    });
    let composed = composed.await.map_err(io::Error::other).flatten().map_err(|error| not_composed(&error));
    let _ = tokio::fs::remove_file(&upper).await;
    if composed.is_err() {
        let _ = tokio::fs::remove_file(target).await;
    }
    composed?;
    Ok(WrittenSnapshot { base_digest: base.map(|base| base.digest), paused })
}

pub(super) async fn count_entries(archive: &Path) -> Result<u64> {
    let archive = archive.to_owned();
    run_blocking(move || archive::count_entries(&archive)).await
}

/// Like [`failed`], but refuses a snapshot that exceeds the limits.
fn not_composed(error: &io::Error) -> Error {
    if error.kind() == io::ErrorKind::FileTooLarge {
        let message = format!("The snapshot could not be made: {error}.");
        return Error::Refused { reason: Reason::TooLarge, message };
    }
    failed("snapshot", error)
}

async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await.map_err(io::Error::other).flatten();
    done.map_err(|error| failed("extract", &error))
}

fn failed(what: &'static str, error: &io::Error) -> Error {
    if error.kind() == io::ErrorKind::StorageFull {
        return Error::NoSpace { what: "a root file system" };
    }
    Error::Failed { what, why: error.to_string() }
}
