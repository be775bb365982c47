//! The agent as the server sees it: a real process, real pipes, real commands.

#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::wildcard_enum_match_arm)]

mod files;
mod flow;
mod lifecycle;
mod limits;
mod probe;
mod stdin;
mod terminal;
mod trees;
