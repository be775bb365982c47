//! New archives out of trees and layers, in one pass over each. Blocks.
//!
//! ```text
//!   complete = the tree without what the layer covers + the layer without its whiteouts
//!   layer    = how the tree differs from its base, without what the layer covers + the layer
//! ```

use std::{
    collections::HashMap,
    fs::{self, File, Metadata},
    io::{self, BufReader, BufWriter, Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use super::{
    OPAQUE,
    entries::{Entry, Kind, Limits, Reader, clean},
    farm::attributes,
    writer::Writer,
};

const BUFFER: usize = 256 << 10;
const COMPRESSION: i32 = 3;
/// runsc hangs the agent there, and makes the place for it.
const MOUNT: &str = ".baton";

/// How many entries an archive has.
pub fn tally(archive: &Path) -> io::Result<u64> {
    let mut reader = read(archive)?;
    while reader.next()?.is_some() {}
    Ok(reader.tally().0)
}

/// Everything a sandbox on `tree` sees whose changes are in `upper`.
pub fn complete(tree: &Path, upper: &Path, target: &Path) -> io::Result<()> {
    let cover = Cover::of(upper)?;
    let mut writer = Writer::new(create(target)?);
    Walk { tree, base: None, cover: &cover, links: HashMap::new() }.add(&mut writer, Path::new(""))?;
    add_layer(&mut writer, upper, false)?;
    close(writer)
}

/// How that differs from `base`, on which `tree` was made.
pub fn layer(tree: &Path, base: &Path, upper: &Path, target: &Path) -> io::Result<()> {
    let cover = Cover::of(upper)?;
    let mut writer = Writer::new(create(target)?);
    Walk { tree, base: Some(base), cover: &cover, links: HashMap::new() }.add(&mut writer, Path::new(""))?;
    add_layer(&mut writer, upper, true)?;
    close(writer)
}

/// A tree as `.tar.zst`.
pub fn pack(tree: &Path, target: &Path) -> io::Result<()> {
    let mut writer = Writer::new(zstd::Encoder::new(create(target)?, COMPRESSION)?);
    Walk { tree, base: None, cover: &Cover::default(), links: HashMap::new() }.add(&mut writer, Path::new(""))?;
    writer.finish()?.finish()?.into_inner().map_err(|error| error.into_error())?.sync_all()
}

fn create(target: &Path) -> io::Result<BufWriter<File>> {
    Ok(BufWriter::with_capacity(BUFFER, File::create(target)?))
}

fn read(archive: &Path) -> io::Result<Reader<BufReader<File>>> {
    Ok(Reader::new(BufReader::with_capacity(BUFFER, File::open(archive)?), Limits::NONE))
}

fn close(writer: Writer<BufWriter<File>>) -> io::Result<()> {
    writer.finish()?.flush()
}

fn add_layer(writer: &mut Writer<impl Write>, upper: &Path, keep_whiteouts: bool) -> io::Result<()> {
    let mut reader = read(upper)?;
    let mut gone = std::collections::BTreeSet::new();
    while let Some(mut entry) = reader.next()? {
        let is_gone = match &entry.kind {
            Kind::Whiteout => true,
            Kind::Link(target) => gone.contains(target),
            Kind::File | Kind::Sparse(_) | Kind::Symlink(_) | Kind::Directory | Kind::Fifo | Kind::Device => false,
        };
        if is_gone {
            gone.insert(entry.path.clone());
            if !keep_whiteouts {
                continue;
            }
            entry.kind = Kind::Whiteout;
        }
        if !keep_whiteouts {
            entry.attributes.retain(|(name, _)| name != OPAQUE.as_bytes());
        }
        writer.add(&entry, &mut reader)?;
    }
    Ok(())
}

/// What of a lower tree a layer leaves to be seen.
#[derive(Debug, Default)]
struct Cover {
    /// Whether everything below the name is covered too.
    names: HashMap<PathBuf, bool>,
}

impl Cover {
    fn of(upper: &Path) -> io::Result<Self> {
        let mut reader = read(upper)?;
        let mut names = HashMap::new();
        while let Some(entry) = reader.next()? {
            names.insert(entry.path.clone(), entry.kind != Kind::Directory || entry.is_opaque());
        }
        Ok(Self { names })
    }
}

struct Walk<'a> {
    tree: &'a Path,
    base: Option<&'a Path>,
    cover: &'a Cover,
    /// The first name of every file that may have more.
    links: HashMap<(u64, u64), PathBuf>,
}

impl Walk<'_> {
    fn add(&mut self, writer: &mut Writer<impl Write>, path: &Path) -> io::Result<()> {
        let place = self.tree.join(path);
        let covered = self.cover.names.get(path);
        if covered == Some(&true) || path == Path::new(MOUNT) {
            return Ok(());
        }
        let about = fs::symlink_metadata(&place)?;
        if covered.is_none() && self.differs(path, &about)? {
            self.write(writer, path, &place, &about)?;
        }
        if !about.is_dir() {
            return Ok(());
        }
        let mut names = names(&place)?;
        for name in &names {
            self.add(writer, &path.join(name))?;
        }
        // What the base has here and the tree has not.
        if let Some(base) = self.base.map(|base| base.join(path)).filter(|base| base.is_dir() && !base.is_symlink()) {
            names.sort();
            for name in self::names(&base)?.into_iter().filter(|name| names.binary_search(name).is_err()) {
                let gone = path.join(name);
                if !self.cover.names.contains_key(&gone) {
                    writer.add(&whiteout(gone), &mut io::empty())?;
                }
            }
        }
        Ok(())
    }

    fn write(
        &mut self,
        writer: &mut Writer<impl Write>,
        path: &Path,
        place: &Path,
        about: &Metadata,
    ) -> io::Result<()> {
        let kind = about.file_type();
        let mut content: Box<dyn Read> = Box::new(io::empty());
        let first = if kind.is_dir() || about.nlink() < 2 {
            None
        } else {
            let first = self.links.entry((about.dev(), about.ino())).or_insert_with(|| path.to_owned());
            (*first != path).then(|| first.clone())
        };
        let kind = if let Some(first) = first {
            Kind::Link(first)
        } else if kind.is_file() {
            content = Box::new(File::open(place)?);
            Kind::File
        } else if kind.is_dir() {
            Kind::Directory
        } else if kind.is_symlink() {
            Kind::Symlink(fs::read_link(place)?.into_os_string())
        } else if kind.is_fifo() {
            Kind::Fifo
        } else {
            // Sockets and devices are of no use to another sandbox.
            return Ok(());
        };
        let size = if kind == Kind::File { about.len() } else { 0 };
        let attributes = if matches!(kind, Kind::File | Kind::Directory) { attributes(place)? } else { Vec::new() };
        let entry = Entry {
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

    /// Whether the base has something else under this name, or nothing.
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
        // A tree that had to be copied shares no file with its base.
        Ok(about.is_file() && (about.len() != there.len() || !same(&here, &place)?))
    }
}

fn names(place: &Path) -> io::Result<Vec<std::ffi::OsString>> {
    let mut names = fs::read_dir(place)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

fn whiteout(path: PathBuf) -> Entry {
    Entry { path, kind: Kind::Whiteout, mode: 0, uid: 0, gid: 0, mtime: (0, 0), size: 0, attributes: Vec::new() }
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
