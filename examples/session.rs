//! A plain WebSocket client: sends each request when the sandbox is ready for it, and prints both directions.
//!
//! ```text
//! cargo run --example session -- ws://127.0.0.1:8080/create '{"language":"python","code":"print(6*7)"}'
//! ```

#![expect(clippy::disallowed_methods, reason = "a client has no clock of an instance")]

use std::time::Duration;

use anyhow::{Context, bail};
use futures::{SinkExt, StreamExt};
use tokio_tungstenite::{connect_async, tungstenite::Message};

const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// After these the next request may be sent.
const READY: [&str; 4] =
    ["SANDBOX_RUNNING", "SANDBOX_EXECUTION_DONE", "SANDBOX_EXECUTION_ERROR", "SANDBOX_FILESYSTEM_SNAPSHOT_CREATED"];

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().context("usage: session URL [REQUEST…]")?;
    let (mut socket, _) = connect_async(&url).await.with_context(|| format!("no server answers at {url}"))?;
    loop {
        let message = tokio::time::timeout(STEP_TIMEOUT, socket.next()).await.context("the server fell silent")?;
        match message {
            Some(Ok(Message::Text(text))) => {
                println!("< {text}");
                let event: serde_json::Value = serde_json::from_str(&text)?;
                let status = event["status"].as_str().unwrap_or_default();
                if READY.contains(&status) {
                    match arguments.next() {
                        Some(request) => {
                            println!("> {request}");
                            socket.send(Message::text(request)).await?;
                        }
                        None => return Ok(socket.close(None).await?),
                    }
                }
            }
            Some(Ok(Message::Close(frame))) => {
                println!("< close {}", frame.map_or(1005, |frame| u16::from(frame.code)));
                return Ok(());
            }
            Some(Ok(Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
            Some(Err(error)) => return Err(error.into()),
            None => bail!("the connection ended without a close"),
        }
    }
}
