//! Mirrors a tree: with directories of its own, and hard links to the other's files. Changes to the mirror do
//! not affect the other tree, as long as files are replaced and never written to.

use std::{
    ffi::OsStr,
    fs::{self, File, Metadata},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt, PermissionsExt, lchown, symlink},
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode},
    io::Errno,
};

use super::{
    extract::{set_attribute, set_time},
    is_kept,
};

/// Fills the empty directory `tree` with the content of `base`. Blocks.
pub fn hardlink_tree(base: &Path, tree: &Path) -> io::Result<()> {
    // Link relative to open directories, which avoids resolving thousands of full paths.
    let (above, below) = (File::open(base)?, File::open(tree)?);
    for entry in fs::read_dir(base)? {
        let entry = entry?;
        let (name, from, to) = (entry.file_name(), entry.path(), || tree.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            fs::create_dir(to())?;
            hardlink_tree(&from, &to())?;
        } else {
            match rustix::fs::linkat(&above, &name, &below, &name, AtFlags::empty()) {
                Ok(()) => {}
                Err(error) if must_copy(error) => copy(&from, &to(), &fs::symlink_metadata(&from)?)?,
                Err(error) => return Err(error.into()),
            }
        }
    }
    dress(base, tree, &fs::symlink_metadata(base)?)
}

/// Whether a link is impossible: another file system, or the file has the maximum number of links.
fn must_copy(error: Errno) -> bool {
    [Errno::XDEV, Errno::MLINK, Errno::PERM, Errno::OPNOTSUPP].contains(&error)
}

fn copy(from: &Path, to: &Path, about: &Metadata) -> io::Result<()> {
    let kind = about.file_type();
    if kind.is_symlink() {
        symlink(fs::read_link(from)?, to)?;
    } else if kind.is_file() {
        fs::copy(from, to)?;
    } else if kind.is_fifo() {
        rustix::fs::mknodat(CWD, to, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
    } else {
        // Devices and sockets: a sandbox has its own.
        return Ok(());
    }
    dress(from, to, about)
}

fn dress(from: &Path, to: &Path, about: &Metadata) -> io::Result<()> {
    lchown(to, Some(about.uid()), Some(about.gid()))?;
    if !about.is_symlink() {
        fs::set_permissions(to, fs::Permissions::from_mode(about.mode() & 0o7777))?;
        for (name, value) in attributes(from)? {
            set_attribute(to, OsStr::from_bytes(&name), &value)?;
        }
    }
    set_time(to, (about.mtime(), u32::try_from(about.mtime_nsec()).unwrap_or(0)))
}

/// The attributes that are kept.
pub(super) fn attributes(path: &Path) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut names = vec![0; 64 << 10];
    let length = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut found = Vec::new();
    for name in names[..length].split(|byte| *byte == 0).filter(|name| is_kept(name)) {
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..])?;
        value.truncate(length);
        found.push((name.to_vec(), value));
    }
    Ok(found)
}
