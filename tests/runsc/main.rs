//! The runtime over the real runsc, and its fake held to the same suite.
//!
//! `BATON_RUNSC`, `BATON_TEST_ROOTFS`, `BATON_AGENT` and `BATON_GCSFUSE` say where the pieces are; `make test`
//! sets them. At most two tests at a time run containers.
#![allow(clippy::disallowed_methods, reason = "tests look at the world, the environment and the time too")]
#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, reason = "a test that is surprised ends")]

mod archives;
mod client;
mod commandline;
mod copies;
mod crash;
mod documents;
mod drain;
mod fake;
mod fence;
mod files;
mod fixture;
mod flow;
mod forks;
mod gate;
#[path = "../storage/gcsfuse.rs"]
mod gcsfuse;
mod guard;
mod halves;
mod handoff;
mod hostile;
mod image;
mod impostor;
mod leftovers;
mod library;
mod limits;
mod local;
mod metrics;
mod mounts;
mod moves;
mod mutants;
mod partition;
mod precedence;
mod proxy;
#[allow(dead_code, reason = "shared with the tests of the command line")]
#[path = "../cli/pty.rs"]
mod pty;
mod recipes;
mod records;
mod room;
mod runtimes;
mod seals;
mod servers;
mod shell;
mod snapshots;
mod socket;
mod stored;
mod suite;
mod traces;
mod transfer;
mod upgrades;
mod warm;
mod without_cgroups;
