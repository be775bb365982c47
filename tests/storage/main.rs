//! The stores: one suite over every implementation, then what is special to each.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod absent_and_damaged;
mod artifacts;
mod directory;
mod footprint;
mod gcsfuse_mount;
mod mounted;
mod names;
mod one_bucket;
mod record_cases;
mod scale;
mod store_cases;
mod store_faults;
mod store_suite;
mod store_under_test;
