//! A directory and what is below it, in order: each directory by name, before what is in it.

use std::{
    ffi::OsString,
    fs::{self, Metadata},
    io,
    path::{Path, PathBuf},
};

/// One thing found.
#[derive(Debug)]
pub(crate) struct Found {
    /// Where it is.
    pub path: PathBuf,
    /// Relative to where the walk began.
    pub name: PathBuf,
    /// Of the thing itself: no link is followed.
    pub metadata: io::Result<Metadata>,
}

/// What is in a directory, down to `depth`; a directory that cannot be read is given a second time, with the error.
#[derive(Debug)]
pub(crate) struct Walk {
    root: PathBuf,
    depth: usize,
    /// For each directory on the way down, its name and what is still to be visited, last first.
    open: Vec<(PathBuf, Vec<OsString>)>,
    failed: Option<Found>,
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
            Err(error) => self.failed = Some(Found { path, name, metadata: Err(error) }),
        }
    }

    fn path_of(&self, name: &Path) -> PathBuf {
        if name.as_os_str().is_empty() { self.root.clone() } else { self.root.join(name) }
    }
}

impl Iterator for Walk {
    type Item = Found;

    fn next(&mut self) -> Option<Found> {
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
            return Some(Found { path, name, metadata });
        }
    }
}
