//! Who may reach a port: the bearer of the sandbox's token, which a browser keeps in a cookie.

use std::{collections::HashMap, sync::Arc, time::Duration};

use axum::http::{HeaderMap, HeaderValue, Uri, header};
use baton_protocol::{id::SandboxId, metadata::Metadata};
use parking_lot::Mutex;

use super::{
    port_refusal::PortRefusal,
    port_route::{PortRoute, PortTarget, query_token},
};
use crate::{
    api::{Api, Tracked, caller::Caller, public_message, rate_limit, token},
    clock::Moment,
};

/// The cookie with the token, with the prefixes that keep other hosts from setting it where https allows them.
pub const COOKIES: [&str; 3] = ["baton_token", "__Secure-baton_token", "__Host-baton_token"];
/// How long the record of a sandbox that runs here is used again: a page is many requests.
const RECENT: Duration = Duration::from_secs(5);
const MOST_RECENT: usize = 4_096;

pub fn is_cookie_of_ours(name: &str) -> bool {
    COOKIES.iter().any(|ours| ours.eq_ignore_ascii_case(name.trim()))
}

/// The tokens that a request shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShownToken {
    Absent,
    /// In a header or as a subprotocol: no page can send it without knowing it.
    Explicit(String),
    /// In the query, as in a link.
    Query(String),
    /// A browser sent them. A neighbouring host can add some, so the right one may be any of them.
    Cookies(Vec<String>),
}

impl ShownToken {
    pub fn of(headers: &HeaderMap, uri: &Uri) -> Self {
        let explicit = rate_limit::header_text(headers, "x-sandbox-token");
        if let Some(token) = explicit.or_else(|| rate_limit::offered(headers, "baton.token.")) {
            return Self::Explicit(token);
        }
        if let Some(token) = query_token(uri) {
            return Self::Query(token.to_owned());
        }
        let lines = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
        let pairs = lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
        let tokens: Vec<_> =
            pairs.filter(|(name, _)| is_cookie_of_ours(name)).map(|(_, value)| value.to_owned()).collect();
        if tokens.is_empty() { Self::Absent } else { Self::Cookies(tokens) }
    }

    fn tokens(&self) -> &[String] {
        match self {
            Self::Absent => &[],
            Self::Explicit(token) | Self::Query(token) => std::slice::from_ref(token),
            Self::Cookies(tokens) => tokens,
        }
    }

    /// Whether one of them has this hash.
    fn is_right(&self, sha256: &str) -> bool {
        self.tokens().iter().fold(false, |found, token| found | token::matches(Some(token), sha256))
    }
}

/// The cookie for a browser that has shown `token` in a link.
pub fn cookie(token: &str, target: &PortTarget, route: PortRoute, is_https: bool) -> Option<HeaderValue> {
    let [plain, secure, of_host] = COOKIES;
    let (name, suffix) = match (is_https, route) {
        (false, _) => (plain, ""),
        (true, PortRoute::Path) => (secure, "; Secure"),
        (true, PortRoute::Host) => (of_host, "; Secure"),
    };
    let path = target.cookie_path(route);
    HeaderValue::from_str(&format!("{name}={token}; Path={path}; HttpOnly; SameSite=Lax{suffix}")).ok()
}

/// Records that were read a moment ago, of sandboxes that run here.
#[derive(Debug, Default)]
pub struct RecentRecords(Mutex<HashMap<SandboxId, (Arc<Metadata>, Moment)>>);

impl RecentRecords {
    fn get(&self, id: &SandboxId, now: Moment) -> Option<Arc<Metadata>> {
        let recent = self.0.lock();
        recent.get(id).filter(|(_, read)| now - *read < RECENT).map(|(found, _)| found.clone())
    }

    fn put(&self, id: &SandboxId, found: &Arc<Metadata>, now: Moment) {
        let mut recent = self.0.lock();
        if recent.len() >= MOST_RECENT {
            recent.retain(|_, (_, read)| now - *read < RECENT);
        }
        if recent.len() < MOST_RECENT {
            recent.insert(id.clone(), (found.clone(), now));
        }
    }

    pub fn forget(&self, id: &SandboxId) {
        self.0.lock().remove(id);
    }
}

impl Api {
    /// The record of the sandbox, if the request shows its token. Failures are counted as those of an attach are.
    pub(super) async fn find_for_port(
        &self,
        id: Option<&SandboxId>,
        shown: &ShownToken,
        caller: Caller,
        connection: &Tracked,
    ) -> Result<Arc<Metadata>, PortRefusal> {
        let is_absent = *shown == ShownToken::Absent;
        let is_known = |id: &SandboxId| match shown {
            ShownToken::Absent => self.is_known(id, None),
            ShownToken::Explicit(_) | ShownToken::Query(_) | ShownToken::Cookies(_) => {
                shown.tokens().iter().any(|token| self.is_known(id, Some(token)))
            }
        };
        if self.is_limited(caller) && !id.is_some_and(is_known) {
            return Err(PortRefusal::Limited);
        }
        // A malformed id was never issued, so nothing is looked up for it.
        let Some(id) = id else {
            self.charge(caller);
            return Err(PortRefusal::NotFound);
        };
        let is_right = |found: &Metadata| {
            (is_absent && self.settings.is_token_optional) || shown.is_right(&found.spec.token_sha256)
        };
        let recent = self.recent_records.get(id, self.clock.now()).filter(|_| self.bus.is_held(id));
        let found = match recent.filter(|found| is_right(found)) {
            Some(found) => found,
            None => {
                let found = self.records.find(id).await;
                let found = found.map_err(|error| PortRefusal::Unavailable(public_message(&error)))?;
                let Some(found) = found.map(Arc::new) else {
                    self.charge(caller);
                    return Err(PortRefusal::NotFound);
                };
                if !is_right(&found) {
                    self.charge(caller);
                    return Err(PortRefusal::Denied);
                }
                self.known_tokens.remember(id, &found.spec.token_sha256);
                self.recent_records.put(id, &found, self.clock.now());
                found
            }
        };
        if connection.prove() { Ok(found) } else { Err(PortRefusal::Crowded) }
    }
}
