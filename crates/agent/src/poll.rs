//! The file descriptors that the agent waits for, and what each of them is.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    io,
};

/// The role of a file descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollSource {
    FromServer,
    ToServer,
    /// A child exited.
    Children,
    Stdin(u32),
    Stdout(u32),
    Stderr(u32),
}

impl PollSource {
    fn number(self) -> u64 {
        let (exec, kind) = match self {
            PollSource::FromServer => (0, 0),
            PollSource::ToServer => (0, 1),
            PollSource::Children => (0, 2),
            PollSource::Stdin(exec) => (exec, 3),
            PollSource::Stdout(exec) => (exec, 4),
            PollSource::Stderr(exec) => (exec, 5),
        };
        u64::from(exec) << 8 | kind
    }

    fn from_number(number: u64) -> Option<Self> {
        let exec = (number >> 8) as u32;
        match number & 0xff {
            0 => Some(PollSource::FromServer),
            1 => Some(PollSource::ToServer),
            2 => Some(PollSource::Children),
            3 => Some(PollSource::Stdin(exec)),
            4 => Some(PollSource::Stdout(exec)),
            5 => Some(PollSource::Stderr(exec)),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub struct Epoll {
    epoll: OwnedFd,
}

impl Epoll {
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    /// Reports `source` whenever `fd` is readable.
    pub fn watch_input(&self, fd: impl AsFd, source: PollSource) -> io::Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(source.number()), epoll::EventFlags::IN)
    }

    /// Reports `source` whenever `fd` is writable.
    pub fn watch_output(&self, fd: impl AsFd, source: PollSource) -> io::Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(source.number()), epoll::EventFlags::OUT)
    }

    /// Stops watching `fd`. Required before closing it, because a duplicate may stay open.
    pub fn forget(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// The sources that are ready; empty after `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Vec<PollSource>> {
        let timeout = timeout
            .map(|span| Timespec { tv_sec: span.as_secs().min(3600) as i64, tv_nsec: i64::from(span.subsec_nanos()) });
        let mut events = Vec::with_capacity(64);
        match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
            Ok(_) | Err(io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        Ok(events.iter().filter_map(|event| PollSource::from_number(event.data.u64())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_comes_back_as_it_went_in() {
        for source in [
            PollSource::FromServer,
            PollSource::ToServer,
            PollSource::Children,
            PollSource::Stdin(0),
            PollSource::Stdout(u32::MAX),
            PollSource::Stderr(7),
        ] {
            assert_eq!(PollSource::from_number(source.number()), Some(source));
        }
    }
}
