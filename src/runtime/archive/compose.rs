//! Composes new archives from trees and layers, in one pass over each. Blocks.
//!
//! ```text
//!   complete = the tree without what the layer covers + the layer without its whiteouts
//!   layer    = how the tree differs from its base, without what the layer covers + the layer
//! ```

use std::{
    collections::{
        HashMap, HashSet,
        hash_map::Entry::{Occupied, Vacant},
    },
    ffi::OsString,
    fs::{self, File, Metadata},
    io::{self, BufReader, BufWriter, Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{
    OPAQUE,
    archive_writer::ArchiveWriter,
    bounds::{ArchiveBudget, Capped},
    entries::{ArchiveEntry, ArchiveLimits, ArchiveReader, EntryKind, clean},
    hardlink_tree::attributes,
};

const BUFFER: usize = 256 << 10;
const COMPRESSION: i32 = 3;
/// The mount point of the agent, which runsc creates.
const MOUNT: &str = ".baton";

/// Counts the entries of an archive.
pub fn count_entries(archive: &Path) -> io::Result<u64> {
    let mut reader = read(archive)?;
    while reader.next()?.is_some() {}
    Ok(reader.count_entries().0)
}

/// Writes everything visible to a sandbox on `tree` whose changes are in `upper`. Refuses what exceeds `limits`,
/// with [`FileTooLarge`](io::ErrorKind::FileTooLarge).
pub fn complete(tree: &Path, upper: &Path, target: &Path, limits: ArchiveLimits) -> io::Result<()> {
    compose(tree, None, upper, target, limits)
}

/// Writes the difference between that and `base`, on which `tree` was made.
pub fn layer(tree: &Path, base: &Path, upper: &Path, target: &Path, limits: ArchiveLimits) -> io::Result<()> {
    compose(tree, Some(base), upper, target, limits)
}

fn compose(tree: &Path, base: Option<&Path>, upper: &Path, target: &Path, limits: ArchiveLimits) -> io::Result<()> {
    let mut bounds = ArchiveBudget::new(limits);
    let cover = Cover::of(upper, limits)?;
    let capped = Capped { target: File::create(target)?, left: limits.size, most: limits.size };
    let mut writer = ArchiveWriter::new(BufWriter::with_capacity(BUFFER, capped));
    Walk { tree, base, cover: &cover, links: HashMap::new(), bounds: &mut bounds }.add(&mut writer, Path::new(""))?;
    add_layer(&mut writer, upper, base.is_some(), &mut bounds)?;
    writer.finish()?.flush()
}

/// Writes a tree as `.tar.zst`.
pub fn pack(tree: &Path, target: &Path) -> io::Result<()> {
    let mut writer = ArchiveWriter::new(zstd::Encoder::new(create(target)?, COMPRESSION)?);
    let (cover, bounds) = (&Cover::default(), &mut ArchiveBudget::new(ArchiveLimits::NONE));
    Walk { tree, base: None, cover, links: HashMap::new(), bounds }.add(&mut writer, Path::new(""))?;
    writer.finish()?.finish()?.into_inner().map_err(|error| error.into_error())?.sync_all()
}

fn create(target: &Path) -> io::Result<BufWriter<File>> {
    Ok(BufWriter::with_capacity(BUFFER, File::create(target)?))
}

fn read(archive: &Path) -> io::Result<ArchiveReader<BufReader<File>>> {
    Ok(ArchiveReader::new(BufReader::with_capacity(BUFFER, File::open(archive)?), ArchiveLimits::NONE))
}

fn add_layer(
    writer: &mut ArchiveWriter<impl Write>,
    upper: &Path,
    keep_whiteouts: bool,
    bounds: &mut ArchiveBudget,
) -> io::Result<()> {
    let mut reader = read(upper)?;
    let mut gone = HashSet::new();
    while let Some(mut entry) = reader.next()? {
        bounds.entry()?;
        let is_gone = match &entry.kind {
            EntryKind::Whiteout => true,
            EntryKind::Link(target) => gone.contains(&Name::of(target)),
            EntryKind::File
            | EntryKind::Sparse(_)
            | EntryKind::Symlink(_)
            | EntryKind::Directory
            | EntryKind::Fifo
            | EntryKind::Device => false,
        };
        if is_gone {
            gone.insert(Name::of(&entry.path));
            if !keep_whiteouts {
                continue;
            }
            entry.kind = EntryKind::Whiteout;
        }
        if !keep_whiteouts {
            entry.attributes.retain(|(name, _)| name != OPAQUE.as_bytes());
        }
        writer.add(&entry, &mut reader)?;
    }
    Ok(())
}

/// A path as its digest: there may be a million paths, of four kilobytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Name([u8; 16]);

impl Name {
    fn of(path: &Path) -> Self {
        let digest = Sha256::digest(path.as_os_str().as_bytes());
        Self(std::array::from_fn(|at| digest[at]))
    }
}

/// The names of a lower tree that a layer covers.
#[derive(Debug, Default)]
struct Cover {
    /// Whether everything below the name is covered too.
    names: HashMap<Name, bool>,
}

impl Cover {
    fn of(upper: &Path, limits: ArchiveLimits) -> io::Result<Self> {
        let mut reader = read(upper)?;
        let (mut names, mut bounds) = (HashMap::new(), ArchiveBudget::new(limits));
        while let Some(entry) = reader.next()? {
            bounds.entry()?;
            names.insert(Name::of(&entry.path), entry.kind != EntryKind::Directory || entry.is_opaque());
        }
        Ok(Self { names })
    }
}

struct Walk<'a> {
    tree: &'a Path,
    base: Option<&'a Path>,
    cover: &'a Cover,
    /// The first name of every file that may have several.
    links: HashMap<(u64, u64), PathBuf>,
    bounds: &'a mut ArchiveBudget,
}

impl Walk<'_> {
    fn add(&mut self, writer: &mut ArchiveWriter<impl Write>, path: &Path) -> io::Result<()> {
        let place = self.tree.join(path);
        let covered = self.cover.names.get(&Name::of(path));
        if covered == Some(&true) || path == Path::new(MOUNT) {
            return Ok(());
        }
        let about = fs::symlink_metadata(&place)?;
        if covered.is_none() && self.differs(path, &about)? {
            self.bounds.entry()?;
            self.write(writer, path, &place, &about)?;
        }
        if !about.is_dir() {
            return Ok(());
        }
        let mut names = names(&place, self.bounds)?;
        for name in &names {
            self.add(writer, &path.join(name))?;
        }
        // Names that the base has here and the tree does not.
        if let Some(base) = self.base.map(|base| base.join(path)).filter(|base| base.is_dir() && !base.is_symlink()) {
            names.sort();
            let there = self::names(&base, self.bounds)?;
            for name in there.iter().filter(|name| names.binary_search(name).is_err()) {
                let gone = path.join(name);
                if !self.cover.names.contains_key(&Name::of(&gone)) {
                    self.bounds.entry()?;
                    writer.add(&whiteout(gone), &mut io::empty())?;
                }
            }
            self.bounds.release(&there);
        }
        self.bounds.release(&names);
        Ok(())
    }

    fn write(
        &mut self,
        writer: &mut ArchiveWriter<impl Write>,
        path: &Path,
        place: &Path,
        about: &Metadata,
    ) -> io::Result<()> {
        let kind = about.file_type();
        let mut content: Box<dyn Read> = Box::new(io::empty());
        let first = if kind.is_dir() || about.nlink() < 2 {
            None
        } else {
            match self.links.entry((about.dev(), about.ino())) {
                Occupied(first) => Some(first.get().clone()),
                Vacant(place) => {
                    self.bounds.count_name(path.as_os_str())?;
                    place.insert(path.to_owned());
                    None
                }
            }
        };
        let kind = if let Some(first) = first {
            EntryKind::Link(first)
        } else if kind.is_file() {
            content = Box::new(File::open(place)?);
            EntryKind::File
        } else if kind.is_dir() {
            EntryKind::Directory
        } else if kind.is_symlink() {
            EntryKind::Symlink(fs::read_link(place)?.into_os_string())
        } else if kind.is_fifo() {
            EntryKind::Fifo
        } else {
            // Sockets and devices are useless in another sandbox.
            return Ok(());
        };
        let size = if kind == EntryKind::File { about.len() } else { 0 };
        let attributes =
            if matches!(kind, EntryKind::File | EntryKind::Directory) { attributes(place)? } else { Vec::new() };
        let entry = ArchiveEntry {
            path: clean(path.as_os_str().as_bytes(), u32::MAX)?,
            kind,
            mode: about.mode() & 0o7777,
            uid: about.uid(),
            gid: about.gid(),
            mtime: (about.mtime(), u32::try_from(about.mtime_nsec()).unwrap_or(0)),
            size,
            attributes,
        };
        writer.add(&entry, &mut content)
    }

    /// Whether the base lacks this name or has something else under it.
    fn differs(&self, path: &Path, about: &Metadata) -> io::Result<bool> {
        let Some(base) = self.base else { return Ok(true) };
        let place = base.join(path);
        let Ok(there) = fs::symlink_metadata(&place) else { return Ok(true) };
        if (about.dev(), about.ino()) == (there.dev(), there.ino()) {
            return Ok(false);
        }
        let look = |about: &Metadata| {
            let time = (about.mtime(), about.mtime_nsec());
            (about.file_type(), about.mode(), about.uid(), about.gid(), time)
        };
        if look(about) != look(&there) {
            return Ok(true);
        }
        if about.is_dir() {
            return Ok(false);
        }
        let here = self.tree.join(path);
        if about.is_symlink() {
            return Ok(fs::read_link(here)? != fs::read_link(place)?);
        }
        // A copied tree shares no files with its base.
        Ok(about.is_file() && (about.len() != there.len() || !same(&here, &place)?))
    }
}

/// The sorted names in a directory, counted in `bounds` until they are released.
fn names(place: &Path, bounds: &mut ArchiveBudget) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(place)? {
        let name = entry?.file_name();
        bounds.count_name(&name)?;
        names.push(name);
    }
    names.sort();
    Ok(names)
}

fn whiteout(path: PathBuf) -> ArchiveEntry {
    ArchiveEntry {
        path,
        kind: EntryKind::Whiteout,
        mode: 0,
        uid: 0,
        gid: 0,
        mtime: (0, 0),
        size: 0,
        attributes: Vec::new(),
    }
}

fn same(one: &Path, other: &Path) -> io::Result<bool> {
    let (mut one, mut other) = (BufReader::new(File::open(one)?), BufReader::new(File::open(other)?));
    let (mut left, mut right) = (vec![0; BUFFER], vec![0; BUFFER]);
    loop {
        let count = one.read(&mut left)?;
        if count == 0 {
            return Ok(other.read(&mut right)? == 0);
        }
        if other.read_exact(&mut right[..count]).is_err() || left[..count] != right[..count] {
            return Ok(false);
        }
    }
}
