//! A cgroup per sandbox: its share of the CPUs and a hard bound for its memory, both enforced by the kernel.
//!
//! A group is made before its container, joined before runsc is executed, and removed after the container. The
//! server, the guard and the short commands of runsc stay outside. If no cgroup can be made on this machine,
//! containers run without, and limits that need one are refused earlier.
//!
//! ```text
//!   <cgroup of the server>/baton-<state directory>/<container>      v1: in each hierarchy, v2: once
//! ```

mod cgroup_mounts;
mod cgroup_v1;
mod cgroup_v2;

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use baton_protocol::limits::{Cpus, Limits};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::clock::SharedClock;

/// The kernel's accounting period, in microseconds.
const PERIOD: u64 = 100_000;
/// Memory of runsc itself, on top of the sandbox's limit.
const OWN: u64 = 128 << 20;
/// How long the last process of a group may take to leave it.
const EMPTY_TIMEOUT: Duration = Duration::from_secs(5);
const EMPTY_POLL: Duration = Duration::from_millis(5);
/// The file through which a process joins a group.
pub const MEMBERS: &str = "cgroup.procs";

/// Makes groups, for one version of cgroups.
pub trait Cgroups: fmt::Debug + Send + Sync {
    /// The version, for messages.
    fn version(&self) -> &'static str;
    fn holds_cpus(&self) -> bool;
    /// Makes an empty group with these bounds. A failure leaves nothing behind.
    fn make(&self, name: &str, bounds: &CgroupLimits) -> io::Result<Group>;
    /// Removes every group made by a server with the same state directory, and their parent.
    fn clear(&self) -> io::Result<()>;
}

/// What cgroups enforce on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shares {
    /// The version of cgroups, for messages.
    pub version: String,
    /// Whether containers are limited to their share of the CPUs.
    pub cpus: bool,
}

impl Shares {
    pub fn of(cgroups: &dyn Cgroups) -> Self {
        Self { version: cgroups.version().to_owned(), cpus: cgroups.holds_cpus() }
    }
}

/// The bounds of one container; `None` means no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupLimits {
    /// Microseconds of CPU in each [`PERIOD`].
    pub quota: Option<u64>,
    /// Bytes, including what runsc itself needs.
    pub memory: Option<u64>,
}

impl CgroupLimits {
    pub fn of(limits: &Limits) -> Self {
        Self {
            quota: limits.cpus.map(|Cpus(thousandths)| u64::from(thousandths) * PERIOD / 1000),
            memory: limits.memory.map(most_memory),
        }
    }
}

/// The bound at which the kernel kills: well above the limit, at which the runtime reclaims memory first.
pub fn most_memory(limit: u64) -> u64 {
    limit.saturating_add(limit / 2).saturating_add(OWN)
}

/// The group of one container: one directory, or one per hierarchy.
#[derive(Clone, Debug)]
pub struct Group {
    directories: Vec<PathBuf>,
    quota: Option<Quota>,
}

/// The file with the CPU quota, and the values that throttle and unthrottle.
#[derive(Clone, Debug)]
struct Quota {
    file: PathBuf,
    held: String,
    free: &'static str,
}

impl Group {
    /// The directories in which a process must register to join the group.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// Limits the group to its share of the CPUs. Until then it starts at full speed.
    pub fn throttle(&self) -> io::Result<()> {
        self.quota.as_ref().map_or(Ok(()), |quota| fs::write(&quota.file, &quota.held))
    }

    /// Lifts the CPU limit, for instance while the commands are paused.
    pub fn unthrottle(&self) -> io::Result<()> {
        self.quota.as_ref().map_or(Ok(()), |quota| fs::write(&quota.file, quota.free))
    }

    /// Removes the group once its processes are dead. Idempotent.
    pub async fn remove(&self, clock: &SharedClock) -> io::Result<()> {
        let until = clock.now() + EMPTY_TIMEOUT;
        loop {
            match self.directories.iter().try_for_each(|directory| gone(directory)) {
                // The kernel takes a moment to remove dead processes.
                Err(error) if is_busy(&error) && clock.now() < until => clock.sleep(EMPTY_POLL).await,
                ended => return ended,
            }
        }
    }
}

const NONE: &str = "this machine has no cgroups";

/// Opens the cgroups of this machine, or says why there are none. Wipes what a server with the same state
/// directory left.
pub fn open(state_dir: &Path) -> Result<Box<dyn Cgroups>, String> {
    let (found, name) = (find()?, place_name(state_dir));
    if found.cpu.is_some() || found.memory.is_some() {
        return cgroup_v1::One::open(found.cpu, found.memory, &name).map(|one| Box::new(one) as Box<dyn Cgroups>);
    }
    let unified = found.unified.ok_or(NONE)?;
    cgroup_v2::Two::open(&unified, &name).map(|two| Box::new(two) as Box<dyn Cgroups>)
}

/// Reports the same, also beside a running server, and leaves nothing behind.
pub fn probe() -> Result<Shares, String> {
    let (found, name) = (find()?, format!("baton-probe-{}", std::process::id()));
    if found.cpu.is_some() || found.memory.is_some() {
        return cgroup_v1::One::open(found.cpu, found.memory, &name).map(|one| Shares::of(&one));
    }
    cgroup_v2::Two::probe(&found.unified.ok_or(NONE)?, &name).map(|two| Shares::of(&two))
}

fn find() -> Result<cgroup_mounts::CgroupMounts, String> {
    let (mounts, own) = (fs::read_to_string("/proc/self/mountinfo"), fs::read_to_string("/proc/self/cgroup"));
    let (Ok(mounts), Ok(own)) = (mounts, own) else { return Err(NONE.to_owned()) };
    Ok(cgroup_mounts::find(&mounts, &own))
}

/// The name of the parent of all groups: one per state directory, and so one per server.
fn place_name(state_dir: &Path) -> String {
    let digest = Sha256::digest(state_dir.as_os_str().as_encoded_bytes());
    format!("baton-{}", baton_protocol::id::hex(&digest[..8]))
}

/// Removes the groups that a killed server left below `place`, and `place` itself.
fn clear(place: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            empty(&entry.path())?;
        }
    }
    gone(place)
}

/// Removes a group, which contains just-killed processes for a moment.
fn empty(directory: &Path) -> io::Result<()> {
    for _ in 0..EMPTY_TIMEOUT.as_millis() / EMPTY_POLL.as_millis() {
        match gone(directory) {
            Err(error) if is_busy(&error) => std::thread::sleep(EMPTY_POLL),
            ended => return ended,
        }
    }
    gone(directory)
}

fn gone(directory: &Path) -> io::Result<()> {
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ResourceBusy
}

/// Makes the directories and writes the bounds; undoes everything if one is refused.
fn make(directories: Vec<PathBuf>, bounds: &[(PathBuf, String)], quota: Option<Quota>) -> io::Result<Group> {
    let made = directories
        .iter()
        .try_for_each(fs::create_dir)
        .and_then(|()| bounds.iter().try_for_each(|(file, value)| fs::write(file, value)))
        // If this cannot be written now, it cannot be written later either.
        .and_then(|()| quota.as_ref().map_or(Ok(()), |quota| fs::write(&quota.file, quota.free)));
    if made.is_err() {
        for directory in &directories {
            let _ = fs::remove_dir(directory);
        }
    }
    made.map(|()| Group { directories, quota })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_told_microseconds_and_bytes_above_the_limit() {
        let limits = Limits { cpus: Some(Cpus(1500)), memory: Some(512 << 20), ..Limits::default() };
        let bounds = CgroupLimits::of(&limits);
        assert_eq!(bounds.quota, Some(150_000));
        assert!(bounds.memory.is_some_and(|most| most > 512 << 20));
        assert_eq!(CgroupLimits::of(&Limits::default()), CgroupLimits::default());
    }

    #[test]
    fn a_place_is_named_after_its_state_directory() {
        let name = place_name(Path::new("/run/baton"));
        assert_eq!(name, place_name(Path::new("/run/baton")));
        assert_ne!(name, place_name(Path::new("/run/baton2")));
        assert_eq!(name.len(), "baton-".len() + 16);
    }
}
