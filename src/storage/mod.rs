//! Object stores and the typed objects kept in them.

pub mod checkpoint_io;

pub mod auto_directory;
pub mod bucket_name;
pub mod checkpoints;
pub mod directory;
pub mod foreign;
pub mod gcs;
pub mod gcsfuse;
pub mod layout;
pub mod lease;
pub mod local_files;
pub mod lock_object;
pub mod memory;
mod metadata_cache;
pub mod metered;
pub mod records;

pub mod garbage_collector;
pub mod signature;
pub mod snapshot_users;
pub mod snapshots;
pub mod store;
pub mod stores;
pub mod unresponsive;
