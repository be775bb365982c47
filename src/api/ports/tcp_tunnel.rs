//! Raw TCP to a port inside, over a WebSocket: binary messages are the bytes, an empty text message ends a direction.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    extract::{ConnectInfo, Path, State},
    http::{HeaderMap, StatusCode, Uri},
    response::{IntoResponse, Response},
};
use baton_protocol::id::SandboxId;
use bytes::{Bytes, BytesMut};
use futures::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio_tungstenite::tungstenite::{
    Message,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use super::{
    arrival,
    port_access::ShownToken,
    port_activity::PortActivity,
    port_refusal::PortRefusal,
    port_route::{PortTarget, port_number},
};
use crate::{
    api::{
        Api, Tracked,
        lingering_close::Peer,
        rate_limit::{self, EdgeRefusal},
        upgrade::{WebSocket, WebSocketUpgrade},
        websocket::MAX_MESSAGE,
    },
    network::{PortBytes, PortStream},
};

/// The longest message that is sent.
const PIECE: usize = 64 << 10;
/// How often a silent client is pinged, and after which silence it counts as gone.
const PING_INTERVAL: Duration = Duration::from_secs(20);
const GONE_AFTER: Duration = Duration::from_secs(60);
/// Timeout for a client that does not read its close frame.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

pub async fn port_forward(
    State(api): State<Arc<Api>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Path((sandbox_id, port)): Path<(String, String)>,
    uri: Uri,
    connection: Tracked,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, (StatusCode, &'static str)>,
) -> Result<Response, Response> {
    let at_edge = |refusal: EdgeRefusal| refusal.into_response();
    rate_limit::check_origin(&headers, &api.settings.origins).map_err(at_edge)?;
    let upgrade = upgrade.map_err(IntoResponse::into_response)?;
    let refuse = |refusal: PortRefusal| refusal.into_response();
    let shown = match ShownToken::of(&headers, &uri) {
        // A cookie is for pages, and no page speaks this.
        ShownToken::Cookies(_) => ShownToken::Absent,
        shown @ (ShownToken::Absent | ShownToken::Explicit(_) | ShownToken::Query(_)) => shown,
    };
    let id = SandboxId::parse(&sandbox_id).ok();
    let caller = api.caller(&headers, peer);
    let found = api.find_for_port(id.as_ref(), &shown, caller, &connection).await.map_err(refuse)?;
    let port = port_number(&port).ok_or_else(|| refuse(PortRefusal::NoPort))?;
    let target = PortTarget { id: found.spec.sandbox_id.clone(), port };
    let traceparent = rate_limit::traceparent(&headers);
    let (stream, activity) = arrival::connect(&api, &target, &found, traceparent).await.map_err(refuse)?;
    connection.upgraded();
    let (response, socket) = upgrade.accept(api.inbound.clone(), api.clock.clone());
    let tunnel = api.clone();
    api.tasks.spawn(async move {
        if let Some(socket) = socket.await {
            socket.get_ref().gauge().set_longest(MAX_MESSAGE as u64);
            forward(&tunnel, socket, stream, &activity).await;
        }
    });
    Ok(response)
}

/// Carries the connection until both directions have ended, one side resets it, or the server stops.
async fn forward(api: &Api, socket: WebSocket, stream: PortStream, activity: &PortActivity) {
    let (mut sink, messages) = socket.split();
    let (reader, writer) = tokio::io::split(PortBytes::new(stream));
    let ends = Ends::default();
    let code = {
        tokio::select! {
            code = to_stream(api, messages, writer, activity, &ends) => code,
            code = to_socket(api, &mut sink, reader, activity, &ends) => code,
            () = api.closing.cancelled() => CloseCode::Restart,
        }
    };
    let close = Message::Close(Some(CloseFrame { code, reason: "".into() }));
    let _ =
        api.clock.timeout(CLOSE_TIMEOUT, async { sink.send(close).await.is_ok() && sink.close().await.is_ok() }).await;
}

/// How a connection ends that one side has reset.
const RESET: CloseCode = CloseCode::Error;

/// Whether one direction has ended already.
#[derive(Debug, Default)]
struct Ends(AtomicBool);

impl Ends {
    /// Notes the end of one direction. Returns whether it was the second one.
    fn end(&self) -> bool {
        self.0.swap(true, Ordering::Relaxed)
    }
}

/// Completes when both directions have ended, or the connection is reset.
async fn to_stream(
    api: &Api,
    mut messages: SplitStream<WebSocket>,
    mut writer: WriteHalf<PortBytes>,
    activity: &PortActivity,
    ends: &Ends,
) -> CloseCode {
    let mut has_ended = false;
    let mut heard_at = api.clock.now();
    loop {
        let message = tokio::select! {
            message = messages.next() => message,
            () = api.clock.sleep_until(heard_at + GONE_AFTER) => return RESET,
        };
        match message {
            Some(Ok(Message::Binary(bytes))) if !has_ended => {
                activity.beat();
                if writer.write_all(&bytes).await.is_err() {
                    return RESET;
                }
            }
            Some(Ok(Message::Text(text))) if text.is_empty() && !has_ended => {
                has_ended = true;
                if writer.shutdown().await.is_err() {
                    return RESET;
                }
                if ends.end() {
                    return CloseCode::Normal;
                }
            }
            Some(Ok(Message::Binary(_) | Message::Text(_))) => return CloseCode::Unsupported,
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
            Some(Ok(Message::Close(_)) | Err(_)) | None => return RESET,
        }
        heard_at = api.clock.now();
    }
}

/// See [`to_stream`].
async fn to_socket(
    api: &Api,
    sink: &mut SplitSink<WebSocket, Message>,
    mut reader: ReadHalf<PortBytes>,
    activity: &PortActivity,
    ends: &Ends,
) -> CloseCode {
    let mut buffer = BytesMut::new();
    let mut has_ended = false;
    loop {
        buffer.reserve(PIECE);
        let message = tokio::select! {
            read = reader.read_buf(&mut buffer), if !has_ended => {
                match read {
                    Ok(0) => {
                        has_ended = true;
                        Message::text("")
                    }
                    Ok(_) => {
                        activity.beat();
                        Message::Binary(buffer.split().freeze())
                    }
                    Err(_) => return RESET,
                }
            }
            () = api.clock.sleep(PING_INTERVAL) => Message::Ping(Bytes::new()),
        };
        let is_end = message.is_text();
        if sink.send(message).await.is_err() {
            return RESET;
        }
        if is_end && ends.end() {
            return CloseCode::Normal;
        }
    }
}
