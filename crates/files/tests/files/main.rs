//! Files and archives in real directories: kept exactly, written whole, and never outside.

#![allow(clippy::unwrap_used)]

mod archives;
mod hostile;
mod hostile_table;
mod single;
mod tree;
