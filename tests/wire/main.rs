//! The wire over real sockets: orders, texts, close codes, and what hostile clients try.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::wildcard_enum_match_arm)]

mod attach;
mod checkpoint_requests;
mod create_limits;
mod egress_policy;
mod exec_logs;
mod hostile_client;
mod hostile_ports;
mod in_use;
mod inner_server;
mod plain_dialect;
mod port_requests;
mod scripted_agent;
mod test_server;
mod v1_dialect;
mod waiting_for_capacity;
mod wire_client;
mod wire_flow_control;
mod wire_halves;
