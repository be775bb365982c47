//! The files of a directory store: looking, publishing, removing. Everything here blocks.

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
        files::{self, Reporter, local_error},
        store::{Digest, Error, Precondition, Result, SMALL, Version, Written},
    },
};

/// Our own corner of the root; no key can name it.
const OWN: &str = ".baton";
/// No upload writes to its draft for so long without a pause.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);
/// What a key without a token has: a file somebody else put there.
const NO_TOKEN: &str = "0";

#[derive(Debug)]
pub struct Tree {
    root: PathBuf,
    clock: SharedClock,
    swept: Once,
}

/// An object as one look saw it. `bytes` is empty for one that is not small.
#[derive(Debug)]
pub struct Seen {
    pub version: Version,
    pub size: u64,
    pub bytes: Vec<u8>,
    pub updated: Option<SystemTime>,
}

/// The part of a version that the content decides. Large objects are written once and never
/// edited, so their size stands for them and the token does the rest.
pub fn mark(bytes: &[u8]) -> String {
    if bytes.len() as u64 > SMALL { large_mark(bytes.len() as u64) } else { hex(&Sha256::digest(bytes)[..16]) }
}

pub fn large_mark(size: u64) -> String {
    format!("size{size}")
}

/// The mark of a file of which this is known.
pub fn mark_of(digest: &Digest) -> String {
    if digest.size > SMALL { large_mark(digest.size) } else { digest.sha256.chars().take(32).collect() }
}

/// What is in the file outlasts a crash.
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

    /// The object and its version, without a lock.
    pub fn look(&self, key: &str) -> Result<Option<Seen>> {
        let mut token = self.token(key)?;
        loop {
            let Some(seen) = self.content(key)? else { return Ok(None) };
            let again = self.token(key)?;
            if token == again {
                return Ok(Some(Seen { version: Version(format!("{}-{token}", seen.version.0)), ..seen }));
            }
            // A write is under way. Each turn of this loop is a write that succeeded.
            token = again;
        }
    }

    /// The object, with its mark alone for a version.
    fn content(&self, key: &str) -> Result<Option<Seen>> {
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
        if about.len() > SMALL {
            let version = Version(large_mark(about.len()));
            return Ok(Some(Seen { version, size: about.len(), bytes: Vec::new(), updated }));
        }
        let mut bytes = Vec::with_capacity(about.len() as usize);
        // An editor may be writing: never more than a small object, whatever the size said.
        Read::take(&mut file, SMALL).read_to_end(&mut bytes).map_err(failed)?;
        Ok(Some(Seen { version: Version(mark(&bytes)), size: bytes.len() as u64, bytes, updated }))
    }

    /// A file of this file system that will be an object, or vanishes.
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

    /// A file somebody gives us as a draft whose content lasts, and what it holds. On one file system it
    /// is the very same file; it is read once, while it is on its way to the disk.
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
            let digest = files::copy(key, &mut source, &mut draft, reporter)?;
            settle(draft.as_file())?;
            return Ok((draft, digest));
        };
        fs::set_permissions(draft.path(), readable()).map_err(failed)?;
        let (digest, settled) = std::thread::scope(|scope| {
            let settled = scope.spawn(|| settle(draft.as_file()));
            (files::copy(key, &mut source, io::sink(), reporter), settled.join())
        });
        settled.unwrap_or_else(|_| Err(failed(io::ErrorKind::Other.into())))?;
        Ok((draft, digest?))
    }

    /// The object as a draft beside `target`, to be read only; `None` where one file cannot have two names.
    pub fn link(&self, key: &str, target: &Path) -> Result<Option<NamedTempFile>> {
        let object = self.root.join(key);
        if !object.exists() {
            return Err(Error::NotFound(key.to_owned()));
        }
        Ok(linked(&object, target.parent().unwrap_or(&self.root)))
    }

    /// Removes drafts of processes that were killed. What cannot be removed now can be the next time.
    fn sweep(&self, drafts: &Path) {
        for entry in fs::read_dir(drafts).into_iter().flatten().flatten() {
            let modified = entry.metadata().and_then(|about| about.modified());
            let age = modified.ok().and_then(|modified| self.clock.wall().duration_since(modified).ok());
            if age.is_some_and(|age| age > ABANDONED) {
                drop(fs::remove_file(entry.path()));
            }
        }
    }

    /// Makes a draft the object, if the condition holds at that moment. After a crash there is this one
    /// or the one before; this one for certain after [`seal`](Self::seal).
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
        // Whoever deletes the last object of a folder takes the folder along, perhaps just now: make it again.
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

    /// Every name in the folder of this key outlasts a crash.
    pub fn seal(&self, key: &str) -> Result<()> {
        match sync_folder(self.root.join(key).parent().unwrap_or(&self.root)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(local_error(key, &error)),
            // The folder is gone because somebody removed the object already.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    pub fn remove(&self, key: &str, condition: &Precondition, deadline: Moment) -> Result<()> {
        let failed = |error: io::Error| local_error(key, &error);
        let path = self.root.join(key);
        let held = self.lock(key, deadline)?;
        let Some(seen) = self.look(key)? else { return Err(Error::NotFound(key.to_owned())) };
        if !condition.holds(Some(&seen.version)) {
            return Err(Error::Conflict(key.to_owned()));
        }
        fs::remove_file(&path).map_err(failed)?;
        // Tokens are random: a later object of this name cannot get this one again.
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
            Precondition::Absent | Precondition::Is(_) => self.look(key)?,
        };
        if condition.holds(current.as_ref().map(|seen| &seen.version)) {
            Ok(())
        } else {
            Err(Error::Conflict(key.to_owned()))
        }
    }

    /// Waits for the lock file of this key, but not for ever: its holder may be a stopped process.
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

    /// In place and not synced: after a crash of the machine nobody remembers a version.
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

/// A second name for a file, in `folder`; `None` if that cannot be.
fn linked(file: &Path, folder: &Path) -> Option<NamedTempFile> {
    let is_plain = fs::symlink_metadata(file).is_ok_and(|about| about.is_file());
    let link = |path: &Path| fs::hard_link(file, path).and_then(|()| File::open(path));
    // Another file system, or one that knows no second names: then it is copied, and that says what is wrong.
    is_plain.then(|| tempfile::Builder::new().prefix(".draft-").make_in(folder, link).ok()).flatten()
}

fn hashed(key: &str) -> String {
    hex(&Sha256::digest(key)[..16])
}

/// Objects are for every instance and operator of this machine that may enter the directory.
fn readable() -> fs::Permissions {
    use std::os::unix::fs::PermissionsExt;
    fs::Permissions::from_mode(0o640)
}

/// Makes a folder and those above it, so that they outlast a crash.
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
        // Somebody cleared away the folder above meanwhile; the caller tries the whole again.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
