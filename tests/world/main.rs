//! The world without runsc: several instances, simulated time, faults on demand.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod by_hand;
mod churn;
mod committed;
mod costs;
mod crash;
mod edits;
mod faulty_store;
mod instances;
mod lease;
mod outcomes;
mod placement;
mod precedence;
mod progress;
mod reconcile;
mod requests;
mod room;
mod rules;
mod sim_regressions;
mod snapshots;
mod sweep;
mod test_machinery;
mod unresponsive;
mod verbs;
