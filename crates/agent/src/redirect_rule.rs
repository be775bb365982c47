//! The table of rules that brings every outbound TCP connection to the agent, as the kernel reads it. Pure.
//!
//! It is the whole `nat` table in the form of `struct ipt_replace` and its entries. No command may change rules, so
//! nothing is lost when it replaces the present one.
//!
//! ```text
//!   PREROUTING   ACCEPT
//!   INPUT        ACCEPT
//!   OUTPUT       -p tcp ! -d 127.0.0.0/8 -j REDIRECT --to-ports PORT
//!                ACCEPT
//!   POSTROUTING  ACCEPT
//!   (end)        ERROR
//! ```

/// The option that replaces a table.
pub const IPT_SO_SET_REPLACE: i32 = 64;

const HOOKS: usize = 5;
const TABLE_NAME: usize = 32;
const REPLACE_SIZE: usize = 96;
/// `struct ipt_entry`, which begins with the `struct ipt_ip` that packets are compared with.
const ENTRY_SIZE: usize = 112;
const DESTINATION: usize = 4;
const DESTINATION_MASK: usize = 12;
const PROTOCOL: usize = 80;
const INVERSE_FLAGS: usize = 83;
const TARGET_OFFSET: usize = 88;
const NEXT_OFFSET: usize = 90;
const INVERT_DESTINATION: u8 = 0x10;
const TCP: u16 = 6;
/// `struct xt_entry_target`, with which every target begins.
const TARGET_HEADER: usize = 32;
/// `-NF_ACCEPT - 1`.
const ACCEPT: i32 = -2;
const PORT_IS_GIVEN: u32 = 2;

/// The table with the redirect to `port`; without one every packet is accepted.
pub fn nat_table(port: Option<u16>) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut add = |filter: [u8; ENTRY_SIZE], target: &[u8]| {
        let at = entries.len() as u32;
        entries.extend(entry(filter, target));
        at
    };
    let prerouting = add([0; ENTRY_SIZE], &accept());
    let input = add([0; ENTRY_SIZE], &accept());
    let redirect = port.map(|port| add(outbound_tcp(), &redirect(port)));
    let output = add([0; ENTRY_SIZE], &accept());
    let postrouting = add([0; ENTRY_SIZE], &accept());
    add([0; ENTRY_SIZE], &error());

    // In order of the kernel's numbers; the table has no FORWARD.
    let begins: [u32; HOOKS] = [prerouting, input, 0, redirect.unwrap_or(output), postrouting];
    let policies: [u32; HOOKS] = [prerouting, input, 0, output, postrouting];
    let count = 5 + u32::from(redirect.is_some());
    let mut table = Vec::with_capacity(REPLACE_SIZE + entries.len());
    table.extend(padded::<TABLE_NAME>(b"nat"));
    for word in [0b11011, count, entries.len() as u32].into_iter().chain(begins).chain(policies) {
        table.extend(word.to_ne_bytes());
    }
    // No counters of the present rules are asked for: their number, and a null pointer.
    table.extend([0; 12]);
    table.extend(entries);
    table
}

fn entry(mut filter: [u8; ENTRY_SIZE], target: &[u8]) -> Vec<u8> {
    put(&mut filter, TARGET_OFFSET, &(ENTRY_SIZE as u16).to_ne_bytes());
    put(&mut filter, NEXT_OFFSET, &((ENTRY_SIZE + target.len()) as u16).to_ne_bytes());
    [&filter, target].concat()
}

fn outbound_tcp() -> [u8; ENTRY_SIZE] {
    let mut filter = [0; ENTRY_SIZE];
    put(&mut filter, DESTINATION, &[127, 0, 0, 0]);
    put(&mut filter, DESTINATION_MASK, &[255, 0, 0, 0]);
    put(&mut filter, PROTOCOL, &TCP.to_ne_bytes());
    put(&mut filter, INVERSE_FLAGS, &[INVERT_DESTINATION]);
    filter
}

fn accept() -> Vec<u8> {
    [&target_header(b"", 40)[..], &ACCEPT.to_ne_bytes(), &[0; 4]].concat()
}

fn redirect(port: u16) -> Vec<u8> {
    let port = port.to_be_bytes();
    let range = [&1u32.to_ne_bytes()[..], &PORT_IS_GIVEN.to_ne_bytes(), &[0; 8], &port, &port, &[0; 4]];
    [&target_header(b"REDIRECT", 56)[..], &range.concat()].concat()
}

fn error() -> Vec<u8> {
    [&target_header(b"ERROR", 64)[..], &padded::<32>(b"ERROR")].concat()
}

fn target_header(name: &[u8], size: u16) -> [u8; TARGET_HEADER] {
    let mut header = [0; TARGET_HEADER];
    put(&mut header, 0, &size.to_ne_bytes());
    put(&mut header, 2, name);
    header
}

fn put(bytes: &mut [u8], at: usize, part: &[u8]) {
    bytes[at..at + part.len()].copy_from_slice(part);
}

fn padded<const N: usize>(name: &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    put(&mut bytes, 0, name);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
    }

    fn half(bytes: &[u8], at: usize) -> u16 {
        u16::from_ne_bytes(*bytes[at..].first_chunk().unwrap())
    }

    /// The targets by following the entries from one to the next, each with where it begins.
    fn targets(table: &[u8]) -> Vec<(u32, usize, &[u8])> {
        let entries = &table[REPLACE_SIZE..];
        let mut found = Vec::new();
        let mut at = 0;
        while at < entries.len() {
            let target = at + usize::from(half(entries, at + TARGET_OFFSET));
            let next = at + usize::from(half(entries, at + NEXT_OFFSET));
            assert_eq!(usize::from(half(entries, target)), next - target, "a target fills its entry");
            assert_eq!((next - at) % 8, 0, "entries are aligned");
            found.push((at as u32, target + REPLACE_SIZE, &entries[target..next]));
            at = next;
        }
        found
    }

    #[test]
    fn every_chain_begins_and_ends_at_an_entry_and_the_sizes_are_right() {
        for port in [None, Some(4711)] {
            let table = nat_table(port);
            let found = targets(&table);
            assert_eq!(&table[..4], b"nat\0");
            assert_eq!(word(&table, 36) as usize, found.len());
            assert_eq!(word(&table, 40) as usize, table.len() - REPLACE_SIZE);
            for hook in [0, 1, 3, 4] {
                for offsets in [44, 64] {
                    let offset = word(&table, offsets + 4 * hook);
                    assert!(found.iter().any(|(at, ..)| *at == offset), "hook {hook}");
                }
                let policy = word(&table, 64 + 4 * hook);
                let (_, _, target) = found.iter().find(|(at, ..)| *at == policy).unwrap();
                assert_eq!(i32::from_ne_bytes(*target[32..].first_chunk().unwrap()), ACCEPT);
            }
        }
    }

    #[test]
    fn only_tcp_that_leaves_the_loopback_network_is_redirected_to_the_port_in_network_order() {
        let table = nat_table(Some(0x1234));
        let begin = REPLACE_SIZE + word(&table, 44 + 4 * 3) as usize;
        let policy = REPLACE_SIZE + word(&table, 64 + 4 * 3) as usize;
        assert!(begin < policy);
        let entry = &table[begin..policy];
        assert_eq!((&entry[4..8], &entry[12..16]), (&[127, 0, 0, 0][..], &[255, 0, 0, 0][..]));
        assert_eq!((half(entry, PROTOCOL), entry[INVERSE_FLAGS]), (6, 0x10));
        let target = &entry[ENTRY_SIZE..];
        assert_eq!(&target[2..11], b"REDIRECT\0");
        assert_eq!((word(target, 32), word(target, 36)), (1, 2));
        assert_eq!(&target[48..52], &[0x12, 0x34, 0x12, 0x34]);
    }
}
