//! One handshake: address, headers, affinity cookie.

use std::collections::BTreeMap;

use tokio::net::TcpStream;
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async_with_config,
    tungstenite::{
        self,
        client::IntoClientRequest,
        http::{HeaderMap, HeaderName, HeaderValue, header},
        protocol::WebSocketConfig,
    },
};

use crate::{
    Error, client_clock,
    client_state::SandboxRef,
    options::Connection,
    retry_policy::{self, RetryPolicy},
};

pub(crate) type ServerSocket = WebSocketStream<MaybeTlsStream<TcpStream>>;

const SUBPROTOCOL: &str = "baton.v1";
/// Frames from the server stay below 1 MiB.
const MAX_MESSAGE: usize = 16 << 20;
const READ_BUFFER: usize = 256 << 10;

/// The server's address, up to and including its own base path.
#[derive(Clone, Debug)]
pub(crate) struct Address(String);

impl Address {
    pub(crate) fn parse(url: &str) -> Result<Self, Error> {
        let url = url.trim_end_matches('/');
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let scheme = match scheme {
            "ws" | "http" => "ws",
            "wss" | "https" => "wss",
            _ => return Err(Error::Connection(format!("the address `{url}` must begin with ws:// or wss://"))),
        };
        let address = format!("{scheme}://{rest}");
        match address.as_str().into_client_request() {
            Ok(request) if request.uri().query().is_none() => Ok(Self(address)),
            _ => Err(Error::Connection(format!("`{url}` is not the address of a server"))),
        }
    }

    /// The same address for requests over HTTP.
    pub(crate) fn http(&self) -> String {
        self.0.replacen("ws", "http", 1)
    }

    /// Scheme, host and port, as in HTTP URLs.
    #[cfg(feature = "google")]
    pub(crate) fn origin(&self) -> String {
        let origin = self.0.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
        Self(origin).http()
    }
}

/// Cookies that load balancers set for session affinity.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cookies(BTreeMap<String, String>);

impl Cookies {
    /// Values of later handshakes replace those of earlier ones.
    fn store(&mut self, headers: &HeaderMap) {
        for cookie in headers.get_all(header::SET_COOKIE) {
            let Some(pair) = cookie.to_str().ok().and_then(|text| text.split(';').next()) else { continue };
            if let Some((name, value)) = pair.split_once('=') {
                self.0.insert(name.trim().to_owned(), value.trim().to_owned());
            }
        }
    }

    fn header(&self) -> Option<HeaderValue> {
        let pairs: Vec<_> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if pairs.is_empty() { None } else { HeaderValue::from_str(&pairs.join("; ")).ok() }
    }

    pub(crate) fn forget(&mut self) {
        self.0.clear();
    }
}

/// Opens a WebSocket: to the sandbox at `place`, or to a new one.
pub(crate) async fn connect(
    address: &Address,
    place: Option<&SandboxRef>,
    cookies: &mut Cookies,
    options: &Connection,
) -> Result<ServerSocket, RetryPolicy> {
    let path = place.map_or_else(|| "/create".to_owned(), |place| format!("/attach/{}", place.id));
    connect_to(address, &path, place, cookies, options).await.map_err(|failure| match failure {
        HandshakeFailure::Unsent(policy) => policy,
        HandshakeFailure::Answer(error) => classify(&error),
    })
}

/// Why there is no WebSocket.
#[derive(Debug)]
pub(crate) enum HandshakeFailure {
    /// The request was not sent, or not answered.
    Unsent(RetryPolicy),
    Answer(tungstenite::Error),
}

impl From<RetryPolicy> for HandshakeFailure {
    fn from(policy: RetryPolicy) -> Self {
        Self::Unsent(policy)
    }
}

/// Opens a WebSocket at any path of the server.
pub(crate) async fn connect_to(
    address: &Address,
    path: &str,
    place: Option<&SandboxRef>,
    cookies: &mut Cookies,
    options: &Connection,
) -> Result<ServerSocket, HandshakeFailure> {
    let mut request = format!("{}{path}", address.0).into_client_request().map_err(|error| classify(&error))?;
    let headers = request.headers_mut();
    for (name, value) in &options.headers {
        let (name, value) = header_of(name, value)?;
        headers.append(name, value);
    }
    if let Some(auth) = &options.auth {
        let given = client_clock::timeout(options.connect_within, auth.headers_for(address)).await;
        let given = given.unwrap_or(Err(Error::Auth(format!("they did not come within {:?}", options.connect_within))));
        for (name, value) in
            given.map_err(|error| HandshakeFailure::Unsent(RetryPolicy::Retry { error, elsewhere: false }))?
        {
            let (name, value) = header_of(&name, &value)?;
            headers.insert(name, value);
        }
    }
    headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(SUBPROTOCOL));
    let token = place.map(|place| place.token.0.as_str());
    for (name, value) in [("x-api-key", options.api_key.as_deref()), ("x-sandbox-token", token)] {
        if let Some(value) = value {
            let mut value = HeaderValue::from_str(value).map_err(|_| bad_header(name))?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
    }
    if let Some(cookie) = cookies.header() {
        headers.insert(header::COOKIE, cookie);
    }
    let config = WebSocketConfig::default()
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE))
        .read_buffer_size(READ_BUFFER);
    let opened =
        client_clock::timeout(options.connect_within, connect_async_with_config(request, Some(config), true)).await;
    match opened {
        Some(Ok((socket, response))) => {
            cookies.store(response.headers());
            Ok(socket)
        }
        Some(Err(error)) => Err(HandshakeFailure::Answer(error)),
        None => Err(RetryPolicy::Retry { error: Error::Timeout(options.connect_within), elsewhere: false }.into()),
    }
}

fn header_of(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), RetryPolicy> {
    let mut value = HeaderValue::from_str(value).map_err(|_| bad_header(name))?;
    value.set_sensitive(true);
    Ok((HeaderName::try_from(name).map_err(|_| bad_header(name))?, value))
}

fn bad_header(name: &str) -> RetryPolicy {
    RetryPolicy::Fatal(Error::Connection(format!("the header `{name}` cannot be sent")))
}

fn classify(error: &tungstenite::Error) -> RetryPolicy {
    #[expect(clippy::wildcard_enum_match_arm, reason = "what is neither HTTP nor a wrong word is the network")]
    match error {
        tungstenite::Error::Http(response) => retry_policy::of_http(response.status().as_u16()),
        tungstenite::Error::Protocol(tungstenite::error::ProtocolError::SecWebSocketSubProtocolError(_)) => {
            RetryPolicy::Fatal(Error::Protocol("the server did not choose it".into()))
        }
        tungstenite::Error::Url(_) | tungstenite::Error::HttpFormat(_) => {
            RetryPolicy::Fatal(Error::Connection(error.to_string()))
        }
        _ => RetryPolicy::lost(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_server_and_nothing_more() {
        for (url, address) in [
            ("ws://localhost:8080", "ws://localhost:8080"),
            ("http://localhost:8080/", "ws://localhost:8080"),
            ("https://sandboxes.example/api/", "wss://sandboxes.example/api"),
        ] {
            assert_eq!(Address::parse(url).unwrap().0, address);
        }
        for bad in ["", "localhost:8080", "ftp://x", "ws://", "ws://a b", "ws://x/?q=1"] {
            assert!(matches!(Address::parse(bad), Err(Error::Connection(_))), "{bad}");
        }
    }

    #[test]
    fn cookies_go_back_without_their_attributes_and_newer_ones_win() {
        let mut cookies = Cookies::default();
        let mut headers = HeaderMap::new();
        headers.append(header::SET_COOKIE, HeaderValue::from_static("GAESA=one; Path=/; HttpOnly"));
        headers.append(header::SET_COOKIE, HeaderValue::from_static("b=2"));
        cookies.store(&headers);
        assert_eq!(cookies.header().unwrap(), "GAESA=one; b=2");
        headers.insert(header::SET_COOKIE, HeaderValue::from_static("GAESA=two"));
        cookies.store(&headers);
        assert_eq!(cookies.header().unwrap(), "GAESA=two; b=2");
        cookies.forget();
        assert!(cookies.header().is_none());
    }
}
