//! The client against a scripted server on a real socket.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::wildcard_enum_match_arm)]

mod auth;
mod resume;
mod script;
mod wire;
