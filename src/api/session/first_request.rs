//! The first message on `/create`, which may be the config of the new sandbox.

use std::time::Duration;

use baton_protocol::{
    event::Status,
    request::{Refusal, Request, SandboxConfig},
};

use super::incoming::IncomingRequests;
use crate::api::{
    Api,
    client_connection::{ClientEvent, EventSink},
    close_code::{Close, SessionEnd},
    dialect::Dialect,
    event_writer::EventWriter,
};

/// How long a new client may take to send its config, if it answers no pings.
const CONFIG_TIMEOUT: Duration = Duration::from_secs(3);
/// How long after its first pong, which shows that the client is connected and has sent nothing before it.
const CONFIG_TIMEOUT_AFTER_PONG: Duration = Duration::from_millis(150);
const FIRST_TOO_LONG: &str =
    "The first message is longer than 256 KiB: send the config first, then a command with more code.";

/// Returns the config of the client: that of its query, that of its first message, or the default. Any other first
/// message is kept in `requests`. On an error the client is already told why.
pub async fn read_config(
    api: &Api,
    writer: &mut EventWriter,
    requests: &mut IncomingRequests,
    query: Option<Result<SandboxConfig, Refusal>>,
) -> Result<SandboxConfig, SessionEnd> {
    let (first, bytes) = match query {
        Some(config) => (config.map(|config| Request::Config(Box::new(config))), 0),
        None => match read_first(api, writer, requests).await? {
            Some(first) => first,
            None => return Ok(SandboxConfig::default()),
        },
    };
    match first {
        Ok(Request::Config(config)) => Ok(*config),
        Err(refusal) if refusal.status == Status::CreationError => {
            writer.refuse(&refusal);
            Err(SessionEnd::Close(Close::Fatal))
        }
        other => {
            requests.push(other, bytes);
            Ok(SandboxConfig::default())
        }
    }
}

/// The first message and the length of its text; `None` if none came in time.
async fn read_first(
    api: &Api,
    writer: &mut EventWriter,
    requests: &mut IncomingRequests,
) -> Result<Option<(Result<Request, Refusal>, usize)>, SessionEnd> {
    let mut deadline = api.clock.now() + CONFIG_TIMEOUT;
    // This ping is not a liveness check: a client that answers no pings has its three seconds.
    writer.ping(vec![], false);
    loop {
        let event = tokio::select! {
            biased;
            () = api.closing.cancelled() => return Err(SessionEnd::Close(Close::Restart)),
            event = writer.next_event() => event,
            () = api.clock.sleep_until(deadline) => return Ok(None),
        };
        let refusal = match event {
            ClientEvent::Wrote => continue,
            ClientEvent::Pong(_) => {
                // The predecessor waited for a config without a deadline.
                if writer.dialect() != Dialect::Predecessor {
                    deadline = deadline.min(api.clock.now() + CONFIG_TIMEOUT_AFTER_PONG);
                }
                continue;
            }
            ClientEvent::Text(text) => match Request::parse(&text) {
                Err(refusal) if refusal.malformed => refusal,
                parsed => return Ok(Some((parsed, text.len()))),
            },
            ClientEvent::Binary(_) => Refusal::malformed("The first message must be text."),
            ClientEvent::TooLong => {
                writer.refuse(&Refusal::of(Status::CreationError, FIRST_TOO_LONG));
                return Err(SessionEnd::Close(Close::TooBig));
            }
            ClientEvent::Broken(close) => return Err(SessionEnd::Close(close)),
            ClientEvent::Gone => return Err(SessionEnd::Gone),
        };
        if let Some(end) = requests.reject_malformed(writer, &refusal) {
            return Err(end);
        }
    }
}
