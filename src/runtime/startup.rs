//! The start of an instance: locks and wipes its state directory and probes runsc.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use baton_protocol::{
    id::{InstanceId, Sha256Name},
    reason::Reason,
};
use rustix::{fs::FlockOperation, process::Signal};
use sha2::{Digest, Sha256};

use super::{Error, Facts, Result, argv, runsc::Runsc, runtime_settings::RuntimeSettings, spawner::Spawner};
use crate::{
    clock::SharedClock,
    config::variables::{CPU_FEATURES, STATE_DIR},
    guard::{guard_mounts, process_handle::ProcessHandle},
};

const SETUP: &str = "`scripts/setup` gets the one this server is made for";

fn refused(reason: Reason, message: String) -> Error {
    Error::Refused { reason, message }
}

/// Longer paths leave too little space for the names of runsc's sockets (108 bytes in all).
const LONGEST_STATE_DIR: usize = 70;
/// How often, and at which interval, to retry locking a state directory that another process holds.
const LOCK_ATTEMPTS: u32 = 30;
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(10);

pub fn check_root() -> Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let message = "root is needed (runsc makes namespaces and mounts): run it as root or with sudo";
    Err(refused(Reason::NotRoot, message.to_owned()))
}

/// Locks the state directory for this process and wipes what another one left there. Returns the settings with
/// absolute paths.
pub async fn prepare_state_dir(mut settings: RuntimeSettings) -> Result<(Arc<RuntimeSettings>, File)> {
    let taken = tokio::task::spawn_blocking(move || {
        check_root()?;
        let held = lock_state_dir(&settings.state_dir)?;
        settings.state_dir = resolve(&settings.state_dir)?;
        // Children start in another working directory.
        for path in [&mut settings.exe, &mut settings.runsc, &mut settings.rootfs, &mut settings.agent] {
            if let Ok(absolute) = std::path::absolute(&*path) {
                *path = absolute;
            }
        }
        // Become the parent of orphaned container processes, so that their exit statuses can be collected.
        let reaper = rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(io::Error::from);
        reaper.and_then(|()| wipe(&settings)).map_err(|error| {
            let place = settings.state_dir.display();
            refused(Reason::StateDir, format!("the state directory {place} cannot be cleared: {error}"))
        })?;
        Ok((Arc::new(settings), held))
    });
    taken.await.unwrap_or_else(|error| Err(refused(Reason::StateDir, error.to_string())))
}

/// The state directory with symbolic links resolved, as it appears in mount tables and command lines.
fn resolve(state_dir: &Path) -> Result<PathBuf> {
    let unusable =
        |why: String| refused(Reason::StateDir, format!("the state directory {} {why}", state_dir.display()));
    let whole = state_dir.canonicalize().map_err(|error| unusable(format!("is not usable: {error}")))?;
    match whole.to_str() {
        // The guard's protocol consists of lines of text.
        None => Err(unusable("has a name that is not text".to_owned())),
        Some(text) if text.contains('\n') => Err(unusable("has a name of several lines".to_owned())),
        Some(text) if text.len() > LONGEST_STATE_DIR => {
            Err(unusable(format!("has a path longer than {LONGEST_STATE_DIR} bytes: set {STATE_DIR} to a shorter one")))
        }
        Some(_) => Ok(whole),
    }
}

/// Removes what only a running server needs. The next start would do it too.
pub async fn give_back(settings: Arc<RuntimeSettings>) {
    let given = tokio::task::spawn_blocking(move || {
        guard_mounts::unmount_below(&settings.state_dir)?;
        clear(&settings.root())
    });
    if let Ok(Err(error)) = given.await {
        tracing::warn!(%error, "the state directory could not be cleaned up");
    }
}

fn lock_state_dir(state_dir: &Path) -> Result<File> {
    let place = state_dir.display();
    // The memory of sandboxes passes through this directory, so it is private.
    let opened = fs::DirBuilder::new().recursive(true).mode(0o700).create(state_dir).and_then(|()| {
        File::options().create(true).truncate(false).write(true).open(state_dir.join(guard_mounts::LOCK))
    });
    let file = opened
        .map_err(|error| refused(Reason::StateDir, format!("the state directory {place} is not usable: {error}")))?;
    for _ in 0..LOCK_ATTEMPTS {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            // The guard of a server that has just ended may still be removing its mounts.
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(LOCK_RETRY_INTERVAL),
            Err(error) => {
                let message = format!("the state directory {place} cannot be locked: {error}");
                return Err(refused(Reason::StateDir, message));
            }
        }
    }
    Err(refused(
        Reason::StateDirHeld,
        format!("another server uses the state directory {place}: stop it, or set {STATE_DIR} to another one"),
    ))
}

/// Processes, then mounts, then files: each step needs the previous one done.
fn wipe(settings: &RuntimeSettings) -> io::Result<()> {
    let root = settings.root();
    let left = processes_of(&root)?;
    for process in &left {
        process.signal(Signal::KILL)?;
    }
    for _ in 0..5_000 {
        left.iter().for_each(ProcessHandle::reap);
        if left.iter().all(ProcessHandle::has_ended) {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    if !left.iter().all(ProcessHandle::has_ended) {
        return Err(io::Error::other("a process of an earlier server does not end"));
    }
    guard_mounts::unmount_below(&settings.state_dir)?;
    let temporary = [settings.bundles(), settings.logs(), settings.overlay(), settings.staging(), root];
    temporary.iter().try_for_each(|directory| clear(directory))
}

fn clear(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => fs::create_dir_all(directory),
    }
}

/// Every runsc process whose `--root` is ours, orphans included. The pidfd is opened before the command line is
/// read, so that the process killed is the one that was checked.
fn processes_of(root: &Path) -> io::Result<Vec<ProcessHandle>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(process) = ProcessHandle::open(pid) else { continue };
        let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let words: Vec<_> = line.split(|byte| *byte == 0).collect();
        if !process.has_ended() && names_root(&words, root) {
            found.push(process);
        }
    }
    Ok(found)
}

fn names_root(words: &[&[u8]], root: &Path) -> bool {
    let root = root.as_os_str().as_encoded_bytes();
    let is_root = |value: &[u8]| value == root;
    words.iter().any(|word| word.strip_prefix(b"--root=").is_some_and(is_root))
        || words.windows(2).any(|pair| pair[0] == b"--root" && is_root(pair[1]))
}

/// Probes runsc; the error says in one sentence why it cannot be used.
pub async fn probe(settings: &Arc<RuntimeSettings>, clock: &SharedClock) -> Result<(Runsc, Facts)> {
    let place = settings.runsc.display();
    let unusable = |error: io::Error| refused(Reason::Runsc, format!("{place} does not run: {error}; {SETUP}"));
    for (what, file) in [("runsc", &settings.runsc), ("agent", &settings.agent), ("root file system", &settings.rootfs)]
    {
        if !tokio::fs::try_exists(file).await.unwrap_or(false) {
            return Err(refused(
                Reason::Missing,
                format!("there is no {what} at {}: run `scripts/setup`", file.display()),
            ));
        }
    }
    let spawner = Spawner::start(settings.exe.clone()).map_err(unusable)?;
    let runsc = Runsc::new(settings.clone(), clock.clone(), spawner);
    let ask = async |words: &[&str]| runsc.ask(words).await.map_err(unusable);
    let version = ask(&["--version"]).await?;
    let version = version.lines().find_map(|line| line.strip_prefix("runsc version "));
    let version =
        version.ok_or_else(|| refused(Reason::Runsc, format!("{place} is not a runsc; {SETUP}")))?.trim().to_owned();
    let (help, restore) = (ask(&["help"]).await?, ask(&["help", "restore"]).await?);
    let has = |verb: &str| help.lines().any(|line| line.split_whitespace().next() == Some(verb));
    let verbs = ["tar", "fscheckpoint", "cpu-features"].into_iter().filter(|verb| !has(verb));
    let flags = ["-background"].into_iter().filter(|flag| !restore.contains(flag));
    let missing: Vec<_> = verbs.chain(flags).collect();
    if !missing.is_empty() {
        let message = format!("{place} (version {version}) has no {}; {SETUP}", missing.join(", no "));
        return Err(refused(Reason::Runsc, message));
    }
    let machine = ask(&["cpu-features"]).await?;
    let machine: Vec<_> = machine.trim().split(',').map(str::to_owned).collect();
    let cpu_features = match &settings.cpu_features {
        None => machine,
        Some(wanted) => match wanted.iter().find(|feature| !machine.contains(feature)) {
            None => wanted.clone(),
            Some(lacking) => {
                let message = format!("{CPU_FEATURES} names {lacking}, which this machine does not have");
                return Err(refused(Reason::CpuFeatures, message));
            }
        },
    };
    let binary = settings.runsc.clone();
    let hashed = tokio::task::spawn_blocking(move || sha256_of(&binary)).await.map_err(io::Error::other).flatten();
    let facts = Facts {
        runsc_version: version,
        runsc_sha256: hashed.map_err(unusable)?,
        platform: argv::PLATFORM.to_owned(),
        cpu_features,
        rootfs_digest: settings.rootfs_digest.clone(),
    };
    Ok((runsc, facts))
}

fn sha256_of(file: &Path) -> io::Result<Sha256Name> {
    let (mut file, mut hash) = (File::open(file)?, Sha256::new());
    let mut chunk = vec![0; 1 << 20];
    loop {
        match io::Read::read(&mut file, &mut chunk)? {
            0 => return Ok(Sha256Name::from_bits(hash.finalize().into())),
            count => hash.update(&chunk[..count]),
        }
    }
}

const INSTANCE: &str = "instance";

/// The instance that used this state directory before; its leases may be taken without waiting. Only valid while
/// the directory is locked ([`super::Containers::open`]).
pub fn predecessor(state_dir: &Path) -> Option<InstanceId> {
    fs::read_to_string(state_dir.join(INSTANCE)).ok()?.trim().parse().ok()
}

/// Records our instance id for the next server in this directory.
pub fn sign(state_dir: &Path, instance: &InstanceId) -> io::Result<()> {
    let fresh = state_dir.join("instance.new");
    fs::write(&fresh, instance.as_str())?;
    fs::rename(fresh, state_dir.join(INSTANCE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_of_our_root_is_ours() {
        let root = Path::new("/run/b/runsc");
        for (words, ours) in [
            (vec!["runsc-sandbox", "--root=/run/b/runsc", "boot"], true),
            (vec!["runsc", "--root", "/run/b/runsc", "run"], true),
            (vec!["runsc", "--root", "/run/b/runsc2", "run"], false),
            (vec!["vi", "/run/b/runsc"], false),
            (vec!["--root"], false),
        ] {
            let words: Vec<_> = words.iter().map(|word| word.as_bytes()).collect();
            assert_eq!(names_root(&words, root), ours, "{words:?}");
        }
    }

    #[test]
    fn a_state_directory_whose_sockets_would_not_fit_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(resolve(directory.path()).unwrap(), directory.path());
        let long = directory.path().join("x".repeat(80));
        fs::create_dir(&long).unwrap();
        assert!(resolve(&long).unwrap_err().to_string().contains("BATON_STATE_DIR"));
        let lines = directory.path().join("a\nb");
        fs::create_dir(&lines).unwrap();
        assert!(resolve(&lines).is_err());
    }

    #[test]
    fn a_state_directory_has_one_holder_and_remembers_the_last_one() {
        let directory = tempfile::tempdir().unwrap();
        let held = lock_state_dir(directory.path()).unwrap();
        let error = lock_state_dir(directory.path()).unwrap_err().to_string();
        assert!(error.contains("another server"), "{error}");
        drop(held);
        lock_state_dir(directory.path()).unwrap();
        assert_eq!(predecessor(directory.path()), None);
        let instance = InstanceId::from_bits([5; 16]);
        sign(directory.path(), &instance).unwrap();
        assert_eq!(predecessor(directory.path()), Some(instance));
    }
}
