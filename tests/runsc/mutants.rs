//! Archives as nobody would write them: valid ones, changed by chance in thousands of ways, the same ways every
//! time. Whatever they say, what lies outside the tree stays as it is, and what fails leaves nothing.

mod make;

use std::{
    fs::{self, File},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use baton::runtime::{
    ArchiveSource, Error, RuntimeSettings,
    archive::{ArchiveLimits, Form, extract_into, hardlink_tree},
};
use make::{mutant, names, valid};
use nix::sched::{CloneFlags, unshare};

use crate::{
    fixture::Place,
    rootfs_archives::{extract, look},
    servers::is_proof,
};

const LIMITS: ArchiveLimits = ArchiveLimits { size: 1 << 20, entries: 200, depth: 16 };

/// One place with a tree, what it may lie on, and what is none of its business.
struct Yard {
    _directory: tempfile::TempDir,
    root: PathBuf,
    names: Vec<Vec<u8>>,
    valid: Vec<u8>,
    before: String,
}

impl Yard {
    fn new() -> Self {
        // In memory, where there is such a place: the disk has nothing to do with it.
        let shared = Path::new("/dev/shm");
        let within = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        let directory = tempfile::Builder::new().prefix("bm").tempdir_in(within).unwrap();
        let root = directory.path().to_owned();
        let outside = root.join("outside");
        for folder in ["outside/folder", "base/etc", "base/a/b", "base/usr"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        for file in
            ["outside/secret", "outside/folder/inner", "base/etc/passwd", "base/gone", "base/a/b/c", "base/usr/x"]
        {
            fs::write(root.join(file), file).unwrap();
        }
        std::os::unix::fs::symlink("usr", root.join("base/way")).unwrap();
        let mut yard =
            Self { _directory: directory, names: names(&outside), root, valid: valid(), before: String::new() };
        yard.before = yard.look();
        yard
    }

    /// Everything but the tree and the archive.
    fn look(&self) -> String {
        let mut all: Vec<_> = fs::read_dir(&self.root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        all.retain(|name| name != "tree" && name != "archive");
        all.sort();
        let about = fs::metadata(self.root.join("outside/secret")).unwrap();
        let touched = (about.ino(), about.nlink(), about.ctime(), about.ctime_nsec());
        format!("{all:?} {touched:?} {:?} {:?}", look(&self.root.join("outside")), look(&self.root.join("base")))
    }

    /// How it went. The calling thread must not be needed for anything else.
    fn extract(&self, archive: &[u8], form: Form) -> std::io::Result<(u64, u64)> {
        let (tree, file) = (self.root.join("tree"), self.root.join("archive"));
        fs::create_dir(&tree).unwrap();
        fs::write(&file, archive).unwrap();
        if form == Form::Layer {
            hardlink_tree(&self.root.join("base"), &tree).unwrap();
        }
        let (archive, place) = (File::open(&file).unwrap(), tree.clone());
        // A root and rights of its own, as the child has them.
        let alone = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_FS).unwrap();
            extract_into(archive, &place, form, LIMITS)
        });
        alone.join().expect("it does not panic")
    }

    fn case(&self, case: u64) -> bool {
        let (archive, form) = mutant(case, &self.valid, &self.names);
        let done = self.extract(&archive, form);
        let tree = self.root.join("tree");
        if let Ok((entries, bytes)) = done {
            assert!(entries <= LIMITS.entries && bytes <= LIMITS.size, "case {case}: {entries} {bytes}");
        }
        check(&tree, case);
        fs::remove_dir_all(&tree).unwrap();
        assert_eq!(self.look(), self.before, "case {case} reached outside");
        done.is_ok()
    }
}

/// Nothing in the tree that a container must not find there, nor deeper or larger than allowed.
fn check(tree: &Path, case: u64) {
    let (mut left, mut sizes) = (vec![(tree.to_owned(), 0)], std::collections::BTreeMap::new());
    while let Some((folder, depth)) = left.pop() {
        assert!(depth <= 2 * LIMITS.depth, "case {case}: {folder:?}");
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let about = fs::symlink_metadata(&path).unwrap();
            let kind = about.file_type();
            assert!(!kind.is_char_device() && !kind.is_block_device() && !kind.is_socket(), "case {case}: {path:?}");
            if about.is_dir() {
                left.push((path, depth + 1));
            } else if about.is_file() {
                sizes.insert(about.ino(), about.len());
            }
        }
    }
    let size: u64 = sizes.values().sum();
    assert!(size <= LIMITS.size + 1024, "case {case}: {size} bytes");
}

#[test]
fn no_change_to_an_archive_reaches_outside_its_tree() {
    let cases = if is_proof() { 1_000_000 } else { 3_000 };
    let next = Arc::new(AtomicU64::new(0));
    let (tell, told) = mpsc::channel();
    let workers: Vec<_> = (0..2)
        .map(|_| {
            let (next, tell) = (next.clone(), tell.clone());
            std::thread::spawn(move || {
                let yard = Yard::new();
                let valid = yard.extract(&yard.valid, Form::Complete).expect("unchanged it is good");
                assert!(valid.0 > 15);
                fs::remove_dir_all(yard.root.join("tree")).unwrap();
                loop {
                    let case = next.fetch_add(1, Ordering::Relaxed);
                    if case >= cases {
                        return;
                    }
                    let _ = tell.send(yard.case(case));
                }
            })
        })
        .collect();
    drop(tell);
    let (mut good, mut bad) = (0_u64, 0_u64);
    loop {
        match told.recv_timeout(Duration::from_secs(60)) {
            Ok(true) => good += 1,
            Ok(false) => bad += 1,
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("a case near {} hangs", next.load(Ordering::Relaxed)),
        }
    }
    for worker in workers {
        worker.join().unwrap();
    }
    println!("{good} were extracted, {bad} refused");
    assert_eq!(good + bad, cases);
    // Otherwise nothing was tried.
    assert!(good > cases / 10 && bad > cases / 10, "{good} {bad}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_becomes_of_changed_archives_is_whole_or_gone() {
    let cases = if is_proof() { 2_000 } else { 60 };
    let place = Place::with(|settings| RuntimeSettings { archive_limits: LIMITS, ..settings }).await;
    let outside = place.path("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "untouched").unwrap();
    let (before, names, valid) = (look(&outside), names(&outside), valid());
    for case in 0..cases {
        let (archive, form) = mutant(case, &valid, &names);
        let from = if form == Form::Base { ArchiveSource::Base } else { ArchiveSource::Complete };
        let name = format!("case {case}");
        match extract(&place, &name, &archive, from).await {
            Ok(tree) => assert!(tree.is_dir(), "{name}"),
            Err(Error::Refused { .. }) => {}
            Err(error) => panic!("{name}: {error}"),
        }
        let left = fs::read_dir(place.path("extracted")).unwrap().map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains(".making")).collect();
        assert!(left.is_empty(), "{name}: {left:?}");
        assert_eq!(look(&outside), before, "{name}");
    }
    place.close().await;
}
