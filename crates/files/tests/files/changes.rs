//! Removing, renaming, making directories, and watching all of it.

use std::{
    fs,
    io::{BufRead, BufReader, PipeReader},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use baton_files::{Fault, MAX_WATCHED, make_directory, remove, rename, watch};
use baton_protocol::file_work::{FileChange, FileChangeKind};

fn code(done: Result<impl Sized, Fault>) -> &'static str {
    done.err().map_or("", |fault| fault.code)
}

#[test]
fn what_is_removed_is_the_entry_itself_and_a_full_directory_only_if_asked() {
    let space = tempfile::tempdir().unwrap();
    let path = |name: &str| space.path().join(name);
    fs::create_dir_all(path("full/deep")).unwrap();
    fs::write(path("full/deep/file"), "x").unwrap();
    fs::write(path("kept"), "x").unwrap();
    symlink(path("kept"), path("full/link")).unwrap();
    symlink(path("full"), path("to-full")).unwrap();
    assert_eq!(code(remove(&path("full"), false)), "ENOTEMPTY");
    assert_eq!(code(remove(&path("none"), true)), "ENOENT");
    assert_eq!(code(remove(&path("full/.."), true)), "EINVAL");
    assert_eq!(code(remove(Path::new("/"), true)), "EINVAL");
    assert_eq!(code(remove(&path("kept/x"), false)), "ENOTDIR");
    assert_eq!(code(remove(&path("to-full"), true)), "");
    assert!(path("full/deep/file").exists(), "a link is not what it leads to");
    assert_eq!(code(remove(&path("full"), true)), "");
    assert!(!path("full").exists() && path("kept").exists());
}

#[test]
fn a_new_name_replaces_a_file_and_no_full_directory() {
    let space = tempfile::tempdir().unwrap();
    let path = |name: &str| space.path().join(name);
    fs::write(path("a"), "a").unwrap();
    fs::write(path("b"), "b").unwrap();
    fs::create_dir_all(path("full/deep")).unwrap();
    fs::create_dir(path("empty")).unwrap();
    assert_eq!(code(rename(&path("a"), &path("b"))), "");
    assert_eq!(fs::read(path("b")).unwrap(), b"a");
    assert_eq!(code(rename(&path("a"), &path("b"))), "ENOENT");
    assert_eq!(code(rename(&path("b"), &path("no/such"))), "ENOENT");
    assert_eq!(code(rename(&path("b"), &path("full"))), "EISDIR");
    assert_eq!(code(rename(&path("empty"), &path("full"))), "ENOTEMPTY");
    assert_eq!(code(rename(&path("full"), &path("moved"))), "");
    assert!(path("moved/deep").exists());
}

#[test]
fn a_directory_has_its_mode_and_with_parents_may_exist() {
    let space = tempfile::tempdir().unwrap();
    let path = |name: &str| space.path().join(name);
    let mode = |name: &str| fs::metadata(path(name)).unwrap().permissions().mode() & 0o7777;
    assert_eq!(code(make_directory(&path("a"), false, Some(0o2777))), "");
    assert_eq!(mode("a"), 0o2777);
    assert_eq!(code(make_directory(&path("a"), false, None)), "EEXIST");
    assert_eq!(code(make_directory(&path("a"), true, Some(0o700))), "");
    assert_eq!(mode("a"), 0o2777, "one that exists stays as it is");
    assert_eq!(code(make_directory(&path("b/c/d"), false, None)), "ENOENT");
    assert_eq!(code(make_directory(&path("b/c/d"), true, Some(0o750))), "");
    assert_eq!(mode("b/c/d"), 0o750);
    fs::write(path("file"), "").unwrap();
    assert_eq!(code(make_directory(&path("file"), true, None)), "EEXIST");
}

/// A watch that runs until its directory is gone.
struct Watching {
    lines: std::io::Lines<BufReader<PipeReader>>,
    thread: std::thread::JoinHandle<Result<baton_files::TransferTotals, Fault>>,
}

impl Watching {
    fn start(path: &Path, recursive: bool) -> Self {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let path = path.to_owned();
        let thread = std::thread::spawn(move || watch(&path, recursive, &mut writer));
        let mut watching = Self { lines: BufReader::new(reader).lines(), thread };
        watching.sees("ready ");
        watching
    }

    fn next(&mut self) -> String {
        let change: FileChange = serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap();
        let kind = serde_json::to_value(change.kind).unwrap();
        let to = change.to.map(|to| format!(" -> {to}")).unwrap_or_default();
        format!("{} {}{to}", kind.as_str().unwrap(), change.name)
    }

    #[track_caller]
    fn sees(&mut self, expected: &str) {
        assert_eq!(self.next(), expected);
    }
}

#[test]
fn every_kind_of_change_is_a_line() {
    let space = tempfile::tempdir().unwrap();
    let root = space.path().join("root");
    fs::create_dir_all(root.join("sub")).unwrap();
    let mut watching = Watching::start(&root, false);
    fs::write(root.join("a"), "x").unwrap();
    watching.sees("create a");
    watching.sees("write a");
    fs::write(root.join("sub/deep"), "x").unwrap();
    fs::set_permissions(root.join("a"), fs::Permissions::from_mode(0o600)).unwrap();
    watching.sees("chmod a");
    fs::rename(root.join("a"), root.join("b\n")).unwrap();
    watching.sees("rename a -> b\n");
    fs::rename(root.join("b\n"), space.path().join("out")).unwrap();
    watching.sees("remove b\n");
    fs::rename(space.path().join("out"), root.join("in")).unwrap();
    watching.sees("create in");
    fs::remove_file(root.join("in")).unwrap();
    watching.sees("remove in");
    fs::remove_dir_all(&root).unwrap();
    watching.sees("remove sub");
    watching.sees("remove root");
    assert!(watching.lines.next().is_none());
    watching.thread.join().unwrap().unwrap();
}

#[test]
fn a_recursive_watch_follows_new_and_renamed_directories() {
    let space = tempfile::tempdir().unwrap();
    let root = space.path();
    fs::create_dir_all(root.join("old/inner")).unwrap();
    let mut watching = Watching::start(root, true);
    fs::write(root.join("old/inner/file"), "x").unwrap();
    watching.sees("create old/inner/file");
    watching.sees("write old/inner/file");
    fs::rename(root.join("old"), root.join("new")).unwrap();
    watching.sees("rename old -> new");
    fs::remove_file(root.join("new/inner/file")).unwrap();
    watching.sees("remove new/inner/file");
    // What is in it before the watch can begin is told all the same, perhaps twice.
    fs::create_dir_all(root.join("fresh/a/b")).unwrap();
    fs::write(root.join("fresh/a/b/last"), "").unwrap();
    let mut seen = Vec::new();
    while seen.last().is_none_or(|last| last != "create fresh/a/b/last") {
        seen.push(watching.next());
    }
    for name in ["fresh", "fresh/a", "fresh/a/b"] {
        assert!(seen.contains(&format!("create {name}")), "{seen:?}");
    }
}

#[test]
fn a_file_is_watched_also_after_it_is_replaced() {
    let space = tempfile::tempdir().unwrap();
    let path = space.path().join("file");
    fs::write(&path, "1").unwrap();
    let mut watching = Watching::start(&path, false);
    fs::write(space.path().join("other"), "x").unwrap();
    fs::rename(space.path().join("other"), &path).unwrap();
    watching.sees("rename other -> file");
    fs::write(&path, "2").unwrap();
    watching.sees("write file");
}

#[test]
fn what_cannot_be_watched_is_a_fault() {
    let space = tempfile::tempdir().unwrap();
    assert_eq!(code(watch(&space.path().join("none"), false, &mut Vec::new())), "ENOENT");
    for number in 0..=MAX_WATCHED {
        fs::create_dir(space.path().join(number.to_string())).unwrap();
    }
    assert_eq!(code(watch(space.path(), true, &mut Vec::new())), "ENOSPC");
}

#[test]
fn directories_beyond_the_limit_are_an_overflow() {
    let space = tempfile::tempdir().unwrap();
    for number in 1..MAX_WATCHED {
        fs::create_dir(space.path().join(number.to_string())).unwrap();
    }
    let mut watching = Watching::start(space.path(), true);
    fs::create_dir(space.path().join("more")).unwrap();
    watching.sees("create more");
    watching.sees("overflow ");
    assert_eq!(FileChangeKind::Overflow, serde_json::from_str("\"overflow\"").unwrap());
}
