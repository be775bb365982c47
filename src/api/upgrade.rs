//! Upgrades a request to a WebSocket as axum does, but over a stream with bounded memory ([`Metered`]).

use axum::{
    body::Body,
    extract::FromRequestParts,
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        handshake::derive_accept_key,
        protocol::{Role, WebSocketConfig},
    },
};

use super::{
    inbound::{Budget, Metered},
    websocket,
};
use crate::clock::SharedClock;

pub type WebSocket = WebSocketStream<Metered<TokioIo<Upgraded>>>;

/// The supported subprotocols, the preferred one first.
const PROTOCOLS: [&str; 2] = [V1, "baton.plain"];
const V1: &str = "baton.v1";

/// A request to upgrade to a WebSocket.
#[derive(Debug)]
pub struct WebSocketUpgrade {
    upgrade: OnUpgrade,
    key: HeaderValue,
    protocol: Option<&'static str>,
}

impl<S: Sync> FromRequestParts<S> for WebSocketUpgrade {
    type Rejection = (StatusCode, &'static str);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let bad = |text| Err((StatusCode::BAD_REQUEST, text));
        if parts.method != Method::GET {
            return Err((StatusCode::METHOD_NOT_ALLOWED, "Request method must be `GET`"));
        }
        if !has_word(&parts.headers, header::CONNECTION, "upgrade") {
            return bad("Connection header did not include 'upgrade'");
        }
        if !has_word(&parts.headers, header::UPGRADE, "websocket") {
            return bad("`Upgrade` header did not include 'websocket'");
        }
        if parts.headers.get(header::SEC_WEBSOCKET_VERSION).is_none_or(|version| version != "13") {
            return bad("`Sec-WebSocket-Version` header did not include '13'");
        }
        let Some(key) = parts.headers.get(header::SEC_WEBSOCKET_KEY).cloned() else {
            return bad("`Sec-WebSocket-Key` header missing");
        };
        let Some(upgrade) = parts.extensions.remove() else {
            return Err((StatusCode::UPGRADE_REQUIRED, "WebSocket request couldn't be upgraded"));
        };
        let offered = |name: &&str| words(&parts.headers, header::SEC_WEBSOCKET_PROTOCOL).any(|offer| offer == *name);
        let protocol = PROTOCOLS.into_iter().find(|name| offered(name));
        Ok(Self { upgrade, key, protocol })
    }
}

impl WebSocketUpgrade {
    pub fn is_v1(&self) -> bool {
        self.protocol == Some(V1)
    }

    /// Returns the answer, and the socket once the client has the answer; `None` if it was gone before that. Offers
    /// that carry a token or a key are never echoed.
    pub fn accept(
        self,
        budget: Budget,
        clock: SharedClock,
    ) -> (Response, impl Future<Output = Option<WebSocket>> + Send) {
        let Self { upgrade, key, protocol } = self;
        let accepted = [
            (header::CONNECTION, "upgrade".to_owned()),
            (header::UPGRADE, "websocket".to_owned()),
            (header::SEC_WEBSOCKET_ACCEPT, derive_accept_key(key.as_bytes())),
        ];
        let protocol = protocol.map(|name| [(header::SEC_WEBSOCKET_PROTOCOL, name)]);
        let response = (StatusCode::SWITCHING_PROTOCOLS, accepted, protocol, Body::empty()).into_response();
        let socket = async move {
            let stream = TokioIo::new(upgrade.await.ok()?);
            let metered = Metered::new(stream, &budget, websocket::MAX_FIRST_MESSAGE as u64, clock);
            Some(WebSocketStream::from_raw_socket(metered, Role::Server, Some(config())).await)
        };
        (response, socket)
    }
}

fn config() -> WebSocketConfig {
    WebSocketConfig::default()
        .max_message_size(Some(websocket::MAX_MESSAGE))
        .max_frame_size(Some(websocket::MAX_MESSAGE))
        .read_buffer_size(websocket::READ_BUFFER_BYTES)
        .max_write_buffer_size(websocket::MAX_WRITE_BUFFER)
}

fn words(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let lines = headers.get_all(name).into_iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim)
}

fn has_word(headers: &HeaderMap, name: HeaderName, word: &str) -> bool {
    words(headers, name).any(|given| given.eq_ignore_ascii_case(word))
}
