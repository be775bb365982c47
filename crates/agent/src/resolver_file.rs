//! `/etc/resolv.conf` while names are answered by the agent. What was there is kept beside it and put back.
//!
//! Images are foreign: it may be a file, a link that leads nowhere, a directory or missing. None of them is ever
//! opened for writing or followed; they are renamed.

use std::{
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags};

const TEXT: &str = "# Names are answered by the agent of this sandbox. The file that was here is resolv.conf.kept.\nnameserver 127.0.0.1\n";

#[derive(Debug)]
pub struct ResolverFile {
    directory: PathBuf,
}

impl ResolverFile {
    /// The file in `directory`, which is `/etc` except in tests.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// Puts the agent's file into place. Idempotent. If it fails, what was there is still there under one of two names.
    pub fn install(&self) -> io::Result<()> {
        if is_own(&self.path()) {
            return Ok(());
        }
        fs::create_dir_all(&self.directory)?;
        let fresh = self.directory.join(".resolv.conf.new");
        let _ = fs::remove_file(&fresh);
        fs::File::create_new(&fresh)?.write_all(TEXT.as_bytes())?;
        if self.path().symlink_metadata().is_ok() {
            fs::rename(self.path(), self.kept())?;
        }
        fs::rename(&fresh, self.path())
    }

    /// Puts back what was there, unless a program has replaced the agent's file since. Idempotent.
    pub fn restore(&self) -> io::Result<()> {
        if !is_own(&self.path()) {
            return Ok(());
        }
        let Ok(kept) = self.kept().symlink_metadata() else { return fs::remove_file(self.path()) };
        if kept.is_dir() {
            // A directory cannot take the place of a file in one step.
            fs::remove_file(self.path())?;
        }
        fs::rename(self.kept(), self.path())
    }

    fn path(&self) -> PathBuf {
        self.directory.join("resolv.conf")
    }

    fn kept(&self) -> PathBuf {
        self.directory.join("resolv.conf.kept")
    }
}

/// Whether it is the agent's file. Neither a link nor a pipe nor a large file can hold up the agent.
fn is_own(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::open(path, flags, Mode::empty()) else { return false };
    let mut bytes = Vec::new();
    let read = fs::File::from(file).take(TEXT.len() as u64 + 1).read_to_end(&mut bytes);
    read.is_ok() && bytes == TEXT.as_bytes()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn whatever_was_there_is_put_back() {
        type Make = fn(&Path);
        type Check = fn(&Path) -> bool;
        let cases: [(&str, Make, Check); 6] = [
            (
                "a file",
                |at| fs::write(at, "nameserver 9.9.9.9\n").unwrap(),
                |at| fs::read_to_string(at).unwrap() == "nameserver 9.9.9.9\n",
            ),
            ("an empty file", |at| fs::write(at, "").unwrap(), |at| fs::read(at).unwrap().is_empty()),
            (
                "a link that leads nowhere",
                |at| symlink("../run/none", at).unwrap(),
                |at| fs::read_link(at).unwrap() == Path::new("../run/none"),
            ),
            ("a directory", |at| fs::create_dir_all(at.join("inside")).unwrap(), |at| at.join("inside").is_dir()),
            (
                "a pipe",
                |at| rustix::fs::mknodat(rustix::fs::CWD, at, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap(),
                |at| !at.is_file() && !at.is_dir() && at.exists(),
            ),
            ("nothing", |_| {}, |at| at.symlink_metadata().is_err()),
        ];
        for (what, make, is_back) in cases {
            let directory = tempfile::tempdir().unwrap();
            let (file, at) = (ResolverFile::new(directory.path()), directory.path().join("resolv.conf"));
            make(&at);
            for _ in 0..2 {
                file.install().unwrap();
                assert_eq!(fs::read_to_string(&at).unwrap(), TEXT, "{what}");
                assert!(!at.is_symlink(), "{what}");
            }
            for _ in 0..2 {
                file.restore().unwrap();
                assert!(is_back(&at), "{what}");
            }
            assert!(names(directory.path()).iter().all(|name| name == "resolv.conf"), "{what}");
        }
    }

    #[test]
    fn a_file_that_a_program_wrote_meanwhile_stays() {
        let directory = tempfile::tempdir().unwrap();
        let (file, at) = (ResolverFile::new(directory.path().join("etc")), directory.path().join("etc/resolv.conf"));
        file.install().unwrap();
        fs::write(&at, "nameserver 1.1.1.1\n").unwrap();
        file.restore().unwrap();
        assert_eq!(fs::read_to_string(&at).unwrap(), "nameserver 1.1.1.1\n");
    }
}
