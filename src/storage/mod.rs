//! The bucket and what lies in it, and the board between the rooms of one instance.

pub mod artifacts;
pub mod board;
pub mod bucket_name;
pub mod checkpoints;
pub mod counted;
pub mod directory;
pub mod files;
pub mod foreign;
pub mod gcs;
pub mod layout;
pub mod lease;
pub mod lock_object;
pub mod memory;
pub mod mount;
pub mod mounted;
mod recent;
pub mod records;
pub mod rules;
pub mod seal;
pub mod snapshots;
pub mod store;
pub mod stores;
pub mod unresponsive;
pub mod upkeep;
pub mod uses;
