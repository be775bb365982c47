//! The runtime over the real runsc, and its fake held to the same suite.
//!
//! `BATON_RUNSC`, `BATON_TEST_ROOTFS`, `BATON_AGENT` and `BATON_GCSFUSE` say where the pieces are; `make test`
//! sets them. At most two tests at a time run containers.
#![allow(clippy::disallowed_methods, reason = "tests look at the world, the environment and the time too")]
#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, reason = "a test that is surprised ends")]

mod agent_network;
mod attach_precedence;
mod bare_sandbox;
mod base_rootfs;
mod commandline;
mod copies;
mod documents;
mod drain;
mod egress;
mod egress_clients;
mod egress_forbidden;
mod egress_hostile;
mod egress_limits;
mod egress_moves;
mod egress_streams;
mod exported_traces;
mod fake;
mod fence;
mod file_transfers;
mod filesystem_snapshots;
mod fixture;
mod forks;
mod full_instance;
mod gate;
#[path = "../storage/gcsfuse_mount.rs"]
mod gcsfuse_mount;
mod guard_process;
mod hostile_sandbox;
mod image;
mod impostor;
mod leftovers;
mod library;
mod live_handoff;
mod local;
mod lying_names;
mod metrics_page;
mod mounted_bucket;
mod mutants;
mod network_fixture;
mod outer_servers;
mod partition;
mod plain_session;
mod proxy;
#[allow(dead_code, reason = "shared with the tests of the command line")]
#[path = "../cli/pty.rs"]
mod pty;
mod random_moves;
mod readme_commands;
mod recipes;
mod rootfs_archives;
mod runsc_flow_control;
mod runsc_halves;
mod runtime_suite;
mod sandbox_limits;
mod sandbox_programs;
mod seals;
mod server_crash;
mod servers;
mod shell;
mod stored;
mod stored_records;
mod stored_runtimes;
mod transfer;
mod upgrades;
mod warm;
mod websocket_client;
mod without_cgroups;
