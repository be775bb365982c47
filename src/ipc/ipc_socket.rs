//! The socket between the halves: who may create it and who may use it.
//!
//! Only the API's user can open the file (0600), and both ends check the peer's user: the reconciler accepts its own
//! user and the API's, the API accepts root and its own user.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
};

use tokio::net::{UnixListener, UnixStream};

use super::Error;
use crate::config::variables::SOCKET_DIR;

/// Short, because socket paths are limited to 108 bytes.
const NAME: &str = "baton.sock";

pub(super) fn path(directory: &Path) -> PathBuf {
    directory.join(NAME)
}

fn failed(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::Socket { path: path.display().to_string(), why: why.to_string() }
}

/// Creates the socket in `directory`, which is created if necessary, for the user `api_user`.
pub fn listen(directory: &Path, api_user: u32) -> Result<UnixListener, Error> {
    let path = path(directory);
    let made = fs::DirBuilder::new().recursive(true).mode(0o711).create(directory);
    made.map_err(|error| failed(directory, format_args!("has no directory: {error}")))?;
    // A socket that does not answer is left over from a reconciler that was killed.
    if std::os::unix::net::UnixStream::connect(&path).is_ok() {
        return Err(failed(
            &path,
            format_args!("belongs to another reconciler: set {SOCKET_DIR} to another directory"),
        ));
    }
    // No peer can connect before the owner and the mode are right.
    let draft = directory.join(".new");
    let bind = || {
        remove(&draft)?;
        let listener = UnixListener::bind(&draft)?;
        fs::set_permissions(&draft, fs::Permissions::from_mode(0o600))?;
        if api_user != own_user() {
            std::os::unix::fs::chown(&draft, Some(api_user), None)?;
        }
        fs::rename(&draft, &path)?;
        Ok::<_, io::Error>(listener)
    };
    bind().map_err(|error| failed(&path, format_args!("cannot be made: {error}")))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Connects to a reconciler that runs as root or as our own user.
pub(super) async fn dial(path: &Path) -> Result<UnixStream, Error> {
    let stream =
        UnixStream::connect(path).await.map_err(|error| failed(path, format_args!("does not answer: {error}")))?;
    check(&stream, &[0, own_user()]).map_err(|error| failed(path, error))?;
    Ok(stream)
}

/// Refuses a peer that runs as any other user.
pub(super) fn check(stream: &UnixStream, users: &[u32]) -> io::Result<()> {
    let user = stream.peer_cred()?.uid();
    if users.contains(&user) {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("has user {user} at its other end, who has no business here"),
    ))
}

pub(super) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}
