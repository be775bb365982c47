//! The name server of the sandbox, on 127.0.0.1:53 by UDP and TCP. The server knows which names exist; addresses are
//! made up here.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4},
    os::fd::{AsFd, OwnedFd},
};

use baton_protocol::{
    agent::NameResolution,
    frame::{self, Frame, FrameKind, Stream},
};
use rustix::{
    io::{self, Errno},
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, accept_with, bind, listen, recv, recvfrom, send,
        sendto, socket_with, sockopt,
    },
};

use crate::{
    dns_message::{DnsAnswer, DnsQuery, TYPE_A, TYPE_AAAA, TYPE_PTR, reversed_address},
    name_table::NameTable,
    outbox::Outbox,
    poll::{Epoll, NetworkSource, PollSource},
};

pub const NAME_PORT: u16 = 53;
const ADDRESS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, NAME_PORT);
/// How many names wait for the server, and how many queries for each of them. When there are more, the oldest is
/// forgotten; whoever asked asks again.
const MOST_WAITING: usize = 512;
const MOST_QUERIES: usize = 16;
/// How many clients there are by TCP. When there are more, the oldest is closed.
const MOST_CLIENTS: usize = 64;
/// The longest query: a name is at most 255 bytes.
const MOST_QUERY: usize = 1024;
/// How many queries are read before other sources have their turn.
const MOST_READ: usize = 64;

/// Who asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asker {
    Datagram(SocketAddr),
    Client(u32),
}

/// A name that the server was asked about. Programs ask for its addresses of both kinds at once.
#[derive(Debug)]
struct WaitingName {
    name: String,
    queries: VecDeque<(Asker, DnsQuery)>,
}

#[derive(Debug)]
struct NameSockets {
    datagrams: OwnedFd,
    listener: OwnedFd,
}

/// A client by TCP, with what it sent of a query so far.
#[derive(Debug)]
struct NameClient {
    socket: OwnedFd,
    received: Vec<u8>,
}

#[derive(Debug, Default)]
pub struct NameServer {
    sockets: Option<NameSockets>,
    clients: BTreeMap<u32, NameClient>,
    waiting: BTreeMap<u32, WaitingName>,
    last_client: u32,
    last_query: u32,
}

impl NameServer {
    /// Begins to answer. Idempotent.
    pub fn open(&mut self, poll: &Epoll) -> io::Result<()> {
        if self.sockets.is_some() {
            return Ok(());
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let datagrams = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
        bind(&datagrams, &ADDRESS)?;
        let listener = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
        sockopt::set_socket_reuseaddr(&listener, true)?;
        bind(&listener, &ADDRESS)?;
        listen(&listener, MOST_CLIENTS as i32)?;
        poll.watch_input(&datagrams, PollSource::Network(NetworkSource::NameDatagrams))?;
        poll.watch_input(&listener, PollSource::Network(NetworkSource::NameListener))?;
        self.sockets = Some(NameSockets { datagrams, listener });
        Ok(())
    }

    pub fn close(&mut self, poll: &Epoll) {
        if let Some(sockets) = self.sockets.take() {
            poll.forget(sockets.datagrams);
            poll.forget(sockets.listener);
        }
        for client in std::mem::take(&mut self.clients).into_values() {
            poll.forget(client.socket);
        }
        self.waiting.clear();
    }

    pub fn is_open(&self) -> bool {
        self.sockets.is_some()
    }

    /// Asks a new server all that the last one did not answer.
    pub fn ask_again(&self, out: &mut Outbox) {
        for (number, waiting) in &self.waiting {
            ask(*number, &waiting.name, out);
        }
    }

    /// Handles the server's answer to a query.
    pub fn resolved(&mut self, frame: &Frame, names: &mut NameTable, poll: &Epoll, out: &mut Outbox) {
        let Some(waiting) = self.waiting.remove(&frame.exec) else { return };
        let resolved = serde_json::from_slice::<NameResolution>(&frame.payload).unwrap_or_else(|error| {
            out.log(&format!("NameResolution was not understood: {error}"));
            NameResolution::Failed {}
        });
        for (asker, query) in waiting.queries {
            let answer = match resolved {
                NameResolution::Found {} if query.kind == TYPE_A => DnsAnswer::Address(names.address_of(&waiting.name)),
                // There is no other network inside, and programs need nothing else of a name.
                NameResolution::Found {} => DnsAnswer::Empty,
                NameResolution::Denied {} | NameResolution::Missing {} => DnsAnswer::Missing,
                NameResolution::Failed {} => DnsAnswer::Failed,
            };
            self.answer(asker, &query, &answer, poll);
        }
    }

    /// Handles queries by UDP.
    pub fn read_datagrams(&mut self, names: &mut NameTable, poll: &Epoll, out: &mut Outbox) {
        let mut message = [0; MOST_QUERY];
        for _ in 0..MOST_READ {
            let Some(sockets) = &self.sockets else { return };
            // The rest waits in the kernel until the server has taken what is pending.
            if out.is_crowded() {
                return;
            }
            match recvfrom(&sockets.datagrams, &mut message[..], RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
                Ok((count, _, Some(from))) if count <= MOST_QUERY => {
                    if let Ok(from) = SocketAddr::try_from(from) {
                        self.handle(&message[..count], Asker::Datagram(from), names, poll, out);
                    }
                }
                Ok(_) | Err(Errno::INTR | Errno::CONNREFUSED) => {}
                Err(_) => return,
            }
        }
    }

    /// Accepts clients by TCP.
    pub fn accept(&mut self, poll: &Epoll) {
        for _ in 0..MOST_CLIENTS {
            let Some(sockets) = &self.sockets else { return };
            let Ok(socket) = accept_with(&sockets.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) else {
                return;
            };
            if self.clients.len() >= MOST_CLIENTS
                && let Some(oldest) = self.clients.keys().next().copied()
            {
                self.forget(oldest, poll);
            }
            self.last_client = self.last_client.wrapping_add(1);
            let source = PollSource::Network(NetworkSource::NameClient(self.last_client));
            if poll.watch_input(&socket, source).is_ok() {
                self.clients.insert(self.last_client, NameClient { socket, received: Vec::new() });
            }
        }
    }

    /// Reads once, and handles every query that is complete.
    pub fn read_client(&mut self, number: u32, names: &mut NameTable, poll: &Epoll, out: &mut Outbox) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        if out.is_crowded() {
            return;
        }
        let mut bytes = [0; MOST_QUERY];
        match recv(&client.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((count @ 1.., _)) => client.received.extend_from_slice(&bytes[..count]),
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok(_) | Err(_) => return self.forget(number, poll),
        }
        // A client is gone as soon as one of its answers cannot be sent.
        while let Some(client) = self.clients.get_mut(&number) {
            let Some((length, rest)) = client.received.split_first_chunk::<2>() else { return };
            let length = usize::from(u16::from_be_bytes(*length));
            if length > MOST_QUERY {
                return self.forget(number, poll);
            }
            let Some(message) = rest.get(..length).map(<[u8]>::to_vec) else { return };
            client.received.drain(..2 + length);
            self.handle(&message, Asker::Client(number), names, poll, out);
        }
    }

    fn handle(&mut self, message: &[u8], asker: Asker, names: &mut NameTable, poll: &Epoll, out: &mut Outbox) {
        let Some(query) = DnsQuery::parse(message) else { return };
        if let Some(answer) = local_answer(&query, names) {
            return self.answer(asker, &query, &answer, poll);
        }
        let Some(name) = query.name.clone() else { return };
        if let Some(waiting) = self.waiting.values_mut().find(|waiting| waiting.name == name) {
            if !waiting.queries.iter().any(|(other, asked)| *other == asker && asked.is_again(&query)) {
                waiting.queries.truncate(MOST_QUERIES - 1);
                waiting.queries.push_front((asker, query));
            }
            return;
        }
        if self.waiting.len() >= MOST_WAITING {
            self.waiting.pop_first();
        }
        self.last_query = self.last_query.wrapping_add(1);
        ask(self.last_query, &name, out);
        self.waiting.insert(self.last_query, WaitingName { name, queries: [(asker, query)].into() });
    }

    fn answer(&mut self, asker: Asker, query: &DnsQuery, answer: &DnsAnswer, poll: &Epoll) {
        let bytes = query.answer(answer);
        match asker {
            Asker::Datagram(to) => {
                if let Some(sockets) = &self.sockets {
                    // Whoever asked may be gone.
                    let _ = sendto(&sockets.datagrams, &bytes, SendFlags::DONTWAIT, &to);
                }
            }
            Asker::Client(number) => {
                let Some(client) = self.clients.get(&number) else { return };
                let bytes = [&(bytes.len() as u16).to_be_bytes()[..], &bytes].concat();
                let sent = send(&client.socket, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
                // A client that does not read its answers is not worth a buffer.
                if sent != Ok(bytes.len()) {
                    self.forget(number, poll);
                }
            }
        }
    }

    fn forget(&mut self, number: u32, poll: &Epoll) {
        if let Some(client) = self.clients.remove(&number) {
            poll.forget(client.socket.as_fd());
        }
    }
}

fn ask(number: u32, name: &str, out: &mut Outbox) {
    frame::encode(out.answers(), FrameKind::Resolve, Stream::Stdin, number, 0, 0, &[name.as_bytes()]);
}

/// The answer to a query that does not concern the server.
fn local_answer(query: &DnsQuery, names: &mut NameTable) -> Option<DnsAnswer> {
    if !query.is_plain {
        return Some(DnsAnswer::NotSupported);
    }
    let Some(name) = query.name.as_deref() else { return Some(DnsAnswer::Missing) };
    if name.ends_with(".arpa") {
        let address = reversed_address(name).filter(|_| query.kind == TYPE_PTR);
        let pointer = address.and_then(|address| match address.is_loopback() {
            true => Some("localhost"),
            false => names.name_of(address),
        });
        return Some(pointer.map_or(DnsAnswer::Missing, |name| DnsAnswer::Pointer(name.to_owned())));
    }
    let is_localhost = name == "localhost" || name.ends_with(".localhost");
    match query.kind {
        TYPE_A if is_localhost || is_own_name(name) => Some(DnsAnswer::Address(Ipv4Addr::LOCALHOST)),
        TYPE_AAAA if is_localhost => Some(DnsAnswer::Address6(Ipv6Addr::LOCALHOST)),
        _ if is_localhost || is_own_name(name) || name.is_empty() => Some(DnsAnswer::Empty),
        _ => None,
    }
}

fn is_own_name(name: &str) -> bool {
    rustix::system::uname().nodename().to_str().is_ok_and(|own| own.eq_ignore_ascii_case(name))
}
