//! A cgroup per sandbox: its share of the CPUs, and a last bound for its memory, both kept by the kernel.
//!
//! A group is made before its container, joined by runsc before it is runsc, and removed after it. The
//! server, the guard and the short commands of runsc stay outside. Where the machine lets no cgroup be
//! made, containers run without, and limits that need one are refused before.
//!
//! ```text
//!   <cgroup of the server>/baton-<state directory>/<container>      v1: in each hierarchy, v2: once
//! ```

mod cgroup_mounts;
mod v1;
mod v2;

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use baton_protocol::limits::{Cpus, Limits};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::clock::SharedClock;

/// How often the kernel counts, in microseconds.
const PERIOD: u64 = 100_000;
/// What runsc itself takes, on top of what a sandbox may have.
const OWN: u64 = 128 << 20;
/// How long the last process of a group may take to be gone from it.
const EMPTY: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);
/// By which a process joins a group.
pub const MEMBERS: &str = "cgroup.procs";

/// Makes groups, in the way of one version of cgroups.
pub trait Cgroups: fmt::Debug + Send + Sync {
    /// For people.
    fn version(&self) -> &'static str;
    fn holds_cpus(&self) -> bool;
    /// An empty group with these bounds. What fails leaves nothing.
    fn make(&self, name: &str, bounds: &Bounds) -> io::Result<Group>;
    /// Removes every group that a server with the same state directory made, and the place for them.
    fn clear(&self) -> io::Result<()>;
}

/// What cgroups do here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shares {
    /// Of cgroups, for people.
    pub version: String,
    /// Containers have their share of the CPUs and no more.
    pub cpus: bool,
}

impl Shares {
    pub fn of(cgroups: &dyn Cgroups) -> Self {
        Self { version: cgroups.version().to_owned(), cpus: cgroups.holds_cpus() }
    }
}

/// What the kernel is told about one container; `None` is no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Microseconds of CPU in each [`PERIOD`].
    pub quota: Option<u64>,
    /// Bytes, with what runsc needs for itself.
    pub memory: Option<u64>,
}

impl Bounds {
    pub fn of(limits: &Limits) -> Self {
        Self {
            quota: limits.cpus.map(|Cpus(thousandths)| u64::from(thousandths) * PERIOD / 1000),
            memory: limits.memory.map(most_memory),
        }
    }
}

/// Where the kernel ends it: well above the limit, at which the runtime itself makes room first.
pub fn most_memory(limit: u64) -> u64 {
    limit.saturating_add(limit / 2).saturating_add(OWN)
}

/// The group of one container, in one directory or one of each hierarchy.
#[derive(Clone, Debug)]
pub struct Group {
    directories: Vec<PathBuf>,
    quota: Option<Quota>,
}

/// The file with the share of the CPUs, and what is written to hold to it or not.
#[derive(Clone, Debug)]
struct Quota {
    file: PathBuf,
    held: String,
    free: &'static str,
}

impl Group {
    /// Where a process has to register to be in it.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// From now on it has its share of the CPUs and no more. Until then it starts as fast as it can.
    pub fn throttle(&self) -> io::Result<()> {
        self.quota.as_ref().map_or(Ok(()), |quota| fs::write(&quota.file, &quota.held))
    }

    /// While its commands stand still it may hurry.
    pub fn unthrottle(&self) -> io::Result<()> {
        self.quota.as_ref().map_or(Ok(()), |quota| fs::write(&quota.file, quota.free))
    }

    /// Once its processes are dead. Safe to repeat.
    pub async fn remove(&self, clock: &SharedClock) -> io::Result<()> {
        let until = clock.now() + EMPTY;
        loop {
            match self.directories.iter().try_for_each(|directory| gone(directory)) {
                // The kernel takes a moment to take the dead out.
                Err(error) if is_busy(&error) && clock.now() < until => clock.sleep(PAUSE).await,
                ended => return ended,
            }
        }
    }
}

const NONE: &str = "this machine has no cgroups";

/// What this machine offers, or why nothing. What a server with the same state directory left is wiped.
pub fn open(state_dir: &Path) -> Result<Box<dyn Cgroups>, String> {
    let (found, name) = (find()?, place_name(state_dir));
    if found.cpu.is_some() || found.memory.is_some() {
        return v1::One::open(found.cpu, found.memory, &name).map(|one| Box::new(one) as Box<dyn Cgroups>);
    }
    let unified = found.unified.ok_or(NONE)?;
    v2::Two::open(&unified, &name).map(|two| Box::new(two) as Box<dyn Cgroups>)
}

/// The same for whoever only asks, beside a server that may run: nothing is left of it.
pub fn probe() -> Result<Shares, String> {
    let (found, name) = (find()?, format!("baton-probe-{}", std::process::id()));
    if found.cpu.is_some() || found.memory.is_some() {
        return v1::One::open(found.cpu, found.memory, &name).map(|one| Shares::of(&one));
    }
    v2::Two::probe(&found.unified.ok_or(NONE)?, &name).map(|two| Shares::of(&two))
}

fn find() -> Result<cgroup_mounts::Found, String> {
    let (mounts, own) = (fs::read_to_string("/proc/self/mountinfo"), fs::read_to_string("/proc/self/cgroup"));
    let (Ok(mounts), Ok(own)) = (mounts, own) else { return Err(NONE.to_owned()) };
    Ok(cgroup_mounts::find(&mounts, &own))
}

/// One server per state directory, and so one name per server.
fn place_name(state_dir: &Path) -> String {
    let digest = Sha256::digest(state_dir.as_os_str().as_encoded_bytes());
    format!("baton-{}", baton_protocol::id::hex(&digest[..8]))
}

/// Removes the groups below `place`, which a server left that was killed, and the place itself.
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

/// What was just killed is in it for a moment.
fn empty(directory: &Path) -> io::Result<()> {
    for _ in 0..EMPTY.as_millis() / PAUSE.as_millis() {
        match gone(directory) {
            Err(error) if is_busy(&error) => std::thread::sleep(PAUSE),
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

/// Makes the directories, writes the bounds, and takes everything back if one is refused.
fn make(directories: Vec<PathBuf>, bounds: &[(PathBuf, String)], quota: Option<Quota>) -> io::Result<Group> {
    let made = directories
        .iter()
        .try_for_each(fs::create_dir)
        .and_then(|()| bounds.iter().try_for_each(|(file, value)| fs::write(file, value)))
        // What could not be written now could not be written later either.
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
        let bounds = Bounds::of(&limits);
        assert_eq!(bounds.quota, Some(150_000));
        assert!(bounds.memory.is_some_and(|most| most > 512 << 20));
        assert_eq!(Bounds::of(&Limits::default()), Bounds::default());
    }

    #[test]
    fn a_place_is_named_after_its_state_directory() {
        let name = place_name(Path::new("/run/baton"));
        assert_eq!(name, place_name(Path::new("/run/baton")));
        assert_ne!(name, place_name(Path::new("/run/baton2")));
        assert_eq!(name.len(), "baton-".len() + 16);
    }
}
