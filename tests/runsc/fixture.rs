//! Where a test with real containers happens: a state directory of its own, one of two permits.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use baton::{
    clock::{SharedClock, SystemClock},
    config::EgressSettings,
    guard::{guard_mounts, process_handle::ProcessHandle},
    network::{Denials, DeniedConnections, NameResolver, NetworkContext},
    runtime::{Containers, RuntimeSettings, StartSpec, archive::ArchiveLimits},
};
use baton_protocol::id::{SandboxId, Sha256Name};

pub fn clock() -> SharedClock {
    Arc::new(SystemClock)
}

pub fn piece(variable: &str) -> PathBuf {
    let found = std::env::var_os(variable).map(PathBuf::from).filter(|path| path.exists());
    found.unwrap_or_else(|| panic!("{variable} names nothing that exists: run `scripts/setup`, then `make test`"))
}

pub fn settings(state_dir: &Path) -> RuntimeSettings {
    RuntimeSettings {
        exe: env!("CARGO_BIN_EXE_baton").into(),
        runsc: piece("BATON_RUNSC"),
        state_dir: state_dir.to_owned(),
        rootfs: piece("BATON_TEST_ROOTFS"),
        rootfs_digest: Sha256Name::from_bits([0x7e; 32]),
        rootfs_cache: state_dir.join("extracted"),
        rootfs_cache_size: 10 << 30,
        runtimes: state_dir.join("runtimes"),
        archive_limits: ArchiveLimits { size: 10 << 30, entries: 1_000_000, depth: 128 },
        agent: piece("BATON_AGENT"),
        detach_grace: Duration::from_secs(60),
        // On a disk that is busy a thread may stand in the kernel for seconds before it can stop, and
        // a container that was killed for that is another story than the one told here.
        confirm: Duration::from_secs(30),
        cpu_features: None,
        warm: Default::default(),
        network: network(EgressSettings::default()).0,
        metrics: Default::default(),
    }
}

/// The network of sandboxes, and what of it is refused.
pub fn network(settings: EgressSettings) -> (Arc<NetworkContext>, DeniedConnections) {
    let (denials, denied) = Denials::new(clock());
    let resolver = NameResolver::of_machine();
    (Arc::new(NetworkContext { clock: clock(), metrics: Default::default(), settings, resolver, denials }), denied)
}

/// One of two, given back when dropped: containers are heavy, and the tests many.
#[derive(Debug)]
pub struct Permit(#[expect(dead_code, reason = "held, not read")] File);

pub async fn permit() -> Permit {
    let taken = tokio::task::spawn_blocking(|| {
        loop {
            for number in 0..2 {
                let path = std::env::temp_dir().join(format!("baton-test-permit-{number}"));
                let file = File::options().create(true).truncate(false).write(true).open(path).unwrap();
                if file.try_lock().is_ok() {
                    return Permit(file);
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    taken.await.unwrap()
}

#[derive(Debug)]
pub struct Place {
    pub containers: Arc<Containers>,
    pub directory: tempfile::TempDir,
    _permit: Permit,
}

impl Place {
    pub async fn new() -> Self {
        Self::with(|settings| settings).await
    }

    /// With settings changed; `state_dir` names the directory of this place already.
    pub async fn with(change: impl FnOnce(RuntimeSettings) -> RuntimeSettings) -> Self {
        let permit = permit().await;
        let directory = directory();
        let containers = Containers::open(change(settings(directory.path())), clock()).await.unwrap();
        Self { containers: Arc::new(containers), directory, _permit: permit }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Sentry and gofer of everything that runs here.
    pub fn processes(&self) -> Vec<ProcessHandle> {
        processes(self.directory.path())
    }

    pub async fn close(self) {
        self.containers.close().await;
        assert_eq!(processes(self.directory.path()).len(), 0, "nothing runs any more");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // After a failed test too, while its containers are still there: a mount would keep the directory.
        let _ = guard_mounts::unmount_below(self.directory.path());
    }
}

/// Whether nothing is mounted there: the guard of a server that was killed sees to that.
pub fn is_unmounted(state_dir: &Path) -> bool {
    guard_mounts::below(state_dir).unwrap().is_empty()
}

pub fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("bt").tempdir().unwrap()
}

/// Every living process that names this state directory as its root.
pub fn processes(state_dir: &Path) -> Vec<ProcessHandle> {
    let root = format!("--root={}", state_dir.join("runsc").display());
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let ours = pids.filter(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == root.as_bytes())
    });
    ours.filter_map(|pid| ProcessHandle::open(pid).ok()).filter(|process| !process.has_ended()).collect()
}

pub fn start() -> StartSpec {
    StartSpec {
        marker: clock().bits(),
        env: [("BATON_TEST".to_owned(), "yes".to_owned())].into(),
        cwd: None,
        limits: Default::default(),
        rootfs: None,
        runsc: None,
        layout: Default::default(),
        egress: Default::default(),
        forked_from: None,
        deadline: clock().now() + Duration::from_secs(600),
    }
}

pub fn sandbox() -> SandboxId {
    clock().sandbox_id()
}

/// Waits for what must come true, for as long as a slow machine may need.
pub async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if is_so() {
            return;
        }
        clock().sleep(Duration::from_millis(2)).await;
    }
    panic!("it never came true: {what}");
}

/// A small file system over a directory, for as long as this lives.
#[derive(Debug)]
pub struct Full(PathBuf);

impl Full {
    pub fn at(path: PathBuf) -> Self {
        std::fs::create_dir_all(&path).unwrap();
        let mounted =
            std::process::Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(&path).status();
        assert!(mounted.unwrap().success());
        Self(path)
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
