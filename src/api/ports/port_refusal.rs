//! Why a request does not reach its port, as a status and a sentence.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

use crate::{
    api::intent::{NO_ROOM, SHUTTING_DOWN},
    network::PortError,
};

/// After how many seconds a client should try again.
const RETRY_AFTER: &str = "2";

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortRefusal {
    #[error("There is no such sandbox.")]
    NotFound,
    #[error("The sandbox token is missing or wrong.")]
    Denied,
    #[error("Too many failed requests came from this address: wait.")]
    Limited,
    #[error(
        "This server refuses requests of web pages from other origins to a port of a sandbox, unless they are only \
         followed links."
    )]
    Foreign,
    #[error("Another client is attached to the sandbox.")]
    InUse,
    #[error("{0}")]
    Quota(String),
    #[error("{NO_ROOM}")]
    Full,
    #[error("{SHUTTING_DOWN}")]
    Draining,
    #[error("The server has too many connections.")]
    Crowded,
    #[error("The sandbox has too many open requests to its ports.")]
    Busy,
    #[error("The sandbox was not released or restored in time.")]
    Late,
    #[error("{0}")]
    Unavailable(String),
    /// The port of the sandbox, and why it is not connected.
    #[error("Port {0} of the sandbox cannot be reached: {1}.")]
    Port(u16, PortError),
    #[error("The server on port {0} of the sandbox did not answer in time.")]
    Silent(u16),
    #[error("The server on port {0} of the sandbox closed the connection, or its answer is not HTTP.")]
    Broken(u16),
    #[error("A port is a number from 1 to 65535.")]
    NoPort,
    #[error("The request is ambiguous: it has both a Content-Length and a Transfer-Encoding.")]
    Ambiguous,
}

impl PortRefusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::NotFound | Self::NoPort => StatusCode::NOT_FOUND,
            Self::Denied => StatusCode::UNAUTHORIZED,
            Self::Foreign => StatusCode::FORBIDDEN,
            Self::InUse => StatusCode::CONFLICT,
            Self::Limited | Self::Quota(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Ambiguous => StatusCode::BAD_REQUEST,
            Self::Port(_, PortError::Refused | PortError::Unsupported) | Self::Broken(_) => StatusCode::BAD_GATEWAY,
            Self::Port(_, PortError::TimedOut) | Self::Silent(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Full
            | Self::Draining
            | Self::Crowded
            | Self::Busy
            | Self::Late
            | Self::Unavailable(_)
            | Self::Port(_, PortError::NotRunning | PortError::Busy) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

impl IntoResponse for PortRefusal {
    fn into_response(self) -> Response {
        let status = self.status();
        let mut response = (status, format!("{self}\n")).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
        }
        response
    }
}
