//! The network of sandboxes: every connection of a program inside is a stream of its agent.
//!
//! ```text
//!  program ──▶ agent ══frames══▶ [`Connections`] ──policy, resolve, dial──▶ destination
//!  program ◀── agent ◀══frames══ [`Connections`] ◀──────[`PortLinks`]────── API
//! ```
//! The sandbox itself has only a loopback ([ADR 21](../../docs/adr/0021-connections-are-streams-of-the-agent.md)). This
//! module knows frames and sockets; which containers there are and what is in storage is for others to know.

mod port_link;

pub use self::port_link::{PORT_BUFFER, PortError, PortLinks, PortStream};
