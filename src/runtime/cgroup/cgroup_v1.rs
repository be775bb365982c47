//! Version 1: one hierarchy per controller.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{CgroupLimits, Cgroups, Group, PERIOD, Quota, clear, make};

#[derive(Debug)]
pub struct One {
    /// Our directories in the hierarchies that allow one.
    cpu: Option<PathBuf>,
    memory: Option<PathBuf>,
}

impl One {
    /// Checks each hierarchy for permission to make a directory, and wipes what is left there. The directory is
    /// made with the first group: most servers never need one.
    pub fn open(cpu: Option<PathBuf>, memory: Option<PathBuf>, name: &str) -> Result<Self, String> {
        let mut why = String::new();
        let mut take = |own: Option<PathBuf>| {
            let place = own?.join(name);
            let taken = clear(&place).and_then(|()| fs::create_dir(&place)).and_then(|()| fs::remove_dir(&place));
            taken.map_err(|error| why = format!("no cgroup can be made here: {error}")).ok().map(|()| place)
        };
        let one = Self { cpu: take(cpu), memory: take(memory) };
        if one.cpu.is_none() && one.memory.is_none() { Err(why) } else { Ok(one) }
    }
}

impl Cgroups for One {
    fn version(&self) -> &'static str {
        "v1"
    }

    fn holds_cpus(&self) -> bool {
        self.cpu.is_some()
    }

    fn make(&self, name: &str, bounds: &CgroupLimits) -> io::Result<Group> {
        let (mut directories, mut values, mut held) = (Vec::new(), Vec::new(), None);
        if let (Some(place), Some(quota)) = (&self.cpu, bounds.quota) {
            ready(place)?;
            let directory = place.join(name);
            values.push((directory.join("cpu.cfs_period_us"), PERIOD.to_string()));
            held = Some(Quota { file: directory.join("cpu.cfs_quota_us"), held: quota.to_string(), free: "-1" });
            directories.push(directory);
        }
        if let (Some(place), Some(memory)) = (&self.memory, bounds.memory) {
            ready(place)?;
            let directory = place.join(name);
            values.push((directory.join("memory.limit_in_bytes"), memory.to_string()));
            directories.push(directory);
        }
        make(directories, &values, held)
    }

    fn clear(&self) -> io::Result<()> {
        self.cpu.iter().chain(&self.memory).try_for_each(|place| clear(place))
    }
}

fn ready(place: &Path) -> io::Result<()> {
    match fs::create_dir(place) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_a_directory_where_it_is_bound_and_nowhere_else() {
        let root = tempfile::tempdir().unwrap();
        let (cpu, memory) = (root.path().join("cpu"), root.path().join("memory"));
        fs::create_dir(&cpu).unwrap();
        let one = One::open(Some(cpu.clone()), Some(memory.clone()), "baton-x").unwrap();
        assert!(one.holds_cpus(), "what the other hierarchy refuses is another matter");
        let bounds = CgroupLimits { quota: Some(50_000), memory: Some(1 << 30) };
        let group = one.make("c1", &bounds).unwrap();
        assert_eq!(group.directories(), [cpu.join("baton-x/c1")]);
        let quota = || fs::read_to_string(cpu.join("baton-x/c1/cpu.cfs_quota_us")).unwrap();
        assert_eq!(quota(), "-1", "it starts as fast as it can");
        group.throttle().unwrap();
        assert_eq!(quota(), "50000");
        group.unthrottle().unwrap();
        assert_eq!(quota(), "-1");
        assert!(one.make("c2", &CgroupLimits::default()).unwrap().directories().is_empty());

        fs::create_dir(&memory).unwrap();
        let both = One::open(None, Some(memory.clone()), "baton-x").unwrap();
        assert!(!both.holds_cpus());
        both.make("c1", &bounds).unwrap();
        assert_eq!(fs::read_to_string(memory.join("baton-x/c1/memory.limit_in_bytes")).unwrap(), "1073741824");
    }

    #[test]
    fn what_is_refused_leaves_nothing_and_says_why() {
        let root = tempfile::tempdir().unwrap();
        let why = One::open(Some(root.path().join("none")), None, "baton-x").unwrap_err();
        assert!(why.starts_with("no cgroup can be made here: "), "{why}");
        let one = One::open(Some(root.path().to_owned()), Some(root.path().join("none")), "baton-x").unwrap();
        fs::create_dir_all(root.path().join("baton-x/c1")).unwrap();
        one.make("c1", &CgroupLimits { quota: Some(1000), memory: None }).unwrap_err();
        assert!(one.make("a/b", &CgroupLimits { quota: Some(1000), memory: None }).is_err());
        assert!(!root.path().join("baton-x/a").exists());
    }
}
