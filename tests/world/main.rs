//! The world without runsc: several instances, simulated time, faults on demand; and the
//! source tree itself, its rooms and its pages.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod by_hand;
mod churn;
mod command_page;
mod committed;
mod costs;
mod crash;
mod dockerfile;
mod edits;
mod faulty_store;
mod gcloud;
mod instances;
mod lease;
mod manifests;
mod operate_page;
mod outcomes;
mod placement;
mod plan_table;
mod precedence;
mod progress;
mod readme;
mod reasons;
mod reconcile;
mod requests;
mod room;
mod rooms;
mod rules;
mod scripts;
mod sim_regressions;
mod snapshots;
mod sweep;
mod terraform;
mod unresponsive;
mod verbs;
