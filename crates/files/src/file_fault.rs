//! What failed and why, as one line that both programs and people can read.

use std::{fmt, io, path::Path};

use baton_protocol::printable::printable_start;

/// These errnos are reported by name; all others are `EIO`.
const NAMES: [(rustix::io::Errno, &str); 9] = [
    (rustix::io::Errno::NOENT, "ENOENT"),
    (rustix::io::Errno::ACCESS, "EACCES"),
    (rustix::io::Errno::PERM, "EPERM"),
    (rustix::io::Errno::ISDIR, "EISDIR"),
    (rustix::io::Errno::NOTDIR, "ENOTDIR"),
    (rustix::io::Errno::EXIST, "EEXIST"),
    (rustix::io::Errno::NOTEMPTY, "ENOTEMPTY"),
    (rustix::io::Errno::NOSPC, "ENOSPC"),
    (rustix::io::Errno::INVAL, "EINVAL"),
];
const MAX_LINE: usize = 1000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// An errno's name.
    pub code: &'static str,
    pub text: String,
}

impl Fault {
    pub fn new(code: &'static str, text: &str, path: &Path) -> Self {
        Self { code, text: format!("{text}: {}", plain(&path.to_string_lossy())) }
    }

    pub fn of(error: &io::Error, path: &Path) -> Self {
        let code = error
            .raw_os_error()
            .and_then(|number| NAMES.iter().find(|(errno, _)| errno.raw_os_error() == number).map(|(_, name)| *name));
        let by_kind = if error.kind() == io::ErrorKind::InvalidData { "EINVAL" } else { "EIO" };
        let text = error.to_string();
        let text = text.split(" (os error").next().unwrap_or(&text);
        Self::new(code.unwrap_or(by_kind), text, path)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.text)
    }
}

impl std::error::Error for Fault {}

/// `text` as one line that is safe for a terminal: file names may come from an untrusted source.
pub fn plain(text: &str) -> String {
    printable_start(text, MAX_LINE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_one_line_whatever_the_name() {
        let error = io::Error::from_raw_os_error(2);
        let fault = Fault::of(&error, Path::new("/a\n\x1b[2J"));
        assert_eq!(fault.to_string(), "ENOENT: No such file or directory: /a??[2J");
        let odd = io::Error::from_raw_os_error(5);
        assert_eq!(Fault::of(&odd, Path::new("x")).code, "EIO");
    }
}
