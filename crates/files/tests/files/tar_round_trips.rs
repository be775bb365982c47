//! A tree goes through an archive unchanged, whoever made the archive.

use std::{fs, io::Read, process::Command};

use baton_files::{
    Trust,
    tar::{Member, MemberKind, TarReader},
};
use proptest::prelude::*;

use crate::tree_fixture::{self, archive, look, member, pack, plant, unpack};

#[test]
fn a_tree_comes_back_exactly() {
    let space = tempfile::tempdir().unwrap();
    let (from, to) = (space.path().join("from"), space.path().join("to"));
    fs::create_dir(&from).unwrap();
    plant(&from);
    let (bytes, faults) = pack(&from);
    assert_eq!(faults, []);
    let (done, faults) = unpack(&bytes, &to, Trust::Known);
    assert_eq!(faults, []);
    assert_eq!((done.unwrap().members, look(&from).len()), (look(&from).len() as u64, look(&to).len()));
    assert_eq!(look(&to), look(&from));
    // A second time over itself: the same again, hard links too.
    let (done, faults) = unpack(&bytes, &to, Trust::Known);
    assert_eq!((done.unwrap().faults, faults), (0, vec![]));
    let (again, wanted) = (look(&to), look(&from));
    let contents = |found: &std::collections::BTreeMap<String, tree_fixture::Thing>| {
        found.iter().map(|(name, thing)| (name.clone(), thing.content.clone(), thing.links)).collect::<Vec<_>>()
    };
    assert_eq!(contents(&again), contents(&wanted));
}

#[test]
fn a_single_file_is_an_archive_of_one() {
    let space = tempfile::tempdir().unwrap();
    fs::write(space.path().join("one"), "1").unwrap();
    std::os::unix::fs::symlink("one", space.path().join("link")).unwrap();
    let (bytes, faults) = pack(&space.path().join("link"));
    assert_eq!(faults, []);
    let to = space.path().join("to");
    assert_eq!(unpack(&bytes, &to, Trust::Stranger).0.unwrap().members, 1);
    assert_eq!(fs::read(to.join("link")).unwrap(), b"1");
    assert!(fs::symlink_metadata(to.join("link")).unwrap().is_file());
}

#[test]
fn what_cannot_be_packed_is_left_out_and_told() {
    let space = tempfile::tempdir().unwrap();
    let from = space.path().join("from");
    fs::create_dir(&from).unwrap();
    fs::write(from.join("a"), "a").unwrap();
    fs::write(from.join("z"), "z").unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(from.join("socket")).unwrap();
    let (bytes, faults) = pack(&from);
    assert_eq!(faults.len(), 1);
    assert!(faults[0].text.ends_with("/socket"), "{}", faults[0]);
    let to = space.path().join("to");
    assert!(unpack(&bytes, &to, Trust::Known).1.is_empty());
    assert_eq!(look(&to).into_keys().collect::<Vec<_>>(), ["a", "z"]);
}

#[test]
fn what_was_packed_is_fetched_under_another_name() {
    let space = tempfile::tempdir().unwrap();
    let from = space.path().join("from");
    fs::create_dir(&from).unwrap();
    plant(&from);
    let fetch = |bytes: &[u8], to: &str| {
        baton_files::fetch(&mut &*bytes, &space.path().join(to), Trust::Stranger, &mut |fault| {
            assert!(fault.text.ends_with("a/far"), "{fault}");
        })
    };
    assert_eq!(fetch(&pack(&from).0, "directory").unwrap().faults, 1, "the link that leads out");
    assert_eq!(look(&from).len(), look(&space.path().join("directory")).len() + 1);
    let (bytes, _) = pack(&from.join("a/run.sh"));
    fetch(&bytes, "new/name").unwrap();
    let (got, wanted) = (look(&space.path().join("new")), look(&from.join("a")));
    assert_eq!(got["name"], wanted["run.sh"]);
    assert_eq!(fetch(&bytes, "directory").unwrap_err().code, "EISDIR");
    assert_eq!(fetch(&archive(&[]), "nothing").unwrap().members, 0);
    assert!(!space.path().join("nothing").exists());
    assert_eq!(fetch(&archive(&[member("x", MemberKind::Symlink, "y")]), "nothing").unwrap_err().code, "EINVAL");
}

#[test]
fn a_file_without_a_size_is_packed_with_what_is_in_it() {
    let mut reader_of = std::io::Cursor::new(pack(std::path::Path::new("/proc/self/status")).0);
    let mut reader = TarReader::new(&mut reader_of);
    assert!(reader.next_member().unwrap().unwrap().size > 100);
}

/// Whether the program exists here.
fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

#[test]
fn other_programs_read_what_we_write_and_we_read_what_they_write() {
    if !has("tar") {
        eprintln!("there is no tar here");
        return;
    }
    let space = tempfile::tempdir().unwrap();
    let (from, theirs) = (space.path().join("from"), space.path().join("theirs"));
    fs::create_dir_all(&from).unwrap();
    fs::create_dir_all(&theirs).unwrap();
    plant(&from);
    let file = space.path().join("ours.tar");
    fs::write(&file, pack(&from).0).unwrap();
    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    run(Command::new("tar").args(["--no-same-owner", "-xpf"]).arg(&file).arg("-C").arg(&theirs));
    let mut wanted = look(&from);
    let got = look(&theirs);
    // Links get the time of the moment from tar.
    for (name, thing) in got.iter().filter(|(_, thing)| thing.kind == "link") {
        wanted.get_mut(name).unwrap().mtime = thing.mtime;
    }
    assert_eq!(got, wanted);
    for format in ["gnu", "pax", "ustar", "oldgnu"] {
        if format == "ustar" {
            // It has no room for such names.
            fs::remove_file(from.join("a/longlink")).unwrap();
            fs::remove_dir_all(from.join("long-name-".repeat(15))).unwrap();
        }
        let bytes =
            run(Command::new("tar").arg(format!("--format={format}")).arg("-cf-").arg("-C").arg(&from).arg("."));
        let ours = space.path().join(format);
        let (done, faults) = unpack(&bytes, &ours, Trust::Known);
        assert_eq!((done.unwrap().faults, faults), (0, vec![]), "{format}");
        let simple = |root: &std::path::Path| {
            let things = look(root).into_iter();
            things.map(|(name, thing)| (name, thing.kind, thing.mode, thing.links, thing.content)).collect::<Vec<_>>()
        };
        assert_eq!(simple(&ours), simple(&from), "{format}");
    }
}

fn any_member() -> impl Strategy<Value = (Member, Vec<u8>)> {
    let name = prop::collection::vec(1u8..=255, 1..300);
    let kind =
        prop::sample::select(vec![MemberKind::File, MemberKind::Symlink, MemberKind::HardLink, MemberKind::Directory]);
    let data = prop::collection::vec(any::<u8>(), 0..1500);
    (name.clone(), kind, 0u32..0o10000, any::<i32>(), 0u32..1_000_000_000, name, data).prop_map(
        |(mut name, kind, mode, seconds, nanoseconds, link, data)| {
            if name.last() == Some(&b'/') {
                name.push(b'x');
            }
            let data = if kind == MemberKind::File { data } else { Vec::new() };
            let link = if matches!(kind, MemberKind::Symlink | MemberKind::HardLink) { link } else { Vec::new() };
            let mtime = (seconds.into(), nanoseconds);
            (Member { name, kind, mode, size: data.len() as u64, mtime, link }, data)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_member_is_read_as_it_was_written(members in prop::collection::vec(any_member(), 0..6)) {
        let bytes = archive(&members);
        prop_assert_eq!(bytes.len() % 512, 0);
        let mut reader = TarReader::new(&bytes[..]);
        for (wanted, data) in &members {
            let member = reader.next_member().unwrap();
            prop_assert_eq!(member.as_ref(), Some(wanted));
            let mut got = Vec::new();
            reader.read_to_end(&mut got).unwrap();
            prop_assert_eq!(&got, data);
        }
        prop_assert_eq!(reader.next_member().unwrap(), None);
    }

    #[test]
    fn damage_is_an_error_or_another_archive_and_never_a_panic(
        members in prop::collection::vec(any_member(), 1..4),
        place in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = archive(&members);
        let at = place.index(bytes.len());
        bytes[at] = byte;
        bytes.truncate(cut.index(bytes.len() + 1));
        let mut reader = TarReader::new(&bytes[..]);
        while let Ok(Some(_)) = reader.next_member() {}
    }
}

#[test]
fn a_header_that_claims_a_lot_costs_nothing() {
    let (mut huge, _) = member("x", MemberKind::File, "");
    huge.size = 1 << 40;
    let mut bytes = archive(&[member("a", MemberKind::File, "a")]);
    bytes.truncate(1024);
    let mut writer = baton_files::tar::TarWriter::new(Vec::new());
    writer.member(&huge).unwrap();
    // The size is in a pax header here: the reader believes it and finds the end.
    let mut claims = Vec::new();
    let mut reader = TarReader::new(&bytes[..]);
    reader.next_member().unwrap();
    reader.read_to_end(&mut claims).unwrap();
    assert_eq!(claims, b"a");
    // A pax header of a terabyte is refused before a byte of it is kept.
    let mut block = archive(&[member("x", MemberKind::File, "")])[..512].to_vec();
    block[124..136].copy_from_slice(b"\x80\0\0\0\0\0\x01\0\0\0\0\0");
    block[156] = b'x';
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut endless = block.as_slice().chain(std::io::repeat(b'x'));
    let error = TarReader::new(&mut endless).next_member().unwrap_err();
    assert_eq!(error.to_string(), "A header is too long");
}
