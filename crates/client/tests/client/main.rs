//! The client against a scripted server on a real socket.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::wildcard_enum_match_arm)]

mod client_wire;
mod credentials;
mod resume;
mod script;
mod stdin_offsets;
mod unattached;
