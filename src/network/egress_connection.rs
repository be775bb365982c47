//! One connection from a program in a sandbox to the outside.

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{Arc, OnceLock},
};

use baton_protocol::{
    frame::{Frame, FrameKind},
    id::SandboxId,
    sandbox_network::Egress,
};
use tokio::{net::TcpStream, sync::watch};

use super::{
    NetworkContext,
    address_rules::SpecialUse,
    egress_rules::{Denial, Destination, EgressPolicy},
    fate::{Fate, decided},
    name_resolver::Lookup,
    relay::AgentEnd,
    traffic::{SandboxTraffic, Traffic},
};
use crate::metrics::{ConnectionEnd, Direction};

/// Where a program connects to, and the address that was dialled for it.
#[derive(Debug)]
pub struct DialTarget {
    destination: Destination,
    port: u16,
    dialled: OnceLock<SocketAddr>,
}

impl DialTarget {
    pub fn new(destination: Destination, port: u16) -> Self {
        Self { destination, port, dialled: OnceLock::new() }
    }

    /// Whether a policy allows the connection, as far as it got.
    pub fn is_allowed(&self, policy: &EgressPolicy) -> bool {
        match self.dialled.get() {
            Some(dialled) => policy.keeps(&self.destination, *dialled),
            None => policy.judge(&self.destination, Some(self.port)).is_ok(),
        }
    }

    fn host(&self) -> String {
        match &self.destination {
            Destination::Name(name) => name.clone(),
            Destination::Address(address) => address.to_string(),
        }
    }
}

#[derive(Debug)]
pub struct EgressConnection {
    pub id: SandboxId,
    pub context: Arc<NetworkContext>,
    pub policy: watch::Receiver<Egress>,
    pub sandbox: Arc<SandboxTraffic>,
    pub target: Arc<DialTarget>,
    pub fate: watch::Receiver<Fate>,
}

/// How a connection ended.
#[derive(Debug)]
enum Ended {
    /// Both directions ended, or the program reset it.
    Closed,
    Denied(Denial),
    /// A limit of the sandbox.
    Limited(&'static str),
    /// It could not be established.
    Failed(String),
    /// It broke, or was ended from this side.
    Broken(String),
}

impl EgressConnection {
    /// Establishes the connection, unless it is `refused` for a reason, and relays until it ends.
    pub async fn run(mut self, end: AgentEnd, refused: Option<&'static str>) {
        let (number, frames, traffic) = (end.number, end.frames.clone(), end.traffic.clone());
        let (ended, is_over) = self.serve(end, refused).await;
        self.report(&ended, &traffic);
        if !is_over {
            let _ = frames.send(Frame::new(FrameKind::ConnectionReset).exec(number)).await;
        }
    }

    /// Also returns whether the agent knows that the connection is over.
    async fn serve(&mut self, end: AgentEnd, refused: Option<&'static str>) -> (Ended, bool) {
        if let Some(why) = refused {
            return (Ended::Limited(why), false);
        }
        let mut fate = self.fate.clone();
        let stream = tokio::select! {
            biased;
            fate = decided(&mut fate) => return ended_by(fate),
            established = self.establish() => match established {
                Ok(stream) => stream,
                Err(ended) => return (ended, false),
            },
        };
        let _open = self.sandbox.open();
        let connected = Frame::new(FrameKind::Connected).exec(end.number).offset(end.window.granted());
        if end.frames.send(connected).await.is_err() {
            return ended_by(Fate::Gone);
        }
        let (limits, traffic) = (*self.sandbox.limits(), end.traffic.clone());
        let mut stream = stream;
        let (ended, is_over) = tokio::select! {
            biased;
            fate = decided(&mut fate) => ended_by(fate),
            relayed = end.relay(&mut stream) => match relayed {
                Ok(()) => (Ended::Closed, true),
                Err(error) if error.kind() == io::ErrorKind::QuotaExceeded => (Ended::Limited("no bytes left"), false),
                Err(error) => (Ended::Broken(error.to_string()), false),
            },
            () = traffic.overdue(limits.idle, limits.lifetime) => (Ended::Limited("silent or open for too long"), false),
        };
        if !matches!((&ended, is_over), (Ended::Closed, true)) || fate.borrow().ne(&Fate::Open) {
            // The peer is told that the connection broke, not that it ended.
            let _ = stream.set_zero_linger();
        }
        (ended, is_over)
    }

    async fn establish(&self) -> Result<TcpStream, Ended> {
        let port = self.target.port;
        let policy = self.context.policy(&self.policy.borrow());
        policy.judge(&self.target.destination, Some(port)).map_err(Ended::Denied)?;
        let limit = self.sandbox.limits().connect;
        let addresses = match &self.target.destination {
            Destination::Address(address) => vec![*address],
            Destination::Name(name) => {
                let found = self.context.clock.timeout(limit, self.context.resolver.lookup(name)).await;
                match found {
                    Ok(Ok(Lookup::Addresses(addresses))) => addresses,
                    Ok(Ok(Lookup::Missing)) => return Err(Ended::Failed("the name does not exist".to_owned())),
                    Ok(Err(error)) => return Err(Ended::Failed(error.to_string())),
                    Err(elapsed) => return Err(Ended::Failed(elapsed.to_string())),
                }
            }
        };
        let dial = async {
            let mut last = Ended::Failed("the name has no address".to_owned());
            for address in addresses {
                if let Err(why) = self.judge_dialled(&policy, address) {
                    last = Ended::Denied(why);
                    continue;
                }
                let dialled = SocketAddr::new(address, port);
                match TcpStream::connect(dialled).await {
                    Ok(stream) => {
                        let _ = self.target.dialled.set(dialled);
                        let _ = stream.set_nodelay(true);
                        return Ok(stream);
                    }
                    Err(error) => last = Ended::Failed(error.to_string()),
                }
            }
            Err(last)
        };
        let stream = self.context.clock.timeout(limit, dial).await;
        let stream = stream.map_err(|elapsed| Ended::Failed(elapsed.to_string())).flatten()?;
        // The policy may have changed since.
        let policy = self.context.policy(&self.policy.borrow());
        if self.target.is_allowed(&policy) { Ok(stream) } else { Err(Ended::Denied(Denial::Policy)) }
    }

    /// The last check, of the very address that is dialled next.
    fn judge_dialled(&self, policy: &EgressPolicy, address: IpAddr) -> Result<(), Denial> {
        policy.judge_dialled(address, Some(self.target.port))?;
        if is_own(address) && !policy.is_exempt(address, Some(self.target.port)) {
            return Err(Denial::Special(SpecialUse::Loopback));
        }
        Ok(())
    }

    fn report(&self, ended: &Ended, traffic: &Traffic) {
        let (host, port) = (self.target.host(), self.target.port);
        let (end, why) = match ended {
            Ended::Closed => (ConnectionEnd::Closed, ""),
            Ended::Denied(why) => {
                return self.context.report_denial(&self.id, &host, Some(port), *why, &self.sandbox);
            }
            Ended::Limited(why) => (ConnectionEnd::Limited, *why),
            Ended::Failed(why) => (ConnectionEnd::Failed, why.as_str()),
            Ended::Broken(why) => (ConnectionEnd::Broken, why.as_str()),
        };
        self.sandbox.count_end(end);
        tracing::info!(
            sandbox = %self.id,
            host,
            port,
            address = self.target.dialled.get().map(tracing::field::display),
            verdict = crate::metrics::Named::name(&end),
            why,
            sent = traffic.moved(Direction::Out),
            received = traffic.moved(Direction::In),
            seconds = traffic.age().as_secs_f64(),
            "connection"
        );
    }
}

fn ended_by(fate: Fate) -> (Ended, bool) {
    match fate {
        Fate::ClosedInside => (Ended::Closed, true),
        Fate::Revoked => (Ended::Denied(Denial::Policy), false),
        Fate::Violated => (Ended::Broken("the agent sent what it may not send".to_owned()), false),
        Fate::Open | Fate::Gone => (Ended::Broken("the sandbox left this instance".to_owned()), true),
    }
}

/// Whether it is an address of this machine, so that a connection to it would reach what listens here.
fn is_own(address: IpAddr) -> bool {
    // Only an own address can be bound.
    UdpSocket::bind((address, 0)).is_ok()
}
