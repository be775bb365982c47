//! Archives from strangers: whatever they say, nothing outside the directory changes, and limits hold.

#[allow(dead_code, unused_imports, reason = "writing archives is not what is tried here")]
#[path = "../../src/runtime/archive/mod.rs"]
mod archive;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Cursor, Seek, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use baton_files::Trust;
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{MemfdFlags, memfd_create};
use tempfile::TempDir;

use self::archive::{ArchiveLimits, Form, extract_into, hardlink_tree};
use crate::recipe;

const LIMITS: ArchiveLimits = ArchiveLimits { size: 1 << 20, entries: 100, depth: 12 };
/// What an instance adds to a complete root file system.
const FURNISHED: u64 = 10;

/// A directory with what an archive must leave alone, and one to unpack into.
struct Yard {
    root: TempDir,
    before: String,
}

static YARD: LazyLock<Yard> = LazyLock::new(|| {
    // In memory, where there is such a place: the disk has nothing to do with it.
    let within = Some(Path::new("/dev/shm")).filter(|shared| shared.is_dir()).map(Path::to_owned);
    let root = tempfile::Builder::new().prefix("bf").tempdir_in(within.unwrap_or_else(std::env::temp_dir)).unwrap();
    for folder in ["outside/folder", "base/etc", "base/a/b", "tree"] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    for file in ["outside/secret", "outside/folder/inner", "base/etc/passwd", "base/gone", "base/a/b/c"] {
        fs::write(root.path().join(file), file).unwrap();
    }
    std::os::unix::fs::symlink("a", root.path().join("base/way")).unwrap();
    let before = outside(root.path());
    Yard { root, before }
});

impl Yard {
    fn tree(&self) -> PathBuf {
        self.root.path().join("tree")
    }

    /// Makes the tree anew.
    fn clear(&self) {
        let _ = fs::remove_dir_all(self.tree());
        fs::create_dir(self.tree()).unwrap();
    }

    fn check(&self) {
        assert_eq!(outside(self.root.path()), self.before, "something outside has changed");
    }
}

/// Everything but the tree: names, kinds, modes, contents, and when anything about them was changed last.
fn outside(root: &Path) -> String {
    let mut seen = BTreeMap::new();
    walk(root, 0, &mut |path, about, _| {
        let is_ours = !path.starts_with(root.join("tree"));
        // A base shares its files with trees: their number of links changes, and with it the time.
        let is_base = path.starts_with(root.join("base")) && !about.is_dir();
        let times = (!is_base && path != root).then(|| (about.nlink(), about.ctime(), about.ctime_nsec()));
        if is_ours {
            let content = about.is_file().then(|| fs::read(path).unwrap());
            seen.insert(
                path.to_owned(),
                (about.mode(), about.uid(), about.mtime(), about.mtime_nsec(), times, content),
            );
        }
        is_ours
    });
    let mut names: Vec<_> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    format!("{names:?} {seen:?}")
}

/// Calls `look` for everything below `folder`, which says whether to go further down.
fn walk(folder: &Path, depth: u32, look: &mut impl FnMut(&Path, &fs::Metadata, u32) -> bool) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let about = fs::symlink_metadata(&path).unwrap();
        if look(&path, &about, depth + 1) && about.is_dir() {
            walk(&path, depth + 1, look);
        }
    }
}

/// An archive from a hostile sandbox, as a client unpacks it.
pub fn files_archive(data: &[u8]) {
    let yard = &*YARD;
    let Some((how, recipe)) = data.split_first() else { return };
    let archive = recipe::archive(recipe, &yard.root.path().display().to_string());
    let tree = yard.tree();
    yard.clear();
    let mut faults = 0;
    let tell = &mut |fault: &baton_files::Fault| {
        faults += 1;
        let told = fault.to_string();
        assert!(!told.chars().any(char::is_control), "{told:?}");
    };
    let (mut from, size) = (Cursor::new(&archive), archive.len() as u64);
    let done = match how % 2 {
        0 => baton_files::unpack(&mut from, &tree, Trust::Stranger, tell),
        _ => baton_files::fetch(&mut from, &tree.join("new"), Trust::Stranger, tell),
    };
    if let Ok(done) = done {
        assert_eq!(done.faults, faults);
        assert!(done.bytes <= size, "more bytes than there are");
    }
    yard.check();
    let top = if how % 2 == 0 { tree } else { tree.join("new") };
    let mut written = 0;
    let is_directory = fs::symlink_metadata(&top).is_ok_and(|about| about.is_dir());
    if !is_directory {
        return;
    }
    walk(&top, 0, &mut |path, about, _| {
        let kind = about.file_type();
        assert!(kind.is_dir() || kind.is_file() || kind.is_symlink(), "{path:?} is {kind:?}");
        assert!(kind.is_symlink() || about.mode() & 0o7000 == 0, "{path:?} runs as another user");
        if let Some(target) = kind.is_symlink().then(|| fs::canonicalize(path).ok()).flatten() {
            assert!(target.starts_with(&top), "{path:?} leads to {target:?}");
        }
        if about.is_file() {
            written += about.len() / about.nlink();
        }
        true
    });
    assert!(written <= size, "{written} bytes out of {size}");
}

/// A snapshot or root file system, as an instance extracts it.
pub fn server_archive(data: &[u8]) {
    let yard = &*YARD;
    let Some((how, recipe)) = data.split_first() else { return };
    let form = [Form::Layer, Form::Complete, Form::Base][usize::from(how % 3)];
    let mut file = File::from(memfd_create("archive", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(&recipe::archive(recipe, &yard.root.path().display().to_string())).unwrap();
    file.rewind().unwrap();
    let tree = yard.tree();
    yard.clear();
    let mut below = 0;
    if form == Form::Layer {
        hardlink_tree(&yard.root.path().join("base"), &tree).unwrap();
        walk(&tree, 0, &mut |_, _, _| {
            below += 1;
            true
        });
    }
    let place = tree.clone();
    // A root and rights of its own, as the child has them.
    let alone = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_FS).unwrap();
        extract_into(file, &place, form, LIMITS)
    });
    let done = alone.join().expect("it does not panic");
    match &done {
        Ok((entries, bytes)) => assert!(*entries <= LIMITS.entries && *bytes <= LIMITS.size, "{entries} {bytes}"),
        // It is shown to the operator.
        Err(error) => assert!(!error.to_string().chars().any(char::is_control), "{error:?}"),
    }
    yard.check();
    let (mut count, mut sizes) = (0, BTreeMap::new());
    walk(&tree, 0, &mut |path, about, depth| {
        let kind = about.file_type();
        use std::os::unix::fs::FileTypeExt;
        assert!(!kind.is_char_device() && !kind.is_block_device() && !kind.is_socket(), "{path:?}");
        assert!(depth <= LIMITS.depth + 1, "{path:?} is too deep");
        count += 1;
        if about.is_file() {
            sizes.insert(about.ino(), about.len());
        }
        true
    });
    // Not every archive names its directories.
    assert!(count <= LIMITS.entries * u64::from(LIMITS.depth + 1) + below + FURNISHED, "{count} names");
    let size: u64 = sizes.values().sum();
    assert!(size <= LIMITS.size + 1024, "{size} bytes");
}
