//! The files of a directory store: reading, publishing, removing. Everything here blocks.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::Once,
    time::{Duration, SystemTime},
};

use baton_protocol::id::hex;
use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;

use crate::{
    clock::{Moment, SharedClock},
    storage::{
        local_files::{self, Reporter, local_error},
        store::{Digest, Error, MAX_SMALL_OBJECT, Precondition, Result, Version, Written},
    },
};

/// The store's private directory under the root; no key can name it.
const OWN: &str = ".baton";
/// Drafts that have not been written to for this long are abandoned.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);
/// The token of a file that was not written by this store.
const NO_TOKEN: &str = "0";

#[derive(Debug)]
pub struct Tree {
    root: PathBuf,
    clock: SharedClock,
    swept: Once,
}

/// An object as read once. `bytes` is empty if the object is not small.
#[derive(Debug)]
pub struct ObjectRead {
    pub version: Version,
    pub size: u64,
    pub bytes: Vec<u8>,
    pub updated: Option<SystemTime>,
}

/// The part of a version that depends on the content. Large objects are written once and never edited, so their size
/// suffices; the token makes the version unique.
pub fn mark(bytes: &[u8]) -> String {
    if bytes.len() as u64 > MAX_SMALL_OBJECT {
        large_mark(bytes.len() as u64)
    } else {
        hex(&Sha256::digest(bytes)[..16])
    }
}

pub fn large_mark(size: u64) -> String {
    format!("size{size}")
}

/// The mark of a file with this digest.
pub fn mark_of(digest: &Digest) -> String {
    if digest.size > MAX_SMALL_OBJECT { large_mark(digest.size) } else { digest.sha256.chars().take(32).collect() }
}

/// Makes the content of a file durable.
pub fn sync(key: &str, file: &File) -> Result<()> {
    file.sync_all().map_err(|error| local_error(key, &error))
}

impl Tree {
    pub fn new(root: PathBuf, clock: SharedClock) -> Self {
        Self { root, clock, swept: Once::new() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn open(&self, key: &str) -> Result<File> {
        File::open(self.root.join(key)).map_err(|error| local_error(key, &error))
    }

    /// Reads the object and its version, without taking a lock.
    pub fn read(&self, key: &str) -> Result<Option<ObjectRead>> {
        let mut token = self.token(key)?;
        loop {
            let Some(seen) = self.content(key)? else { return Ok(None) };
            let again = self.token(key)?;
            if token == again {
                return Ok(Some(ObjectRead { version: Version(format!("{}-{token}", seen.version.0)), ..seen }));
            }
            // A write is in progress. Each iteration of this loop means that a write succeeded.
            token = again;
        }
    }

    /// Reads the object; its version is the mark alone.
    fn content(&self, key: &str) -> Result<Option<ObjectRead>> {
        let mut file = match self.open(key) {
            Ok(file) => file,
            Err(Error::NotFound(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        let failed = |error: io::Error| local_error(key, &error);
        let about = file.metadata().map_err(failed)?;
        if !about.is_file() {
            return Ok(None);
        }
        let updated = about.modified().ok();
        if about.len() > MAX_SMALL_OBJECT {
            let version = Version(large_mark(about.len()));
            return Ok(Some(ObjectRead { version, size: about.len(), bytes: Vec::new(), updated }));
        }
        let mut bytes = Vec::with_capacity(about.len() as usize);
        // An editor may be writing: never read more than a small object, whatever the reported size.
        Read::take(&mut file, MAX_SMALL_OBJECT).read_to_end(&mut bytes).map_err(failed)?;
        Ok(Some(ObjectRead { version: Version(mark(&bytes)), size: bytes.len() as u64, bytes, updated }))
    }

    /// Creates a temporary file on this file system that either becomes an object or is removed.
    pub fn draft(&self, key: &str) -> Result<NamedTempFile> {
        let failed = |error: io::Error| local_error(key, &error);
        let drafts = self.root.join(OWN).join("drafts");
        self.swept.call_once(|| self.sweep(&drafts));
        let make = || tempfile::Builder::new().permissions(readable()).tempfile_in(&drafts);
        match make() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(&drafts).map_err(failed)?;
                make().map_err(failed)
            }
            made => made.map_err(failed),
        }
    }

    /// Turns a file that we own into a durable draft and returns its digest. On the same file system the draft is a
    /// hard link to the file, which is read once, in parallel with the sync.
    pub fn adopt(&self, key: &str, file: &Path, reporter: &Reporter) -> Result<(NamedTempFile, Digest)> {
        let failed = |error: io::Error| local_error(key, &error);
        let path = self.root.join(key);
        let mut source = File::open(file).map_err(failed)?;
        let drafts = self.root.join(OWN).join("drafts");
        fs::create_dir_all(&drafts).map_err(failed)?;
        let settle = |file: &File| {
            sync(key, file)?;
            make_folder(&self.root, path.parent().unwrap_or(&self.root)).map_err(failed)
        };
        let Some(draft) = linked(file, &drafts) else {
            let mut draft = self.draft(key)?;
            let digest = local_files::copy(key, &mut source, &mut draft, reporter)?;
            settle(draft.as_file())?;
            return Ok((draft, digest));
        };
        fs::set_permissions(draft.path(), readable()).map_err(failed)?;
        let (digest, settled) = std::thread::scope(|scope| {
            let settled = scope.spawn(|| settle(draft.as_file()));
            (local_files::copy(key, &mut source, io::sink(), reporter), settled.join())
        });
        settled.unwrap_or_else(|_| Err(failed(io::ErrorKind::Other.into())))?;
        Ok((draft, digest?))
    }

    /// Links the object to a draft beside `target`, for reading only; `None` if hard links are not possible.
    pub fn link(&self, key: &str, target: &Path) -> Result<Option<NamedTempFile>> {
        let object = self.root.join(key);
        if !object.exists() {
            return Err(Error::NotFound(key.to_owned()));
        }
        Ok(linked(&object, target.parent().unwrap_or(&self.root)))
    }

    /// Removes drafts of killed processes. Failures are left to the next sweep.
    fn sweep(&self, drafts: &Path) {
        for entry in fs::read_dir(drafts).into_iter().flatten().flatten() {
            let modified = entry.metadata().and_then(|about| about.modified());
            let age = modified.ok().and_then(|modified| self.clock.wall().duration_since(modified).ok());
            if age.is_some_and(|age| age > ABANDONED) {
                drop(fs::remove_file(entry.path()));
            }
        }
    }

    /// Makes a draft the object if the condition holds at that moment. After a crash either this object or the previous
    /// one exists; after [`seal`](Self::seal) it is certainly this one.
    pub fn publish(
        &self,
        key: &str,
        draft: NamedTempFile,
        condition: &Precondition,
        mark: String,
        deadline: Moment,
    ) -> Result<Written> {
        let failed = |error: io::Error| local_error(key, &error);
        let path = self.root.join(key);
        let token = hex(&self.clock.bits());
        let held = self.lock(key, deadline)?;
        self.check(key, condition)?;
        self.set_token(key, &token).map_err(failed)?;
        let mut draft = draft;
        // A concurrent delete of a folder's last object also removes the folder: create it again.
        loop {
            make_folder(&self.root, path.parent().unwrap_or(&self.root)).map_err(failed)?;
            let moved = match condition {
                Precondition::Absent => draft.persist_noclobber(&path),
                Precondition::Any | Precondition::Is(_) => draft.persist(&path),
            };
            match moved {
                Ok(_) => break,
                Err(lost) if lost.error.kind() == io::ErrorKind::NotFound && lost.file.path().exists() => {
                    draft = lost.file;
                }
                Err(lost) if lost.error.kind() == io::ErrorKind::AlreadyExists => {
                    return Err(Error::Conflict(key.to_owned()));
                }
                Err(lost) => return Err(failed(lost.error)),
            }
        }
        drop(held);
        // A directory has no clock of its own to compare ours with.
        Ok(Written { version: Version(format!("{mark}-{token}")), updated: None })
    }

    /// Makes every name in the folder of this key durable.
    pub fn seal(&self, key: &str) -> Result<()> {
        match sync_folder(self.root.join(key).parent().unwrap_or(&self.root)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(local_error(key, &error)),
            // The folder is gone because the object has already been removed.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    pub fn remove(&self, key: &str, condition: &Precondition, deadline: Moment) -> Result<()> {
        let failed = |error: io::Error| local_error(key, &error);
        let path = self.root.join(key);
        let held = self.lock(key, deadline)?;
        let Some(seen) = self.read(key)? else { return Err(Error::NotFound(key.to_owned())) };
        if !condition.holds(Some(&seen.version)) {
            return Err(Error::Conflict(key.to_owned()));
        }
        fs::remove_file(&path).map_err(failed)?;
        // Tokens are random: a later object of this name cannot get the same one.
        match fs::remove_file(self.token_path(key)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            Ok(()) | Err(_) => {}
        }
        drop(held);
        let mut folder = path.parent();
        while let Some(empty) = folder.filter(|folder| *folder != self.root && folder.starts_with(&self.root)) {
            if fs::remove_dir(empty).is_err() {
                break;
            }
            folder = empty.parent();
        }
        match folder.map_or(Ok(()), sync_folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn check(&self, key: &str, condition: &Precondition) -> Result<()> {
        let current = match condition {
            Precondition::Any => return Ok(()),
            Precondition::Absent | Precondition::Is(_) => self.read(key)?,
        };
        if condition.holds(current.as_ref().map(|seen| &seen.version)) {
            Ok(())
        } else {
            Err(Error::Conflict(key.to_owned()))
        }
    }

    /// Waits for the lock file of this key until the deadline: its holder may be a stopped process.
    fn lock(&self, key: &str, deadline: Moment) -> Result<File> {
        let failed = |error: io::Error| local_error(key, &error);
        let locks = self.root.join(OWN).join("locks");
        let path = locks.join(&hashed(key)[..2]);
        let open = || File::options().create(true).write(true).truncate(false).open(&path);
        let file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(&locks).map_err(failed)?;
                open().map_err(failed)?
            }
            opened => opened.map_err(failed)?,
        };
        let mut pause = Duration::from_micros(100);
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(error)) => return Err(failed(error)),
                Err(TryLockError::WouldBlock) if self.clock.now() >= deadline => {
                    let why = "another process holds its lock file".to_owned();
                    return Err(Error::Unavailable { key: key.to_owned(), why });
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(pause),
            }
            pause = (pause * 2).min(Duration::from_millis(5));
        }
    }

    fn token(&self, key: &str) -> Result<String> {
        match fs::read_to_string(self.token_path(key)) {
            Ok(token) if token.len() == 32 => Ok(token),
            Ok(_) => Ok(NO_TOKEN.to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(NO_TOKEN.to_owned()),
            Err(error) => Err(local_error(key, &error)),
        }
    }

    /// Written in place and not synced: no process remembers a version across a crash of the machine.
    fn set_token(&self, key: &str, token: &str) -> io::Result<()> {
        let path = self.token_path(key);
        let open = || File::options().create(true).write(true).truncate(false).open(&path);
        let mut file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(path.parent().unwrap_or(&self.root))?;
                open()?
            }
            opened => opened?,
        };
        file.write_all(token.as_bytes())
    }

    fn token_path(&self, key: &str) -> PathBuf {
        let hash = hashed(key);
        self.root.join(OWN).join("tokens").join(&hash[..2]).join(&hash[2..])
    }
}

/// Creates a hard link to a file in `folder`; `None` if that is not possible.
fn linked(file: &Path, folder: &Path) -> Option<NamedTempFile> {
    let is_plain = fs::symlink_metadata(file).is_ok_and(|about| about.is_file());
    let link = |path: &Path| fs::hard_link(file, path).and_then(|()| File::open(path));
    // Different file systems, or no support for hard links: the caller copies instead, which reports the actual error.
    is_plain.then(|| tempfile::Builder::new().prefix(".draft-").make_in(folder, link).ok()).flatten()
}

fn hashed(key: &str) -> String {
    hex(&Sha256::digest(key)[..16])
}

/// Objects are readable by every instance and operator on this machine that may enter the directory.
fn readable() -> fs::Permissions {
    use std::os::unix::fs::PermissionsExt;
    fs::Permissions::from_mode(0o640)
}

/// Creates a folder and its ancestors durably.
fn make_folder(root: &Path, folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    if folder == root {
        return fs::create_dir_all(root);
    }
    let above = folder.parent().unwrap_or(root);
    make_folder(root, above)?;
    match fs::create_dir(folder) {
        Ok(()) => sync_folder(above),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // The parent was removed concurrently; the caller retries as a whole.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
