//! The digest of a root file system, the same as `scripts/setup` computes for its trees.
//!
//! SHA-256 over two sorted lists of records that end in NUL: first every entry below the root with type, mode,
//! owner, size (of files), link target (of links) and path; then the SHA-256 of every file's content with its
//! path. Times are excluded, because they differ from build to build, and so is the directory that runsc creates
//! in a tree as the agent's mount point.

use std::{
    fs::{self, File, Metadata},
    io,
    os::unix::{ffi::OsStrExt, fs::FileTypeExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use baton_protocol::id::Sha256Name;
use sha2::{Digest, Sha256};

const MOUNT: &str = ".baton";

/// The digest of the root file system made from an archive: the same on every instance, without reading a file.
pub fn derived(base_digest: Option<&Sha256Name>, archive_sha256: &Sha256Name) -> Sha256Name {
    let text = format!("root file system\n{}\n{archive_sha256}\n", base_digest.map_or("complete", Sha256Name::as_str));
    Sha256Name::from_bits(Sha256::digest(text.as_bytes()).into())
}

/// Computes the digest. Reads every file once, which takes about a second for a small Debian. Blocks.
pub fn digest(root: &Path) -> io::Result<Sha256Name> {
    let mut entries = Vec::new();
    let mut files = Vec::new();
    walk(root, root, &mut entries, &mut files)?;
    entries.sort();
    files.sort();
    let mut all = Sha256::new();
    for entry in entries {
        all.update(&entry);
        all.update([0]);
    }
    for (name, path) in files {
        all.update(content(&path)?.as_bytes());
        all.update(b"  ./");
        all.update(&name);
        all.update([0]);
    }
    Ok(Sha256Name::from_bits(all.finalize().into()))
}

type Named = (Vec<u8>, PathBuf);

fn walk(root: &Path, below: &Path, entries: &mut Vec<Vec<u8>>, files: &mut Vec<Named>) -> io::Result<()> {
    for entry in fs::read_dir(below)? {
        let path = entry?.path();
        if below == root && path.file_name().is_some_and(|name| name == MOUNT) {
            continue;
        }
        let about = fs::symlink_metadata(&path)?;
        let name = path.strip_prefix(root).map_err(io::Error::other)?.as_os_str().as_bytes().to_vec();
        let detail = if about.is_file() {
            about.len().to_string().into_bytes()
        } else if about.is_symlink() {
            fs::read_link(&path)?.as_os_str().as_bytes().to_vec()
        } else {
            b"-".to_vec()
        };
        let head = format!("{} {:o} {}:{} ", letter(&about), about.mode() & 0o7777, about.uid(), about.gid());
        entries.push([head.as_bytes(), &detail, b" ", &name].concat());
        if about.is_dir() {
            walk(root, &path, entries, files)?;
        } else if about.is_file() {
            files.push((name, path));
        }
    }
    Ok(())
}

fn letter(about: &Metadata) -> char {
    let kind = about.file_type();
    match () {
        () if kind.is_file() => 'f',
        () if kind.is_dir() => 'd',
        () if kind.is_symlink() => 'l',
        () if kind.is_fifo() => 'p',
        () if kind.is_socket() => 's',
        () if kind.is_block_device() => 'b',
        () => 'c',
    }
}

fn content(path: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 128 << 10];
    loop {
        match io::Read::read(&mut file, &mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            count => hasher.update(&buffer[..count]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt, process::Command};

    use super::*;

    fn small_tree() -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        let at = |name: &str| tree.path().join(name);
        fs::create_dir_all(at("usr/bin")).unwrap();
        fs::create_dir(at("tmp")).unwrap();
        fs::set_permissions(at("tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
        fs::write(at("usr/bin/tool"), "#!/bin/sh\n").unwrap();
        fs::set_permissions(at("usr/bin/tool"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::write(at("usr/empty"), "").unwrap();
        fs::write(at("usr/a name\nwith a \\ line"), "x").unwrap();
        std::os::unix::fs::symlink("usr/bin", at("bin")).unwrap();
        std::os::unix::fs::symlink("nowhere at all", at("dangling")).unwrap();
        tree
    }

    #[test]
    fn the_digest_is_the_one_that_setup_computes() {
        let tree = small_tree();
        let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/setup");
        let printed = Command::new(setup).arg("--digest").arg(tree.path()).output().unwrap();
        assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
        assert_eq!(String::from_utf8(printed.stdout).unwrap().trim(), digest(tree.path()).unwrap().as_str());
    }

    #[test]
    fn every_change_but_one_of_time_changes_the_digest() {
        let tree = small_tree();
        let at = |name: &str| tree.path().join(name);
        let mut seen = vec![digest(tree.path()).unwrap()];
        File::open(at("usr/empty")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(digest(tree.path()).unwrap(), seen[0]);
        let changes: [&dyn Fn(); 5] = [
            &|| fs::write(at("usr/empty"), "y").unwrap(),
            &|| fs::write(at("usr/empty"), "z").unwrap(),
            &|| fs::set_permissions(at("usr/empty"), fs::Permissions::from_mode(0o600)).unwrap(),
            &|| fs::rename(at("usr/empty"), at("usr/full")).unwrap(),
            &|| {
                fs::remove_file(at("bin")).unwrap();
                std::os::unix::fs::symlink("usr/sbin", at("bin")).unwrap();
            },
        ];
        for change in changes {
            change();
            let now = digest(tree.path()).unwrap();
            assert!(!seen.contains(&now));
            seen.push(now);
        }
    }
}
