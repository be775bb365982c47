//! A mounted bucket as a store for objects that are written once.
//!
//! Such a mount supports neither locks nor conditional renames, and a file becomes visible to others only after it was
//! closed and caches have caught up. So an object is written directly to its final name, the result of `close` is
//! checked (that is when it becomes an object), and a reader that knows a name waits for it to appear. Compare-and-set
//! is refused: locks and metadata cannot be stored here. Other instances may use the same bucket without a mount: the
//! names of objects are the same.

use std::{
    fmt,
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;

use super::{
    directory::{
        directory_listing,
        directory_tree::{self, ObjectRead},
    },
    local_files::{self, Reporter, Wanted, local_error},
    store::{
        Digest, Error, MAX_SMALL_OBJECT, Page, PollResult, Precondition, ProgressFn, Result, Store, Version, Written,
        check_key, check_small,
    },
};
use crate::{clock::SharedClock, config::variables::SANDBOX_METADATA_BUCKET};

const PAGE: usize = 1000;
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the caches of a mount may hide a new file.
const VISIBILITY_DELAY: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// How often a vanished folder is created again for one file.
const FOLDER_ATTEMPTS: u32 = 3;

/// Access to the operating system; tests substitute a slow or failing one.
pub trait Disk: fmt::Debug + Send + Sync + 'static {
    /// Creates a file; with `replace`, an existing one is overwritten.
    fn create(&self, path: &Path, replace: bool) -> io::Result<Box<dyn GcsfuseWriter>>;
    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + Send>>;
    fn size(&self, path: &Path) -> io::Result<u64>;
}

/// A file that is being written.
pub trait GcsfuseWriter: Write + Send {
    /// Closes the file. Only if this succeeds does it become an object.
    fn close(self: Box<Self>) -> io::Result<()>;
}

/// The local file system.
#[derive(Debug, Default)]
pub struct Files;

impl Disk for Files {
    fn create(&self, path: &Path, replace: bool) -> io::Result<Box<dyn GcsfuseWriter>> {
        let mut options = File::options();
        options.write(true);
        if replace {
            options.create(true).truncate(true)
        } else {
            options.create_new(true)
        };
        Ok(Box::new(options.open(path)?))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + Send>> {
        Ok(Box::new(File::open(path)?))
    }

    fn size(&self, path: &Path) -> io::Result<u64> {
        let about = fs::metadata(path)?;
        if about.is_file() { Ok(about.len()) } else { Err(io::ErrorKind::NotFound.into()) }
    }
}

impl GcsfuseWriter for File {
    fn close(self: Box<Self>) -> io::Result<()> {
        // Dropping a file would ignore the error of close.
        Ok(nix::unistd::close(*self)?)
    }
}

#[derive(Debug)]
pub struct Mounted {
    clock: SharedClock,
    root: PathBuf,
    disk: Arc<dyn Disk>,
    page: usize,
    settles: Duration,
}

impl Mounted {
    pub fn new(root: impl Into<PathBuf>, clock: SharedClock) -> Self {
        Self { clock, root: root.into(), disk: Arc::new(Files), page: PAGE, settles: VISIBILITY_DELAY }
    }

    pub fn with_disk(mut self, disk: Arc<dyn Disk>) -> Self {
        self.disk = disk;
        self
    }

    /// Lists in pages of `page` entries.
    pub fn with_page(mut self, page: usize) -> Self {
        self.page = page;
        self
    }

    /// Sets how long a reader waits for a known file to become visible.
    pub fn with_settling(mut self, settles: Duration) -> Self {
        self.settles = settles;
        self
    }

    async fn call<T: Send + 'static>(
        &self,
        key: &str,
        progress: ProgressFn<'_>,
        work: impl FnOnce(&BlockingStore, &Reporter) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let shelf = BlockingStore { root: self.root.clone(), disk: self.disk.clone() };
        local_files::run_blocking(&self.clock, key, STALL_TIMEOUT, progress, move |reporter| work(&shelf, reporter))
            .await
    }
}

fn refused(key: &str) -> Error {
    let why = format!("a mounted bucket cannot compare and set; set {SANDBOX_METADATA_BUCKET}");
    Error::Other { key: key.to_owned(), why }
}

fn is_settling(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::StaleNetworkFileHandle)
}

/// The error of `close` if the object was written concurrently through another path.
fn is_clobbered(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::StaleNetworkFileHandle
}

/// Whether the directory lists a file; true if that cannot be determined.
fn is_listed(path: &Path) -> bool {
    let Some(entries) = path.parent().map(fs::read_dir) else { return true };
    match entries {
        Ok(mut entries) => {
            entries.any(|entry| entry.map_or(true, |entry| Some(&*entry.file_name()) == path.file_name()))
        }
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// The blocking part of the store.
struct BlockingStore {
    root: PathBuf,
    disk: Arc<dyn Disk>,
}

impl BlockingStore {
    fn read(&self, key: &str) -> Result<Option<ObjectRead>> {
        let path = self.root.join(key);
        let seen = self.disk.size(&path).and_then(|size| {
            let mut bytes = Vec::new();
            if size <= MAX_SMALL_OBJECT {
                self.disk.open(&path)?.take(MAX_SMALL_OBJECT).read_to_end(&mut bytes)?;
            }
            let mark =
                if size <= MAX_SMALL_OBJECT { directory_tree::mark(&bytes) } else { directory_tree::large_mark(size) };
            // Modification times of a mount come from its cache.
            Ok(ObjectRead { version: Version(mark), size, bytes, updated: None })
        });
        match seen {
            Ok(seen) => Ok(Some(seen)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(local_error(key, &error)),
        }
    }

    /// Writes to the final name. On an error or a mismatch the file is removed.
    fn write(
        &self,
        key: &str,
        condition: &Precondition,
        fill: impl FnOnce(&mut dyn Write) -> Result<String>,
    ) -> Result<Written> {
        let path = self.root.join(key);
        let replace = match condition {
            Precondition::Any => true,
            Precondition::Absent => false,
            Precondition::Is(_) => return Err(refused(key)),
        };
        let mut sheet = match self.create(&path, replace) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(Error::Conflict(key.to_owned()));
            }
            created => created.map_err(|error| local_error(key, &error))?,
        };
        let mark = match fill(&mut *sheet) {
            Ok(mark) => mark,
            Err(error) => {
                // Removed before it is closed, so that it never becomes an object.
                drop(fs::remove_file(&path));
                drop(sheet.close());
                return Err(error);
            }
        };
        match sheet.close() {
            Ok(()) => Ok(Written { version: Version(mark), updated: None }),
            // Another writer was faster, but caches hid its object from `create`. It is not ours to remove.
            Err(error) if !replace && is_clobbered(&error) => Err(Error::Conflict(key.to_owned())),
            Err(error) => {
                // No reader knows the name yet: the manifest would have been written last.
                drop(fs::remove_file(&path));
                Err(local_error(key, &error))
            }
        }
    }

    /// Creates a file under its final name. Its folder may vanish meanwhile: deleting the last file of a folder removes
    /// it.
    fn create(&self, path: &Path, replace: bool) -> io::Result<Box<dyn GcsfuseWriter>> {
        let folder = path.parent().unwrap_or(&self.root);
        for _ in 1..FOLDER_ATTEMPTS {
            fs::create_dir_all(folder)?;
            match self.disk.create(path, replace) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                created => return created,
            }
        }
        fs::create_dir_all(folder)?;
        self.disk.create(path, replace)
    }

    /// Deletes a file, and its folder if it is empty: in the bucket a folder is an object of its own.
    fn remove(&self, key: &str) -> Result<()> {
        let path = self.root.join(key);
        match fs::remove_file(&path) {
            // A file deleted through another path is still cached, and gcsfuse returns EIO: list the bucket.
            Err(error) if error.kind() != io::ErrorKind::NotFound && !is_listed(&path) => {
                return Err(Error::NotFound(key.to_owned()));
            }
            removed => removed.map_err(|error| local_error(key, &error))?,
        }
        let mut folder = path.parent();
        // Top-level folders are shared and soon needed again.
        while let Some(empty) = folder.filter(|folder| folder.parent().is_some_and(|above| self.is_inside(above))) {
            if fs::remove_dir(empty).is_err() {
                break;
            }
            folder = empty.parent();
        }
        Ok(())
    }

    fn is_inside(&self, path: &Path) -> bool {
        path != self.root && path.starts_with(&self.root)
    }

    fn digest(&self, key: &str, reporter: &Reporter) -> Result<Digest> {
        let mut file = self.disk.open(&self.root.join(key)).map_err(|error| local_error(key, &error))?;
        local_files::copy(key, &mut *file, io::sink(), reporter)
    }
}

impl Mounted {
    async fn bring(&self, key: &str, file: &Path, wanted: &Wanted, progress: ProgressFn<'_>) -> Result<Digest> {
        check_key(key)?;
        let deadline = self.clock.now() + self.settles;
        loop {
            let (name, target, wanted) = (key.to_owned(), file.to_owned(), wanted.clone());
            let fetched = self.call(key, progress, move |shelf, reporter| {
                let source = match shelf.disk.open(&shelf.root.join(&name)) {
                    Err(error) if is_settling(&error) => return Ok(None),
                    opened => opened.map_err(|error| local_error(&name, &error))?,
                };
                let mut draft = local_files::draft(&name, &target)?;
                let mut source = source.take(wanted.most().saturating_add(1));
                let found = local_files::copy(&name, &mut source, &mut draft, reporter)?;
                local_files::verify_and_rename(&name, draft, &target, &wanted, found, reporter).map(Some)
            });
            if let Some(found) = fetched.await? {
                return Ok(found);
            }
            if self.clock.now() >= deadline {
                return Err(Error::NotFound(key.to_owned()));
            }
            self.clock.sleep(LOOK_AGAIN).await;
        }
    }
}

#[async_trait]
impl Store for Mounted {
    async fn get_if_changed(&self, key: &str, known: Option<&Version>) -> Result<PollResult> {
        check_key(key)?;
        let (name, known) = (key.to_owned(), known.cloned());
        self.call(key, &|_| {}, move |shelf, _| {
            let Some(seen) = shelf.read(&name)? else { return Ok(PollResult::Missing) };
            if known.as_ref() == Some(&seen.version) {
                return Ok(PollResult::Unchanged);
            }
            check_small(&name, seen.size)?;
            Ok(PollResult::Changed(seen.bytes.into(), seen.version))
        })
        .await
    }

    async fn put(&self, key: &str, bytes: Bytes, condition: Precondition) -> Result<Written> {
        check_key(key)?;
        check_small(key, bytes.len() as u64)?;
        let name = key.to_owned();
        self.call(key, &|_| {}, move |shelf, _| {
            shelf.write(&name, &condition, |sheet| {
                sheet.write_all(&bytes).map_err(|error| local_error(&name, &error))?;
                Ok(directory_tree::mark(&bytes))
            })
        })
        .await
    }

    async fn delete(&self, key: &str, condition: Precondition) -> Result<()> {
        check_key(key)?;
        if condition != Precondition::Any {
            return Err(refused(key));
        }
        let name = key.to_owned();
        self.call(key, &|_| {}, move |shelf, _| shelf.remove(&name)).await
    }

    async fn remove_folder(&self, name: &str) -> Result<()> {
        let name = name.to_owned();
        self.call(&name.clone(), &|_| {}, move |shelf, _| match fs::remove_dir(shelf.root.join(&name)) {
            Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {
                Err(local_error(&name, &error))
            }
            Ok(()) | Err(_) => Ok(()),
        })
        .await
    }

    async fn list(&self, prefix: &str, after: Option<&str>) -> Result<Page> {
        let (prefix, after, page) = (prefix.to_owned(), after.map(str::to_owned), self.page);
        let name = prefix.clone();
        self.call(&name, &|_| {}, move |shelf, _| {
            directory_listing::page(&shelf.root, &prefix, after.as_deref(), page, &|key| shelf.read(key))
        })
        .await
    }

    async fn upload(
        &self,
        key: &str,
        file: &Path,
        condition: Precondition,
        digest: &Digest,
        progress: ProgressFn<'_>,
    ) -> Result<Written> {
        check_key(key)?;
        let (name, path, digest) = (key.to_owned(), file.to_owned(), digest.clone());
        self.call(key, progress, move |shelf, reporter| {
            let mut source = File::open(path).map_err(|error| local_error(&name, &error))?;
            let written = shelf.write(&name, &condition, |sheet| {
                let found = local_files::copy(&name, &mut source, sheet, reporter)?;
                digest.verify(&name, &found)?;
                reporter.check_cancelled(&name)?;
                Ok(directory_tree::large_mark(found.size))
            });
            match written {
                Err(Error::Conflict(_)) if condition == Precondition::Absent => {
                    if shelf.digest(&name, reporter)? != digest {
                        return Err(Error::Conflict(name));
                    }
                }
                Ok(_) => {}
                Err(error) => return Err(error),
            }
            let seen = shelf.read(&name)?.map(|seen| seen.version);
            // The file may not be visible yet although it is closed, but its size is known.
            Ok(Written { version: seen.unwrap_or(Version(directory_tree::large_mark(digest.size))), updated: None })
        })
        .await
    }

    async fn download(&self, key: &str, file: &Path, digest: &Digest, progress: ProgressFn<'_>) -> Result<()> {
        self.bring(key, file, &Wanted::This(digest.clone()), progress).await.map(drop)
    }

    async fn download_unverified(&self, key: &str, file: &Path, most: u64, progress: ProgressFn<'_>) -> Result<Digest> {
        self.bring(key, file, &Wanted::AtMost(most), progress).await
    }

    fn visibility_delay(&self) -> Duration {
        self.settles
    }
}
