//! The command line and the client as a person meets them: the real binary on real sockets and
//! terminals, against a scripted server, and the client against the server itself.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::wildcard_enum_match_arm)]

#[allow(dead_code, reason = "shared with the tests of the wire")]
#[path = "../wire/agent.rs"]
mod agent;
mod auth;
mod cloud_run;
mod copy;
mod exec;
#[path = "../wire/halves.rs"]
mod halves;
mod operators;
mod pipes;
mod pty;
mod refusals;
#[allow(dead_code, reason = "shared with the tests of the client")]
#[path = "../../crates/client/tests/client/script.rs"]
mod script;
mod server;
mod snapshots;
mod terminal;
mod verb_tree;
#[allow(dead_code, reason = "shared with the tests of the wire")]
#[path = "../wire/world.rs"]
mod world;
