//! The bounds for clients' connections.

use std::time::Duration;

use super::{
    Error, Reader, parse,
    variables::{INBOUND_MEMORY, KEEP_ALIVE, PEER_CONNECTIONS},
};

/// One client's message must fit into the memory that all clients share.
const LONGEST_MESSAGE: u64 = 16 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    pub keep_alive: Duration,
    pub per_peer: usize,
    pub inbound_memory: u64,
}

impl ConnectionLimits {
    /// A proxy keeps connections open for the next client; the longest common keep-alive timeout is ten minutes.
    pub(super) fn read(from: &mut Reader<'_>, is_proxied: bool) -> Result<Self, Error> {
        let limits = Self {
            keep_alive: from.found(KEEP_ALIVE, parse::span, if is_proxied { "620s" } else { "20s" })?,
            per_peer: from.required(PEER_CONNECTIONS, parse::count)? as usize,
            inbound_memory: from.required(INBOUND_MEMORY, parse::size)?,
        };
        if limits.inbound_memory < LONGEST_MESSAGE {
            return Err(Error::Conflict(format!(
                "{INBOUND_MEMORY} is below 16MiB, the maximum size of one message: raise it"
            )));
        }
        Ok(limits)
    }
}
