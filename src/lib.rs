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
//! The API writes what is *wanted*; the reconciler makes it *so*; they meet in storage
//! and on the bus, and never call each other. `tests/world/rooms.rs` holds the rooms apart.

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
