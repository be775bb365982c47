//! Which port of which sandbox a request is for: by the beginning of its path, or by its host name.

use axum::http::{HeaderMap, Uri, header, uri::PathAndQuery};
use baton_protocol::id::SandboxId;

/// The domain below which every port of every sandbox has a host name of its own: `{port}-{id}.{domain}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortDomain(String);

impl PortDomain {
    pub fn new(domain: &str) -> Self {
        Self(domain.to_ascii_lowercase())
    }

    /// The host name of a port.
    pub fn host(&self, id: &SandboxId, port: u16) -> String {
        format!("{port}-{id}.{}", self.0)
    }

    /// The port that a request names as its host. `None` if it names anything else.
    pub fn target(&self, headers: &HeaderMap) -> Option<PortTarget> {
        let (name, _) = split_authority(host(headers)?);
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        let label = name.strip_suffix(&self.0)?.strip_suffix('.')?;
        let (port, id) = label.split_once('-')?;
        Some(PortTarget { id: SandboxId::parse(id).ok()?, port: port_number(port)? })
    }
}

/// One port of one sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortTarget {
    pub id: SandboxId,
    pub port: u16,
}

/// How a request reached its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortRoute {
    /// Below a path of the API's own origin, which is that of all other sandboxes too.
    Path,
    /// By a host name, which is an origin of its own.
    Host,
}

impl PortTarget {
    /// The path below which the port is reached, without a slash at the end.
    pub fn prefix(&self) -> String {
        format!("/sandboxes/{}/ports/{}", self.id, self.port)
    }

    /// The path of its cookie: everything below the prefix, or the whole host.
    pub fn cookie_path(&self, route: PortRoute) -> String {
        match route {
            PortRoute::Path => self.prefix() + "/",
            PortRoute::Host => "/".to_owned(),
        }
    }

    /// What the server inside is asked for, byte for byte as the client wrote it, without our token. `None` if the
    /// prefix is not followed by a slash.
    pub fn inner_path(&self, route: PortRoute, uri: &Uri) -> Option<PathAndQuery> {
        let path = match route {
            PortRoute::Path => uri.path().strip_prefix(&self.prefix())?,
            PortRoute::Host => uri.path(),
        };
        path.starts_with('/').then(|| path_and_query(path, uri.query()))?
    }
}

/// The name of the token in a query.
const TOKEN: &str = "sandbox_token";

fn is_token(parameter: &str) -> bool {
    parameter.split_once('=').map_or(parameter, |(name, _)| name) == TOKEN
}

/// The token in the query of a request. It is hex, so nothing in it is escaped.
pub fn query_token(uri: &Uri) -> Option<&str> {
    let parameter = uri.query()?.split('&').find(|parameter| is_token(parameter))?;
    Some(parameter.split_once('=').map_or("", |(_, value)| value))
}

/// Joins a path and a query without our token.
pub fn path_and_query(path: &str, query: Option<&str>) -> Option<PathAndQuery> {
    let kept: Vec<_> = query.unwrap_or_default().split('&').filter(|parameter| !is_token(parameter)).collect();
    let text = match kept.join("&") {
        empty if empty.is_empty() && query.is_none_or(|query| !query.is_empty()) => path.to_owned(),
        query => format!("{path}?{query}"),
    };
    text.parse().ok()
}

/// A decimal port in its one spelling.
pub fn port_number(text: &str) -> Option<u16> {
    let port: u16 = text.parse().ok()?;
    (port != 0 && port.to_string() == text).then_some(port)
}

/// The only `Host` of a request.
pub fn host(headers: &HeaderMap) -> Option<&str> {
    let mut given = headers.get_all(header::HOST).iter();
    let host = given.next()?.to_str().ok()?;
    given.next().is_none().then_some(host)
}

/// The name and the port of `name:port`.
pub fn split_authority(authority: &str) -> (&str, Option<&str>) {
    match authority.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (name, Some(port)),
        Some(_) | None => (authority, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";

    fn target(host: &str) -> Option<(String, u16)> {
        let headers = [(header::HOST, host.parse().unwrap())].into_iter().collect();
        PortDomain::new("Preview.Example").target(&headers).map(|target| (target.id.to_string(), target.port))
    }

    #[test]
    fn a_host_name_is_a_port_and_an_id_below_the_domain_and_fits_a_label() {
        for host in [
            format!("8000-{ID}.preview.example"),
            format!("8000-{ID}.preview.example:8443"),
            format!("8000-{ID}.PREVIEW.example."),
        ] {
            assert_eq!(target(&host), Some((ID.to_owned(), 8000)), "{host}");
        }
        for host in [
            "preview.example".to_owned(),
            "x.preview.example".to_owned(),
            format!("{ID}.preview.example"),
            format!("0-{ID}.preview.example"),
            format!("65536-{ID}.preview.example"),
            format!("08-{ID}.preview.example"),
            format!("+8-{ID}.preview.example"),
            format!("8000-{ID}.evil.example"),
            format!("8000-{ID}preview.example"),
            format!("8000-{ID}.preview.example.evil.example"),
            format!("a.8000-{ID}.preview.example"),
        ] {
            assert_eq!(target(&host), None, "{host}");
        }
        let id = SandboxId::parse(ID).unwrap();
        let host = PortDomain::new("preview.example").host(&id, u16::MAX);
        assert!(host.split('.').next().unwrap().len() <= 63, "{host}");
    }

    #[test]
    fn the_path_inside_is_what_the_client_wrote_without_prefix_and_token() {
        let target = PortTarget { id: SandboxId::parse(ID).unwrap(), port: 80 };
        for (uri, inner) in [
            ("/", Some("/")),
            ("/?", Some("/?")),
            ("/a%2fb/..//c?x=%20&y", Some("/a%2fb/..//c?x=%20&y")),
            ("/?sandbox_token=t", Some("/")),
            ("/a?x=1&sandbox_token=t&y=2", Some("/a?x=1&y=2")),
            ("/a?sandbox_tokens=t", Some("/a?sandbox_tokens=t")),
            ("", None),
            ("1/", None),
        ] {
            let given: Uri = format!("{}{uri}", target.prefix()).parse().unwrap();
            let found = target.inner_path(PortRoute::Path, &given);
            assert_eq!(found.as_ref().map(PathAndQuery::as_str), inner, "{uri}");
        }
        let given: Uri = format!("{}/x", target.prefix()).parse().unwrap();
        let found = target.inner_path(PortRoute::Host, &given).unwrap();
        assert_eq!(found.as_str(), format!("{}/x", target.prefix()), "on a host of its own nothing is cut off");
        assert_eq!(query_token(&"/?a=1&sandbox_token=t".parse().unwrap()), Some("t"));
        assert_eq!(query_token(&"/?sandbox_tokens=t".parse().unwrap()), None);
    }
}
