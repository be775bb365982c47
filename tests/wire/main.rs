//! The wire over real sockets: orders, texts, close codes, and what hostile clients try.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::wildcard_enum_match_arm)]

mod agent;
mod attach;
mod checkpoint;
mod client;
mod flow;
mod halves;
mod hostile;
mod in_use;
mod limits;
mod logs;
mod plain;
mod room;
mod v1;
mod world;
