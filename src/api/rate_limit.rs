//! Authentication and rate limits, checked before anything else: keys, origins, and how often a caller may fail.

use std::{collections::HashMap, time::Duration};

use axum::{
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use baton_protocol::{id::Tenant, printable::printable_start};
use parking_lot::Mutex;

use super::{ApiSettings, caller::Caller, token};
use crate::{clock::Moment, config::variables::ORIGINS, traces::Traceparent};

/// How many callers are remembered. Above that, callers without failures are forgotten; if there are none, all new ones
/// share one bucket.
const MOST_CALLERS: usize = 10_000;
/// How many characters of an origin are shown.
const LONGEST_ORIGIN: usize = 200;
const TIDY_EVERY: Duration = Duration::from_secs(1);
/// How many bursts a caller can be in debt: many requests may be in progress before the first of them fails.
const MOST_BEHIND: f64 = 10.0;

/// How often one caller may fail: a burst, and then this many times per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FailureRate {
    pub burst: u32,
    pub per_second: f64,
}

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    at: Moment,
}

impl Bucket {
    fn filled(&self, rate: FailureRate, now: Moment) -> f64 {
        (self.tokens + (now - self.at).as_secs_f64() * rate.per_second).min(f64::from(rate.burst))
    }
}

#[derive(Debug, Default)]
struct Callers {
    /// The bucket under `None` is shared by all callers that did not fit.
    buckets: HashMap<Option<Caller>, Bucket>,
    /// When all buckets were last scanned, which is expensive: at most once a second.
    tidied_at: Option<Moment>,
}

impl Callers {
    fn key(&self, caller: Caller) -> Option<Caller> {
        let is_full = self.buckets.len() >= MOST_CALLERS;
        Some(caller).filter(|caller| !is_full || self.buckets.contains_key(&Some(*caller)))
    }
}

/// Counts failures per caller. Successful requests are never counted.
#[derive(Debug, Default)]
pub struct Limiter(Mutex<Callers>);

impl Limiter {
    /// Whether `caller` has failed too often recently.
    pub fn is_limited(&self, rate: FailureRate, caller: Caller, now: Moment) -> bool {
        let callers = self.0.lock();
        callers.buckets.get(&callers.key(caller)).is_some_and(|bucket| bucket.filled(rate, now) < 1.0)
    }

    /// Counts a failure of `caller`.
    pub fn charge(&self, rate: FailureRate, caller: Caller, now: Moment) {
        let mut callers = self.0.lock();
        let full = f64::from(rate.burst);
        if callers.key(caller).is_none() && callers.tidied_at.is_none_or(|at| now - at >= TIDY_EVERY) {
            callers.tidied_at = Some(now);
            callers.buckets.retain(|_, bucket| bucket.filled(rate, now) < full);
        }
        let key = callers.key(caller);
        let bucket = callers.buckets.entry(key).or_insert(Bucket { tokens: full, at: now });
        let tokens = (bucket.filled(rate, now) - 1.0).max(-MOST_BEHIND * full);
        *bucket = Bucket { tokens, at: now };
    }
}

/// Why a request is refused before anything else is looked at.
#[derive(Debug)]
pub enum EdgeRefusal {
    /// The web page that sent the request, which `BATON_ORIGINS` does not list.
    Origin(String),
    Status(StatusCode),
}

impl From<StatusCode> for EdgeRefusal {
    fn from(status: StatusCode) -> Self {
        Self::Status(status)
    }
}

impl IntoResponse for EdgeRefusal {
    fn into_response(self) -> Response {
        match self {
            Self::Status(status) => status.into_response(),
            Self::Origin(origin) => {
                let text = format!(
                    "This server refuses requests of web pages from the origin `{origin}`: its operator has to list the \
                     origin in {ORIGINS}.\n"
                );
                (StatusCode::FORBIDDEN, text).into_response()
            }
        }
    }
}

/// Checks the origin of a web page; other clients send none and are allowed.
pub fn check_origin(headers: &HeaderMap, origins: &[String]) -> Result<(), EdgeRefusal> {
    let mut given = headers.get_all(header::ORIGIN).iter();
    let Some(origin) = given.next() else { return Ok(()) };
    let allowed = |origin: &str| origins.iter().any(|known| known == "*" || known.eq_ignore_ascii_case(origin));
    match (origin.to_str(), given.next()) {
        (Ok(origin), None) if allowed(origin) => Ok(()),
        (origin, _) => {
            let origin = printable_start(origin.unwrap_or("?"), LONGEST_ORIGIN);
            tracing::warn!(origin, variable = %ORIGINS, "a web page was refused: its origin is not listed");
            Err(EdgeRefusal::Origin(origin))
        }
    }
}

/// The trace that a request says it is part of.
pub fn traceparent(headers: &HeaderMap) -> Option<Traceparent> {
    header_text(headers, "traceparent").and_then(|text| Traceparent::parse(text.trim()))
}

/// What a request shows of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// No keys are configured: every request is allowed, and there are no tenants.
    NotNeeded,
    /// A key of this tenant; the operator's key has none.
    Right(Option<Tenant>),
    Wrong,
}

/// The key of a request to `/create` or `/execute`, which need one if keys are configured.
pub fn api_key(headers: &HeaderMap, settings: &ApiSettings) -> Key {
    let key = header_text(headers, "x-api-key").or_else(|| offered(headers, "baton.key."));
    if settings.api_keys.is_empty() {
        return Key::NotNeeded;
    }
    let tenant = token::tenant_of(key.as_deref(), &settings.api_keys);
    tenant.map_or(Key::Wrong, |tenant| Key::Right(Some(tenant.clone())))
}

/// The key of a request to `/sandboxes`, which always needs one: the operator's, or one of a tenant for its own
/// sandboxes. `NotNeeded` means that the server has no key at all.
pub fn list_key(headers: &HeaderMap, settings: &ApiSettings) -> Key {
    let key = header_text(headers, "x-api-key");
    let is_admin = settings.admin_key.iter().any(|admin| token::is_one_of(key.as_deref(), &[admin.to_owned()]));
    if is_admin {
        return Key::Right(None);
    }
    match api_key(headers, settings) {
        Key::NotNeeded if settings.admin_key.is_some() => Key::Wrong,
        key @ (Key::NotNeeded | Key::Right(_) | Key::Wrong) => key,
    }
}

pub fn header_text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// What follows `prefix` in one of the offered subprotocols.
pub fn offered(headers: &HeaderMap, prefix: &str) -> Option<String> {
    let offers = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|offer| offer.to_str().ok());
    let mut names = offers.flat_map(|offer| offer.split(',')).map(str::trim);
    names.find_map(|name| name.strip_prefix(prefix)).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn origins_are_allowed_by_name_and_absence_is_no_origin() {
        let origins = ["https://app.example".to_owned()];
        let told = |pairs: &[(&'static str, &str)], origins: &[String]| check_origin(&headers(pairs), origins).is_ok();
        assert!(told(&[], &[]));
        assert!(told(&[("origin", "https://app.example")], &origins));
        for bad in [
            "https://evil.example",
            "null",
            "",
            "http://app.example",
            "https://app.example.evil.example",
            "https://app.example:8443",
            "https://app.example/",
        ] {
            assert!(!told(&[("origin", bad)], &origins), "{bad}");
        }
        assert!(!told(&[("origin", "https://app.example")], &[]));
        assert!(told(&[("origin", "https://any.example")], &["*".to_owned()]));
        let mut two = headers(&[("origin", "https://app.example")]);
        two.append("origin", "https://app.example".parse().unwrap());
        assert!(check_origin(&two, &origins).is_err());
    }

    #[test]
    fn an_offer_is_found_among_others() {
        let given = headers(&[("sec-websocket-protocol", "baton.v1, baton.token.abc,baton.key.k")]);
        assert_eq!(offered(&given, "baton.token.").as_deref(), Some("abc"));
        assert_eq!(offered(&given, "baton.key.").as_deref(), Some("k"));
        assert_eq!(offered(&headers(&[]), "baton.key."), None);
    }

    fn caller(number: usize) -> Caller {
        Caller::of(std::net::Ipv4Addr::from(number as u32).into())
    }

    #[test]
    fn a_burst_of_failures_is_answered_and_then_the_rate() {
        let (limiter, rate) = (Limiter::default(), FailureRate { burst: 3, per_second: 2.0 });
        let at = |ms| Moment(Duration::from_millis(ms));
        let fails = |caller, now| {
            let is_limited = limiter.is_limited(rate, caller, now);
            if !is_limited {
                limiter.charge(rate, caller, now);
            }
            !is_limited
        };
        assert_eq!((0..5).filter(|_| fails(caller(1), at(0))).count(), 3);
        assert!(fails(caller(2), at(0)), "another address is not meant");
        assert!(!fails(caller(1), at(400)));
        assert!(fails(caller(1), at(900)));
    }

    #[test]
    fn failures_that_were_under_way_together_are_all_counted_up_to_a_bound() {
        let (limiter, rate) = (Limiter::default(), FailureRate { burst: 3, per_second: 1.0 });
        let at = |seconds| Moment(Duration::from_secs(seconds));
        for _ in 0..10 {
            limiter.charge(rate, caller(1), at(0));
        }
        assert!(limiter.is_limited(rate, caller(1), at(7)));
        assert!(!limiter.is_limited(rate, caller(1), at(8)));
        for _ in 0..1000 {
            limiter.charge(rate, caller(1), at(8));
        }
        assert!(!limiter.is_limited(rate, caller(1), at(8 + 31)));
    }

    #[test]
    fn more_callers_than_are_remembered_share_one_bucket_until_others_are_quiet() {
        let (limiter, rate) = (Limiter::default(), FailureRate { burst: 3, per_second: 2.0 });
        let at = |ms| Moment(Duration::from_millis(ms));
        for number in 0..2 * MOST_CALLERS {
            limiter.charge(rate, caller(number), at(0));
        }
        assert_eq!(limiter.0.lock().buckets.len(), MOST_CALLERS + 1);
        assert!(!limiter.is_limited(rate, caller(0), at(0)));
        assert!(limiter.is_limited(rate, caller(3 * MOST_CALLERS), at(0)));
        limiter.charge(rate, caller(3 * MOST_CALLERS), at(60_000));
        assert_eq!(limiter.0.lock().buckets.len(), 1, "the quiet ones are forgotten");
    }
}
