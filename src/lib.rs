//! baton: stateful code sandboxes that move between instances.
//!
//! ```text
//!             Request            spec (CAS)           changes
//!  client ──────────────▶ api ──────────────▶ storage ─────────▶ reconciler ──Action──▶ runtime ──▶ runsc
//!    ▲                     │ ▲                  │ ▲                   │  ▲                 │
//!    └────── Event ────────┘ └───── bus ────────┘ └──── status ───────┘  └────── Seen ─────┘
//!    ▲                     ▲                                                               │
//!    └─── stdin, output ───┴──────────────────── frames, bytes only ───────────────────────┘
//! ```
//!
//! The API writes the *desired* state; the reconciler *brings it about*; they meet in storage and on the bus, and
//! never call each other. `tests/repo/rooms.rs` checks which modules may use which.

pub mod api;
pub mod bus;
pub mod cli;
pub mod clock;
pub mod config;
pub mod fair_watch;
pub mod guard;
pub mod ipc;
pub mod metrics;
pub mod network;
pub mod reconciler;
pub mod runtime;
pub mod storage;
pub mod telemetry;
pub mod traces;

#[cfg(test)]
extern crate self as baton;
/// The sources of `baton-testkit`, built against this crate: the crate itself depends on another build of it.
#[cfg(test)]
#[path = "../crates/testkit/src/lib.rs"]
#[allow(dead_code, unused_imports, reason = "unit tests use a part of it")]
mod testkit;
