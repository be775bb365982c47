//! A directory that no path leads out of: each component is opened on its own, and no link is followed.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{Mode, OFlags, mkdirat, openat},
    io::Errno,
};

/// Deeper than any path that can be opened by name.
const MAX_DEPTH: usize = 2048;

/// The components of a name in an archive; `None` if it leads out of the directory or is invalid.
pub(crate) fn parts(name: &[u8]) -> Option<Vec<OsString>> {
    if name.starts_with(b"/") || name.contains(&0) {
        return None;
    }
    let mut parts = Vec::new();
    for part in name.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return None,
            part => parts.push(OsStr::from_bytes(part).to_owned()),
        }
    }
    (parts.len() <= MAX_DEPTH).then_some(parts)
}

/// Whether a link `depth` directories below the top does not lead above it.
///
/// `..` is accepted only at the front: after a component that is itself a link, it leads somewhere else.
pub(crate) fn stays_inside(target: &[u8], depth: usize) -> bool {
    let parts: Vec<&[u8]> =
        target.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    let up = parts.iter().take_while(|part| **part == b"..").count();
    !target.starts_with(b"/") && up <= depth && !parts[up..].contains(&&b".."[..])
}

#[derive(Debug)]
pub(crate) struct OpenDirectory {
    top: OwnedFd,
    /// The directory that was requested last.
    last: Option<(Vec<OsString>, OwnedFd)>,
}

impl OpenDirectory {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { top: File::open(path)?.into(), last: None })
    }

    /// Opens the directory with these components. Creates missing ones if `make` is set.
    pub(crate) fn directory(&mut self, parts: &[OsString], make: bool) -> io::Result<BorrowedFd<'_>> {
        if parts.is_empty() {
            return Ok(self.top.as_fd());
        }
        let is_known = self.last.as_ref().is_some_and(|(known, _)| known == parts);
        if !is_known {
            let mut here: Option<OwnedFd> = None;
            for part in parts {
                let above = here.as_ref().map_or(self.top.as_fd(), AsFd::as_fd);
                here = Some(step(above, part, make)?);
            }
            self.last = here.map(|here| (parts.to_vec(), here));
        }
        Ok(self.last.as_ref().map_or(self.top.as_fd(), |(_, here)| here.as_fd()))
    }
}

fn step(above: BorrowedFd<'_>, part: &OsStr, make: bool) -> io::Result<OwnedFd> {
    match enter(above, part) {
        Err(Errno::NOENT) if make => {
            match mkdirat(above, part, Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            Ok(enter(above, part)?)
        }
        entered => Ok(entered?),
    }
}

/// Opens the directory itself, never one that a link leads to.
pub(crate) fn enter(above: BorrowedFd<'_>, part: &OsStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(above, part, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_out_have_no_parts() {
        for bad in ["/etc/passwd", "../x", "a/../../x", "a/..", "..", "a\0b"] {
            assert_eq!(parts(bad.as_bytes()), None, "{bad}");
        }
        let plain = |name: &str| parts(name.as_bytes()).map(|parts| parts.join(OsStr::new("/")));
        assert_eq!(plain("./a//b/."), Some("a/b".into()));
        assert_eq!(plain("./"), Some("".into()));
        assert_eq!(plain("..a/b.."), Some("..a/b..".into()));
    }

    #[test]
    fn a_link_stays_inside_only_if_that_can_be_seen_from_its_text() {
        for (target, depth, inside) in [
            ("b", 0, true),
            ("a/b/./c", 0, true),
            ("../b", 1, true),
            ("../../b", 1, false),
            ("..", 0, false),
            ("/etc/passwd", 5, false),
            // `a` may be a link to `.`; the path then leads above the top.
            ("a/../b", 0, false),
            ("../a/../../b", 3, false),
            ("", 0, true),
        ] {
            assert_eq!(stays_inside(target.as_bytes(), depth), inside, "{target:?} at {depth}");
        }
    }
}
