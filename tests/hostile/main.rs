//! Attacks on the server, on its storage and on its clients. Each test has a control that shows the attack works
//! where the defence is off.
//!
//! Tests that start containers read the same variables as `tests/runsc`; `make test` sets them.
#![allow(clippy::disallowed_methods, reason = "tests look at the world, the environment and the time too")]
#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, reason = "a test that is surprised ends")]

mod admission_limits;
mod connection_limits;
mod defaults;
mod disk;
mod hostile_containers;
mod hostile_terminal;
mod numbers;
mod rates;
mod remains;
mod storage_writer;
mod tenant_isolation;

/// Fixtures with the real runsc: servers as processes, sessions on their sockets.
#[allow(dead_code, reason = "shared with the tests of runsc")]
#[path = "../runsc"]
mod real {
    pub mod fixture;
    pub mod impostor;
    pub mod plain_session;
    pub mod servers;
    pub mod websocket_client;
}

/// Fixtures of instances on one store, with containers and a time that are simulated.
#[allow(dead_code, reason = "shared with the tests of the world")]
#[path = "../world"]
mod simulated {
    pub mod faulty_store;
    pub mod instances;
}
/// Fixtures of the command line: a real pseudo terminal, and a server that does what a test tells it.
#[allow(dead_code, reason = "shared with the tests of the command line")]
#[path = "../cli/pty.rs"]
mod pty;
#[allow(dead_code, reason = "shared with the tests of the client")]
#[path = "../../crates/client/tests/client/script.rs"]
mod script;

/// Fixtures without it: an API in this process, with a scripted agent behind it.
#[allow(dead_code, reason = "shared with the tests of the wire")]
#[path = "../wire"]
mod scripted {
    pub mod scripted_agent;
    pub mod test_server;
    pub mod wire_client;
    pub mod wire_halves;
}
