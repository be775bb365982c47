//! Copies a sandbox's changes to its root file system from the sentry into an archive on the local disk.
//!
//! The sentry writes holes as zeros, so an archive can be far larger than what the sandbox holds. It comes
//! through a pipe and is cut off when it exceeds what the sandbox may have.

use std::{io, os::fd::OwnedFd, path::Path, process::Stdio};

use baton_protocol::{limits::show_size, reason::Reason};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::unix::pipe::Receiver,
};

use super::{Error, Result, disk_space};

/// A large pipe needs fewer reads.
const PIPE: usize = 1 << 20;
/// Allowance for names, owners and times of files, which the sandbox's disk limit does not count.
const NAME_ALLOWANCE: u64 = 64 << 20;
/// How many bytes are written between two checks of the free disk space.
const SPACE_CHECK_INTERVAL: u64 = 16 << 20;

/// The maximum size of the archive of a sandbox that may write `disk` bytes; one larger than `most` could not
/// become a root file system again.
pub(super) fn largest(disk: Option<u64>, most: u64) -> u64 {
    disk.map_or(most, |disk| disk.saturating_add(disk / 8).saturating_add(NAME_ALLOWANCE).min(most))
}

/// A pipe: the end for runsc, which passes it to the sentry, and our end.
pub(super) fn pipe() -> io::Result<(Stdio, Receiver)> {
    let (read, write) = io::pipe()?;
    // Best-effort: a smaller pipe is only slower.
    let _ = rustix::pipe::fcntl_setpipe_size(&write, PIPE);
    Ok((Stdio::from(OwnedFd::from(write)), Receiver::from_owned_fd(OwnedFd::from(read))?))
}

/// Writes the pipe's content into `file` until it ends. More than `most` bytes are refused, and so is what would
/// fill the disk; then the pipe is closed, which ends the writer. A failure leaves nothing behind.
pub(super) async fn receive(mut from: Receiver, file: &Path, most: u64) -> Result<()> {
    let received = copy(&mut from, file, most).await;
    if received.is_err() {
        let _ = tokio::fs::remove_file(file).await;
    }
    // Closed last, so that the error is known by the time the writer sees the pipe close.
    drop(from);
    received
}

async fn copy(from: &mut Receiver, file: &Path, most: u64) -> Result<()> {
    let mut target = tokio::fs::File::create(file).await.map_err(|error| failed(&error))?;
    let mut chunk = vec![0; PIPE];
    let (mut written, mut look_at) = (0_u64, SPACE_CHECK_INTERVAL);
    loop {
        let count = from.read(&mut chunk).await.map_err(|error| failed(&error))?;
        if count == 0 {
            return target.flush().await.map_err(|error| failed(&error));
        }
        written = written.saturating_add(count as u64);
        if written > most {
            return Err(too_large(most));
        }
        if written >= look_at {
            look_at = written.saturating_add(SPACE_CHECK_INTERVAL);
            disk_space::check_margin(file.to_owned()).await?;
        }
        target.write_all(&chunk[..count]).await.map_err(|error| failed(&error))?;
    }
}

fn too_large(most: u64) -> Error {
    let message = format!(
        "The changed files make an archive of more than {}, which is all that this sandbox may have: holes in sparse \
         files count as if they were written.",
        show_size(most)
    );
    Error::Refused { reason: Reason::TooLarge, message }
}

fn failed(error: &io::Error) -> Error {
    if error.kind() == io::ErrorKind::StorageFull {
        return Error::NoSpace { what: "a snapshot" };
    }
    Error::Failed { what: "snapshot", why: error.kind().to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn an_archive_is_bounded_by_the_disk_of_its_sandbox_and_by_what_can_be_extracted() {
        let most = 10 << 30;
        assert_eq!(largest(None, most), most);
        assert_eq!(largest(Some(64 * MIB), most), 136 * MIB);
        assert_eq!(largest(Some(100 << 30), most), most);
        assert_eq!(largest(Some(u64::MAX), u64::MAX), u64::MAX);
        assert_eq!(largest(Some(64 * MIB), MIB), MIB);
    }

    #[tokio::test]
    async fn what_is_too_large_is_cut_off_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("archive");
        for (size, fits) in [(0, true), (3 * MIB, true), (3 * MIB + 1, false)] {
            let (read, mut write) = io::pipe().unwrap();
            let from = Receiver::from_owned_fd(OwnedFd::from(read)).unwrap();
            let writer = std::thread::spawn(move || {
                io::copy(&mut io::Read::take(io::repeat(7), size), &mut write).map_err(|error| error.kind())
            });
            let received = receive(from, &file, 3 * MIB).await;
            assert_eq!(received.is_ok(), fits, "{received:?}");
            assert_eq!(file.metadata().map_or(0, |file| file.len()), if fits { size } else { 0 });
            let written = writer.join().unwrap();
            assert!(written == Ok(size) || (!fits && written == Err(io::ErrorKind::BrokenPipe)), "{written:?}");
        }
    }
}
