//! One file: written whole or not at all, read in part, listed.

use std::{
    fs,
    io::{self, Read},
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
};

use baton_files::{Fault, How, TransferTotals, run, write};
use baton_protocol::file_work::{FileEntry, FileKind, Work};

use crate::tree_fixture::{look, plant};

fn put(path: &Path, text: &str, how: &How) -> Result<TransferTotals, Fault> {
    write(path, &mut text.as_bytes(), how)
}

fn names(directory: &Path) -> Vec<String> {
    look(directory).into_keys().collect()
}

#[test]
fn a_file_gets_its_bytes_mode_and_time_and_its_directories() {
    let space = tempfile::tempdir().unwrap();
    let path = space.path().join("a/b/file");
    let how = How { mode: Some(0o640), mtime: Some((1_600_000_000, 250_000_000)), size: Some(5) };
    assert_eq!(put(&path, "hello", &how).unwrap().bytes, 5);
    let found = fs::metadata(&path).unwrap();
    assert_eq!((found.mode() & 0o7777, found.mtime(), found.mtime_nsec()), (0o640, 1_600_000_000, 250_000_000));
    put(&path, "again", &How::default()).unwrap();
    assert_eq!((fs::read(&path).unwrap(), fs::metadata(&path).unwrap().mode() & 0o7777), (b"again".to_vec(), 0o640));
}

#[test]
fn a_write_that_fails_leaves_what_there_was_and_nothing_else() {
    struct Broken(u32);
    impl Read for Broken {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0 += 1;
            if self.0 > 3 {
                Err(io::Error::other("given up"))
            } else {
                buffer[0] = b'x';
                Ok(1)
            }
        }
    }
    let space = tempfile::tempdir().unwrap();
    let path = space.path().join("file");
    fs::write(&path, "old").unwrap();
    assert_eq!(put(&path, "1234", &How { size: Some(5), ..How::default() }).unwrap_err().code, "EINVAL");
    assert_eq!(put(&path, "123456", &How { size: Some(5), ..How::default() }).unwrap_err().code, "EINVAL");
    assert_eq!(write(&path, &mut Broken(0), &How::default()).unwrap_err().code, "EIO");
    assert_eq!((fs::read(&path).unwrap(), names(space.path())), (b"old".to_vec(), vec!["file".to_owned()]));
}

#[test]
fn a_reader_of_the_old_file_keeps_it() {
    let space = tempfile::tempdir().unwrap();
    let path = space.path().join("file");
    fs::write(&path, "old").unwrap();
    let mut reader = fs::File::open(&path).unwrap();
    put(&path, "newer", &How::default()).unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), fs::read_to_string(&path).unwrap().as_str()), ("old", "newer"));
}

#[test]
fn a_link_is_followed_and_stays_a_link() {
    let space = tempfile::tempdir().unwrap();
    symlink("real/file", space.path().join("link")).unwrap();
    put(&space.path().join("link"), "x", &How::default()).unwrap();
    assert_eq!(fs::read(space.path().join("real/file")).unwrap(), b"x");
    assert!(fs::symlink_metadata(space.path().join("link")).unwrap().is_symlink());
    symlink("circle", space.path().join("circle")).unwrap();
    assert!(put(&space.path().join("circle"), "x", &How::default()).is_ok(), "a circle leads nowhere and is replaced");
}

#[test]
fn what_is_no_file_is_not_replaced() {
    let space = tempfile::tempdir().unwrap();
    for (path, code) in [(space.path().to_owned(), "EISDIR"), ("/dev/null".into(), "EINVAL"), ("/".into(), "EISDIR")] {
        assert_eq!(put(&path, "x", &How::default()).unwrap_err().code, code, "{}", path.display());
    }
    let slash = space.path().join("new/");
    assert_eq!(put(&slash, "x", &How::default()).unwrap_err().code, "EISDIR");
    fs::write(space.path().join("file"), "").unwrap();
    assert_eq!(put(&space.path().join("file/below"), "x", &How::default()).unwrap_err().code, "ENOTDIR");
}

fn done(work: &Work) -> Result<Vec<u8>, Fault> {
    let mut out = Vec::new();
    run(work, &mut io::empty(), &mut out, &mut |fault| panic!("{fault}")).map(|_| out)
}

#[test]
fn a_part_of_a_file_can_be_read() {
    let space = tempfile::tempdir().unwrap();
    let path = space.path().join("file");
    fs::write(&path, "0123456789").unwrap();
    let read = |offset, length| {
        let path = path.to_str().unwrap().to_owned();
        String::from_utf8(done(&Work::ReadFile { path, offset, length, archive: false }).unwrap()).unwrap()
    };
    assert_eq!([read(0, None), read(3, Some(4)), read(8, Some(100)), read(50, None)], ["0123456789", "3456", "89", ""]);
    let of = |path: &Path| {
        let path = path.to_str().unwrap().to_owned();
        done(&Work::ReadFile { path, offset: 0, length: None, archive: false }).unwrap_err().code
    };
    assert_eq!((of(space.path()), of(&space.path().join("none"))), ("EISDIR", "ENOENT"));
}

fn list(path: &Path, depth: u32) -> Vec<FileEntry> {
    let text = done(&Work::ListFiles { path: path.to_str().unwrap().to_owned(), depth }).unwrap();
    text.split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect()
}

#[test]
fn a_listing_tells_of_each_thing_as_deep_as_wanted() {
    let space = tempfile::tempdir().unwrap();
    plant(space.path());
    let names = |depth| list(space.path(), depth).into_iter().map(|entry| entry.name).collect::<Vec<_>>();
    let long = "long-name-".repeat(15);
    assert_eq!(names(1), ["a", "empty", long.as_str()]);
    assert_eq!(names(2)[..5], ["a", "a/b", "a/far", "a/longlink", "a/near"]);
    assert_eq!(names(256).len(), look(space.path()).len());
    let itself = list(&space.path().join("a"), 0);
    assert_eq!((itself.len(), itself[0].name.as_str(), itself[0].kind), (1, "a", FileKind::Directory));
    let script = list(&space.path().join("a/run.sh"), 1).remove(0);
    assert_eq!(
        (script.name.as_str(), script.kind, script.size, script.mode, script.mtime_ms),
        ("run.sh", FileKind::File, 10, 0o751, 1_600_000_000_123)
    );
    let link = list(&space.path().join("a/near"), 0).remove(0);
    assert_eq!((link.kind, link.target.as_deref()), (FileKind::Symlink, Some("b/size-1")));
    symlink("a", space.path().join("to-a")).unwrap();
    assert_eq!(list(&space.path().join("to-a"), 1).len(), list(&space.path().join("a"), 1).len());
    assert_eq!(list(&space.path().join("to-a"), 0)[0].kind, FileKind::Symlink);
    let none = Work::ListFiles { path: space.path().join("none").to_str().unwrap().to_owned(), depth: 1 };
    assert_eq!(done(&none).unwrap_err().code, "ENOENT");
    fs::set_permissions(space.path().join("empty"), fs::Permissions::from_mode(0o700)).unwrap();
}
