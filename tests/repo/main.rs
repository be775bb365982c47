//! The repository itself: the sources' modules and names, the pages, and what an operator deploys. Nothing here starts
//! a server.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod command_page;
mod dockerfile;
mod gcloud;
mod links;
mod log_messages;
mod manifests;
mod operate_page;
mod plan_table;
mod readme;
mod reasons;
mod repo_files;
mod rooms;
mod rust_source;
mod scripts;
mod setting_names;
mod terraform;
mod unique_names;
