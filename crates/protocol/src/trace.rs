//! The position of a request in a trace: the `traceparent` of the W3C Trace Context, as carried by an HTTP header
//! and by `metadata.json`.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// The parent of a span. Neither id is ever zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traceparent {
    /// The trace that the request belongs to.
    pub trace: [u8; 16],
    /// The span that the next one is a child of.
    pub span: [u8; 8],
    /// The trace is being recorded.
    pub sampled: bool,
}

impl Traceparent {
    /// Returns `None` if the text is invalid; the request is then not traced. Later versions may append to the flags.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let [version] = bytes(parts.next()?)?;
        let (trace, span) = (bytes(parts.next()?)?, bytes(parts.next()?)?);
        let [flags] = bytes(parts.next()?)?;
        let fits = if version == 0 { parts.next().is_none() } else { version != 0xff };
        let is_set = trace != [0; 16] && span != [0; 8];
        (fits && is_set).then_some(Self { trace, span, sampled: flags & 1 == 1 })
    }

    /// The trace id alone, as collectors and log lines show it.
    pub fn trace_id(&self) -> String {
        crate::id::hex(&self.trace)
    }
}

/// Parses two lower-case hexadecimal digits per byte.
fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N || !digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

impl fmt::Display for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = crate::id::hex;
        write!(f, "00-{}-{}-{:02x}", hex(&self.trace), hex(&self.span), u8::from(self.sampled))
    }
}

impl Serialize for Traceparent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Deserializes a field of a record. An invalid trace context becomes `None`: a sandbox does not depend on it.
pub fn lenient<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Traceparent>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    Ok(value.as_str().and_then(Traceparent::parse))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_context_is_written_as_it_was_read() {
        let context = Traceparent::parse(TEXT).unwrap();
        assert!(context.sampled);
        assert_eq!(context.to_string(), TEXT);
        assert_eq!(context.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        let unsampled = TEXT.replace("-01", "-00");
        assert_eq!(Traceparent::parse(&unsampled).unwrap().to_string(), unsampled);
    }

    #[test]
    fn a_later_version_may_say_more_and_the_first_may_not() {
        let more = format!("{TEXT}-more");
        assert_eq!(Traceparent::parse(&more), None);
        assert_eq!(Traceparent::parse(&more.replacen("00", "01", 1)), Traceparent::parse(TEXT));
        assert_eq!(Traceparent::parse(&TEXT.replacen("00", "ff", 1)), None);
    }

    #[test]
    fn what_is_no_context_is_none() {
        let zero_trace = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
        let zero_span = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", "0".repeat(16));
        for text in ["", "-", "00", &TEXT[..54], &TEXT.to_uppercase(), &zero_trace, &zero_span, &TEXT.replace('b', "é")]
        {
            assert_eq!(Traceparent::parse(text), None, "{text}");
        }
    }
}
