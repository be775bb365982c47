//! The network of sandboxes: every connection of a program inside is a stream of its agent.
//!
//! ```text
//!  program ──▶ agent ══frames══▶ [`SandboxConnections`] ──policy, resolve, dial──▶ destination
//!  program ◀── agent ◀══frames══ [`SandboxConnections`] ◀──────[`PortLinks`]────── API
//! ```
//! The sandbox itself has only a loopback ([ADR 21](../../docs/adr/0021-connections-are-streams-of-the-agent.md)). This
//! module knows frames and sockets; which containers there are and what is in storage is for others to know.

mod address_rules;
mod connection_registry;
mod credit_pool;
mod denials;
mod egress_connection;
mod egress_rules;
mod fate;
mod name_query;
mod name_resolver;
mod open_rate;
mod port_bytes;
mod port_connection;
mod port_link;
mod relay;
mod sandbox_connections;
mod traffic;

use baton_protocol::{id::SandboxId, sandbox_network::Egress};

pub use self::{
    denials::{Denials, DeniedConnection, DeniedConnections},
    name_resolver::NameResolver,
    port_bytes::PortBytes,
    port_link::{NetworkView, PORT_BUFFER, PortError, PortLinks, PortStream},
    sandbox_connections::{NetworkLink, SandboxConnections, access},
};
use self::{
    egress_rules::{Denial, EgressPolicy},
    traffic::SandboxTraffic,
};
use crate::{clock::SharedClock, config::EgressSettings, metrics::Metrics};

/// What the connections of all sandboxes share.
#[derive(Debug)]
pub struct NetworkContext {
    pub clock: SharedClock,
    pub metrics: Metrics,
    pub settings: EgressSettings,
    pub resolver: NameResolver,
    pub denials: Denials,
}

impl NetworkContext {
    fn policy(&self, sandbox: &Egress) -> EgressPolicy {
        let EgressSettings { ceiling, exempt, .. } = &self.settings;
        EgressPolicy { sandbox: sandbox.clone(), ceiling: ceiling.clone(), exempt: exempt.clone() }
    }

    /// Whether a sandbox with this policy may reach anything at all.
    pub fn is_open(&self, sandbox: &Egress) -> bool {
        !self.policy(sandbox).is_closed()
    }

    /// Logs, counts and announces that a name or a connection was refused.
    fn report_denial(&self, id: &SandboxId, host: &str, port: Option<u16>, why: Denial, traffic: &SandboxTraffic) {
        traffic.count_denial();
        let why: &'static str = match why {
            Denial::Special(special) => special.into(),
            Denial::Policy | Denial::Ceiling => why.into(),
        };
        tracing::info!(sandbox = %id, host, port, verdict = "denied", why, "connection");
        self.denials.post(DeniedConnection { sandbox: id.clone(), host: host.to_owned(), port, why });
    }
}

#[cfg(test)]
mod tests;
