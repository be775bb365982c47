//! Walks a directory in order: entries are sorted by name, and a directory comes before its content.

use std::{
    ffi::OsString,
    fs::{self, Metadata},
    io,
    path::{Path, PathBuf},
};

/// One entry.
#[derive(Debug)]
pub(crate) struct WalkEntry {
    /// The full path.
    pub path: PathBuf,
    /// Relative to the root of the walk.
    pub name: PathBuf,
    /// The metadata of the entry itself: links are not followed.
    pub metadata: io::Result<Metadata>,
}

/// The entries of a directory, down to `depth`; a directory that cannot be read appears a second time, with the error.
#[derive(Debug)]
pub(crate) struct Walk {
    root: PathBuf,
    depth: usize,
    /// For each open directory, its name and the entries still to be visited, in reverse order.
    open: Vec<(PathBuf, Vec<OsString>)>,
    failed: Option<WalkEntry>,
}

impl Walk {
    pub(crate) fn new(root: &Path, depth: usize) -> Self {
        let mut walk = Self { root: root.to_owned(), depth, open: Vec::new(), failed: None };
        walk.enter(PathBuf::new());
        walk
    }

    fn enter(&mut self, name: PathBuf) {
        if self.open.len() >= self.depth {
            return;
        }
        let path = self.path_of(&name);
        let names: io::Result<Vec<OsString>> =
            fs::read_dir(&path).and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect());
        match names {
            Ok(mut names) => {
                names.sort_unstable_by(|a, b| b.cmp(a));
                self.open.push((name, names));
            }
            Err(error) => self.failed = Some(WalkEntry { path, name, metadata: Err(error) }),
        }
    }

    fn path_of(&self, name: &Path) -> PathBuf {
        if name.as_os_str().is_empty() { self.root.clone() } else { self.root.join(name) }
    }
}

impl Iterator for Walk {
    type Item = WalkEntry;

    fn next(&mut self) -> Option<WalkEntry> {
        if let Some(failed) = self.failed.take() {
            return Some(failed);
        }
        loop {
            let (directory, names) = self.open.last_mut()?;
            let Some(last) = names.pop() else {
                self.open.pop();
                continue;
            };
            let name = directory.join(last);
            let path = self.path_of(&name);
            let metadata = fs::symlink_metadata(&path);
            if metadata.as_ref().is_ok_and(Metadata::is_dir) {
                self.enter(name.clone());
            }
            return Some(WalkEntry { path, name, metadata });
        }
    }
}
