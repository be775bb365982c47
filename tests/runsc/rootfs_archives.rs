//! Archives become root file systems, and hostile ones become nothing.

use std::{
    collections::BTreeMap,
    io::Write,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use baton::runtime::{ArchiveSource, Error, Extract, Lifecycle, RuntimeSettings, archive::ArchiveLimits};
use baton_files::tar::pax;
use baton_protocol::id::Sha256Name;
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use crate::fixture::{Full, Place};

/// Everything about a tree that a snapshot promises to keep.
pub fn look(tree: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut left = vec![tree.to_owned()];
    while let Some(folder) = left.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let about = std::fs::symlink_metadata(&path).unwrap();
            let content = if about.is_symlink() {
                format!("{:?}", std::fs::read_link(&path).unwrap())
            } else if about.is_file() {
                format!("{:x?}", Sha256::digest(std::fs::read(&path).unwrap()))
            } else {
                String::new()
            };
            let what = (about.mode(), about.uid(), about.gid(), about.mtime(), content);
            found.insert(path.strip_prefix(tree).unwrap().to_owned(), format!("{what:?}"));
            if about.is_dir() {
                left.push(path);
            }
        }
    }
    found
}

pub fn header(kind: EntryType, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(0o755);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1_700_000_000);
    header
}

/// One entry with any name, which the library would refuse to write.
pub fn raw(archive: &mut Vec<u8>, kind: EntryType, name: &[u8], link: &[u8], content: &[u8]) {
    let mut header = header(kind, content.len() as u64);
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
    header.set_cksum();
    archive.extend_from_slice(header.as_bytes());
    archive.extend_from_slice(content);
    archive.resize(archive.len().next_multiple_of(512), 0);
}

pub fn ended(mut archive: Vec<u8>) -> Vec<u8> {
    archive.resize(archive.len() + 1024, 0);
    archive
}

/// Kind, name, link and content.
type Row<'a> = (EntryType, &'a [u8], &'a [u8], &'a [u8]);

fn of(entries: &[Row<'_>]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (kind, name, link, content) in entries {
        raw(&mut archive, *kind, name, link, content);
    }
    ended(archive)
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub async fn extract(place: &Place, name: &str, bytes: &[u8], from: ArchiveSource) -> Result<PathBuf, Error> {
    let file = place.path("archive");
    std::fs::write(&file, bytes).unwrap();
    let digest = format!("{:0>64}", name.bytes().map(|byte| format!("{byte:02x}")).collect::<String>());
    let wanted = Extract { digest: Sha256Name::parse(&digest).unwrap(), from };
    place.containers.extract(&file, &wanted).await?;
    Ok(place.path("extracted").join(digest).join("rootfs"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_not_the_archives_fault() {
    let place = Place::new().await;
    let content = vec![7; 256 << 10];
    let archive = of(&[(EntryType::Regular, b"large", b"", &content)]);
    let full = Full::at(place.path("extracted"));
    let refused = extract(&place, "full", &archive, ArchiveSource::Complete).await;
    assert!(matches!(refused, Err(Error::NoSpace { .. })), "{refused:?}");
    drop(full);
    let tree = extract(&place, "full", &archive, ArchiveSource::Complete).await.unwrap();
    assert_eq!(std::fs::read(tree.join("large")).unwrap(), content);
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_archive_leaves_nothing_and_touches_nothing() {
    let limits = ArchiveLimits { size: 8 << 20, entries: 1000, depth: 32 };
    let place = Place::with(|settings| RuntimeSettings { archive_limits: limits, ..settings }).await;
    let outside = place.path("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("secret"), "untouched").unwrap();
    let before = look(&outside);
    use EntryType as T;
    let deep: Vec<u8> = b"d/".repeat(40);
    let long_name = {
        let mut archive = Vec::new();
        raw(&mut archive, T::GNULongName, b"././@LongLink", b"", &vec![b'a'; 4 << 20]);
        raw(&mut archive, T::Regular, b"a", b"", b"");
        ended(archive)
    };
    let many = {
        let mut archive = Vec::new();
        (0..2000).for_each(|n| raw(&mut archive, T::Regular, format!("f{n}").as_bytes(), b"", b""));
        ended(archive)
    };
    let zeros = of(&[(T::Regular, b"zeros", b"", &vec![0; 64 << 20])]);
    let sparse = {
        let mut header = header(T::GNUSparse, 0);
        header.as_gnu_mut().unwrap().set_real_size(1 << 40);
        header.as_old_mut().name[..6].copy_from_slice(b"sparse");
        header.set_cksum();
        ended(header.as_bytes().to_vec())
    };
    let wrong_map = {
        let mut header = header(T::GNUSparse, 512);
        let gnu = header.as_gnu_mut().unwrap();
        gnu.set_real_size(100);
        gnu.sparse[0].set_offset(u64::MAX - 10);
        gnu.sparse[0].set_length(512);
        header.as_old_mut().name[..6].copy_from_slice(b"sparse");
        header.set_cksum();
        let mut archive = header.as_bytes().to_vec();
        archive.resize(1024, 7);
        ended(archive)
    };
    let pax = |records: &[u8]| {
        let mut archive = Vec::new();
        raw(&mut archive, T::XHeader, b"x", b"", records);
        raw(&mut archive, T::Regular, b"a", b"", b"content");
        ended(archive)
    };
    // Each step is short, and the last one would be nine hundred directories deep.
    let ladder = {
        let mut archive = Vec::new();
        let step = b"d/".repeat(30);
        raw(&mut archive, T::Directory, &step, b"", b"");
        for n in 0..30 {
            let below = if n == 0 { step.clone() } else { [format!("s{}/", n - 1).as_bytes(), &step].concat() };
            raw(&mut archive, T::Symlink, format!("s{n}").as_bytes(), &below, b"");
            raw(&mut archive, T::Directory, &[format!("s{n}/").as_bytes(), &step].concat(), b"", b"");
        }
        ended(archive)
    };
    let attributes = {
        let mut archive = Vec::new();
        let mut records = Vec::new();
        pax::record(&mut records, b"SCHILY.xattr.user.x", &vec![b'a'; 700 << 10]);
        (0..3).for_each(|_| raw(&mut archive, T::XHeader, b"x", b"", &records));
        raw(&mut archive, T::Directory, b"a/", b"", b"");
        ended(archive)
    };
    let headers = {
        let mut archive = Vec::new();
        (0..20_000).for_each(|_| raw(&mut archive, T::XHeader, b"x", b"", b""));
        ended(archive)
    };
    let cut = of(&[(T::Regular, b"a", b"", &[1; 4096])])[..2000].to_vec();
    let mut damaged = of(&[(T::Regular, b"a", b"", b"x")]);
    damaged[3] ^= 0xff;
    for (name, archive, reason) in [
        ("climbs", of(&[(T::Regular, b"../secret", b"", b"x")]), "outside"),
        ("climbs inside", of(&[(T::Regular, b"a/../../secret", b"", b"x")]), "outside"),
        ("links out", of(&[(T::Link, b"a", b"../outside/secret", b"")]), "outside"),
        ("links to nothing", of(&[(T::Link, b"a", b"etc/shadow", b"")]), "a: "),
        ("too deep", of(&[(T::Directory, &deep, b"", b"")]), "deep"),
        ("ladder", ladder, "deep"),
        ("attributes", attributes, "too many attributes"),
        ("headers", headers, "more than 8388608 bytes"),
        ("long name", long_name, "too long"),
        ("many entries", many, "more than 1000 entries"),
        ("large", zeros.clone(), "more than 8388608 bytes"),
        ("bomb", gzip(&zeros), "more than 8388608 bytes"),
        ("zstd bomb", zstd::encode_all(&zeros[..], 3).unwrap(), "more than 8388608 bytes"),
        ("sparse bomb", sparse, "more than 8388608 bytes"),
        ("wrong map", wrong_map, "sparse"),
        ("pax climbs", pax(b"18 path=../../etc\n"), "outside"),
        ("pax absurd", pax(b"99 path=x\n"), "extended header"),
        ("pax size", pax(b"27 size=9999999999999999999\n"), "extended header"),
        ("cut", cut, "ends early"),
        ("damaged", damaged, "no tar archive"),
        ("no archive", b"this is not an archive".to_vec(), "ends early"),
        ("empty", Vec::new(), "ends early"),
        ("file as root", of(&[(T::Regular, b"./", b"", b""), (T::Symlink, b".", b"/etc", b"")]), "root"),
        ("below a file", of(&[(T::Regular, b"a", b"", b"x"), (T::Regular, b"a/b", b"", b"x")]), "a/b"),
        ("loop", of(&[(T::Symlink, b"a", b"a", b""), (T::Regular, b"a/b", b"", b"x")]), "a/b"),
        ("unknown", of(&[(T::new(b'Z'), b"a", b"", b"")]), "unknown kind"),
    ] {
        let refused = extract(&place, name, &archive, ArchiveSource::Complete).await;
        let Err(Error::Refused { message, .. }) = refused else { panic!("{name}: {refused:?}") };
        assert!(message.contains(reason), "{name}: {message}");
        assert!(!message.contains(place.directory.path().to_str().unwrap()), "{name}: {message}");
    }
    assert_eq!(look(&outside), before);
    let left: Vec<_> = std::fs::read_dir(place.path("extracted")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.iter().all(|path| path.extension().is_some_and(|end| end == "lock")), "{left:?}");

    // What looks like a way out leads nowhere but into the tree.
    let outward = outside.join("secret");
    let outward = outward.as_os_str().as_bytes();
    let tree = of(&[
        (T::Symlink, b"way", b"/", b""),
        (T::Regular, b"way/note", b"", b"inside"),
        (T::Symlink, b"secret", outward, b""),
        (T::Regular, b"secret", b"", b"mine"),
        (T::Symlink, b"up", b"../../../../../../../../..", b""),
        (T::Regular, b"up/above", b"", b"inside"),
        (T::Regular, b"/absolute", b"", b"inside"),
        (T::Char, b"dev/kmsg", b"", b""),
        (T::Block, b"disk", b"", b""),
        (T::Fifo, b"fifo", b"", b""),
    ]);
    let tree = extract(&place, "ways", &tree, ArchiveSource::Complete).await.unwrap();
    let kept = look(&tree);
    for inside in ["note", "secret", "above", "absolute", "fifo", "tmp/.keep", "proc"] {
        assert!(kept.contains_key(Path::new(inside)), "{inside}: {kept:?}");
    }
    assert!(!kept.contains_key(Path::new("disk")) && !kept.contains_key(Path::new("dev/kmsg")));
    assert_eq!(look(&outside), before);
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_changes_removes_and_hides_without_touching_its_base() {
    let place = Place::new().await;
    use EntryType as T;
    let base = of(&[
        (T::Directory, b"etc/", b"", b""),
        (T::Regular, b"etc/kept", b"", b"kept"),
        (T::Regular, b"etc/changed", b"", b"old"),
        (T::Regular, b"etc/gone", b"", b"old"),
        (T::Regular, b"etc/also", b"", b"old"),
        (T::Directory, b"whole/", b"", b""),
        (T::Regular, b"whole/hidden", b"", b"old"),
        (T::Directory, b"dir/", b"", b""),
        (T::Regular, b"dir/x", b"", b"old"),
    ]);
    let below = extract(&place, "base", &base, ArchiveSource::Complete).await.unwrap();
    let before = look(&below);
    let mut layer = Vec::new();
    raw(&mut layer, T::Directory, b"./", b"", b"");
    raw(&mut layer, T::Directory, b"./etc/", b"", b"");
    raw(&mut layer, T::Regular, b"./etc/changed", b"", b"new");
    // A character device 0:0, and a link to it, as runsc writes names that are gone.
    let mut gone = header(T::Char, 0);
    gone.as_old_mut().name[..10].copy_from_slice(b"./etc/gone");
    gone.set_device_major(0).unwrap();
    gone.set_device_minor(0).unwrap();
    gone.set_cksum();
    layer.extend_from_slice(gone.as_bytes());
    raw(&mut layer, T::Link, b"./etc/also", b"./etc/gone", b"");
    raw(&mut layer, T::XHeader, b"x", b"", b"41 SCHILY.xattr.trusted.overlay.opaque=y\n");
    raw(&mut layer, T::Directory, b"./whole/", b"", b"");
    raw(&mut layer, T::Regular, b"./whole/shown", b"", b"new");
    raw(&mut layer, T::Regular, b"./dir", b"", b"a file now");
    raw(&mut layer, T::Link, b"./linked", b"./etc/kept", b"");
    let base_digest = below.parent().unwrap().file_name().unwrap().to_str().unwrap();
    let base_digest = Sha256Name::parse(base_digest).unwrap();
    let from = ArchiveSource::Layer { base_digest };
    let tree = extract(&place, "layer", &ended(layer), from).await.unwrap();
    let read = |name: &str| std::fs::read_to_string(tree.join(name)).ok();
    for (name, content) in [
        ("etc/kept", Some("kept")),
        ("etc/changed", Some("new")),
        ("etc/gone", None),
        ("etc/also", None),
        ("whole/hidden", None),
        ("whole/shown", Some("new")),
        ("dir", Some("a file now")),
        ("linked", Some("kept")),
    ] {
        assert_eq!(read(name).as_deref(), content, "{name}");
    }
    let inode = |path: PathBuf| std::fs::metadata(path).unwrap().ino();
    assert_eq!(inode(tree.join("etc/kept")), inode(below.join("etc/kept")), "what did not change is shared");
    assert_eq!(look(&below), before, "the base is as it was");
    place.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_that_want_the_same_make_it_once_and_the_least_used_goes_first() {
    let place = Place::with(|settings| RuntimeSettings { rootfs_cache_size: 5 << 20, ..settings }).await;
    let archive = |name: &str| {
        let mut builder = Builder::new(Vec::new());
        let mut header = header(EntryType::Regular, 2 << 20);
        let content: Vec<u8> = name.bytes().cycle().take(2 << 20).collect();
        builder.append_data(&mut header, "large", &content[..]).unwrap();
        builder.into_inner().unwrap()
    };
    let containers = Arc::clone(&place.containers);
    let digest = |name: &str| Sha256Name::parse(&format!("{name:0>64}")).unwrap();
    let file = |name: &str| {
        let file = place.path(&format!("{name}.tar"));
        std::fs::write(&file, archive(name)).unwrap();
        file
    };
    let make = |name: &'static str| {
        let (containers, file) = (containers.clone(), file(name));
        let wanted = Extract { digest: digest(name), from: ArchiveSource::Complete };
        async move { containers.extract(&file, &wanted).await.unwrap() }
    };
    let all = futures::future::join_all((0..8).map(|_| make("a"))).await;
    let here = |name: &str| place.path("extracted").join(digest(name).as_str()).join("rootfs/large").exists();
    assert!(here("a"));
    drop(all);
    let held = make("b").await;
    drop(make("a").await);
    drop(make("c").await);
    assert!(here("b") && here("c") && !here("a"), "the least used goes, but nothing that is held");
    assert!(place.containers.acquire_rootfs(&digest("a")).is_none());
    drop(held);
    drop(make("d").await);
    assert!(!here("b") && here("d"));
    place.close().await;
}
