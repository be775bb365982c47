//! Version 2: one tree, in which a group with subgroups has no processes of its own.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{CgroupLimits, Cgroups, Group, MEMBERS, PERIOD, Quota, clear, make};

const CONTROLLERS: [&str; 2] = ["cpu", "memory"];
const BELOW: &str = "cgroup.subtree_control";

#[derive(Debug)]
pub struct Two {
    place: PathBuf,
    has_cpu: bool,
    has_memory: bool,
}

impl Two {
    /// Makes the parent of all groups below our own cgroup. This process first moves into a sibling of it, and
    /// back on failure; other processes in our cgroup are enough to make it fail.
    pub fn open(own: &Path, name: &str) -> Result<Self, String> {
        let wanted = offered(own)?;
        let orders = wanted.iter().map(|name| format!("+{name}")).collect::<Vec<_>>().join(" ");
        let (place, aside) = (own.join(name), own.join(format!("{name}-server")));
        let taken = clear(&place).and_then(|()| fs::create_dir(&place)).and_then(|()| {
            // Only the root cgroup may have both processes and subgroups.
            if own.join("cgroup.type").exists() {
                fs::create_dir_all(&aside)?;
                fs::write(aside.join(MEMBERS), "0")?;
            }
            fs::write(own.join(BELOW), &orders)?;
            fs::write(place.join(BELOW), &orders)
        });
        if let Err(error) = taken {
            if aside.exists() {
                let _ = fs::write(own.join(MEMBERS), "0");
                let _ = fs::remove_dir(&aside);
            }
            let _ = fs::remove_dir(&place);
            return Err(refused(error));
        }
        Ok(Self::with(place, &wanted))
    }

    /// Checks whether groups could be made, as far as possible without moving processes.
    pub fn probe(own: &Path, name: &str) -> Result<Self, String> {
        let (wanted, place) = (offered(own)?, own.join(name));
        fs::create_dir(&place).and_then(|()| fs::remove_dir(&place)).map_err(refused)?;
        Ok(Self::with(place, &wanted))
    }

    fn with(place: PathBuf, wanted: &[&str]) -> Self {
        Self { place, has_cpu: wanted.contains(&"cpu"), has_memory: wanted.contains(&"memory") }
    }
}

fn refused(error: io::Error) -> String {
    format!("no cgroup can be made here: {error}")
}

/// The controllers we need that our own cgroup has.
fn offered(own: &Path) -> Result<Vec<&'static str>, String> {
    let offered = fs::read_to_string(own.join("cgroup.controllers")).map_err(refused)?;
    let has = |controller: &&str| offered.split_whitespace().any(|name| name == *controller);
    let wanted: Vec<_> = CONTROLLERS.into_iter().filter(has).collect();
    if wanted.is_empty() { Err("no cgroup here holds CPUs or memory".to_owned()) } else { Ok(wanted) }
}

impl Cgroups for Two {
    fn version(&self) -> &'static str {
        "v2"
    }

    fn holds_cpus(&self) -> bool {
        self.has_cpu
    }

    fn make(&self, name: &str, bounds: &CgroupLimits) -> io::Result<Group> {
        let directory = self.place.join(name);
        let quota = bounds.quota.filter(|_| self.has_cpu).map(|quota| Quota {
            file: directory.join("cpu.max"),
            held: format!("{quota} {PERIOD}"),
            free: "max",
        });
        let memory = bounds.memory.filter(|_| self.has_memory);
        let memory: Vec<_> =
            memory.map(|memory| (directory.join("memory.max"), memory.to_string())).into_iter().collect();
        let directories = if quota.is_some() || !memory.is_empty() { vec![directory] } else { Vec::new() };
        make(directories, &memory, quota)
    }

    fn clear(&self) -> io::Result<()> {
        clear(&self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(controllers: &str, is_root: bool) -> tempfile::TempDir {
        let own = tempfile::tempdir().unwrap();
        fs::write(own.path().join("cgroup.controllers"), controllers).unwrap();
        if !is_root {
            fs::write(own.path().join("cgroup.type"), "domain\n").unwrap();
        }
        own
    }

    fn read(own: &tempfile::TempDir, file: &str) -> String {
        fs::read_to_string(own.path().join(file)).unwrap_or_default()
    }

    #[test]
    fn the_server_moves_aside_and_a_group_has_one_directory() {
        let own = tree("cpuset cpu io memory pids\n", false);
        let two = Two::open(own.path(), "baton-x").unwrap();
        assert_eq!(read(&own, "baton-x-server/cgroup.procs"), "0");
        assert_eq!(read(&own, BELOW), "+cpu +memory");
        assert_eq!(read(&own, "baton-x/cgroup.subtree_control"), "+cpu +memory");
        let group = two.make("c1", &CgroupLimits { quota: Some(150_000), memory: Some(1 << 30) }).unwrap();
        assert_eq!(group.directories(), [own.path().join("baton-x/c1")]);
        assert_eq!(read(&own, "baton-x/c1/memory.max"), "1073741824");
        assert_eq!(read(&own, "baton-x/c1/cpu.max"), "max");
        group.throttle().unwrap();
        assert_eq!(read(&own, "baton-x/c1/cpu.max"), "150000 100000");
        assert!(two.make("c2", &CgroupLimits::default()).unwrap().directories().is_empty());
    }

    #[test]
    fn only_what_is_offered_is_used() {
        let own = tree("memory\n", true);
        let two = Two::open(own.path(), "baton-x").unwrap();
        assert!(!two.holds_cpus());
        assert!(!own.path().join("baton-x-server").exists(), "in the root of all nobody has to move");
        let group = two.make("c1", &CgroupLimits { quota: Some(150_000), memory: None }).unwrap();
        assert!(group.directories().is_empty());
        let none = tree("hugetlb\n", true);
        assert_eq!(Two::open(none.path(), "baton-x").unwrap_err(), "no cgroup here holds CPUs or memory");
        assert!(Two::probe(none.path(), "baton-x").is_err());
        assert!(!Two::probe(own.path(), "baton-probe").unwrap().holds_cpus());
        assert!(!own.path().join("baton-probe").exists());
    }

    #[test]
    fn one_that_is_shared_with_others_is_left_as_it_was() {
        let own = tree("cpu\n", false);
        // The kernel refuses to enable a controller below processes; a directory refuses to be written to.
        fs::create_dir(own.path().join(BELOW)).unwrap();
        let why = Two::open(own.path(), "baton-x").unwrap_err();
        assert!(why.starts_with("no cgroup can be made here: "), "{why}");
        assert_eq!(read(&own, MEMBERS), "0", "it is back where it was");
        assert!(!own.path().join("baton-x").exists());
    }
}
