//! Ports inside sandboxes, reached from outside: by path, by host name, and as raw TCP.
//!
//! ```text
//!   client ──▶ by_path, by_host ──▶ port_access ──▶ arrival ──▶ port_exchange ──HTTP──▶ PortLinks ──▶ server inside
//!                                   its token       its sandbox runs here
//! ```
//! A server inside is as untrusted as any code in a sandbox: [`port_headers`] keeps its pages apart from those of other
//! sandboxes, and nothing of ours (tokens, cookies, keys) is passed in.

mod arrival;
mod port_access;
mod port_activity;
mod port_exchange;
mod port_headers;
mod port_limits;
mod port_list;
mod port_refusal;
mod port_route;
mod tcp_tunnel;

use std::sync::Arc;

use axum::{
    Router,
    extract::{ConnectInfo, FromRequestParts, Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header, uri::PathAndQuery},
    middleware::Next,
    response::{IntoResponse, Response},
    routing::{any, get},
};
use baton_protocol::id::SandboxId;

pub use self::{
    port_access::RecentRecords,
    port_activity::PortUses,
    port_limits::PortLimits,
    port_route::{PortDomain, port_number},
};
use self::{
    port_access::ShownToken,
    port_headers::{Arrived, Sender},
    port_refusal::PortRefusal,
    port_route::{PortRoute, PortTarget},
};
use super::{Api, Tracked, lingering_close::Peer, rate_limit};

pub fn router() -> Router<Arc<Api>> {
    Router::new()
        .route("/sandboxes/{sandbox_id}/ports", get(port_list::list))
        .route("/sandboxes/{sandbox_id}/ports/{port}", any(by_path))
        .route("/sandboxes/{sandbox_id}/ports/{port}/", any(by_path))
        .route("/sandboxes/{sandbox_id}/ports/{port}/{*path}", any(by_path))
        .route("/sandboxes/{sandbox_id}/port-forward/{port}", any(tcp_tunnel::port_forward))
}

/// Takes the requests whose `Host` is that of a port; all others go on.
pub async fn by_host(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    let target = api.settings.domain.as_ref().and_then(|domain| domain.target(request.headers()));
    match target {
        Some(target) => answer(&api, request, Some(target.id), Some(target.port), PortRoute::Host).await,
        None => next.run(request).await,
    }
}

async fn by_path(State(api): State<Arc<Api>>, request: Request) -> Response {
    // As the client wrote it: what follows is passed on byte for byte.
    let mut parts = request.uri().path().split('/').skip(2);
    let (id, port) = (parts.next().unwrap_or_default(), parts.nth(1).unwrap_or_default());
    let (id, port) = (SandboxId::parse(id).ok(), port_number(port));
    answer(&api, request, id, port, PortRoute::Path).await
}

async fn answer(
    api: &Arc<Api>,
    request: Request,
    id: Option<SandboxId>,
    port: Option<u16>,
    route: PortRoute,
) -> Response {
    let (mut parts, body) = request.into_parts();
    let peer = ConnectInfo::<Peer>::from_request_parts(&mut parts, api).await;
    let Ok(connection) = Tracked::from_request_parts(&mut parts, api).await;
    let Ok(ConnectInfo(peer)) = peer else { return StatusCode::INTERNAL_SERVER_ERROR.into_response() };
    let visit = Visit { api, connection, peer, id, port, route };
    visit.answer(Request::from_parts(parts, body)).await.unwrap_or_else(IntoResponse::into_response)
}

/// One request to a port.
struct Visit<'a> {
    api: &'a Arc<Api>,
    connection: Tracked,
    peer: Peer,
    id: Option<SandboxId>,
    port: Option<u16>,
    route: PortRoute,
}

impl Visit<'_> {
    async fn answer(self, request: Request) -> Result<Response, PortRefusal> {
        let Self { api, connection, peer, id, port, route } = self;
        let settings = &api.settings;
        let (headers, method, uri) = (request.headers(), request.method(), request.uri());
        if headers.contains_key(header::TRANSFER_ENCODING) && headers.contains_key(header::CONTENT_LENGTH) {
            return Err(PortRefusal::Ambiguous);
        }
        let shown = ShownToken::of(headers, uri);
        let is_upgrade = port_headers::upgrade_of(headers).is_some();
        let acts = !method.is_safe() || is_upgrade || matches!(shown, ShownToken::Cookies(_));
        let outer = port_headers::outer_host(headers);
        let is_foreign = port_headers::sender(method, headers, outer.as_deref()) == Sender::Foreign;
        if acts && is_foreign && !is_listed(headers, &settings.origins) {
            return Err(PortRefusal::Foreign);
        }
        let caller = api.caller(headers, peer);
        let found = api.find_for_port(id.as_ref(), &shown, caller, &connection).await?;
        let target = PortTarget { id: found.spec.sandbox_id.clone(), port: port.ok_or(PortRefusal::NoPort)? };
        let is_https = port_headers::is_https(headers, settings.proxies);
        let is_page = matches!(*method, Method::GET | Method::HEAD) && !is_upgrade;
        if let (ShownToken::Query(token), true) = (&shown, is_page) {
            return Ok(enter(api, &target, route, token, uri, headers, is_https));
        }
        let Some(path) = target.inner_path(route, uri) else {
            let path = port_route::path_and_query(&(target.prefix() + "/"), uri.query());
            return Ok(redirect(StatusCode::PERMANENT_REDIRECT, path.as_ref().map_or("/", PathAndQuery::as_str)));
        };
        let traceparent = rate_limit::traceparent(headers);
        let link = arrival::connect(api, &target, &found, traceparent).await?;
        let api_keys = settings.api_keys.iter().map(|key| key.secret.reveal().clone());
        let keys: Vec<String> = api_keys.chain(settings.admin_key.clone()).collect();
        let arrived = Arrived { target: &target, route, peer: peer.0.ip(), proxies: settings.proxies, keys: &keys };
        let response = port_exchange::exchange(api, link, request, path, &arrived).await?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            connection.upgraded();
        }
        Ok(response)
    }
}

/// Whether the operator lets pages of this origin connect.
fn is_listed(headers: &HeaderMap, origins: &[String]) -> bool {
    headers.contains_key(header::ORIGIN) && rate_limit::check_origin(headers, origins).is_ok()
}

/// Answers a link that carries the token: the token goes into a cookie, and out of the address. A page goes to a host
/// name of its own, if there are any.
fn enter(
    api: &Api,
    target: &PortTarget,
    route: PortRoute,
    token: &str,
    uri: &Uri,
    headers: &HeaderMap,
    is_https: bool,
) -> Response {
    let is_document = headers.get("sec-fetch-dest").is_some_and(|dest| dest == "document");
    if let (PortRoute::Path, true, Some(domain)) = (route, is_document, &api.settings.domain) {
        let given = port_headers::outer_host(headers).unwrap_or_default();
        let port = port_route::split_authority(&given).1.map_or(String::new(), |port| format!(":{port}"));
        let path = uri.path().strip_prefix(&target.prefix()).filter(|path| !path.is_empty()).unwrap_or("/");
        let query = uri.query().unwrap_or_default();
        let proto = if is_https { "https" } else { "http" };
        let host = domain.host(&target.id, target.port);
        return redirect(StatusCode::SEE_OTHER, &format!("{proto}://{host}{port}{path}?{query}"));
    }
    let path = match route {
        PortRoute::Path if uri.path() == target.prefix() => target.prefix() + "/",
        PortRoute::Path | PortRoute::Host => uri.path().to_owned(),
    };
    let kept = port_route::path_and_query(&path, uri.query());
    let mut response = redirect(StatusCode::SEE_OTHER, kept.as_ref().map_or("/", PathAndQuery::as_str));
    if let Some(cookie) = port_access::cookie(token, target, route, is_https) {
        response.headers_mut().append(header::SET_COOKIE, cookie);
    }
    response
}

fn redirect(status: StatusCode, location: &str) -> Response {
    let Ok(location) = HeaderValue::from_str(location) else { return StatusCode::BAD_REQUEST.into_response() };
    let headers = [
        (header::LOCATION, location),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    (status, headers).into_response()
}
