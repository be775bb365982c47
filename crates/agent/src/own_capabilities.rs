//! Capabilities that the agent has and no command ever gets.
//!
//! With the first two it sets up the network. With the third, a command could take them from the agent: it could
//! trace it, or write its memory.

use rustix::{
    io,
    thread::{CapabilitySet, remove_capability_from_bounding_set},
};

const OWN: [CapabilitySet; 3] = [CapabilitySet::NET_ADMIN, CapabilitySet::NET_RAW, CapabilitySet::SYS_PTRACE];

/// Keeps the capabilities from every process that is started from now on. Idempotent. It fails where the agent may not
/// change the set, which is so outside a sandbox without root.
pub fn keep_from_commands() -> io::Result<()> {
    OWN.into_iter().try_for_each(remove_capability_from_bounding_set)
}
