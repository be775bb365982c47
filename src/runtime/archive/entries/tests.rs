use std::io::Read;

use proptest::prelude::*;

use super::*;
use crate::runtime::archive::archive_writer::ArchiveWriter;

const LIMITS: ArchiveLimits = ArchiveLimits { size: 1 << 20, entries: 1000, depth: 100 };

fn entry(path: &str, kind: EntryKind, size: u64) -> ArchiveEntry {
    let attributes = vec![(b"user.any".to_vec(), b"line\nzero\0end".to_vec())];
    ArchiveEntry {
        path: path.into(),
        kind,
        mode: 0o4751,
        uid: 3_000_000,
        gid: 7,
        mtime: (1_700_000_000, 5),
        size,
        attributes,
    }
}

fn sample() -> Vec<(ArchiveEntry, Vec<u8>)> {
    let content = b"content of a file".repeat(40);
    vec![
        (entry("", EntryKind::Directory, 0), vec![]),
        (entry(&format!("{}/ünï", "d".repeat(200)), EntryKind::File, content.len() as u64), content),
        (entry("link", EntryKind::Link("first".into()), 0), vec![]),
        (entry("symlink", EntryKind::Symlink("x".repeat(300).into()), 0), vec![]),
        (entry("gone", EntryKind::Whiteout, 0), vec![]),
        (entry("fifo", EntryKind::Fifo, 0), vec![]),
    ]
}

fn written() -> Vec<u8> {
    let mut writer = ArchiveWriter::new(Vec::new());
    for (entry, content) in sample() {
        writer.add(&entry, &mut &content[..]).unwrap();
    }
    writer.finish().unwrap()
}

fn read(bytes: &[u8]) -> io::Result<Vec<(ArchiveEntry, Vec<u8>)>> {
    let mut reader = ArchiveReader::new(bytes, LIMITS);
    let mut found = Vec::new();
    while let Some(entry) = reader.next()? {
        let mut content = Vec::new();
        reader.read_to_end(&mut content)?;
        found.push((entry, content));
    }
    Ok(found)
}

#[test]
fn what_is_written_is_read_again() {
    assert_eq!(read(&written()).unwrap(), sample());
}

#[test]
fn what_is_cut_anywhere_is_noticed() {
    let whole = written();
    let end = whole.len() - 1024;
    assert!((0..=end).step_by(97).all(|length| read(&whole[..length]).is_err()));
}

#[test]
fn what_a_header_holds_is_not_quoted_in_an_error() {
    for field in [100..108, 108..116, 116..124, 124..136, 136..148, 148..156] {
        let mut writer = ArchiveWriter::new(Vec::new());
        writer.add(&ArchiveEntry { uid: 0, ..entry("short", EntryKind::Fifo, 0) }, &mut io::empty()).unwrap();
        let mut bytes = writer.finish().unwrap();
        // After the extended header and its content.
        let header = &mut bytes[1024..1536];
        header[field.clone()].fill(0x1b);
        if field.start != 148 {
            header[148..156].fill(b' ');
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        let error = read(&bytes).unwrap_err().to_string();
        assert!(!error.contains(char::is_control), "{field:?}: {error:?}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_read_too_much_or_break(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = written();
        for (at, byte) in changes {
            *at.get_mut(&mut bytes) = byte;
        }
        if let Ok(found) = read(&bytes) {
            let size: u64 = found.iter().map(|(_, content)| content.len() as u64).sum();
            prop_assert!(size <= LIMITS.size);
            prop_assert!(found.iter().all(|(entry, _)| !entry.path.is_absolute() && !entry.path.iter().any(|part| part == "..")));
        }
    }
}
