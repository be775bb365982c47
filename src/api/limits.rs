//! Who may knock at all: keys, origins and how often.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use axum::http::{HeaderMap, StatusCode, header};
use baton_protocol::id::Tenant;

use super::{Settings, token};
use crate::{clock::Moment, traces::Traceparent};

/// So many callers are remembered. When it is more, those who could come freely are forgotten,
/// and if that is nobody, no new one may come.
const MOST_CALLERS: usize = 10_000;
const TIDY_EVERY: Duration = Duration::from_secs(1);

/// How often one caller may come: a burst, and then so many a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    pub burst: u32,
    pub per_second: f64,
}

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    at: Moment,
}

#[derive(Debug, Default)]
struct Callers {
    buckets: HashMap<String, Bucket>,
    /// Looking through all of them is dear: once a second must do.
    tidied_at: Option<Moment>,
}

#[derive(Debug, Default)]
pub struct Limiter(Mutex<Callers>);

impl Limiter {
    /// Whether `caller` may come once more now.
    pub fn admit(&self, rate: Rate, caller: &str, now: Moment) -> bool {
        let mut callers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Callers { buckets, tidied_at } = &mut *callers;
        let full = f64::from(rate.burst);
        let filled = |bucket: &Bucket| (bucket.tokens + (now - bucket.at).as_secs_f64() * rate.per_second).min(full);
        if buckets.len() >= MOST_CALLERS && !buckets.contains_key(caller) {
            if tidied_at.is_none_or(|at| now - at >= TIDY_EVERY) {
                *tidied_at = Some(now);
                buckets.retain(|_, bucket| filled(bucket) < full);
            }
            if buckets.len() >= MOST_CALLERS {
                return false;
            }
        }
        let bucket = buckets.entry(caller.to_owned()).or_insert(Bucket { tokens: full, at: now });
        *bucket = Bucket { tokens: filled(bucket), at: now };
        let admitted = bucket.tokens >= 1.0;
        if admitted {
            bucket.tokens -= 1.0;
        }
        admitted
    }
}

/// A page of a browser names itself; everything else has no origin and may come.
pub fn check_origin(headers: &HeaderMap, origins: &[String]) -> Result<(), StatusCode> {
    let mut given = headers.get_all(header::ORIGIN).iter();
    let Some(origin) = given.next() else { return Ok(()) };
    let allowed = |origin: &str| origins.iter().any(|known| known == "*" || known.eq_ignore_ascii_case(origin));
    match (origin.to_str(), given.next()) {
        (Ok(origin), None) if allowed(origin) => Ok(()),
        _ => Err(StatusCode::FORBIDDEN),
    }
}

/// The trace of which a request says it is a part.
pub fn traceparent(headers: &HeaderMap) -> Option<Traceparent> {
    header_text(headers, "traceparent").and_then(|text| Traceparent::parse(text.trim()))
}

/// Needed for `/create` and `/execute` where keys are configured: whom the key belongs to. Without keys nobody is told
/// apart, and there are no tenants.
pub fn check_key(headers: &HeaderMap, settings: &Settings) -> Result<Option<Tenant>, StatusCode> {
    if settings.api_keys.is_empty() {
        return Ok(None);
    }
    let key = header_text(headers, "x-api-key").or_else(|| offered(headers, "baton.key."));
    let tenant = token::tenant_of(key.as_deref(), &settings.api_keys);
    tenant.map(|tenant| Some(tenant.clone())).ok_or(StatusCode::UNAUTHORIZED)
}

pub fn check_admin(headers: &HeaderMap, settings: &Settings) -> Result<(), StatusCode> {
    let Some(admin) = &settings.admin_key else { return Err(StatusCode::FORBIDDEN) };
    let key = header_text(headers, "x-api-key");
    if token::is_one_of(key.as_deref(), std::slice::from_ref(admin)) { Ok(()) } else { Err(StatusCode::UNAUTHORIZED) }
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

/// Whom a request comes from. Behind a proxy that is the last address it added itself.
pub fn caller(headers: &HeaderMap, peer: &str, is_proxied: bool) -> String {
    let forwarded = || header_text(headers, "x-forwarded-for")?.rsplit(',').next().map(|last| last.trim().to_owned());
    let caller = is_proxied.then(forwarded).flatten().unwrap_or_else(|| peer.to_owned());
    caller.chars().take(64).collect()
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

    #[test]
    fn a_caller_behind_the_proxy_is_the_one_the_proxy_saw() {
        let given = headers(&[("x-forwarded-for", "1.1.1.1, 2.2.2.2")]);
        assert_eq!(caller(&given, "127.0.0.1", true), "2.2.2.2");
        assert_eq!(caller(&given, "127.0.0.1", false), "127.0.0.1");
        assert_eq!(caller(&headers(&[]), "127.0.0.1", true), "127.0.0.1");
    }

    #[test]
    fn a_burst_is_admitted_and_then_the_rate() {
        let (limiter, rate) = (Limiter::default(), Rate { burst: 3, per_second: 2.0 });
        let at = |ms| Moment(Duration::from_millis(ms));
        assert_eq!((0..5).filter(|_| limiter.admit(rate, "a", at(0))).count(), 3);
        assert!(limiter.admit(rate, "b", at(0)));
        assert!(!limiter.admit(rate, "a", at(400)));
        assert!(limiter.admit(rate, "a", at(900)));
        for caller in 0..2 * MOST_CALLERS {
            limiter.admit(rate, &caller.to_string(), at(1000));
        }
        assert_eq!(limiter.0.lock().unwrap().buckets.len(), MOST_CALLERS);
        assert!(limiter.admit(rate, "new", at(5000)), "the quiet ones are forgotten");
        assert_eq!(limiter.0.lock().unwrap().buckets.len(), 1);
    }
}
