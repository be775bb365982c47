//! Sandboxes from Rust: create or attach, run commands, hand off, over one WebSocket that reconnects by itself.
//!
//! ```no_run
//! # async fn example() -> Result<(), baton_client::Error> {
//! use baton_client::{Exec, Options, Sandbox};
//!
//! let sandbox = Sandbox::create("ws://127.0.0.1:8080", Options::default()).await?;
//! let done = sandbox.exec(Exec::argv(["echo", "hello"])).await?.collect().await?;
//! assert_eq!(done.stdout, b"hello\n");
//! sandbox.kill().await
//! # }
//! ```
//!
//! Files and whole directories can be copied in and out:
//!
//! ```no_run
//! # async fn example(sandbox: baton_client::Sandbox) -> Result<(), baton_client::Error> {
//! sandbox.write_file("/data/note", "hello").await?;
//! assert_eq!(sandbox.read_file("/data/note").await?, b"hello");
//! sandbox.upload("src", "/src").await?;
//! sandbox.download("/src/out", "out").await
//! # }
//! ```
//!
//! Sandboxes can be listed and killed without attaching to them:
//!
//! ```no_run
//! # async fn example(connection: baton_client::Connection) -> Result<(), baton_client::Error> {
//! use baton_client::Sandbox;
//!
//! let url = "ws://127.0.0.1:8080";
//! let mut sandboxes = Sandbox::list(url, [("team".into(), "blue".into())].into(), connection.clone())?;
//! while let Some(found) = sandboxes.next().await? {
//!     Sandbox::kill_by_id(url, &found.id, None, connection.clone()).await?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A server in the sandbox can be reached from outside, over raw connections or by a link for a browser:
//!
//! ```no_run
//! # async fn example(sandbox: baton_client::Sandbox) -> Result<(), Box<dyn std::error::Error>> {
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! println!("open {}", sandbox.url(8000));
//! let mut connection = sandbox.port(5432).connect().await?;
//! connection.write_all(b"hello").await?;
//! connection.read(&mut [0; 64]).await?;
//! # Ok(())
//! # }
//! ```
//!
//! ```text
//!   Sandbox ──commands──▶ link: one task, owns the socket ──▶ server
//!      ▲                    │ one session per connection
//!      └────── state ◀──────┤   what the server reported last
//!   Running ◀── pipes ◀─────┘   output in order, once, bounded
//! ```
//!
//! Behind Cloud Run's access control, with the feature `google`:
//!
//! ```no_run
//! # #[cfg(feature = "google")]
//! # async fn example() -> Result<(), baton_client::Error> {
//! use baton_client::{Auth, Connection, Options, Sandbox};
//!
//! let connection = Connection { auth: Some(Auth::google()), ..Connection::default() };
//! let sandbox = Sandbox::create("wss://baton-abc.run.app", Options { connection, ..Options::default() }).await?;
//! # sandbox.kill().await
//! # }
//! ```
//!
//! After a lost connection the client reconnects and resumes: commands keep running, and each byte of their
//! output and input arrives once. Whatever cannot be resumed ends with a typed [`Error`].

#![warn(missing_docs)]

mod auth;
mod client_clock;
mod client_exec;
mod client_ports;
mod client_session;
mod client_socket;
mod client_state;
mod connect;
mod connection;
mod error;
mod files;
mod http_api;
mod options;
mod retry_policy;
mod running;
mod sandbox;
mod stdin_buffer;
mod stream;

pub use baton_protocol::{
    event::{EndReason, ExecView, Status, StdStream, Token, Update},
    file_work::{FileChange, FileChangeKind, FileEntry, FileKind},
    id::{CheckpointId, ExecId, InstanceId, SandboxId, SnapshotName},
    limits::{Cpus, Limits},
    request::{Idle, Language, Offsets, Persistence, SandboxConfig},
    sandbox_network::{Egress, EgressHost, EgressRule, SandboxNetwork},
};

pub use self::{
    auth::{Auth, Headers},
    client_exec::Outcome,
    client_ports::{Port, PortConnection},
    client_state::SandboxRef,
    error::{Ending, Error},
    files::{FileMode, FileWatch, OnBytes, OnLeftOut, Reading, Transfer},
    http_api::{SandboxList, SandboxSummary},
    options::{Connection, Exec, OnRollBack, OnStatus, Options, RollBack},
    running::{Collected, Control, OutputStream, Running},
    sandbox::{CheckpointOptions, Sandbox},
    stream::Chunk,
};
