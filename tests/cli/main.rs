//! The command line and the client as a person meets them: the real binary on real sockets and
//! terminals, against a scripted server, and the client against the server itself.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::wildcard_enum_match_arm)]

mod cli_credentials;
mod cli_exec;
mod cli_snapshots;
mod cli_terminal;
mod cloud_run;
mod contexts;
mod copy;
mod forwarded_ports;
mod operators;
mod pipes;
mod pty;
mod refusals;
#[allow(dead_code, reason = "shared with the tests of the client")]
#[path = "../../crates/client/tests/client/script.rs"]
mod script;
#[allow(dead_code, reason = "shared with the tests of the wire")]
#[path = "../wire/scripted_agent.rs"]
mod scripted_agent;
mod scripted_server;
#[allow(dead_code, reason = "shared with the tests of the wire")]
#[path = "../wire/test_server.rs"]
mod test_server;
mod verb_tree;
#[path = "../wire/wire_halves.rs"]
mod wire_halves;
