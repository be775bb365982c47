//! Which addresses no sandbox reaches, in every form in which they can be written. Pure.
//!
//! An address is reachable only if it is an ordinary one of the public Internet. Everything else is listed by why it is
//! not, so that a log can say so.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Why an address is never dialled, unless the operator has named exactly this address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::EnumIter)]
#[strum(serialize_all = "snake_case")]
pub enum SpecialUse {
    /// The host itself, or one of its own addresses.
    Loopback,
    /// 169.254.0.0/16 and fe80::/10: among them the metadata servers of cloud platforms.
    LinkLocal,
    Private,
    /// 100.64.0.0/10, which providers use between customers and the Internet.
    CarrierGrade,
    Multicast,
    /// An address of a cloud platform for its own customers' machines, such as the private way to a bucket.
    Platform,
    /// Set aside by a standard: documentation, benchmarks, future use, "this network".
    Reserved,
    /// An IPv4 address inside an IPv6 address, in a form that only a gateway understands.
    Embedded,
}

struct Block<T> {
    first: T,
    prefix: u32,
    why: SpecialUse,
}

const fn v4(first: [u8; 4], prefix: u32, why: SpecialUse) -> Block<u32> {
    Block { first: u32::from_be_bytes(first), prefix, why }
}

const fn v6(first: [u16; 8], prefix: u32, why: SpecialUse) -> Block<u128> {
    let [a, b, c, d, e, f, g, h] = first;
    Block { first: Ipv6Addr::new(a, b, c, d, e, f, g, h).to_bits(), prefix, why }
}

/// The special-purpose registry of IPv4, and what platforms use.
const V4: [Block<u32>; 19] = [
    v4([0, 0, 0, 0], 8, SpecialUse::Reserved),
    v4([10, 0, 0, 0], 8, SpecialUse::Private),
    v4([100, 64, 0, 0], 10, SpecialUse::CarrierGrade),
    v4([127, 0, 0, 0], 8, SpecialUse::Loopback),
    v4([169, 254, 0, 0], 16, SpecialUse::LinkLocal),
    v4([172, 16, 0, 0], 12, SpecialUse::Private),
    v4([192, 0, 0, 0], 24, SpecialUse::Reserved),
    v4([192, 0, 2, 0], 24, SpecialUse::Reserved),
    v4([192, 88, 99, 0], 24, SpecialUse::Embedded),
    v4([192, 168, 0, 0], 16, SpecialUse::Private),
    v4([198, 18, 0, 0], 15, SpecialUse::Reserved),
    v4([198, 51, 100, 0], 24, SpecialUse::Reserved),
    v4([203, 0, 113, 0], 24, SpecialUse::Reserved),
    v4([224, 0, 0, 0], 4, SpecialUse::Multicast),
    v4([240, 0, 0, 0], 4, SpecialUse::Reserved),
    // The wire server of Azure's virtual machines.
    v4([168, 63, 129, 16], 32, SpecialUse::Platform),
    // private.googleapis.com and restricted.googleapis.com, and direct connectivity to them.
    v4([199, 36, 153, 0], 24, SpecialUse::Platform),
    v4([34, 126, 0, 0], 18, SpecialUse::Platform),
    // Oracle's services for instances.
    v4([192, 0, 0, 192], 32, SpecialUse::Platform),
];

/// What lies inside 2000::/3, the only part of IPv6 that is the public Internet, and still is not for sandboxes.
const V6: [Block<u128>; 6] = [
    // Teredo, ORCHID, benchmarks and other protocols.
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23, SpecialUse::Embedded),
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32, SpecialUse::Reserved),
    // 6to4.
    v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16, SpecialUse::Embedded),
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20, SpecialUse::Reserved),
    // Private access to Google's APIs.
    v6([0x2600, 0x2d00, 0x0002, 0x2000, 0, 0, 0, 0], 64, SpecialUse::Platform),
    v6([0x2001, 0x4860, 0x8040, 0, 0, 0, 0, 0], 42, SpecialUse::Platform),
];

/// Why `address` is special; `None` for an ordinary address of the public Internet.
pub fn special_use(address: IpAddr) -> Option<SpecialUse> {
    match address {
        IpAddr::V4(address) => special_v4(address),
        IpAddr::V6(address) => special_v6(address),
    }
}

fn special_v4(address: Ipv4Addr) -> Option<SpecialUse> {
    let bits = address.to_bits();
    let is_in = |block: &&Block<u32>| (bits ^ block.first).leading_zeros() >= block.prefix;
    V4.iter().find(is_in).map(|block| block.why)
}

fn special_v6(address: Ipv6Addr) -> Option<SpecialUse> {
    let (bits, segments) = (address.to_bits(), address.segments());
    if segments[..6] == [0x64, 0xff9b, 0, 0, 0, 0] {
        // The gateway of an IPv6-only network: the last 32 bits are the address that is reached.
        return special_v4(Ipv4Addr::from_bits(bits as u32));
    }
    let is_in = |block: &&Block<u128>| (bits ^ block.first).leading_zeros() >= block.prefix;
    match segments[0] {
        0x2000..=0x3fff => V6.iter().find(is_in).map(|block| block.why),
        _ if address.is_loopback() => Some(SpecialUse::Loopback),
        // Mapped, compatible and translated IPv4 addresses, and local gateways.
        0 if !address.is_unspecified() => Some(SpecialUse::Embedded),
        0x64 => Some(SpecialUse::Embedded),
        0xfe80..=0xfebf => Some(SpecialUse::LinkLocal),
        0xfc00..=0xfdff | 0xfec0..=0xfeff => Some(SpecialUse::Private),
        0xff00..=0xffff => Some(SpecialUse::Multicast),
        _ => Some(SpecialUse::Reserved),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(text: &str) -> Option<SpecialUse> {
        special_use(text.parse().expect(text))
    }

    #[test]
    fn ordinary_addresses_are_not_special() {
        for text in [
            "1.1.1.1",
            "8.8.8.8",
            "93.184.216.34",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "169.253.255.255",
            "172.15.255.255",
            "172.32.0.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "199.36.152.255",
            "2606:4700:4700::1111",
            "2001:4860:4860::8888",
            "2a00::1",
            "64:ff9b::8.8.8.8",
        ] {
            assert_eq!(why(text), None, "{text}");
        }
    }

    #[test]
    fn every_special_block_is_known_from_its_first_to_its_last_address() {
        for block in &V4 {
            let last = block.first | u32::MAX.checked_shr(block.prefix).unwrap_or(0);
            for bits in [block.first, last] {
                assert!(special_v4(Ipv4Addr::from_bits(bits)).is_some(), "{}", Ipv4Addr::from_bits(bits));
            }
        }
        for (text, expected) in [
            ("127.0.0.1", SpecialUse::Loopback),
            ("127.255.255.254", SpecialUse::Loopback),
            ("169.254.169.254", SpecialUse::LinkLocal),
            ("10.0.0.1", SpecialUse::Private),
            ("172.31.255.255", SpecialUse::Private),
            ("192.168.1.1", SpecialUse::Private),
            ("100.100.100.200", SpecialUse::CarrierGrade),
            ("0.0.0.0", SpecialUse::Reserved),
            ("0.1.2.3", SpecialUse::Reserved),
            ("198.19.255.255", SpecialUse::Reserved),
            ("255.255.255.255", SpecialUse::Reserved),
            ("224.0.0.1", SpecialUse::Multicast),
            ("168.63.129.16", SpecialUse::Platform),
            ("199.36.153.8", SpecialUse::Platform),
        ] {
            assert_eq!(why(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn no_spelling_of_ipv6_reaches_a_special_address() {
        for (text, expected) in [
            ("::", SpecialUse::Reserved),
            ("::1", SpecialUse::Loopback),
            ("0:0:0:0:0:0:0:1", SpecialUse::Loopback),
            ("::ffff:169.254.169.254", SpecialUse::Embedded),
            ("::ffff:8.8.8.8", SpecialUse::Embedded),
            ("::127.0.0.1", SpecialUse::Embedded),
            ("::ffff:0:169.254.169.254", SpecialUse::Embedded),
            ("64:ff9b::169.254.169.254", SpecialUse::LinkLocal),
            ("64:ff9b::7f00:1", SpecialUse::Loopback),
            ("64:ff9b:1::8.8.8.8", SpecialUse::Embedded),
            ("2002:a9fe:a9fe::1", SpecialUse::Embedded),
            ("2001:0:53aa:64c::1", SpecialUse::Embedded),
            ("2001:db8::1", SpecialUse::Reserved),
            ("fe80::1", SpecialUse::LinkLocal),
            ("febf::1", SpecialUse::LinkLocal),
            ("fec0::1", SpecialUse::Private),
            ("fd00:ec2::254", SpecialUse::Private),
            ("fd20:ce::254", SpecialUse::Private),
            ("fc00::1", SpecialUse::Private),
            ("ff02::1", SpecialUse::Multicast),
            ("100::1", SpecialUse::Reserved),
            ("4000::1", SpecialUse::Reserved),
            ("5f00::1", SpecialUse::Reserved),
        ] {
            assert_eq!(why(text), Some(expected), "{text}");
        }
    }
}
