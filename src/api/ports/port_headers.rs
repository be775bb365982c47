//! What changes in the headers of a request and its response on the way through, so that connections stay our own
//! business and sandboxes stay apart from each other. No I/O.

use std::net::IpAddr;

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};

use super::{
    port_access::is_cookie_of_ours,
    port_route::{PortRoute, PortTarget, host, split_authority},
};
use crate::api::token;

/// Headers that concern one connection only, beside those that `Connection` names.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];
/// Headers of responses by which a server inside would rule over more than its own pages.
const NOT_ITS_OWN: [&str; 3] = ["service-worker-allowed", "clear-site-data", "strict-transport-security"];
/// Gives a page an origin that nothing else has: without a host name of its own, it must not read the pages of other
/// sandboxes in the same browser.
const SANDBOX: &str = "sandbox allow-scripts allow-forms allow-modals allow-popups allow-downloads";
const FORWARDED: [&str; 4] = ["x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-forwarded-prefix"];

/// What a request says about the way it came.
#[derive(Clone, Debug)]
pub struct Arrived<'a> {
    pub target: &'a PortTarget,
    pub route: PortRoute,
    pub peer: IpAddr,
    /// How many trusted proxies are in front.
    pub proxies: usize,
    /// Keys of this server, which no sandbox may see.
    pub keys: &'a [String],
}

/// The protocol to which a request asks to upgrade.
pub fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks = list(headers, &header::CONNECTION).any(|word| word.eq_ignore_ascii_case("upgrade"));
    headers.get(header::UPGRADE).filter(|_| asks).cloned()
}

/// Whether the client reached the outermost proxy, or this server, by https.
pub fn is_https(headers: &HeaderMap, proxies: usize) -> bool {
    proxies > 0 && headers.get("x-forwarded-proto").is_some_and(|proto| proto.as_bytes().starts_with(b"https"))
}

/// The name and port under which the client knows this server.
pub fn outer_host(headers: &HeaderMap) -> Option<String> {
    host(headers).map(str::to_owned)
}

/// Prepares the headers of a request for the server inside.
pub fn to_inside(headers: &mut HeaderMap, arrived: &Arrived<'_>) {
    let proto = if is_https(headers, arrived.proxies) { "https" } else { "http" };
    let outer = outer_host(headers);
    let chain = forwarded_for(headers, arrived);
    let is_own = is_own_origin(headers, outer.as_deref());
    drop_hop_by_hop(headers);
    // How the body is framed, and when it may be sent, is decided anew for this connection.
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::EXPECT);
    headers.remove(header::FORWARDED);
    headers.remove("x-sandbox-token");
    headers.remove("x-serverless-authorization");
    let shows_key = headers.get("x-api-key").is_some_and(|key| token::is_one_of(key.to_str().ok(), arrived.keys));
    if shows_key {
        headers.remove("x-api-key");
    }
    keep(headers, &header::COOKIE, "; ", ';', |cookie| {
        !is_cookie_of_ours(cookie.split_once('=').map_or(cookie, |(name, _)| name))
    });
    keep(headers, &header::SEC_WEBSOCKET_PROTOCOL, ", ", ',', |offer| {
        !offer.starts_with("baton.token.") && !offer.starts_with("baton.key.")
    });
    for name in FORWARDED {
        headers.remove(name);
    }
    let mut set = |name: &'static str, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(name, value);
        }
    };
    set("x-forwarded-for", &chain);
    set("x-forwarded-proto", proto);
    if let Some(outer) = &outer {
        set("x-forwarded-host", outer);
    }
    if arrived.route == PortRoute::Path {
        set("x-forwarded-prefix", &arrived.target.prefix());
    }
    // Development servers answer to localhost only, and compare the origin with it.
    let inner = format!("localhost:{}", arrived.target.port);
    set("host", &inner);
    if is_own {
        set("origin", &format!("http://{inner}"));
    }
}

fn forwarded_for(headers: &HeaderMap, arrived: &Arrived<'_>) -> String {
    let peer = arrived.peer.to_canonical().to_string();
    // What a client claims about itself is not passed on.
    let seen = list(headers, &HeaderName::from_static("x-forwarded-for")).map(str::to_owned).collect::<Vec<_>>();
    let kept = seen.len().saturating_sub(arrived.proxies);
    seen[kept..].iter().cloned().chain([peer]).collect::<Vec<_>>().join(", ")
}

/// Prepares the headers of a response for the client.
pub fn to_outside(headers: &mut HeaderMap, target: &PortTarget, route: PortRoute) {
    if headers.contains_key(header::TRANSFER_ENCODING) {
        // It counts, and a length beside it does not.
        headers.remove(header::CONTENT_LENGTH);
    }
    drop_hop_by_hop(headers);
    for name in NOT_ITS_OWN {
        headers.remove(name);
    }
    relocate(headers, target, route);
    let cookies: Vec<_> = headers.get_all(header::SET_COOKIE).iter().filter_map(|value| value.to_str().ok()).collect();
    let cookies: Vec<_> = cookies.into_iter().filter_map(|cookie| own_cookie(cookie, target, route)).collect();
    headers.remove(header::SET_COOKIE);
    for cookie in cookies {
        headers.append(header::SET_COOKIE, cookie);
    }
    if route == PortRoute::Path {
        headers.append(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(SANDBOX));
        headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    }
}

/// Points a redirect within the server inside to where the client reaches it.
fn relocate(headers: &mut HeaderMap, target: &PortTarget, route: PortRoute) {
    let Some(location) = headers.get(header::LOCATION).and_then(|value| value.to_str().ok()) else { return };
    let path = match own_path(location, target.port) {
        Some(path) => path,
        None if location.starts_with('/') && !location.starts_with("//") => location,
        None => return,
    };
    let slash = if path.starts_with('/') { "" } else { "/" };
    let moved = match route {
        PortRoute::Path if path.starts_with(&(target.prefix() + "/")) => path.to_owned(),
        PortRoute::Path => format!("{}{slash}{path}", target.prefix()),
        PortRoute::Host => format!("{slash}{path}"),
    };
    if let Ok(moved) = HeaderValue::from_str(&moved) {
        headers.insert(header::LOCATION, moved);
    }
}

/// What follows the host if `location` is a URL of the server inside under the name that it was told.
fn own_path(location: &str, port: u16) -> Option<&str> {
    let rest = location.strip_prefix("http://").or_else(|| location.strip_prefix("https://"))?;
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (name, given) = split_authority(authority);
    let is_same_port = given.map_or(port == 80, |given| given == port.to_string());
    (is_same_port && ["localhost", "127.0.0.1", "[::1]"].contains(&name)).then_some(path)
}

/// A cookie of the server inside that stays on its own path and host; `None` if it would take the place of ours.
fn own_cookie(cookie: &str, target: &PortTarget, route: PortRoute) -> Option<HeaderValue> {
    let mut parts = cookie.split(';').map(str::trim);
    let pair = parts.next()?;
    let name = pair.split_once('=').map_or("", |(name, _)| name.trim());
    if is_cookie_of_ours(name) {
        return None;
    }
    // A browser accepts this prefix for the path `/` only.
    if route == PortRoute::Path && name.to_ascii_lowercase().starts_with("__host-") {
        return None;
    }
    let mut kept = vec![pair.to_owned()];
    let mut path = None;
    for part in parts {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        match name.trim().to_ascii_lowercase().as_str() {
            "domain" => {}
            "path" => path = Some(value.trim().to_owned()),
            _ => kept.push(part.to_owned()),
        }
    }
    match (route, path) {
        (PortRoute::Host, None) => {}
        (PortRoute::Host, Some(path)) => kept.push(format!("Path={path}")),
        (PortRoute::Path, path) => {
            let path = path.filter(|path| path.starts_with('/')).unwrap_or_else(|| "/".to_owned());
            let path = path.strip_prefix(&target.prefix()).filter(|rest| rest.starts_with('/')).unwrap_or(&path);
            kept.push(format!("Path={}{path}", target.prefix()));
        }
    }
    HeaderValue::from_str(&kept.join("; ")).ok()
}

/// Whether a web page of this very origin sent the request.
pub fn is_own_origin(headers: &HeaderMap, outer: Option<&str>) -> bool {
    let mut given = headers.get_all(header::ORIGIN).iter();
    let (Some(origin), None) = (given.next(), given.next()) else { return false };
    let origin = origin.to_str().unwrap_or_default();
    let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    authority.zip(outer).is_some_and(|(origin, outer)| origin.eq_ignore_ascii_case(outer))
}

/// How far a request is from the page that sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// No page, or one of this origin; or the user, who typed or followed a link.
    Trusted,
    /// A page of another origin.
    Foreign,
}

/// Judges the sender of a request by the headers that pages cannot set.
pub fn sender(method: &Method, headers: &HeaderMap, outer: Option<&str>) -> Sender {
    let says = |name: &str, values: &[&str]| {
        headers.get(name).is_some_and(|value| values.iter().any(|wanted| value.as_bytes() == wanted.as_bytes()))
    };
    let is_own = is_own_origin(headers, outer);
    let is_navigation = method.is_safe() && says("sec-fetch-mode", &["navigate"]);
    if is_navigation {
        return Sender::Trusted;
    }
    let is_foreign = headers.contains_key(header::ORIGIN) && !is_own;
    if is_foreign || says("sec-fetch-site", &["cross-site", "same-site"]) { Sender::Foreign } else { Sender::Trusted }
}

fn drop_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<_> = list(headers, &header::CONNECTION).filter_map(|name| name.parse::<HeaderName>().ok()).collect();
    for name in HOP_BY_HOP.into_iter().chain(named) {
        headers.remove(name);
    }
}

/// Keeps the parts of a list for which `holds`.
fn keep(headers: &mut HeaderMap, name: &HeaderName, joint: &str, separator: char, holds: impl Fn(&str) -> bool) {
    let lines = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    let parts: Vec<_> = lines.flat_map(|line| line.split(separator)).map(str::trim).collect();
    if parts.iter().all(|part| holds(part)) {
        return;
    }
    let kept = parts.into_iter().filter(|part| holds(part)).collect::<Vec<_>>().join(joint);
    headers.remove(name);
    if let Some(kept) = HeaderValue::from_str(&kept).ok().filter(|kept| !kept.is_empty()) {
        headers.insert(name.clone(), kept);
    }
}

fn list<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> + use<'a> {
    let lines = headers.get_all(name).into_iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).filter(|part| !part.is_empty())
}

#[cfg(test)]
#[path = "port_headers_tests.rs"]
mod tests;
