//! Files, as the server asks for them: each is a command with streams, an end and an exit code.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use baton_protocol::{
    agent::AgentExec,
    file_work::{FileEntry, Work},
    frame::{Frame, FrameKind, Stream},
};

use crate::probe::{ALL, AgentProcess, FRAME_TIMEOUT, command};

fn asked(work: Work) -> AgentExec {
    AgentExec { stdin: work.has_stdin(), file: Some(work), ..command(&["baton-agent"]) }
}

fn read(path: &Path) -> AgentExec {
    asked(Work::ReadFile { path: path.to_str().unwrap().into(), offset: 0, length: None, archive: false })
}

fn write(path: &Path, size: Option<u64>) -> AgentExec {
    let path = path.to_str().unwrap().into();
    asked(Work::WriteFile { path, mode: Some(0o640), mtime_ms: Some(1_600_000_000_250), size, archive: false })
}

fn stdin(number: u32, offset: u64, bytes: &[u8]) -> Frame {
    Frame::new(FrameKind::Stdin).exec(number).offset(offset).payload(bytes)
}

fn end(number: u32, offset: u64) -> Frame {
    Frame::new(FrameKind::StdinEof).exec(number).offset(offset)
}

fn names(directory: &Path) -> Vec<String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_file_is_written_and_read_through_the_streams() {
    let space = tempfile::tempdir().unwrap();
    let path = space.path().join("new/file");
    let mut probe = AgentProcess::start();
    probe.exec(1, &write(&path, Some(11)));
    probe.send(stdin(1, 0, b"hello "));
    probe.send(stdin(1, 3, b"lo world"));
    probe.send(end(1, 11));
    let outcome = probe.collect(1, ALL);
    assert_eq!((outcome.exit.code, outcome.stderr), (Some(0), vec![]));
    let found = fs::metadata(&path).unwrap();
    assert_eq!((found.mode() & 0o7777, found.mtime(), found.mtime_nsec()), (0o640, 1_600_000_000, 250_000_000));
    let outcome = probe.run(2, &read(&path));
    assert_eq!((outcome.text().as_str(), outcome.exit.code), ("hello world", Some(0)));
}

#[test]
fn a_fault_is_an_exit_code_and_a_line_with_an_errno() {
    let mut probe = AgentProcess::start();
    let outcome = probe.run(1, &read(Path::new("/no/such\nfile")));
    assert_eq!(outcome.exit.code, Some(1));
    assert_eq!(String::from_utf8(outcome.stderr).unwrap(), "ENOENT: No such file or directory: /no/such?file\n");
    let list = asked(Work::ListFiles { path: "/no/such".into(), depth: 1 });
    assert_eq!(probe.run(2, &list).exit.code, Some(1));
}

#[test]
fn a_write_given_up_leaves_nothing_behind() {
    let space = tempfile::tempdir().unwrap();
    let path = space.path().join("file");
    let mut probe = AgentProcess::start();
    for (number, size) in [(1, None), (2, Some(100))] {
        probe.exec(number, &write(&path, size));
        probe.send(stdin(number, 0, b"some"));
        // Once the worker has begun its file a signal has something to take back.
        let deadline = std::time::Instant::now() + FRAME_TIMEOUT;
        while names(space.path()).is_empty() {
            assert!(std::time::Instant::now() < deadline, "it never began");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        match size {
            None => probe.send(Frame::new(FrameKind::Signal).exec(number).offset(15)),
            Some(_) => probe.send(end(number, 4)),
        }
        let outcome = probe.collect(number, ALL);
        assert_eq!(outcome.exit.code, Some(1), "{}", String::from_utf8_lossy(&outcome.stderr));
        assert_eq!(names(space.path()), Vec::<String>::new());
    }
}

#[test]
fn a_tree_goes_in_and_comes_out() {
    let space = tempfile::tempdir().unwrap();
    let from = space.path().join("from");
    fs::create_dir_all(from.join("a/b")).unwrap();
    fs::write(from.join("a/b/one"), vec![7; 700_000]).unwrap();
    std::os::unix::fs::symlink("b/one", from.join("a/link")).unwrap();
    let mut probe = AgentProcess::start();
    let path = from.to_str().unwrap().to_owned();
    let archive = probe.run(1, &asked(Work::ReadFile { path, offset: 0, length: None, archive: true })).stdout;
    let to = space.path().join("to");
    let path = to.to_str().unwrap().to_owned();
    let unpack = asked(Work::WriteFile { path, mode: None, mtime_ms: None, size: None, archive: true });
    probe.exec(2, &unpack);
    let mut acked = 0;
    while acked < archive.len() {
        let until = archive.len().min(acked + 500_000);
        probe.send(stdin(2, acked as u64, &archive[acked..until]));
        while acked < until {
            acked = probe.wait_for(FrameKind::StdinAck, 2).offset as usize;
        }
    }
    probe.send(end(2, archive.len() as u64));
    assert_eq!(probe.collect(2, ALL).exit.code, Some(0));
    assert_eq!(fs::read(to.join("a/link")).unwrap(), vec![7; 700_000]);
    let list = probe.run(3, &asked(Work::ListFiles { path: to.to_str().unwrap().into(), depth: 9 }));
    let entries: Vec<FileEntry> = list.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), ["a", "a/b", "a/b/one", "a/link"]);
}

#[test]
fn work_with_files_is_done_as_the_user_asked_for() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let space = tempfile::tempdir().unwrap();
    fs::set_permissions(space.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = space.path().join("secret");
    fs::write(&path, "x").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let mut probe = AgentProcess::start();
    let outcome = probe.run(1, &AgentExec { user: Some("65534".into()), ..read(&path) });
    assert_eq!(outcome.exit.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.starts_with(b"EACCES: "), "{}", String::from_utf8_lossy(&outcome.stderr));
}

#[test]
fn a_slow_reader_costs_the_agent_no_more_than_its_ring() {
    let space = tempfile::tempdir().unwrap();
    let path = space.path().join("big");
    fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    let mut probe = AgentProcess::start();
    let before = probe.memory();
    probe.exec(1, &read(&path));
    probe.credit(1, Stream::Stdout, 1 << 20);
    probe.wait_for_state(|state| state.execs[0].stdout.to >= 4 << 20);
    assert!(probe.memory() < before + (16 << 20), "{} then {}", before, probe.memory());
    let outcome = probe.collect(1, 1 << 20);
    assert_eq!((outcome.stdout.len(), outcome.exit.code), (64 << 20, Some(0)));
}

#[test]
fn directories_are_changed_and_watched_and_a_watch_is_in_the_background() {
    let space = tempfile::tempdir().unwrap();
    let path = |name: &str| space.path().join(name).to_str().unwrap().to_owned();
    let mut probe = AgentProcess::start();
    probe.exec(1, &asked(Work::WatchFiles { path: path(""), recursive: false }));
    assert_eq!(probe.wait_for(FrameKind::Started, 1).payload, br#"{"background":true}"#);
    probe.credit(1, Stream::Stdout, 1 << 20);
    let line = |probe: &mut AgentProcess| String::from_utf8(probe.wait_for(FrameKind::Data, 1).payload).unwrap();
    assert_eq!(line(&mut probe), "{\"type\":\"ready\",\"name\":\"\"}\n");
    assert!(probe.state().execs[0].background);
    let make = Work::MakeDirectory { path: path("a"), parents: false, mode: None };
    assert_eq!(probe.run(2, &asked(make)).exit.code, Some(0));
    let rename = Work::RenameFile { path: path("a"), to: path("b") };
    assert_eq!(probe.run(3, &asked(rename)).exit.code, Some(0));
    assert_eq!(probe.run(4, &asked(Work::RemoveFile { path: path("b"), recursive: true })).exit.code, Some(0));
    let outcome = probe.run(5, &asked(Work::RemoveFile { path: path("b"), recursive: true }));
    assert_eq!(outcome.exit.code, Some(1));
    assert!(outcome.stderr.starts_with(b"ENOENT: "), "{outcome:?}");
    let mut seen = String::new();
    while !seen.contains("\"remove\"") {
        seen += &line(&mut probe);
    }
    assert!(seen.contains("{\"type\":\"rename\",\"name\":\"a\",\"to\":\"b\"}"), "{seen}");
    probe.send(Frame::new(FrameKind::Signal).exec(1).offset(15));
    assert_eq!(probe.exit(1).signal, Some(15));
}
