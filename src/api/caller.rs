//! The address that a request comes from, for limits per address.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use axum::http::HeaderMap;

/// An address that limits apply to. For IPv6 this is the /64 network, since one customer has all of its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Caller(IpAddr);

impl Caller {
    pub fn of(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
            }
            address @ IpAddr::V4(_) => address,
        })
    }

    /// Behind `proxies` trusted proxies, the address that the outermost of them saw: each appends one to
    /// `X-Forwarded-For`, and anything before is the client's own claim. If the value is not an address, the peer
    /// counts.
    pub fn find(headers: &HeaderMap, peer: IpAddr, proxies: usize) -> Self {
        let lines = headers.get_all("x-forwarded-for").iter();
        let values: Vec<_> = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b',')).collect();
        let seen = proxies.checked_sub(1).and_then(|further| values.iter().rev().nth(further));
        Self::of(seen.and_then(|value| parse(value)).unwrap_or(peer))
    }
}

/// Accepts a port, which some proxies add.
fn parse(value: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(value).ok()?.trim();
    text.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(lines: &[&str], proxies: usize) -> Caller {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append("x-forwarded-for", line.parse().unwrap());
        }
        Caller::find(&headers, "127.0.0.1".parse().unwrap(), proxies)
    }

    fn caller(text: &str) -> Caller {
        Caller::of(text.parse().unwrap())
    }

    #[test]
    fn a_caller_behind_a_proxy_is_the_one_that_proxy_saw() {
        let peer = caller("127.0.0.1");
        for (lines, proxies, expected) in [
            (&["1.1.1.1, 2.2.2.2"][..], 1, caller("2.2.2.2")),
            (&["1.1.1.1, 2.2.2.2"], 2, caller("1.1.1.1")),
            (&["1.1.1.1, 2.2.2.2"], 0, peer),
            (&["1.1.1.1, 2.2.2.2"], 3, peer),
            // A client cannot hide behind a header line of its own.
            (&["9.9.9.9", "2.2.2.2"], 1, caller("2.2.2.2")),
            (&["9.9.9.9, 8.8.8.8", "2.2.2.2", "3.3.3.3"], 2, caller("2.2.2.2")),
            (&["2.2.2.2:4711"], 1, caller("2.2.2.2")),
            (&["[2001:db8::1]:4711"], 1, caller("2001:db8::1")),
            (&["1.1.1.1, nonsense"], 1, peer),
            (&["1.1.1.1,"], 1, peer),
            (&[""], 1, peer),
            (&[], 1, peer),
        ] {
            assert_eq!(found(lines, proxies), expected, "{lines:?} behind {proxies}");
        }
    }

    #[test]
    fn addresses_of_one_network_are_one_caller() {
        assert_eq!(caller("2001:db8::1"), caller("2001:db8::ffff:1:2:3"));
        assert_ne!(caller("2001:db8::1"), caller("2001:db8:0:1::1"));
        assert_ne!(caller("10.0.0.1"), caller("10.0.0.2"));
        assert_eq!(caller("::ffff:10.0.0.1"), caller("10.0.0.1"));
    }
}
