//! What baton's components send to each other. No I/O, no clock, no randomness.
//!
//! | module | used between |
//! |---|---|
//! | [`request`], [`event`], [`binary`] | a client and the server, over a WebSocket |
//! | [`metadata`], [`by_hand`], [`lock`], [`manifest`], [`versioned`] | instances and operators, through the bucket |
//! | [`frame`], [`agent`] | the server and the agent inside a sandbox, over two pipes |
//! | [`file_work`] | a client and the agent, for files of a sandbox |
//! | [`id`], [`snapshot_key`], [`limits`], [`sandbox_network`], [`printable`], [`reason`], [`trace`] | all of them |

#![warn(missing_docs)]

pub mod agent;
pub mod binary;
pub mod by_hand;
pub mod event;
pub mod file_work;
pub mod frame;
pub mod id;
pub mod limits;
pub mod lock;
pub mod manifest;
pub mod metadata;
pub mod printable;
pub mod reason;
pub mod request;
pub mod sandbox_network;
pub mod snapshot_key;
pub mod trace;
pub mod versioned;
