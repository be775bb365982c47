//! The world without runsc: several instances, simulated time, faults on demand.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

mod churn;
mod committed;
mod costs;
mod crash_points;
mod edits;
mod eviction_order;
mod faulty_store;
mod hand_edits;
mod instances;
mod lease_holder;
mod lease_rule_cases;
mod outcomes;
mod placement;
mod precedence_cases;
mod progress_events;
mod reconcile;
mod requests;
mod sim_regressions;
mod snapshot_requests;
mod sweep_cases;
mod test_machinery;
mod unresponsive_holder;
mod verbs;
