//! The stores: one suite over every implementation, then what is special to each.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod absent_and_damaged;
mod artifacts;
mod cases;
mod directory;
mod faults;
mod footprint;
mod gcsfuse;
mod mounted;
mod names;
mod one_bucket;
mod records;
mod scale;
mod stores;
mod suite;
