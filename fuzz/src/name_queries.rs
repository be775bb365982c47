//! Name queries of programs, as the agent reads them.

#[allow(dead_code, reason = "the agent uses more of it")]
#[path = "../../crates/agent/src/dns_message.rs"]
mod dns_message;

use std::net::Ipv4Addr;

use self::dns_message::{DnsAnswer, DnsQuery, reversed_address};

/// A datagram without the extension of EDNS is at most this long.
const DATAGRAM: usize = 512;
/// The bit of a header that makes a message a response, and where it is.
const IS_RESPONSE: u8 = 0x80;
const FLAGS: usize = 2;

/// Name queries of programs, as the agent reads them.
pub fn name_queries(data: &[u8]) {
    let Some(query) = DnsQuery::parse(data) else { return };
    if let Some(name) = &query.name {
        assert!(name.len() <= baton_protocol::agent::MAX_NAME && !name.ends_with('.'), "{name:?}");
        assert!(name.bytes().all(|byte| byte.is_ascii_graphic() && !byte.is_ascii_uppercase()), "{name:?}");
        reversed_address(name);
    }
    for answer in [
        DnsAnswer::Address(Ipv4Addr::LOCALHOST),
        DnsAnswer::Pointer("a-name.example".to_owned()),
        DnsAnswer::Empty,
        DnsAnswer::Missing,
    ] {
        let bytes = query.answer(&answer);
        assert!(bytes.len() <= DATAGRAM && bytes[..2] == data[..2], "{answer:?}");
        assert_eq!(DnsQuery::parse(&bytes), None, "an answer is no query");
    }
    // What was read is written in an answer without records: as a query, that is read as the same.
    let mut again = query.answer(&DnsAnswer::Empty);
    again[FLAGS] &= !IS_RESPONSE;
    let again = DnsQuery::parse(&again).expect("what was written can be read");
    assert!(again.is_again(&query) && (again.name, again.kind) == (query.name, query.kind));
}
