//! The fields of one JSON object, read one by one, so that an error names its field.
//!
//! Only known fields are kept, and as raw text: a hostile message costs no more memory
//! than its own length, however deep or wide it is.

use std::{collections::BTreeMap, fmt, time::Duration};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor},
};
use serde_json::{Value, value::RawValue};

use super::sandbox_config::Idle;
use crate::{limits::Limits, sandbox_network::SandboxNetwork};

/// The longest value of `network`: more than its rules can have.
const MOST_NETWORK: usize = 128 << 10;

/// Every field name of every request.
const KNOWN: [&str; 52] = [
    "action",
    "archive",
    "argv",
    "code",
    "cols",
    "count",
    "cwd",
    "data",
    "depth",
    "details",
    "enable_checkpoint",
    "enable_idle_timeout_auto_checkpoint",
    "enable_sandbox_handoff",
    "encoding",
    "env",
    "eof",
    "event",
    "exec_id",
    "filesystem_snapshot_name",
    "from_checkpoint",
    "full",
    "idle_timeout",
    "keep_running",
    "labels",
    "language",
    "length",
    "limits",
    "live",
    "mode",
    "mtime_ms",
    "name",
    "network",
    "offset",
    "offsets",
    "on_incompatible",
    "parents",
    "path",
    "peek",
    "persistent",
    "pty",
    "recursive",
    "rows",
    "signal",
    "size",
    "source_token",
    "stderr",
    "stdin",
    "stdout",
    "timeout",
    "to",
    "ttl",
    "user",
];

#[derive(Debug)]
pub struct Fields<'a>(BTreeMap<&'static str, &'a RawValue>);

/// A field with an invalid value.
#[derive(Debug, PartialEq, Eq)]
pub struct Wrong {
    pub field: &'static str,
    pub message: String,
}

impl<'a> Fields<'a> {
    /// Returns `None` if the text is not a JSON object.
    pub fn parse(text: &'a str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    pub fn has(&self, field: &'static str) -> bool {
        debug_assert!(KNOWN.contains(&field), "{field} is missing in KNOWN");
        self.0.contains_key(field)
    }

    /// `null` counts as absent.
    pub fn optional<T: DeserializeOwned>(&self, field: &'static str, expected: &str) -> Result<Option<T>, Wrong> {
        match self.raw(field) {
            None => Ok(None),
            Some(raw) if raw.get() == "null" => Ok(None),
            Some(raw) => match serde_json::from_str(raw.get()) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(wrong(field, expected)),
            },
        }
    }

    pub fn required<T: DeserializeOwned>(&self, field: &'static str, expected: &str) -> Result<T, Wrong> {
        self.optional(field, expected)?.ok_or_else(|| Wrong { field, message: format!("`{field}` is missing.") })
    }

    pub fn flag(&self, field: &'static str) -> Result<bool, Wrong> {
        Ok(self.optional(field, "true or false")?.unwrap_or(false))
    }

    pub fn string(&self, field: &'static str) -> Result<Option<String>, Wrong> {
        self.optional(field, "a string")
    }

    /// Reads a name as one of the parsed types; the error text includes the type's rule.
    pub fn name<T: std::str::FromStr<Err = crate::id::Invalid>>(
        &self,
        field: &'static str,
    ) -> Result<Option<T>, Wrong> {
        let Some(text) = self.string(field)? else { return Ok(None) };
        text.parse().map(Some).map_err(|invalid| Wrong { field, message: format!("`{field}` is {invalid}.") })
    }

    pub fn strings(&self, field: &'static str) -> Result<BTreeMap<String, String>, Wrong> {
        Ok(self.optional(field, "an object of strings")?.unwrap_or_default())
    }

    /// Reads every known limit, each checked against its own bounds; the error names an unknown one.
    pub fn limits(&self) -> Result<Limits, Wrong> {
        let given = self.optional::<BTreeMap<String, Box<RawValue>>>("limits", "an object")?;
        let mut limits = Limits::default();
        for (name, raw) in given.into_iter().flatten() {
            // A number or a short text; anything longer is neither and not worth the memory.
            let value = if raw.get().len() <= 64 { serde_json::from_str(raw.get()).ok() } else { None };
            let set = limits.set(&name, &value.unwrap_or(Value::Bool(false))).and_then(|()| limits.check());
            set.map_err(|message| Wrong { field: "limits", message })?;
        }
        Ok(limits)
    }

    /// Reads what the sandbox may reach; the error names what is wrong.
    pub fn network(&self) -> Result<SandboxNetwork, Wrong> {
        let Some(raw) = self.optional::<Box<RawValue>>("network", "an object")? else {
            return Ok(SandboxNetwork::default());
        };
        // A longer one is not worth the memory of its values.
        let value = if raw.get().len() <= MOST_NETWORK { serde_json::from_str(raw.get()).ok() } else { None };
        SandboxNetwork::from_client(&value.unwrap_or(Value::Bool(false)))
            .map_err(|message| Wrong { field: "network", message })
    }

    /// Reads seconds as a number, or a text such as `5m`; must be greater than zero.
    pub fn duration(&self, field: &'static str) -> Result<Option<Duration>, Wrong> {
        const EXPECTED: &str = "a positive number of seconds or a duration such as \"5m\"";
        let Some(given) = self.optional::<Span>(field, EXPECTED)? else { return Ok(None) };
        let span = match given {
            Span::Seconds(seconds) => Duration::try_from_secs_f64(seconds).ok(),
            Span::Text(text) if text.len() <= 64 => humantime::parse_duration(&text).ok(),
            Span::Text(_) => None,
        };
        // A hundred years are enough, and sums of them do not overflow.
        let longest = Duration::from_secs(100 * 365 * 86_400);
        match span {
            Some(span) if !span.is_zero() && span <= longest => Ok(Some(span)),
            Some(_) | None => Err(wrong(field, EXPECTED)),
        }
    }

    /// Reads `idle_timeout`: a duration, or `null` for never.
    pub fn idle_timeout(&self) -> Result<Option<Idle>, Wrong> {
        if self.is_null("idle_timeout") {
            return Ok(Some(Idle::Never));
        }
        Ok(self.duration("idle_timeout")?.map(Idle::After))
    }

    fn is_null(&self, field: &'static str) -> bool {
        self.raw(field).is_some_and(|raw| raw.get() == "null")
    }

    fn raw(&self, field: &'static str) -> Option<&'a RawValue> {
        debug_assert!(KNOWN.contains(&field), "{field} is missing in KNOWN");
        self.0.get(field).copied()
    }
}

pub fn wrong(field: &'static str, expected: &str) -> Wrong {
    Wrong { field, message: format!("`{field}` must be {expected}.") }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Span {
    Seconds(f64),
    Text(String),
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    match KNOWN.iter().find(|known| **known == key) {
                        // If a field occurs twice, the last one counts.
                        Some(known) => {
                            fields.insert(*known, map.next_value()?);
                        }
                        None => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_object_has_fields() {
        for text in ["", "[]", "1", "null", "\"x\"", "{", "{} {}", "{\"a\":1e999}x", "\u{0}"] {
            assert!(Fields::parse(text).is_none(), "{text:?}");
        }
        assert!(Fields::parse("{}").is_some());
    }

    #[test]
    fn depth_and_repetition_are_harmless() {
        let deep = format!("{{\"x\":{}{},\"code\":\"a\",\"code\":\"b\"}}", "[".repeat(100_000), "]".repeat(100_000));
        let fields = Fields::parse(&deep).unwrap();
        assert_eq!(fields.string("code"), Ok(Some("b".into())));
        let deep = format!("{{\"code\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(Fields::parse(&deep).unwrap().string("code").is_err());
    }

    #[test]
    fn a_duration_is_seconds_or_a_text() {
        let read = |text: &str| Fields::parse(&format!("{{\"ttl\":{text}}}")).unwrap().duration("ttl");
        assert_eq!(read("2"), Ok(Some(Duration::from_secs(2))));
        assert_eq!(read("0.5"), Ok(Some(Duration::from_millis(500))));
        assert_eq!(read("\"5m\""), Ok(Some(Duration::from_secs(300))));
        assert_eq!(read("null"), Ok(None));
        for bad in ["0", "-1", "1e300", "123456789012345678901234567890", "\"\"", "\"soon\"", "true", "[]", "\"9999y\""]
        {
            let error = read(bad).unwrap_err();
            assert!(error.message.starts_with("`ttl` must be a positive number"), "{bad}: {}", error.message);
        }
    }
}
