//! Name queries as they come over the wire, and their answers. Pure: it never panics, whatever the bytes are.
//!
//! Only what a resolver asks is understood: one question, and perhaps an EDNS record. The question is repeated in the
//! answer byte for byte, because some resolvers vary the case of its letters and compare.

use std::net::{Ipv4Addr, Ipv6Addr};

use baton_protocol::agent::MAX_NAME;

/// The type of an IPv4 address, of an IPv6 address, and of the name of an address.
pub const TYPE_A: u16 = 1;
pub const TYPE_AAAA: u16 = 28;
pub const TYPE_PTR: u16 = 12;
const TYPE_OPT: u16 = 41;
const CLASS_INTERNET: u16 = 1;
const HEADER: usize = 12;
/// The longest name on the wire, and the longest label.
const MOST_WIRE_NAME: usize = 255;
const MOST_LABEL: usize = 63;
const IS_RESPONSE: u16 = 0x8000;
const OPCODE: u16 = 0x7800;
const RECURSION_DESIRED: u16 = 0x0100;
const RECURSION_AVAILABLE: u16 = 0x0080;
/// The size of datagrams that the answers announce; they are all much smaller.
const DATAGRAM_SIZE: u16 = 1232;

/// How many seconds an answer may be remembered.
pub const TTL: u32 = 60;

/// A query that is understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsQuery {
    id: u16,
    flags: u16,
    /// The question as it came: name, type and class.
    question: Vec<u8>,
    /// In lower case, without a dot at the end; `None` if it cannot be the name of a host.
    pub name: Option<String>,
    pub kind: u16,
    /// It is a plain question about the Internet, and not of a kind that only servers need.
    pub is_plain: bool,
    has_edns: bool,
}

/// What a query is answered with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsAnswer {
    Address(Ipv4Addr),
    Address6(Ipv6Addr),
    /// The name of an address. It is a name that was in a query before.
    Pointer(String),
    /// The name exists, but has nothing of the wanted type.
    Empty,
    /// The name does not exist.
    Missing,
    /// It could not be found out.
    Failed,
    /// Queries of this kind are not supported.
    NotSupported,
}

impl DnsAnswer {
    fn code(&self) -> u16 {
        match self {
            DnsAnswer::Address(_) | DnsAnswer::Address6(_) | DnsAnswer::Pointer(_) | DnsAnswer::Empty => 0,
            DnsAnswer::Failed => 2,
            DnsAnswer::Missing => 3,
            DnsAnswer::NotSupported => 4,
        }
    }

    fn record(&self) -> Option<(u16, Vec<u8>)> {
        match self {
            DnsAnswer::Address(address) => Some((TYPE_A, address.octets().to_vec())),
            DnsAnswer::Address6(address) => Some((TYPE_AAAA, address.octets().to_vec())),
            DnsAnswer::Pointer(name) => Some((TYPE_PTR, wire_name(name))),
            DnsAnswer::Empty | DnsAnswer::Missing | DnsAnswer::Failed | DnsAnswer::NotSupported => None,
        }
    }
}

impl DnsQuery {
    /// Reads a query; `None` if it is malformed, or no query at all. Such a message is not answered.
    pub fn parse(message: &[u8]) -> Option<Self> {
        let mut reader = Reader { rest: message };
        let [id, flags, questions, answers, authorities, additional] = reader.halves()?;
        if flags & IS_RESPONSE != 0 || questions != 1 || answers != 0 || authorities != 0 {
            return None;
        }
        let name = reader.name()?;
        let [kind, class] = reader.halves()?;
        let question = message[HEADER..message.len() - reader.rest.len()].to_vec();
        let mut has_edns = false;
        for _ in 0..additional {
            has_edns |= reader.record()? == TYPE_OPT;
        }
        // Types from 249 on are zone transfers and the like, except ANY; 255 may be answered with what there is.
        let is_plain = flags & OPCODE == 0 && class == CLASS_INTERNET && !(249..=254).contains(&kind);
        Some(Self { id, flags, question, name, kind, is_plain, has_edns })
    }

    /// The bytes of the answer; never more than a datagram holds.
    pub fn answer(&self, answer: &DnsAnswer) -> Vec<u8> {
        let record = answer.record();
        let flags = IS_RESPONSE | RECURSION_AVAILABLE | self.flags & (OPCODE | RECURSION_DESIRED) | answer.code();
        let counts = [1, u16::from(record.is_some()), 0, u16::from(self.has_edns)];
        let mut bytes = Vec::with_capacity(HEADER + self.question.len() + 64);
        for half in [self.id, flags].into_iter().chain(counts) {
            bytes.extend(half.to_be_bytes());
        }
        bytes.extend_from_slice(&self.question);
        if let Some((kind, data)) = record {
            // The name is that of the question, which follows the header.
            for half in [0xc000 | HEADER as u16, kind, CLASS_INTERNET] {
                bytes.extend(half.to_be_bytes());
            }
            bytes.extend(TTL.to_be_bytes());
            bytes.extend((data.len() as u16).to_be_bytes());
            bytes.extend(data);
        }
        if self.has_edns {
            bytes.push(0);
            for half in [TYPE_OPT, DATAGRAM_SIZE, 0, 0, 0] {
                bytes.extend(half.to_be_bytes());
            }
        }
        bytes
    }

    /// Whether `other` is the same question, asked again.
    pub fn is_again(&self, other: &Self) -> bool {
        self.id == other.id && self.question == other.question
    }
}

/// The address whose name is asked for by `name`; `None` unless it is one of IPv4.
pub fn reversed_address(name: &str) -> Option<Ipv4Addr> {
    let address: Ipv4Addr = name.strip_suffix(".in-addr.arpa")?.parse().ok()?;
    let [a, b, c, d] = address.octets();
    Some(Ipv4Addr::new(d, c, b, a))
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }

    fn halves<const N: usize>(&mut self) -> Option<[u16; N]> {
        let bytes = self.take(2 * N)?.as_chunks::<2>().0;
        let mut halves = [0; N];
        for (half, bytes) in halves.iter_mut().zip(bytes) {
            *half = u16::from_be_bytes(*bytes);
        }
        Some(halves)
    }

    /// The name in a question. It comes first, so there is nothing that a compressed one could refer to.
    fn name(&mut self) -> Option<Option<String>> {
        let (mut name, mut length, mut is_host) = (String::new(), 1, true);
        loop {
            let size = usize::from(self.take(1)?[0]);
            if size == 0 {
                return Some(is_host.then_some(name));
            }
            length += size + 1;
            if size > MOST_LABEL || length > MOST_WIRE_NAME {
                return None;
            }
            let label = self.take(size)?;
            is_host &= label.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(byte));
            if !name.is_empty() {
                name.push('.');
            }
            name.extend(label.iter().map(|byte| char::from(byte.to_ascii_lowercase())));
        }
    }

    /// Skips a record and returns its type.
    fn record(&mut self) -> Option<u16> {
        loop {
            match self.take(1)?[0] {
                0 => break,
                // A reference to another name ends this one.
                0xc0.. => {
                    self.take(1)?;
                    break;
                }
                size if usize::from(size) <= MOST_LABEL => self.take(usize::from(size))?,
                _ => return None,
            };
        }
        let [kind, _, _, _, length] = self.halves()?;
        self.take(length.into())?;
        Some(kind)
    }
}

/// The name of a host on the wire.
fn wire_name(name: &str) -> Vec<u8> {
    debug_assert!(name.len() <= MAX_NAME);
    let labels = name.split('.').filter(|label| !label.is_empty());
    let mut bytes = Vec::with_capacity(name.len() + 2);
    for label in labels {
        let label = &label.as_bytes()[..label.len().min(MOST_LABEL)];
        bytes.push(label.len() as u8);
        bytes.extend_from_slice(label);
    }
    bytes.push(0);
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(labels: &[&[u8]], kind: u16) -> Vec<u8> {
        let mut bytes = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in labels {
            bytes.push(label.len() as u8);
            bytes.extend_from_slice(label);
        }
        bytes.push(0);
        bytes.extend(kind.to_be_bytes());
        bytes.extend([0, 1]);
        bytes
    }

    fn query(labels: &[&[u8]], kind: u16) -> DnsQuery {
        DnsQuery::parse(&message(labels, kind)).unwrap()
    }

    #[test]
    fn a_query_is_read_and_its_answer_repeats_it_byte_for_byte() {
        let asked = message(&[b"wWw", b"Example", b"ORG"], TYPE_A);
        let query = DnsQuery::parse(&asked).unwrap();
        assert_eq!((query.name.as_deref(), query.kind, query.is_plain), (Some("www.example.org"), TYPE_A, true));
        let answer = query.answer(&DnsAnswer::Address(Ipv4Addr::new(198, 18, 0, 1)));
        assert_eq!(&answer[..12], &[0x12, 0x34, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(&answer[12..asked.len()], &asked[12..]);
        assert_eq!(&answer[asked.len()..], &[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 198, 18, 0, 1]);
    }

    #[test]
    fn every_answer_has_its_code_and_only_found_ones_a_record() {
        let query = query(&[b"a"], TYPE_A);
        for (answer, code, records) in [
            (DnsAnswer::Empty, 0, 0),
            (DnsAnswer::Failed, 2, 0),
            (DnsAnswer::Missing, 3, 0),
            (DnsAnswer::NotSupported, 4, 0),
            (DnsAnswer::Address6(Ipv6Addr::LOCALHOST), 0, 1),
            (DnsAnswer::Pointer("a.b".to_owned()), 0, 1),
        ] {
            let bytes = query.answer(&answer);
            assert_eq!((bytes[3] & 15, bytes[7]), (code, records), "{answer:?}");
        }
        let bytes = query.answer(&DnsAnswer::Pointer("a.bc".to_owned()));
        assert!(bytes.ends_with(&[0, 6, 1, b'a', 2, b'b', b'c', 0]), "{bytes:?}");
    }

    #[test]
    fn edns_is_answered_with_edns() {
        let mut asked = message(&[b"a"], TYPE_A);
        asked[11] = 1;
        asked.extend([0, 0, 41, 16, 0, 0, 0, 0x80, 0, 0, 4, 1, 2, 3, 4]);
        let answer = DnsQuery::parse(&asked).unwrap().answer(&DnsAnswer::Empty);
        assert_eq!(answer[11], 1);
        assert!(answer.ends_with(&[0, 0, 41, 4, 0xd0, 0, 0, 0, 0, 0, 0]), "{answer:?}");
        asked.pop();
        assert_eq!(DnsQuery::parse(&asked), None, "a record that is cut");
    }

    #[test]
    fn names_with_anything_but_letters_digits_and_dashes_are_no_hosts() {
        for label in [&b"a.b"[..], b"a b", b"a\0", b"\xc3\xa4", b"a/b", b"*"] {
            assert_eq!(query(&[label, b"org"], TYPE_A).name, None, "{label:?}");
        }
        assert_eq!(query(&[b"_dmarc", b"a-b"], TYPE_A).name.as_deref(), Some("_dmarc.a-b"));
        assert_eq!(query(&[], 2).name.as_deref(), Some(""), "the root");
    }

    #[test]
    fn the_longest_name_is_read_and_a_longer_one_is_not() {
        let long = [b'a'; 63];
        let longest = [&long[..], &long, &long, &long[..61]];
        assert_eq!(query(&longest, TYPE_A).name.map(|name| name.len()), Some(MAX_NAME));
        assert_eq!(DnsQuery::parse(&message(&[&long, &long, &long, &long[..62]], TYPE_A)), None);
        assert_eq!(DnsQuery::parse(&message(&[&[b'a'; 64]], TYPE_A)), None, "a label is too long");
    }

    #[test]
    fn what_is_malformed_or_no_query_is_not_understood() {
        let good = message(&[b"a", b"b"], TYPE_A);
        for length in 0..good.len() {
            assert_eq!(DnsQuery::parse(&good[..length]), None, "cut after {length} bytes");
        }
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            DnsQuery::parse(&bytes)
        };
        assert_eq!(with(2, 0x81), None, "a response");
        assert_eq!([with(5, 0), with(5, 2), with(7, 1), with(9, 1), with(11, 1)], [const { None }; 5], "counts");
        assert_eq!([with(12, 0xc0), with(12, 0x40), with(14, 0xff)], [const { None }; 3], "a compressed name");
        assert!(!with(2, 0x29).unwrap().is_plain, "an update");
        assert!(!with(good.len() - 1, 3).unwrap().is_plain, "another class");
        let transfer = query(&[b"a"], 252);
        assert!(!transfer.is_plain);
    }

    #[test]
    fn a_loop_of_references_is_not_followed() {
        let mut asked = message(&[b"a"], TYPE_A);
        asked[11] = 2;
        for _ in 0..2 {
            asked.extend([0xc0, asked.len() as u8, 0, 41, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
        assert!(DnsQuery::parse(&asked).is_some());
    }

    #[test]
    fn an_address_is_read_backwards() {
        assert_eq!(reversed_address("4.3.18.198.in-addr.arpa"), Some(Ipv4Addr::new(198, 18, 3, 4)));
        for other in ["3.18.198.in-addr.arpa", "x.in-addr.arpa", "4.3.18.198", "1.ip6.arpa", ""] {
            assert_eq!(reversed_address(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_and_every_answer_fits(bytes in prop::collection::vec(any::<u8>(), 0..600), fix in any::<bool>()) {
            let mut bytes = bytes;
            if fix && bytes.len() >= 12 {
                bytes[2] &= 0x7f;
                let additional = bytes[11] & 3;
                bytes[4..12].copy_from_slice(&[0, 1, 0, 0, 0, 0, 0, additional]);
            }
            if let Some(query) = DnsQuery::parse(&bytes) {
                let answer = query.answer(&DnsAnswer::Pointer("a".repeat(63)));
                prop_assert!(answer.len() <= 512);
                prop_assert_eq!(&answer[..2], &bytes[..2]);
            }
        }
    }
}
