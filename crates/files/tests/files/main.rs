//! Files and archives in real directories: kept exactly, written whole, and never outside.

#![allow(clippy::unwrap_used)]

mod changes;
mod hostile_archives;
mod hostile_table;
mod single;
mod tar_round_trips;
mod tree_fixture;
