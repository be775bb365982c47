//! The TCP ports on which programs inside listen.

use std::{collections::BTreeSet, fs};

use baton_protocol::agent::{ListeningPorts, MAX_PORTS};

/// The state of a listening socket, in hex.
const LISTENING: &str = "0A";
/// 127.0.0.1 as the kernel writes it.
const LOOPBACK: &str = "0100007F";

/// The ports of all programs, without those of the agent itself on 127.0.0.1.
pub fn listening_ports(own: &[u16]) -> ListeningPorts {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| fs::read_to_string(path).unwrap_or_default());
    ListeningPorts { ports: ports_in(&tables, own) }
}

fn ports_in(tables: &[String], own: &[u16]) -> Vec<u16> {
    let lines = tables.iter().flat_map(|table| table.lines().skip(1));
    let ports: BTreeSet<u16> = lines
        .filter_map(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let (local, _, state) = (fields.next()?, fields.next()?, fields.next()?);
            let (address, port) = local.split_once(':')?;
            let port = u16::from_str_radix(port, 16).ok()?;
            let is_own = address == LOOPBACK && own.contains(&port);
            (state == LISTENING && !is_own).then_some(port)
        })
        .collect();
    ports.into_iter().take(MAX_PORTS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str =
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode";

    fn line(local: &str, state: &str) -> String {
        format!("   0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 1 1")
    }

    #[test]
    fn every_listening_port_is_reported_once_and_the_agents_own_are_not() {
        let four = [
            HEAD.to_owned(),
            line("0100007F:0035", "0A"),
            line("00000000:1F90", "0A"),
            line("0100007F:D431", "0A"),
            line("0100007F:1F91", "01"),
            "broken".to_owned(),
        ];
        let six = [
            HEAD.to_owned(),
            line("00000000000000000000000000000000:1F90", "0A"),
            line("00000000000000000000000001000000:0035", "0A"),
            line("00000000000000000000000001000000:0BB8", "0A"),
        ];
        let tables = [four.join("\n"), six.join("\n")];
        assert_eq!(ports_in(&tables, &[53, 0xd431]), [53, 3000, 8080]);
        assert_eq!(ports_in(&[String::new()], &[]), [0u16; 0]);
    }

    #[test]
    fn a_flood_of_ports_is_cut() {
        let lines: Vec<String> = (1..=400).map(|port| line(&format!("00000000:{port:04X}"), "0A")).collect();
        let table = [HEAD.to_owned(), lines.join("\n")].join("\n");
        assert_eq!(ports_in(&[table], &[]), (1..=MAX_PORTS as u16).collect::<Vec<_>>());
    }
}
