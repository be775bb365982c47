//! The agent's own file operations, in a separate process: process 1 never blocks on a disk.
//!
//! The agent starts itself a second time with the work as an argument. In its streams, its exit and a
//! checkpoint, this process is like any other command.

use std::{
    ffi::OsString,
    io::{self, Read, Write},
    os::fd::{AsFd, BorrowedFd},
    process::ExitCode,
};

use baton_files::Fault;
use baton_protocol::file_work::Work;
use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

/// The first argument of such a process.
pub const WORD: &str = "file";
/// The agent's executable; it runs from memory, so it has no other path.
pub const PROGRAM: &str = "/proc/self/exe";
/// Timeout in seconds without input. A client that lost its connection returns much sooner, and work that waits
/// forever would keep its sandbox from ever being idle.
const INPUT_TIMEOUT: Timespec = Timespec { tv_sec: 3600, tv_nsec: 0 };
/// Maximum number of faults that are reported one by one.
const MOST_TOLD: u64 = 1000;

/// The command line of the process that does `work`.
pub fn argv(work: &Work) -> Vec<String> {
    let work = serde_json::to_string(work).unwrap_or_default();
    vec!["baton-agent".to_owned(), WORD.to_owned(), work]
}

/// Does the work and reports on stderr what could not be done.
pub fn main(work: Option<OsString>) -> ExitCode {
    let work = work.and_then(|work| serde_json::from_str::<Work>(work.to_str()?).ok());
    let Some(work) = work else {
        eprintln!("EINVAL: The agent does not know this work");
        return ExitCode::FAILURE;
    };
    let (mut told, mut stderr) = (0, io::stderr());
    let mut tell = |fault: &Fault| {
        told += 1;
        if told <= MOST_TOLD {
            let _ = writeln!(stderr, "{fault}");
        }
    };
    let done = if work.has_stdin() { with_stdin(&work, &mut tell) } else { without_stdin(&work, &mut tell) };
    match done {
        Ok(done) if done.faults == 0 => return ExitCode::SUCCESS,
        Ok(done) if done.faults > MOST_TOLD => {
            let _ = writeln!(io::stderr(), "EIO: And {} more", done.faults - MOST_TOLD);
        }
        Ok(_) => {}
        Err(fault) => {
            let _ = writeln!(io::stderr(), "{fault}");
        }
    }
    ExitCode::FAILURE
}

fn without_stdin(work: &Work, tell: &mut dyn FnMut(&Fault)) -> Result<baton_files::TransferTotals, Fault> {
    // Not Rust's own stdout, which searches for line ends.
    let mut stdout = Fd(rustix::stdio::stdout());
    baton_files::run(work, &mut io::empty(), &mut stdout, tell)
}

fn with_stdin(work: &Work, tell: &mut dyn FnMut(&Fault)) -> Result<baton_files::TransferTotals, Fault> {
    let failed = |error: io::Error| Fault { code: "EIO", text: error.to_string() };
    let ends = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    ends.thread_block().map_err(|error| failed(error.into()))?;
    let signals = SignalFd::with_flags(&ends, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .map_err(|error| failed(error.into()))?;
    let mut input = Input { stdin: rustix::stdio::stdin(), signals, patience: INPUT_TIMEOUT };
    baton_files::run(work, &mut input, &mut io::sink(), tell)
}

/// Stdin, which a signal interrupts with a read error, so that unfinished work is undone.
struct Input<'a> {
    stdin: BorrowedFd<'a>,
    signals: SignalFd,
    patience: Timespec,
}

impl Read for Input<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = [
                PollFd::from_borrowed_fd(self.stdin, PollFlags::IN),
                PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN),
            ];
            match poll(&mut ready, Some(&self.patience)) {
                Ok(0) => return Err(io::Error::other("Nothing came for too long")),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            // It stays readable, so every later read fails too.
            if !ready[1].revents().is_empty() {
                return Err(io::Error::other("It was given up"));
            }
            match rustix::io::read(self.stdin, &mut *buffer) {
                Ok(count) => return Ok(count),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

struct Fd<'a>(BorrowedFd<'a>);

impl Write for Fd<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(self.0, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_that_falls_silent_is_not_waited_for_for_ever() {
        let (stdin, sender) = rustix::pipe::pipe().unwrap();
        let signals = SignalFd::with_flags(&SigSet::empty(), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).unwrap();
        let patience = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        let mut input = Input { stdin: stdin.as_fd(), signals, patience };
        rustix::io::write(&sender, b"some").unwrap();
        let mut buffer = [0; 8];
        assert_eq!(input.read(&mut buffer).unwrap(), 4);
        assert_eq!(input.read(&mut buffer).unwrap_err().to_string(), "Nothing came for too long");
        drop(sender);
        assert_eq!(input.read(&mut buffer).unwrap(), 0, "an end is an end");
    }
}
