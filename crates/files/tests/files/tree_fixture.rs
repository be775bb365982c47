//! A directory as a comparable value, and archives made by hand.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
};

use baton_files::{
    Fault, TransferTotals, Trust,
    tar::{Member, MemberKind, TarWriter},
};
use std::io::Write;

/// What one thing in a directory is.
#[derive(Debug, PartialEq, Eq)]
pub struct Thing {
    pub kind: &'static str,
    pub mode: u32,
    pub mtime: (i64, i64),
    pub links: u64,
    pub content: Vec<u8>,
}

/// Everything below `root`, by name.
pub fn look(root: &Path) -> BTreeMap<String, Thing> {
    let mut found = BTreeMap::new();
    let mut open = vec![root.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let (kind, content) = if metadata.is_dir() {
                open.push(path.clone());
                ("directory", Vec::new())
            } else if metadata.is_symlink() {
                ("link", fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes())
            } else {
                ("file", fs::read(&path).unwrap())
            };
            let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
            let links = if metadata.is_dir() { 0 } else { metadata.nlink() };
            let mtime = (metadata.mtime(), metadata.mtime_nsec());
            found.insert(name, Thing { kind, mode: metadata.mode() & 0o7777, mtime, links, content });
        }
    }
    found
}

/// A tree with one of everything.
pub fn plant(root: &Path) {
    let long = "long-name-".repeat(15);
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::create_dir_all(root.join("empty")).unwrap();
    fs::create_dir_all(root.join(&long).join(&long)).unwrap();
    fs::write(root.join(&long).join(&long).join("deep é"), "deep").unwrap();
    fs::write(root.join("a/run.sh"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(root.join("a/run.sh"), fs::Permissions::from_mode(0o751)).unwrap();
    for size in [0, 1, 511, 512, 513, 70_000, 600_000] {
        let bytes: Vec<u8> = (0..size).map(|at: u32| (at * 7 + at / 256) as u8).collect();
        fs::write(root.join(format!("a/b/size-{size}")), bytes).unwrap();
    }
    fs::hard_link(root.join("a/b/size-513"), root.join("a/zz-again")).unwrap();
    symlink("b/size-1", root.join("a/near")).unwrap();
    symlink("/nowhere/at/all", root.join("a/far")).unwrap();
    symlink("x".repeat(300), root.join("a/longlink")).unwrap();
    fs::set_permissions(root.join("empty"), fs::Permissions::from_mode(0o500)).unwrap();
    let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_600_000_000, 123_456_789);
    fs::File::open(root.join("a/run.sh")).unwrap().set_modified(time).unwrap();
    fs::File::open(root.join("a")).unwrap().set_modified(time).unwrap();
}

pub fn member(name: &str, kind: MemberKind, content: &str) -> (Member, Vec<u8>) {
    let is_file = kind == MemberKind::File;
    let member = Member {
        name: name.into(),
        kind,
        mode: 0o644,
        size: if is_file { content.len() as u64 } else { 0 },
        mtime: (1_000_000_000, 0),
        link: if is_file { Vec::new() } else { content.into() },
    };
    (member, if is_file { content.into() } else { Vec::new() })
}

pub fn archive(members: &[(Member, Vec<u8>)]) -> Vec<u8> {
    let mut writer = TarWriter::new(Vec::new());
    for (member, data) in members {
        writer.member(member).unwrap();
        writer.write_all(data).unwrap();
    }
    writer.finish().unwrap()
}

pub fn pack(from: &Path) -> (Vec<u8>, Vec<Fault>) {
    let (mut bytes, mut faults) = (Vec::new(), Vec::new());
    baton_files::pack(from, &mut bytes, &mut |fault| faults.push(fault.clone())).unwrap();
    (bytes, faults)
}

pub fn unpack(mut bytes: &[u8], into: &Path, trust: Trust) -> (Result<TransferTotals, Fault>, Vec<Fault>) {
    let mut faults = Vec::new();
    let done = baton_files::unpack(&mut bytes, into, trust, &mut |fault| faults.push(fault.clone()));
    (done, faults)
}
