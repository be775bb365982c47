//! Detects changes in a directory store immediately, whichever process makes them.
//!
//! One inotify instance per store, since the kernel limits them per user. Each waiting call watches one name in one
//! folder: that of its object, or that of the first missing folder on its path.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
};

use futures::StreamExt;
use inotify::{EventMask, EventOwned, Inotify, WatchDescriptor, WatchMask, Watches};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, futures::OwnedNotified},
    task::JoinSet,
};

/// The maximum number of remembered stat results; beyond it all are dropped, which only costs a wake-up.
const MAX_STATS: usize = 4096;

#[derive(Debug)]
pub struct Watch {
    root: PathBuf,
    /// The stat result of each object when it was last read: a hint whether it has changed since.
    looks: Mutex<HashMap<String, Look>>,
    kernel: Mutex<Option<Kernel>>,
    waiting: Arc<Mutex<Waiting>>,
}

/// Inode, size, modification and change time.
type Look = Option<(u64, u64, i64, i64, i64, i64)>;

#[derive(Debug)]
struct Kernel {
    watches: Watches,
    /// Reads events; ends with the store.
    _reader: JoinSet<()>,
}

#[derive(Debug, Default)]
struct Waiting {
    folders: HashMap<WatchDescriptor, Folder>,
}

#[derive(Debug, Default)]
struct Folder {
    names: BTreeMap<String, Name>,
}

#[derive(Debug, Default)]
struct Name {
    bell: Arc<Notify>,
    calls: usize,
}

impl Watch {
    pub fn new(root: PathBuf) -> Self {
        Self { root, looks: Mutex::default(), kernel: Mutex::default(), waiting: Arc::default() }
    }

    /// Records that the object is being read: later changes are reported.
    pub fn looked(&self, key: &str) {
        let stat = stat(&self.root.join(key));
        let mut looks = self.looks.lock();
        if looks.len() >= MAX_STATS {
            looks.clear();
        }
        looks.insert(key.to_owned(), stat);
    }

    /// Watches for changes of the object since it was last read; `None` if the kernel cannot provide it.
    pub fn watch(self: &Arc<Self>, key: &str) -> Option<Watching> {
        let known = self.looks.lock().get(key).copied();
        let mut watching = self.add(key)?;
        // Compared after the watch is set up, so that no change since the last read is missed.
        watching.is_news = known.is_some_and(|known| known != stat(&self.root.join(key)));
        Some(watching)
    }

    fn add(self: &Arc<Self>, key: &str) -> Option<Watching> {
        let path = self.root.join(key);
        let mut kernel = self.kernel.lock();
        if kernel.is_none() {
            *kernel = self.start();
        }
        let watches = &mut kernel.as_mut()?.watches;
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::MOVED_FROM
            | WatchMask::MOVED_TO
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        for folder in path.ancestors().skip(1) {
            let mut waiting = self.waiting.lock();
            let Ok(descriptor) = watches.add(folder, mask) else { continue };
            let name = path.strip_prefix(folder).ok()?.components().next()?.as_os_str().to_str()?.to_owned();
            let entry = waiting.folders.entry(descriptor.clone()).or_default().names.entry(name.clone()).or_default();
            entry.calls += 1;
            let heard = Box::pin(entry.bell.clone().notified_owned());
            return Some(Watching { heard, watch: self.clone(), descriptor, name, is_news: false });
        }
        None
    }

    fn start(&self) -> Option<Kernel> {
        let mut events = Inotify::init().ok()?.into_event_stream(vec![0; 16 << 10]).ok()?;
        let watches = events.watches();
        let waiting = self.waiting.clone();
        let mut reader = JoinSet::new();
        reader.spawn(async move {
            while let Some(Ok(event)) = events.next().await {
                waiting.lock().handle(&event);
            }
        });
        Some(Kernel { watches, _reader: reader })
    }
}

impl Waiting {
    fn handle(&mut self, event: &EventOwned) {
        if event.mask.contains(EventMask::Q_OVERFLOW) {
            self.folders.values().for_each(Folder::wake);
            return;
        }
        if let Some(folder) = self.folders.get(&event.wd) {
            match event.name.as_ref().and_then(|name| name.to_str()) {
                Some(name) => folder.names.get(name).into_iter().for_each(|name| name.bell.notify_waiters()),
                None => folder.wake(),
            }
        }
        if event.mask.contains(EventMask::IGNORED) {
            self.folders.remove(&event.wd);
        }
    }
}

impl Folder {
    fn wake(&self) {
        self.names.values().for_each(|name| name.bell.notify_waiters());
    }
}

/// One waiting call; the last one of a folder removes the watch.
#[derive(Debug)]
pub struct Watching {
    heard: Pin<Box<OwnedNotified>>,
    watch: Arc<Watch>,
    descriptor: WatchDescriptor,
    name: String,
    is_news: bool,
}

impl Watching {
    pub async fn changed(mut self) {
        if !self.is_news {
            self.heard.as_mut().await;
        }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut kernel = self.watch.kernel.lock();
        let mut waiting = self.watch.waiting.lock();
        let Some(folder) = waiting.folders.get_mut(&self.descriptor) else { return };
        if let Some(name) = folder.names.get_mut(&self.name) {
            name.calls -= 1;
            if name.calls == 0 {
                folder.names.remove(&self.name);
            }
        }
        if folder.names.is_empty() {
            waiting.folders.remove(&self.descriptor);
            if let Some(kernel) = kernel.as_mut() {
                // The watch of a deleted folder is already gone.
                let _ = kernel.watches.remove(self.descriptor.clone());
            }
        }
    }
}

fn stat(path: &Path) -> Look {
    let about = fs::symlink_metadata(path).ok()?;
    Some((about.ino(), about.size(), about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec()))
}
