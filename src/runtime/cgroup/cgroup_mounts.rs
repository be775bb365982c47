//! Locates the cgroup of this process in the file system, from two texts of the kernel.

use std::path::{Path, PathBuf};

/// The directories of our own cgroups that are mounted.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CgroupMounts {
    /// In the hierarchies of version 1.
    pub cpu: Option<PathBuf>,
    pub memory: Option<PathBuf>,
    /// In the one of version 2.
    pub unified: Option<PathBuf>,
}

/// `mounts` is `/proc/self/mountinfo`, `own` is `/proc/self/cgroup`.
pub fn find(mounts: &str, own: &str) -> CgroupMounts {
    CgroupMounts { cpu: one(mounts, own, "cpu"), memory: one(mounts, own, "memory"), unified: two(mounts, own) }
}

fn one(mounts: &str, own: &str, controller: &str) -> Option<PathBuf> {
    let named = |list: &str| list.split(',').any(|name| name == controller);
    let path = own.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        named(controllers).then_some(path)
    })?;
    let mount = mounts.lines().filter_map(mount).find(|mount| mount.kind == "cgroup" && named(mount.options))?;
    Some(mount.directory(path))
}

fn two(mounts: &str, own: &str) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mount = mounts.lines().filter_map(mount).find(|mount| mount.kind == "cgroup2")?;
    Some(mount.directory(path))
}

struct Mount<'a> {
    /// The cgroup mounted at `place`.
    root: &'a str,
    place: &'a str,
    kind: &'a str,
    options: &'a str,
}

impl Mount<'_> {
    /// In a container without a cgroup namespace, only its own cgroup may be mounted.
    fn directory(&self, cgroup: &str) -> PathBuf {
        let below = Path::new(cgroup).strip_prefix(self.root).unwrap_or(Path::new(""));
        if below == Path::new("") { PathBuf::from(self.place) } else { Path::new(self.place).join(below) }
    }
}

fn mount(line: &str) -> Option<Mount<'_>> {
    let (front, back) = line.split_once(" - ")?;
    let mut front = front.split(' ').skip(3);
    let mut back = back.split(' ');
    let (root, place) = (front.next()?, front.next()?);
    Some(Mount { root, place, kind: back.next()?, options: back.nth(1)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "25 24 0:22 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
                       28 24 0:25 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                       29 24 0:26 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

    #[test]
    fn each_hierarchy_of_version_one_has_its_own_place() {
        let own = "9:name=systemd:/\n4:memory:/a/b\n1:cpu,cpuacct:/\n0::/\n";
        let found = find(ONE, own);
        assert_eq!(found.cpu, Some("/sys/fs/cgroup/cpu".into()));
        assert_eq!(found.memory, Some("/sys/fs/cgroup/memory/a/b".into()));
        assert_eq!(found.unified, Some("/sys/fs/cgroup/unified".into()));
    }

    #[test]
    fn in_version_two_there_is_one() {
        let mounts = "31 23 0:26 / /sys/fs/cgroup ro,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = find(mounts, "0::/system.slice/baton.service\n");
        assert_eq!(found.unified, Some("/sys/fs/cgroup/system.slice/baton.service".into()));
        assert_eq!((found.cpu, found.memory), (None, None));
    }

    #[test]
    fn a_container_sees_its_own_cgroup_as_the_root() {
        let mounts = "40 39 0:22 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n";
        assert_eq!(find(mounts, "3:cpu:/docker/abc\n").cpu, Some("/sys/fs/cgroup/cpu".into()));
        assert_eq!(find(mounts, "3:cpu:/docker/abc/x\n").cpu, Some("/sys/fs/cgroup/cpu/x".into()));
        assert_eq!(find(mounts, "3:cpu:/elsewhere\n").cpu, Some("/sys/fs/cgroup/cpu".into()));
    }

    #[test]
    fn without_a_mount_there_is_nothing() {
        assert_eq!(find("", "3:cpu:/\n0::/\n"), CgroupMounts::default());
        assert_eq!(find(ONE, ""), CgroupMounts::default());
        assert_eq!(find("nonsense\n", "nonsense"), CgroupMounts::default());
    }
}
