//! Parses every kind of variable in the table. `None` means that the text is invalid.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

pub use baton_protocol::limits::size;
use baton_protocol::{id::Sha256Name, limits::Bounds, metadata::PlainWords, sandbox_network::Egress};

pub fn text(text: &str) -> Option<String> {
    Some(text.to_owned())
}

pub fn path(text: &str) -> Option<PathBuf> {
    Some(PathBuf::from(text))
}

pub fn names(text: &str) -> Option<Vec<String>> {
    Some(pieces(text, ',').map(str::to_owned).collect())
}

pub fn digests(text: &str) -> Option<Vec<Sha256Name>> {
    pieces(text, ',').map(|digest| Sha256Name::parse(digest).ok()).collect()
}

/// Parses names that cannot be guessed: 32 bytes are the length of the HMAC's digest.
pub fn keys(text: &str) -> Option<Vec<String>> {
    names(text).filter(|keys| !keys.is_empty() && keys.iter().all(|key| key.len() >= 32))
}

pub(super) fn pieces(text: &str, separator: char) -> impl Iterator<Item = &str> {
    text.split(separator).map(str::trim).filter(|piece| !piece.is_empty())
}

pub fn port(text: &str) -> Option<u16> {
    text.parse().ok()
}

pub fn address(text: &str) -> Option<SocketAddr> {
    text.parse().ok()
}

/// The inner `None` means off.
pub fn address_or_off(text: &str) -> Option<Option<SocketAddr>> {
    if is_off(text) { Some(None) } else { address(text).map(Some) }
}

/// A domain name in lower case; the inner `None` means off.
pub fn domain_or_off(text: &str) -> Option<Option<String>> {
    if is_off(text) {
        return Some(None);
    }
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(is_word)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    // With a port of a sandbox before it, a name may have 253 bytes.
    let fits = text.len() <= 200 && text.split('.').all(is_label) && text.parse::<std::net::Ipv4Addr>().is_err();
    fits.then(|| Some(text.to_ascii_lowercase()))
}

pub fn url(text: &str) -> Option<String> {
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"))?;
    (!rest.is_empty() && !rest.contains(char::is_whitespace)).then(|| text.trim_end_matches('/').to_owned())
}

/// Parses a URL, or the host and port of a server without TLS.
pub fn url_or_host(text: &str) -> Option<String> {
    url(text).or_else(|| url(&format!("http://{text}")).filter(|_| !text.contains("://")))
}

pub fn yes_no(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Some(true),
        "false" | "no" | "off" | "0" => Some(false),
        _ => None,
    }
}

pub fn plain_words(text: &str) -> Option<PlainWords> {
    match text {
        "documents" => Some(PlainWords::Documents),
        "predecessor" => Some(PlainWords::Predecessor),
        _ => None,
    }
}

/// Parses whether something is optional.
pub fn is_optional(text: &str) -> Option<bool> {
    match text {
        "required" => Some(false),
        "optional" => Some(true),
        _ => None,
    }
}

pub fn count(text: &str) -> Option<u32> {
    text.parse().ok().filter(|count| *count > 0)
}

pub fn count_or_none(text: &str) -> Option<u32> {
    if is_off(text) { Some(0) } else { count(text) }
}

pub fn factor(text: &str) -> Option<f64> {
    text.parse().ok().filter(|factor| (0.02..=50.0).contains(factor))
}

pub fn span(text: &str) -> Option<Duration> {
    humantime::parse_duration(text).ok().filter(|span| !span.is_zero())
}

/// The inner `None` means off.
pub fn span_or_off(text: &str) -> Option<Option<Duration>> {
    if is_off(text) { Some(None) } else { span(text).map(Some) }
}

fn is_off(text: &str) -> bool {
    ["off", "0", "0s", "never", "none"].contains(&text.to_ascii_lowercase().as_str())
}

/// A number of events per period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    pub count: u32,
    pub per: Duration,
}

/// The inner `None` means no limit.
pub fn rate(text: &str) -> Option<Option<Rate>> {
    if is_off(text) {
        return Some(None);
    }
    let (times, per) = text.split_once('/')?;
    let per = match per.trim() {
        "s" => Duration::from_secs(1),
        "m" => Duration::from_secs(60),
        "h" => Duration::from_secs(3600),
        _ => return None,
    };
    Some(Some(Rate { count: count(times.trim())?, per }))
}

pub fn egress(text: &str) -> Option<Egress> {
    text.parse().ok()
}

pub fn limits(text: &str) -> Option<Bounds> {
    Bounds::parse(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn off_is_not_a_duration_of_nothing() {
        assert_eq!(span_or_off("off"), Some(None));
        assert_eq!(span_or_off("0"), Some(None));
        assert_eq!(span_or_off("90s"), Some(Some(Duration::from_secs(90))));
        assert_eq!(span_or_off("soon"), None);
        assert_eq!(span("0s"), None);
        assert_eq!(span("15"), None, "a number without a unit says nothing");
    }

    #[test]
    fn none_is_a_count_only_where_that_means_something() {
        assert_eq!((count("3"), count("0"), count("-1"), count("off")), (Some(3), None, None, None));
        assert_eq!((count_or_none("3"), count_or_none("0"), count_or_none("off")), (Some(3), Some(0), Some(0)));
        assert_eq!((count_or_none("-1"), count_or_none("some")), (None, None));
    }

    #[test]
    fn rates_have_a_count_and_a_unit() {
        assert_eq!(rate("10/s"), Some(Some(Rate { count: 10, per: Duration::from_secs(1) })));
        assert_eq!(rate("5/m"), Some(Some(Rate { count: 5, per: Duration::from_secs(60) })));
        assert_eq!(rate("off"), Some(None));
        for text in ["10", "/s", "0/s", "1/day", "-1/s"] {
            assert_eq!(rate(text), None, "{text}");
        }
    }

    #[test]
    fn lists_drop_empty_pieces() {
        assert_eq!(names(" a, b,,"), Some(vec!["a".to_owned(), "b".to_owned()]));
    }

    #[test]
    fn an_endpoint_is_a_url_without_a_slash_at_its_end() {
        assert_eq!(url("http://127.0.0.1:4443/").as_deref(), Some("http://127.0.0.1:4443"));
        assert_eq!(url("127.0.0.1:4443"), None);
        assert_eq!(url("http://"), None);
    }
}
