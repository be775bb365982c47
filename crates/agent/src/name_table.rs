//! Which made-up address stands for which name.
//!
//! The table is part of every checkpoint, so an address that a program remembers means the same after a restore.

use std::{collections::BTreeMap, net::Ipv4Addr};

/// The first of the addresses, which are reserved for benchmarks: no host on the Internet has one.
const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 0]);
const PREFIX: u32 = 15;
const COUNT: u32 = 1 << (32 - PREFIX);
/// How many names are remembered: about a megabyte.
const MOST_NAMES: usize = 8192;

/// Whether `address` is one that stands for a name, whether or not there is one at present.
pub fn is_made_up(address: Ipv4Addr) -> bool {
    u32::from(address) >> (32 - PREFIX) == FIRST >> (32 - PREFIX)
}

#[derive(Debug)]
struct NamedAddress {
    name: String,
    used: u64,
}

/// Names and their addresses; the least recently used is forgotten first.
#[derive(Debug, Default)]
pub struct NameTable {
    addresses: BTreeMap<String, u32>,
    names: BTreeMap<u32, NamedAddress>,
    /// Addresses by their last use.
    order: BTreeMap<u64, u32>,
    uses: u64,
    /// The address made up last. They are given out in turn, so that one is not soon used for another name.
    last: u32,
}

impl NameTable {
    /// The address of `name`, which is made up if there is none.
    pub fn address_of(&mut self, name: &str) -> Ipv4Addr {
        if let Some(number) = self.addresses.get(name).copied() {
            self.touch(number);
            return Ipv4Addr::from(FIRST + number);
        }
        if self.names.len() >= MOST_NAMES
            && let Some((_, oldest)) = self.order.pop_first()
            && let Some(forgotten) = self.names.remove(&oldest)
        {
            self.addresses.remove(&forgotten.name);
        }
        let number = self.free_number();
        self.addresses.insert(name.to_owned(), number);
        self.names.insert(number, NamedAddress { name: name.to_owned(), used: 0 });
        self.touch(number);
        Ipv4Addr::from(FIRST + number)
    }

    /// The name that `address` stands for. A name that is used is not the next to be forgotten.
    pub fn name_of(&mut self, address: Ipv4Addr) -> Option<&str> {
        let number = u32::from(address).checked_sub(FIRST)?;
        self.touch(number);
        self.names.get(&number).map(|named| named.name.as_str())
    }

    fn touch(&mut self, number: u32) {
        let Some(named) = self.names.get_mut(&number) else { return };
        self.uses += 1;
        self.order.remove(&named.used);
        named.used = self.uses;
        self.order.insert(self.uses, number);
    }

    fn free_number(&mut self) -> u32 {
        loop {
            self.last = (self.last + 1) % COUNT;
            // Some programs take these for the addresses of networks.
            let is_odd = matches!(self.last & 0xff, 0 | 0xff);
            if !is_odd && !self.names.contains_key(&self.last) {
                return self.last;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_address_and_another_gets_another() {
        let mut table = NameTable::default();
        let first = table.address_of("a.example");
        let second = table.address_of("b.example");
        assert_eq!((first, table.address_of("a.example")), (Ipv4Addr::new(198, 18, 0, 1), first));
        assert_ne!(first, second);
        assert_eq!(table.name_of(second), Some("b.example"));
        assert_eq!(table.name_of(Ipv4Addr::new(198, 18, 0, 9)), None);
        assert_eq!(table.name_of(Ipv4Addr::new(1, 2, 3, 4)), None);
        assert_eq!(table.name_of(Ipv4Addr::BROADCAST), None);
    }

    #[test]
    fn the_least_recently_used_is_forgotten_and_its_address_means_nothing_then() {
        let mut table = NameTable::default();
        let addresses: Vec<Ipv4Addr> = (0..MOST_NAMES).map(|at| table.address_of(&format!("h{at}"))).collect();
        assert_eq!(table.name_of(addresses[0]), Some("h0"));
        let fresh = table.address_of("fresh");
        assert!(!addresses.contains(&fresh), "an address is not used again so soon");
        assert!(table.name_of(addresses[0]).is_some() && table.name_of(fresh).is_some());
        assert_eq!(table.name_of(addresses[1]), None);
        assert_eq!((table.names.len(), table.addresses.len(), table.order.len()), (MOST_NAMES, MOST_NAMES, MOST_NAMES));
    }

    #[test]
    fn addresses_stay_in_their_range_when_they_have_all_been_used() {
        let mut table = NameTable::default();
        for at in 0..150_000 {
            let address = table.address_of(&format!("h{at}"));
            assert!(is_made_up(address) && !matches!(address.octets()[3], 0 | 255), "{address}");
        }
        assert!(!is_made_up(Ipv4Addr::new(198, 20, 0, 0)) && !is_made_up(Ipv4Addr::new(198, 17, 255, 255)));
        assert!(is_made_up(Ipv4Addr::new(198, 18, 0, 0)) && is_made_up(Ipv4Addr::new(198, 19, 255, 255)));
    }
}
