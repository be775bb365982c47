//! Resolves names for sandboxes with the name servers of this machine.

use std::net::IpAddr;

use hickory_resolver::{TokioResolver, config::LookupIpStrategy, net::NetError};

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// At least one address, in the order in which they should be tried.
    Addresses(Vec<IpAddr>),
    /// The name does not exist, or has no address.
    Missing,
}

/// Why a name could not be looked up. A retry may succeed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct LookupError(String);

/// Clones share the cache.
#[derive(Clone, Debug)]
pub struct NameResolver {
    /// The error says why there is none.
    resolver: Result<TokioResolver, LookupError>,
}

impl NameResolver {
    /// Reads the machine's settings. If there are none, every lookup fails and says so.
    pub fn of_machine() -> Self {
        let resolver = TokioResolver::builder_tokio().and_then(|mut builder| {
            let options = builder.options_mut();
            // Most networks of servers have no IPv6.
            options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
            builder.build()
        });
        Self { resolver: resolver.map_err(|error| LookupError(error.to_string())) }
    }

    /// Looks up a name as it is, without search domains. Has no timeout of its own.
    pub async fn lookup(&self, name: &str) -> Result<Lookup, LookupError> {
        let resolver = self.resolver.as_ref().map_err(Clone::clone)?;
        match resolver.lookup_ip(format!("{name}.")).await {
            Ok(found) => {
                let (mut addresses, v6): (Vec<_>, Vec<_>) = found.iter().partition(IpAddr::is_ipv4);
                addresses.extend(v6);
                Ok(if addresses.is_empty() { Lookup::Missing } else { Lookup::Addresses(addresses) })
            }
            Err(error) if is_missing(&error) => Ok(Lookup::Missing),
            Err(error) => Err(LookupError(error.to_string())),
        }
    }
}

fn is_missing(error: &NetError) -> bool {
    error.is_nx_domain() || error.is_no_records_found()
}
