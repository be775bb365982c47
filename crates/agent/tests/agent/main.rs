//! The agent as the server sees it: a real process, real pipes, real commands.

#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::wildcard_enum_match_arm)]

mod agent_connections;
mod agent_files;
mod agent_flow_control;
mod agent_lifecycle;
mod agent_limits;
mod agent_stdin;
mod agent_terminal;
mod probe;
mod trees;
