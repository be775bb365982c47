//! Makes the loopback answer for every address and leads all outbound connections to the agent; and undoes it.
//!
//! After a restore the kernel has neither the addresses nor the rule any more, while sockets and files are as before.
//! So every step may be repeated, and the rest is not undone because one step failed.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use nix::libc;
use rustix::{
    io,
    net::{
        AddressFamily, SocketFlags, SocketType, bind, getsockname, ipproto, listen, socket_with,
        sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size},
    },
};

use crate::{
    connection_table,
    poll::{Epoll, NetworkSource, PollSource},
    raw_sockopt::set_raw_option,
    redirect_rule::{IPT_SO_SET_REPLACE, nat_table},
    resolver_file::ResolverFile,
    rtnetlink_address,
};

/// Addresses whose networks together are 0.0.0.0 to 223.255.255.255. No connection can lead to the rest, which is
/// multicast and reserved: without a route it fails at once, instead of waiting for an answer.
const ADDRESSES: [(Ipv4Addr, u8); 3] =
    [(Ipv4Addr::new(10, 255, 255, 1), 1), (Ipv4Addr::new(128, 0, 0, 1), 2), (Ipv4Addr::new(192, 0, 0, 1), 3)];
const BACKLOG: i32 = 1024;
/// Of each connection in the kernel: what is in there is part of every checkpoint too.
const SOCKET_BUFFER: usize = 256 << 10;

#[derive(Debug)]
pub struct NetworkSetup {
    listener: Option<OwnedFd>,
    file: ResolverFile,
    /// Whether programs may reach out, as it was set up last; unknown at first and after a restore.
    egress: Option<bool>,
    /// It was set up at some time, perhaps in part, and not undone since.
    is_touched: bool,
}

impl NetworkSetup {
    pub fn new() -> Self {
        Self { listener: None, file: ResolverFile::new("/etc"), egress: None, is_touched: false }
    }

    /// What the kernel has is unknown now.
    pub fn forget(&mut self) {
        self.egress = None;
    }

    /// Whether anything has to be done so that it is as wanted.
    pub fn differs(&self, egress: bool) -> bool {
        self.egress != Some(egress) && (egress || self.is_touched)
    }

    /// Sets everything up. Returns what failed; the next call tries that again.
    pub fn install(&mut self, poll: &Epoll) -> Vec<String> {
        self.is_touched = true;
        let mut failures = Vec::new();
        let port = self.listen(poll);
        let addresses = ADDRESSES.into_iter().try_for_each(|(address, prefix)| rtnetlink_address::add(address, prefix));
        note(&mut failures, "the loopback does not answer for all addresses", addresses);
        match port {
            Ok(port) => note(&mut failures, "connections are not redirected", replace_rules(Some(port))),
            Err(error) => note(&mut failures, "the agent does not listen for connections", Err(error)),
        }
        note(&mut failures, "resolv.conf was not replaced", self.file.install());
        self.egress = failures.is_empty().then_some(true);
        failures
    }

    /// Undoes everything. Returns what failed; the next call tries that again.
    pub fn remove(&mut self, poll: &Epoll) -> Vec<String> {
        let mut failures = Vec::new();
        // First, so that whoever connects at this moment is refused.
        if let Some(listener) = self.listener.take() {
            poll.forget(listener);
        }
        note(&mut failures, "connections are still redirected", replace_rules(None));
        let addresses = ADDRESSES.map(|(address, prefix)| rtnetlink_address::remove(address, prefix));
        let addresses = addresses.into_iter().collect::<io::Result<()>>();
        note(&mut failures, "the loopback still answers for all addresses", addresses);
        note(&mut failures, "resolv.conf was not put back", self.file.restore());
        self.is_touched = !failures.is_empty();
        self.egress = failures.is_empty().then_some(false);
        failures
    }

    pub fn listener(&self) -> Option<BorrowedFd<'_>> {
        self.listener.as_ref().map(AsFd::as_fd)
    }

    /// The port of the listener, which exists also after a restore.
    pub fn port(&self) -> Option<u16> {
        self.listener.as_ref().and_then(|listener| port_of(listener).ok())
    }

    fn listen(&mut self, poll: &Epoll) -> io::Result<u16> {
        if let Some(listener) = &self.listener {
            return port_of(listener);
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
        // Accepted sockets inherit these.
        let _ = set_socket_recv_buffer_size(&listener, SOCKET_BUFFER);
        let _ = set_socket_send_buffer_size(&listener, SOCKET_BUFFER);
        connection_table::prepare(&listener);
        bind(&listener, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
        listen(&listener, BACKLOG)?;
        poll.watch_input(&listener, PollSource::Network(NetworkSource::Outbound))?;
        let port = port_of(&listener)?;
        self.listener = Some(listener);
        Ok(port)
    }
}

fn port_of(socket: &OwnedFd) -> io::Result<u16> {
    let address = SocketAddrV4::try_from(getsockname(socket)?)?;
    Ok(address.port())
}

fn replace_rules(port: Option<u16>) -> io::Result<()> {
    let raw = socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, Some(ipproto::RAW))?;
    set_raw_option(raw, libc::IPPROTO_IP, IPT_SO_SET_REPLACE, &nat_table(port))
        .map_err(|error| io::Errno::from_raw_os_error(error as i32))
}

fn note<E: std::fmt::Display>(failures: &mut Vec<String>, what: &str, done: Result<(), E>) {
    if let Err(error) = done {
        failures.push(format!("{what}: {error}"));
    }
}
