//! Whether a connection of a sandbox is allowed. Pure.
//!
//! ```text
//!  sandbox's policy ∧ operator's ceiling ──▶ name or address, port ──▶ address about to be dialled ──▶ allowed
//! ```
//! A connection to a name is judged by the name, a connection to an address by the address. In both cases the address
//! that is about to be dialled must be an ordinary one, or one that the operator has named.

use core::net::{IpAddr, SocketAddr};

use baton_protocol::sandbox_network::{Egress, EgressRule};

use super::address_rules::{SpecialUse, special_use};

/// Where a program wants to connect to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// A name in lower case.
    Name(String),
    Address(IpAddr),
}

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Denial {
    /// The sandbox's own policy does not allow the destination.
    Policy,
    /// The operator allows no sandbox this destination.
    Ceiling,
    /// The address is not for sandboxes.
    Special(SpecialUse),
}

/// Everything a decision depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressPolicy {
    pub sandbox: Egress,
    pub ceiling: Egress,
    /// Special addresses that may be dialled all the same.
    pub exempt: Vec<EgressRule>,
}

impl EgressPolicy {
    /// Whether nothing at all may be reached.
    pub fn is_closed(&self) -> bool {
        let is_empty = |egress: &Egress| match egress {
            Egress::None => true,
            Egress::Any => false,
            Egress::List(rules) => rules.is_empty(),
        };
        is_empty(&self.sandbox) || is_empty(&self.ceiling)
    }

    /// Judges the destination. With `port: None` it is allowed if any of its ports is.
    pub fn judge(&self, destination: &Destination, port: Option<u16>) -> Result<(), Denial> {
        if !covers(&self.sandbox, destination, port) {
            return Err(Denial::Policy);
        }
        if !covers(&self.ceiling, destination, port) {
            return Err(Denial::Ceiling);
        }
        match destination {
            Destination::Name(_) => Ok(()),
            Destination::Address(address) => self.judge_dialled(*address, port),
        }
    }

    /// Judges an address that is about to be dialled for an allowed destination.
    pub fn judge_dialled(&self, address: IpAddr, port: Option<u16>) -> Result<(), Denial> {
        match special_use(address) {
            Some(why) if !self.is_exempt(address, port) => Err(Denial::Special(why)),
            Some(_) | None => Ok(()),
        }
    }

    /// Whether the operator has named exactly this address. A network does not name its addresses.
    pub fn is_exempt(&self, address: IpAddr, port: Option<u16>) -> bool {
        self.exempt.iter().any(|rule| rule.host.single_address() == Some(address) && has_port(rule, port))
    }

    /// Whether a connection that is established may stay.
    pub fn keeps(&self, destination: &Destination, dialled: SocketAddr) -> bool {
        let port = Some(dialled.port());
        self.judge(destination, port).and_then(|()| self.judge_dialled(dialled.ip(), port)).is_ok()
    }
}

fn has_port(rule: &EgressRule, port: Option<u16>) -> bool {
    rule.port.is_none() || port.is_none() || rule.port == port
}

fn covers(egress: &Egress, destination: &Destination, port: Option<u16>) -> bool {
    match egress {
        Egress::None => false,
        Egress::Any => true,
        Egress::List(rules) => rules.iter().any(|rule| {
            let has_host = match destination {
                Destination::Name(name) => rule.host.has_name(name),
                Destination::Address(address) => rule.host.has_address(*address),
            };
            has_host && has_port(rule, port)
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(sandbox: &str, ceiling: &str, exempt: &str) -> EgressPolicy {
        let rules = |text: &str| match text.parse().unwrap() {
            Egress::List(rules) => rules,
            Egress::None | Egress::Any => Vec::new(),
        };
        EgressPolicy { sandbox: sandbox.parse().unwrap(), ceiling: ceiling.parse().unwrap(), exempt: rules(exempt) }
    }

    fn destination(text: &str) -> Destination {
        text.parse().map_or_else(|_| Destination::Name(text.to_owned()), Destination::Address)
    }

    /// Every combination of a few policies, destinations and ports.
    const POLICIES: [&str; 6] = ["none", "any", "a.example", "*.example:443", "8.8.8.0/24:53", "10.0.0.5:5432"];
    const DESTINATIONS: [&str; 8] =
        ["a.example", "b.example", "example", "8.8.8.8", "9.9.9.9", "10.0.0.5", "169.254.169.254", "::ffff:8.8.8.8"];
    const PORTS: [Option<u16>; 4] = [None, Some(53), Some(443), Some(5432)];

    /// What a policy of the table allows, written down by hand.
    fn allows(policy: &str, destination: &str, port: Option<u16>) -> bool {
        let is = |wanted: u16| port.is_none_or(|port| port == wanted);
        match policy {
            "none" => false,
            "any" => true,
            "a.example" => destination == "a.example",
            "*.example:443" => matches!(destination, "a.example" | "b.example") && is(443),
            "8.8.8.0/24:53" => destination == "8.8.8.8" && is(53),
            "10.0.0.5:5432" => destination == "10.0.0.5" && is(5432),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn policy_and_ceiling_must_both_allow_it_and_special_addresses_must_be_named() {
        for (sandbox, ceiling) in POLICIES.iter().flat_map(|one| POLICIES.map(|two| (*one, two))) {
            for (text, port) in DESTINATIONS.iter().flat_map(|text| PORTS.map(|port| (*text, port))) {
                for exempt in ["none", "10.0.0.5:5432", "10.0.0.0/8", "169.254.169.254"] {
                    let judged = policy(sandbox, ceiling, exempt).judge(&destination(text), port);
                    let is_special = matches!(text, "10.0.0.5" | "169.254.169.254" | "::ffff:8.8.8.8");
                    let is_named = exempt == text || (exempt == "10.0.0.5:5432" && allows(exempt, text, port));
                    let expected = if !allows(sandbox, text, port) {
                        Err(Denial::Policy)
                    } else if !allows(ceiling, text, port) {
                        Err(Denial::Ceiling)
                    } else if is_special && !is_named {
                        Err(Denial::Special(special_use(text.parse().unwrap()).unwrap()))
                    } else {
                        Ok(())
                    };
                    assert_eq!(judged, expected, "{sandbox} below {ceiling}, but for {exempt}: {text} {port:?}");
                }
            }
        }
    }

    #[test]
    fn a_name_does_not_make_a_special_address_reachable() {
        let open = policy("any", "any", "none");
        assert!(open.judge(&destination("rebinding.example"), Some(80)).is_ok());
        for address in ["127.0.0.1", "169.254.169.254", "10.1.2.3", "::1", "fd00:ec2::254"] {
            assert!(open.judge_dialled(address.parse().unwrap(), Some(80)).is_err(), "{address}");
            let named = policy("any", "any", address);
            assert!(named.judge_dialled(address.parse().unwrap(), Some(80)).is_ok(), "{address}");
        }
    }

    #[test]
    fn a_connection_stays_as_long_as_it_would_be_allowed() {
        let dialled: SocketAddr = "93.184.216.34:443".parse().unwrap();
        let (name, address) = (destination("a.example"), destination("93.184.216.34"));
        assert!(policy("a.example", "any", "none").keeps(&name, dialled));
        assert!(!policy("a.example:80", "any", "none").keeps(&name, dialled));
        assert!(!policy("a.example", "any", "none").keeps(&address, dialled), "it was opened by its address");
        assert!(!policy("none", "any", "none").keeps(&name, dialled));
        assert!(!policy("any", "any", "none").keeps(&name, "10.0.0.1:443".parse().unwrap()));
    }

    #[test]
    fn only_what_allows_nothing_is_closed() {
        for (sandbox, ceiling, closed) in [
            ("none", "any", true),
            ("any", "none", true),
            ("", "any", true),
            ("any", "any", false),
            ("a.b", "a.b", false),
        ] {
            assert_eq!(policy(sandbox, ceiling, "none").is_closed(), closed, "{sandbox} {ceiling}");
        }
    }
}
