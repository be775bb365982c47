//! Adds addresses to the loopback interface and removes them again, by rtnetlink.

use std::net::Ipv4Addr;

use rustix::{
    io::{self, Errno},
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netdevice, recv, send, socket_with},
};

const NEW_ADDRESS: u16 = 20;
const DELETE_ADDRESS: u16 = 21;
/// `NLM_F_REQUEST | NLM_F_ACK`, and for a new address `NLM_F_CREATE`. Without `NLM_F_EXCL`: it may be there already.
const REQUEST: u16 = 0x5;
const CREATE: u16 = 0x400;
const ERROR: u16 = 2;
const LOCAL_ADDRESS: u16 = 2;
const HEADER: usize = 16;

/// Adds `address` to the loopback interface. Idempotent.
pub fn add(address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    match exchange(NEW_ADDRESS, REQUEST | CREATE, address, prefix) {
        Err(Errno::EXIST) => Ok(()),
        done => done,
    }
}

/// Removes `address` from the loopback interface. Idempotent.
pub fn remove(address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    match exchange(DELETE_ADDRESS, REQUEST, address, prefix) {
        Err(Errno::ADDRNOTAVAIL) => Ok(()),
        done => done,
    }
}

fn exchange(kind: u16, flags: u16, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    let names = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let loopback = netdevice::name_to_index(names, "lo")?;
    send(&socket, &request(kind, flags, loopback, address, prefix), SendFlags::empty())?;
    let mut answer = [0; 256];
    // The kernel answers before the request returns.
    let (count, _) = recv(&socket, &mut answer[..], RecvFlags::DONTWAIT)?;
    outcome(&answer[..count])
}

fn request(kind: u16, flags: u16, interface: u32, address: Ipv4Addr, prefix: u8) -> Vec<u8> {
    let attribute = [&8u16.to_ne_bytes()[..], &LOCAL_ADDRESS.to_ne_bytes(), &address.octets()].concat();
    // Family, prefix, flags, scope of the host.
    let body =
        [&[AddressFamily::INET.as_raw() as u8, prefix, 0, 254][..], &interface.to_ne_bytes(), &attribute].concat();
    let mut message = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    // Sequence and sender.
    message.extend([0; 8]);
    message.extend(body);
    message
}

/// The error number that an answer carries; an acknowledgement is an error with the number 0.
fn outcome(answer: &[u8]) -> io::Result<()> {
    let Some((header, rest)) = answer.split_first_chunk::<HEADER>() else { return Err(Errno::PROTO) };
    let Some(number) = rest.first_chunk::<4>().map(|number| i32::from_ne_bytes(*number)) else {
        return Err(Errno::PROTO);
    };
    match (u16::from_ne_bytes([header[4], header[5]]), number) {
        (ERROR, 0) => Ok(()),
        (ERROR, number) => Err(Errno::from_raw_os_error(number.saturating_neg())),
        _ => Err(Errno::PROTO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_announces_its_length_and_names_the_address_once() {
        let bytes = request(NEW_ADDRESS, REQUEST | CREATE, 1, Ipv4Addr::new(10, 255, 255, 1), 1);
        assert_eq!(bytes.len(), 32);
        assert_eq!(&bytes[..8], &[32, 0, 0, 0, 20, 0, 5, 4]);
        assert_eq!(&bytes[16..], &[2, 1, 0, 254, 1, 0, 0, 0, 8, 0, 2, 0, 10, 255, 255, 1]);
    }

    #[test]
    fn an_answer_is_an_acknowledgement_an_error_or_nothing_that_is_understood() {
        let answer = |kind: u16, number: i32| {
            let mut bytes = vec![0; 20];
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
            bytes[16..].copy_from_slice(&number.to_ne_bytes());
            bytes
        };
        assert_eq!(outcome(&answer(ERROR, 0)), Ok(()));
        assert_eq!(outcome(&answer(ERROR, -17)), Err(Errno::EXIST));
        assert_eq!(outcome(&answer(NEW_ADDRESS, 0)), Err(Errno::PROTO));
        assert_eq!(outcome(&answer(ERROR, 0)[..18]), Err(Errno::PROTO));
        assert_eq!(outcome(&[]), Err(Errno::PROTO));
    }
}
