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
//! never call each other. `tests/world/rooms.rs` checks which modules may use which.

pub mod api;
pub mod bus;
pub mod cli;
pub mod clock;
pub mod config;
pub mod fair_watch;
pub mod guard;
pub mod ipc;
pub mod metrics;
pub mod reconciler;
pub mod runtime;
pub mod storage;
pub mod telemetry;
pub mod traces;
