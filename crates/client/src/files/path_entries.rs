//! Names in the sandbox: what exists, what is removed or renamed, and what changes.

use baton_protocol::file_work::{FileChange, FileChangeKind, FileEntry, Work};

use super::{Transfer, working::Working};
use crate::{Error, Sandbox};

impl Sandbox {
    /// The file, directory or link at `path` itself. Returns [`Error::File`] with code `ENOENT` if there is none.
    pub async fn stat_file(&self, path: &str) -> Result<FileEntry, Error> {
        let entry = self.list_files(path, 0).await?.into_iter().next();
        entry.ok_or_else(|| Error::Protocol("a listing is empty".into()))
    }

    /// Whether there is anything at `path`; a link counts, wherever it leads.
    pub async fn file_exists(&self, path: &str) -> Result<bool, Error> {
        match self.stat_file(path).await {
            Ok(_) => Ok(true),
            Err(Error::File { code, .. }) if code == "ENOENT" || code == "ENOTDIR" => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes a file, a link or an empty directory; with `recursive`, a directory and everything in it.
    pub async fn remove_file(&self, path: &str, recursive: bool) -> Result<(), Error> {
        self.do_work(Work::RemoveFile { path: path.to_owned(), recursive }).await
    }

    /// Renames a file or directory. A file at `to` is replaced atomically.
    pub async fn rename_file(&self, path: &str, to: &str) -> Result<(), Error> {
        self.do_work(Work::RenameFile { path: path.to_owned(), to: to.to_owned() }).await
    }

    /// Creates a directory and the missing ones above it; one that exists is not an error.
    pub async fn make_directory(&self, path: &str) -> Result<(), Error> {
        self.do_work(Work::MakeDirectory { path: path.to_owned(), parents: true, mode: None }).await
    }

    /// Watches a directory, or with `recursive` everything below it, or one file. When this returns, every later change
    /// is reported. The watch continues after a reconnect, a checkpoint and a handoff.
    pub async fn watch_files(&self, path: &str, recursive: bool) -> Result<FileWatch, Error> {
        let work = Work::WatchFiles { path: path.to_owned(), recursive };
        let mut watch = FileWatch { working: self.work(work, &Transfer::default()).await?, rest: Vec::new() };
        match watch.next_line().await? {
            Some(FileChange { kind: FileChangeKind::Ready, .. }) => Ok(watch),
            Some(_) => Err(Error::Protocol("a watch begins with a change".into())),
            None => Err(Error::Protocol("a watch ended before it began".into())),
        }
    }

    async fn do_work(&self, work: Work) -> Result<(), Error> {
        self.work(work, &Transfer::default()).await?.finish().await?
    }
}

/// The changes of a watched directory. Dropping it ends the watch.
#[derive(Debug)]
pub struct FileWatch {
    working: Working,
    /// The beginning of a line.
    rest: Vec<u8>,
}

impl FileWatch {
    /// The next change; `None` if the watched directory is gone.
    pub async fn next(&mut self) -> Result<Option<FileChange>, Error> {
        self.next_line().await
    }

    async fn next_line(&mut self) -> Result<Option<FileChange>, Error> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                let change = serde_json::from_slice(&line).map(Some);
                return change.map_err(|_| Error::Protocol("a watch is damaged".into()));
            }
            match self.working.next().await? {
                Some(bytes) => self.rest.extend_from_slice(&bytes),
                None => return self.working.finish().await?.map(|()| None),
            }
        }
    }
}
