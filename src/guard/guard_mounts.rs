//! Finds and unmounts what runsc leaves mounted below a state directory.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use rustix::mount::UnmountFlags;

/// The file in a state directory that its server keeps locked.
pub const LOCK: &str = "lock";

/// Unmounts everything below `directory`, deepest first. Idempotent.
pub fn unmount_below(directory: &Path) -> io::Result<()> {
    for mount in below(directory)? {
        rustix::mount::unmount(&mount, UnmountFlags::DETACH)?;
    }
    Ok(())
}

/// The mount points below `directory`, deepest first.
pub fn below(directory: &Path) -> io::Result<Vec<PathBuf>> {
    Ok(listed(&fs::read("/proc/self/mountinfo")?, directory))
}

fn listed(table: &[u8], directory: &Path) -> Vec<PathBuf> {
    let fifth = |line: &[u8]| line.split(|byte| *byte == b' ').nth(4).map(unescaped);
    let places = table.split(|byte| *byte == b'\n').filter_map(fifth);
    let mut below: Vec<_> = places.filter(|place| place.starts_with(directory) && place != directory).collect();
    below.sort_by_key(|place| std::cmp::Reverse(place.components().count()));
    below
}

/// Decodes a path: the kernel writes spaces, tabs, line breaks and backslashes as three octal digits.
fn unescaped(text: &[u8]) -> PathBuf {
    let (mut plain, mut rest) = (Vec::with_capacity(text.len()), text);
    while let Some((first, after)) = rest.split_first() {
        match (first, octal(after)) {
            (b'\\', Some(byte)) => {
                plain.push(byte);
                rest = &after[3..];
            }
            _ => {
                plain.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(plain))
}

fn octal(digits: &[u8]) -> Option<u8> {
    u8::from_str_radix(std::str::from_utf8(digits.get(..3)?).ok()?, 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_below_a_directory_are_found_whatever_its_name() {
        let table = "22 1 0:21 / /run rw - tmpfs tmpfs rw\n\
                     23 22 0:22 / /run/b rw - tmpfs tmpfs rw\n\
                     24 22 0:4 net:[1] /run/b/runsc/null-netns rw shared:7 - nsfs nsfs rw\n\
                     25 22 0:23 / /run/b/runsc rw - tmpfs tmpfs rw\n\
                     26 22 0:23 / /run/b2/runsc rw - tmpfs tmpfs rw\n\
                     27 22 0:4 net:[1] /run/a\\040b\\134/x rw - nsfs nsfs rw\n";
        let found = |directory: &str| listed(table.as_bytes(), Path::new(directory));
        let names = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(found("/run/b"), names(&["/run/b/runsc/null-netns", "/run/b/runsc"]), "the deepest first");
        assert_eq!(found("/run/a b\\"), names(&["/run/a b\\/x"]));
        assert_eq!(found("/run/c"), names(&[]));
    }

    #[test]
    fn what_is_no_escape_stays_as_it_is() {
        for (text, plain) in [("/a\\04", "/a\\04"), ("/a\\", "/a\\"), ("/\\777", "/\\777"), ("/\\012", "/\n")] {
            assert_eq!(unescaped(text.as_bytes()), Path::new(plain));
        }
    }
}
