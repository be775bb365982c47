//! The network of the sandbox: what the agent does for programs that reach out, and for ports inside.

use baton_protocol::{
    agent::{NetworkAccess, PORT_CONNECTION},
    frame::{self, Frame, FrameKind, Stream},
};

use crate::{
    connection_table::ConnectionTable,
    listening_ports::listening_ports,
    name_server::{NAME_PORT, NameServer},
    name_table::NameTable,
    network_setup::NetworkSetup,
    outbox::Outbox,
    poll::{Epoll, NetworkSource},
};

#[derive(Debug)]
pub struct InnerNetwork {
    setup: NetworkSetup,
    names: NameTable,
    name_server: NameServer,
    connections: ConnectionTable,
}

impl InnerNetwork {
    pub fn new() -> Self {
        Self {
            setup: NetworkSetup::new(),
            names: NameTable::default(),
            name_server: NameServer::default(),
            connections: ConnectionTable::default(),
        }
    }

    /// Handles a frame of the network.
    pub fn apply(&mut self, frame: &Frame, poll: &Epoll, out: &mut Outbox) {
        if frame.kind == FrameKind::Network {
            match serde_json::from_slice::<NetworkAccess>(&frame.payload) {
                Ok(access) => self.set_egress(access.egress, poll, out),
                Err(error) => out.log(&format!("Network was not understood: {error}")),
            }
        } else if frame.kind == FrameKind::Resolved {
            self.name_server.resolved(frame, &mut self.names, poll, out);
        } else if frame.kind == FrameKind::ListPorts {
            let own_name_port = self.name_server.is_open().then_some(NAME_PORT);
            let own: Vec<u16> = self.setup.port().into_iter().chain(own_name_port).collect();
            let payload = serde_json::to_vec(&listening_ports(&own)).unwrap_or_default();
            let answers = out.answers();
            frame::encode(answers, FrameKind::Ports, Stream::Stdin, 0, 0, frame.sequence, &[&payload]);
        } else {
            self.connections.apply(frame, poll, out);
        }
    }

    /// Handles a socket that is ready.
    pub fn ready(&mut self, source: NetworkSource, is_broken: bool, poll: &Epoll, out: &mut Outbox) {
        let names = &mut self.names;
        match source {
            NetworkSource::Outbound => {
                if let Some(listener) = self.setup.listener() {
                    self.connections.accept(listener, names, poll, out);
                }
            }
            NetworkSource::NameDatagrams => self.name_server.read_datagrams(names, poll, out),
            NetworkSource::NameListener => self.name_server.accept(poll),
            NetworkSource::NameClient(number) => self.name_server.read_client(number, names, poll, out),
            NetworkSource::Connection(number) => self.connections.changed(number, is_broken, poll, out),
        }
    }

    /// Adds one frame of a connection, if there is one to send.
    pub fn emit(&mut self, scratch: &mut [u8], out: &mut Outbox) -> bool {
        self.connections.emit(scratch, out)
    }

    /// Starts again with a server that knows no connection, and perhaps in another kernel.
    pub fn resync(&mut self) {
        self.connections.reset(|_| true, None);
        self.setup.forget();
    }

    fn set_egress(&mut self, egress: bool, poll: &Epoll, out: &mut Outbox) {
        if !self.setup.differs(egress) {
            return;
        }
        if std::process::id() != 1 {
            out.log("outside a sandbox the network is not the agent's to change");
            return;
        }
        let mut failures = Vec::new();
        if egress {
            // Before resolv.conf names it.
            if let Err(error) = self.name_server.open(poll) {
                failures.push(format!("names are not answered: {error}"));
            }
            failures.extend(self.setup.install(poll));
            self.name_server.ask_again(out);
        } else {
            // First, because no reset finds its way when the addresses are gone.
            self.connections.reset(|number| number & PORT_CONNECTION == 0, Some(out));
            self.name_server.close(poll);
            failures.extend(self.setup.remove(poll));
        }
        for failure in failures {
            out.log(&failure);
        }
    }
}
