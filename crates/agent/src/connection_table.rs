//! All connections of the sandbox, by number: frames and events in, frames out.
//!
//! Those that may have something to send wait in a queue, and one frame of the first is sent at a time.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4},
    os::fd::{AsFd, OwnedFd},
};

use baton_protocol::{
    agent::{Dial, MAX_CONNECTIONS, PORT_CONNECTION},
    frame::{self, Frame, FrameKind, Stream},
};
use nix::sys::socket::{getsockopt, sockopt::OriginalDst};
use rustix::{
    io::{self, Errno},
    net::{AddressFamily, SocketFlags, SocketType, accept_with, connect, getpeername, socket_with, sockopt},
};

use crate::{
    input_credit::InputCredit,
    name_table::{self, NameTable},
    outbox::Outbox,
    poll::{Epoll, NetworkSource, PollSource},
    program_connection::{self, ConnectionStage, EmitOutcome, ProgramConnection},
};

/// How many connections are accepted before other sources have their turn.
const MOST_ACCEPTED: usize = 32;

#[derive(Debug, Default)]
pub struct ConnectionTable {
    connections: BTreeMap<u32, ProgramConnection>,
    credit: InputCredit,
    queue: VecDeque<u32>,
    /// The number of the last connection that a program opened.
    last: u32,
    /// That there are too many was logged, and there have been too many since.
    is_full: bool,
}

impl ConnectionTable {
    /// Accepts connections of programs to the outside.
    pub fn accept(&mut self, listener: impl AsFd, names: &mut NameTable, poll: &Epoll, out: &mut Outbox) {
        for _ in 0..MOST_ACCEPTED {
            // The rest waits in the kernel until the server has taken what is pending.
            if out.is_crowded() {
                return;
            }
            match accept_with(&listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => self.accepted(socket, names, poll, out),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    out.log(&format!("a connection could not be accepted: {error}"));
                    return;
                }
            }
        }
    }

    fn accepted(&mut self, socket: OwnedFd, names: &mut NameTable, poll: &Epoll, out: &mut Outbox) {
        let Some(wanted) = original_destination(&socket) else { return program_connection::reset(socket) };
        let name = names.name_of(*wanted.ip()).map(str::to_owned);
        // Without a name it means nothing any more; a connection to the listener itself never did.
        if wanted.ip().is_loopback() || name.is_none() && name_table::is_made_up(*wanted.ip()) {
            return program_connection::reset(socket);
        }
        if !self.has_room(out) {
            return program_connection::reset(socket);
        }
        let number = self.next_number();
        let dial = Dial { name, address: *wanted.ip(), port: wanted.port() };
        let mut connection = ProgramConnection::new(socket, ConnectionStage::Dialling);
        let granted = connection.input.grant(&mut self.credit, self.connections.len() + 1).unwrap_or(0);
        let payload = serde_json::to_vec(&dial).unwrap_or_default();
        frame::encode(out.answers(), FrameKind::Dial, Stream::Stdin, number, granted, 0, &[&payload]);
        self.insert(number, connection, poll, out);
    }

    /// Handles a frame about a connection. One about an unknown connection is ignored.
    pub fn apply(&mut self, frame: &Frame, poll: &Epoll, out: &mut Outbox) {
        let number = frame.exec;
        if frame.kind == FrameKind::Connect {
            return self.connect(number, frame.offset, poll, out);
        }
        if frame.kind == FrameKind::ConnectionReset {
            self.remove(number).into_iter().for_each(ProgramConnection::reset);
            return;
        }
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let (socket, input) = (&connection.socket, &mut connection.input);
        let taken = if frame.kind == FrameKind::ConnectionInput {
            input.take(socket, frame.offset, &frame.payload, &mut self.credit)
        } else if frame.kind == FrameKind::ConnectionInputEof {
            input.end(frame.offset).map(|()| input.flush(socket, &mut self.credit))
        } else {
            if frame.kind == FrameKind::Connected && connection.stage == ConnectionStage::Dialling {
                connection.stage = ConnectionStage::Open;
            }
            connection.set_credit(frame.offset);
            Ok(Ok(()))
        };
        match taken {
            Ok(Ok(())) => self.advance(number, out),
            Ok(Err(_)) => self.close(number, out),
            Err(_) => {
                out.log(&format!("connection {number} was sent bytes that do not belong at {}", frame.offset));
                self.close(number, out);
            }
        }
    }

    /// Handles a connection whose socket changed.
    pub fn changed(&mut self, number: u32, is_broken: bool, poll: &Epoll, out: &mut Outbox) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if let ConnectionStage::Connecting { port, is_last } = connection.stage {
            return self.connecting(number, port, is_last, poll, out);
        }
        connection.set_readable();
        // The flag alone says little: a connection that ended in both directions may have it too.
        let is_reset = is_broken && !matches!(sockopt::socket_error(&connection.socket), Ok(Ok(())));
        if is_reset || connection.input.flush(&connection.socket, &mut self.credit).is_err() {
            return self.close(number, out);
        }
        self.advance(number, out);
    }

    /// Adds one frame of the next connection that has one. Returns whether there was one.
    pub fn emit(&mut self, scratch: &mut [u8], out: &mut Outbox) -> bool {
        while let Some(number) = self.queue.pop_front() {
            let Some(connection) = self.connections.get_mut(&number) else { continue };
            connection.is_queued = false;
            match connection.emit(number, scratch, out.bytes()) {
                EmitOutcome::Sent => {
                    self.advance(number, out);
                    return true;
                }
                EmitOutcome::Nothing => {}
                EmitOutcome::Broken => self.close(number, out),
            }
        }
        false
    }

    /// Resets the connections that programs opened, or all of them. The server is told only if it knows them.
    pub fn reset(&mut self, is_meant: impl Fn(u32) -> bool, mut out: Option<&mut Outbox>) {
        let numbers: Vec<u32> = self.connections.keys().copied().filter(|number| is_meant(*number)).collect();
        for number in numbers {
            match &mut out {
                Some(out) => self.close(number, out),
                None => self.remove(number).into_iter().for_each(ProgramConnection::reset),
            }
        }
    }

    fn connect(&mut self, number: u32, port: u64, poll: &Epoll, out: &mut Outbox) {
        if self.connections.contains_key(&number) {
            out.log(&format!("a second connection {number} was ignored"));
            return;
        }
        let port = u16::try_from(port).ok().filter(|port| *port > 0 && number & PORT_CONNECTION != 0);
        match port {
            Some(port) if self.has_room(out) => self.start_connecting(number, port, false, poll, out),
            _ => closed(number, out),
        }
    }

    fn start_connecting(&mut self, number: u32, port: u16, is_last: bool, poll: &Epoll, out: &mut Outbox) {
        let address: SocketAddr = match is_last {
            false => (Ipv4Addr::LOCALHOST, port).into(),
            true => (Ipv6Addr::LOCALHOST, port).into(),
        };
        match connecting_socket(address) {
            Ok(socket) => {
                let stage = ConnectionStage::Connecting { port, is_last };
                self.insert(number, ProgramConnection::new(socket, stage), poll, out);
            }
            Err(_) if !is_last => self.start_connecting(number, port, true, poll, out),
            Err(_) => closed(number, out),
        }
    }

    fn connecting(&mut self, number: u32, port: u16, is_last: bool, poll: &Epoll, out: &mut Outbox) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        match sockopt::socket_error(&connection.socket) {
            Ok(Ok(())) if getpeername(&connection.socket).is_err() => {}
            Ok(Ok(())) => {
                connection.stage = ConnectionStage::Open;
                let count = self.connections.len();
                let Some(connection) = self.connections.get_mut(&number) else { return };
                let granted = connection.input.grant(&mut self.credit, count).unwrap_or(0);
                frame::encode(out.answers(), FrameKind::Accepted, Stream::Stdin, number, granted, 0, &[]);
                self.advance(number, out);
            }
            Ok(Err(_)) | Err(_) => {
                self.remove(number);
                match is_last {
                    false => self.start_connecting(number, port, true, poll, out),
                    true => closed(number, out),
                }
            }
        }
    }

    /// Grants credit, queues the connection if it may have something to send, and forgets it if it is done.
    fn advance(&mut self, number: u32, out: &mut Outbox) {
        let count = self.connections.len();
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if connection.is_done() {
            self.remove(number);
            return;
        }
        if connection.stage == ConnectionStage::Open
            && let Some(granted) = connection.input.grant(&mut self.credit, count)
        {
            let answers = out.answers();
            frame::encode(answers, FrameKind::ConnectionInputCredit, Stream::Stdin, number, granted, 0, &[]);
        }
        if connection.may_emit() && !std::mem::replace(&mut connection.is_queued, true) {
            self.queue.push_back(number);
        }
    }

    fn insert(&mut self, number: u32, connection: ProgramConnection, poll: &Epoll, out: &mut Outbox) {
        let watched = poll.watch_changes(&connection.socket, PollSource::Network(NetworkSource::Connection(number)));
        self.connections.insert(number, connection);
        if let Err(error) = watched {
            out.log(&format!("connection {number} cannot be watched: {error}"));
            self.close(number, out);
        }
    }

    /// Ends a connection that the server knows.
    fn close(&mut self, number: u32, out: &mut Outbox) {
        if let Some(connection) = self.remove(number) {
            connection.reset();
            closed(number, out);
        }
    }

    fn remove(&mut self, number: u32) -> Option<ProgramConnection> {
        let connection = self.connections.remove(&number)?;
        self.credit.release(connection.input.outstanding());
        Some(connection)
    }

    fn has_room(&mut self, out: &mut Outbox) -> bool {
        let is_full = self.connections.len() >= MAX_CONNECTIONS;
        if is_full && !self.is_full {
            out.log(&format!("there are {MAX_CONNECTIONS} connections already: more are refused"));
        }
        self.is_full = is_full;
        !is_full
    }

    fn next_number(&mut self) -> u32 {
        loop {
            self.last = (self.last + 1) & !PORT_CONNECTION;
            if self.last != 0 && !self.connections.contains_key(&self.last) {
                return self.last;
            }
        }
    }
}

fn closed(number: u32, out: &mut Outbox) {
    frame::encode(out.answers(), FrameKind::ConnectionClosed, Stream::Stdin, number, 0, 0, &[]);
}

/// Where the program wanted to go before the rule brought it here.
fn original_destination(socket: &OwnedFd) -> Option<SocketAddrV4> {
    let address = getsockopt(socket, OriginalDst).ok()?;
    let octets = address.sin_addr.s_addr.to_ne_bytes();
    Some(SocketAddrV4::new(octets.into(), u16::from_be(address.sin_port)))
}

fn connecting_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    prepare(&socket);
    match connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// Bytes are passed on in large pieces, so they need not be collected first.
pub fn prepare(socket: impl AsFd) {
    let _ = sockopt::set_tcp_nodelay(socket, true);
}
