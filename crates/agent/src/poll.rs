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
    Network(NetworkSource),
}

/// The role of a socket of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkSource {
    /// Programs connect to somewhere outside.
    Outbound,
    /// Name queries by UDP.
    NameDatagrams,
    /// New clients for name queries by TCP.
    NameListener,
    NameClient(u32),
    Connection(u32),
}

/// A source with something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadySource {
    pub source: PollSource,
    /// It may have an error to report.
    pub is_broken: bool,
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
            PollSource::Network(NetworkSource::Outbound) => (0, 6),
            PollSource::Network(NetworkSource::NameDatagrams) => (0, 7),
            PollSource::Network(NetworkSource::NameListener) => (0, 8),
            PollSource::Network(NetworkSource::NameClient(client)) => (client, 9),
            PollSource::Network(NetworkSource::Connection(connection)) => (connection, 10),
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
            6 => Some(PollSource::Network(NetworkSource::Outbound)),
            7 => Some(PollSource::Network(NetworkSource::NameDatagrams)),
            8 => Some(PollSource::Network(NetworkSource::NameListener)),
            9 => Some(PollSource::Network(NetworkSource::NameClient(exec))),
            10 => Some(PollSource::Network(NetworkSource::Connection(exec))),
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

    /// Reports `source` once each time `fd` becomes readable or writable, or ends. One call for a connection's whole
    /// life, because calls are expensive in a sandbox.
    pub fn watch_changes(&self, fd: impl AsFd, source: PollSource) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(source.number()), flags)
    }

    /// Stops watching `fd`. Required before closing it, because a duplicate may stay open.
    pub fn forget(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// The sources that are ready; empty after `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Vec<ReadySource>> {
        let timeout = timeout
            .map(|span| Timespec { tv_sec: span.as_secs().min(3600) as i64, tv_nsec: i64::from(span.subsec_nanos()) });
        let mut events = Vec::with_capacity(64);
        match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
            Ok(_) | Err(io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let ready = events.iter().filter_map(|event| {
            let source = PollSource::from_number(event.data.u64())?;
            // A copy, because the structure is packed.
            let flags = event.flags;
            Some(ReadySource { source, is_broken: flags.contains(epoll::EventFlags::ERR) })
        });
        Ok(ready.collect())
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
            PollSource::Network(NetworkSource::Outbound),
            PollSource::Network(NetworkSource::NameDatagrams),
            PollSource::Network(NetworkSource::NameListener),
            PollSource::Network(NetworkSource::NameClient(3)),
            PollSource::Network(NetworkSource::Connection(u32::MAX)),
        ] {
            assert_eq!(PollSource::from_number(source.number()), Some(source));
        }
    }
}
