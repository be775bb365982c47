//! Which `Host` a request may name. A web page whose domain was made to resolve to a loopback address (DNS rebinding)
//! can read what a local server answers without a key; but its requests still name the page's own host.

use std::net::{IpAddr, SocketAddr};

use axum::http::{HeaderMap, StatusCode, header};

/// The hosts that a listener answers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hosts {
    Any,
    /// `localhost`, every IP address, and these names, in lower case.
    Named(Vec<String>),
}

impl Hosts {
    /// On a loopback address without a proxy, only hosts that an operator named are allowed. Elsewhere access is
    /// controlled by others, under names that the server cannot know, so all hosts are allowed unless an operator named
    /// some.
    pub fn new(listen: SocketAddr, is_proxied: bool, named: &[String]) -> Self {
        let is_open = named.is_empty() && (is_proxied || !listen.ip().to_canonical().is_loopback());
        if is_open || named.iter().any(|name| name == "*") {
            return Self::Any;
        }
        Self::Named(named.iter().map(|name| name.to_ascii_lowercase()).collect())
    }

    /// Refuses a request that names another host. A request without a `Host` does not come from a browser.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), StatusCode> {
        let Self::Named(names) = self else { return Ok(()) };
        let mut given = headers.get_all(header::HOST).iter();
        let Some(host) = given.next() else { return Ok(()) };
        let is_allowed = host.to_str().is_ok_and(|host| is_one_of(host, names)) && given.next().is_none();
        if is_allowed { Ok(()) } else { Err(StatusCode::FORBIDDEN) }
    }
}

fn is_one_of(host: &str, names: &[String]) -> bool {
    let is_address = host.parse::<SocketAddr>().is_ok()
        || host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
    if is_address {
        return true;
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        Some(_) | None => host,
    };
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost") || names.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(listen: &str, is_proxied: bool, named: &[&str]) -> Hosts {
        let named: Vec<_> = named.iter().map(|name| (*name).to_owned()).collect();
        Hosts::new(listen.parse().unwrap(), is_proxied, &named)
    }

    #[test]
    fn a_name_is_checked_on_loopback_and_where_an_operator_says_so() {
        for (listen, is_proxied, named, is_checked) in [
            ("127.0.0.1:8080", false, &[][..], true),
            ("[::1]:8080", false, &[], true),
            ("127.0.0.1:8080", true, &[], false),
            ("0.0.0.0:8080", false, &[], false),
            ("10.0.0.7:8080", false, &[], false),
            ("0.0.0.0:8080", false, &["baton.example"], true),
            ("127.0.0.1:8080", true, &["baton.example"], true),
            ("127.0.0.1:8080", false, &["*"], false),
        ] {
            let hosts = hosts(listen, is_proxied, named);
            assert_eq!(hosts != Hosts::Any, is_checked, "{listen} {is_proxied} {named:?}");
        }
    }

    #[test]
    fn localhost_addresses_and_named_hosts_are_answered_and_all_others_are_not() {
        let hosts = hosts("127.0.0.1:8080", false, &["Baton.Example"]);
        let check = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::HOST, value.parse().unwrap());
            }
            hosts.check(&headers).is_ok()
        };
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "localhost.:8080",
            "app.localhost:3000",
            "127.0.0.1",
            "127.0.0.1:8080",
            "[::1]",
            "[::1]:8080",
            "10.1.2.3:9464",
            "baton.example",
            "baton.example:443",
        ] {
            assert!(check(&[host]), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:8080",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "notlocalhost",
            "evil.example:localhost",
            "baton.example.evil.example",
        ] {
            assert!(!check(&[host]), "{host}");
        }
        assert!(check(&[]), "no browser leaves it out");
        assert!(!check(&["localhost", "localhost"]));
    }
}
