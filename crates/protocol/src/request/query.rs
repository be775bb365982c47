//! A config given as query parameters of `/create`, for clients that cannot send a first message.
//!
//! Each parameter becomes the field of the same name, so both forms share one reader and its error texts. JSON objects
//! are spelled out: `label=tier=free` and `env=LANG=C` may repeat, limits are `limits.memory=512MiB`, and
//! destinations are separated by commas: `egress=example.org:443,*.example.net`.

use serde_json::{Map, Value, json};

use super::{Fields, Refusal, SandboxConfig};

/// Parsed as `true` or `false`, as in JSON, or as `1` or `0`; any other text stays one.
const FLAGS: [&str; 5] =
    ["details", "enable_checkpoint", "enable_idle_timeout_auto_checkpoint", "enable_sandbox_handoff", "persistent"];
const DURATIONS: [&str; 2] = ["idle_timeout", "ttl"];
const TEXTS: [&str; 5] = ["cwd", "filesystem_snapshot_name", "from_checkpoint", "on_incompatible", "source_token"];

impl SandboxConfig {
    /// Returns the config in these parameters, and whether any of them but `details` was given: in that case the server
    /// does not wait for a first message. Parameters that do not describe the sandbox are ignored.
    pub fn from_query(parameters: &[(String, String)]) -> Result<(Self, bool), Refusal> {
        let mut fields = Map::new();
        for (name, value) in parameters {
            let name = name.as_str();
            if FLAGS.contains(&name) {
                fields.insert(name.to_owned(), flag(value));
            } else if DURATIONS.contains(&name) {
                fields.insert(name.to_owned(), duration(value));
            } else if TEXTS.contains(&name) {
                fields.insert(name.to_owned(), json!(value));
            } else if name == "label" {
                insert_pair(&mut fields, "labels", value);
            } else if name == "env" {
                insert_pair(&mut fields, "env", value);
            } else if name == "egress" {
                insert(&mut fields, "network", "egress", egress(value));
            } else if let Some(limit) = name.strip_prefix("limits.") {
                insert(&mut fields, "limits", limit, number_or_text(value));
            }
        }
        let is_given = fields.keys().any(|name| name != "details");
        let text = Value::Object(fields).to_string();
        let fields = Fields::parse(&text).expect("an object was written");
        Ok((Self::read(&fields)?, is_given))
    }
}

fn flag(value: &str) -> Value {
    match value {
        "true" | "1" => json!(true),
        "false" | "0" => json!(false),
        // The field's own reader refuses it and names the field.
        other => json!(other),
    }
}

fn duration(value: &str) -> Value {
    if value == "null" { Value::Null } else { number_or_text(value) }
}

/// A word, or destinations separated by commas.
fn egress(value: &str) -> Value {
    match value {
        "none" | "any" => json!(value),
        list => list.split(',').filter(|text| !text.is_empty()).collect(),
    }
}

fn number_or_text(value: &str) -> Value {
    value.parse::<f64>().ok().filter(|number| number.is_finite()).map_or_else(|| json!(value), |number| json!(number))
}

/// Inserts `NAME=VALUE` as one entry of an object. Without `=`, the object's own reader refuses it.
fn insert_pair(fields: &mut Map<String, Value>, object: &str, pair: &str) {
    match pair.split_once('=') {
        Some((name, value)) => insert(fields, object, name, json!(value)),
        None => drop(fields.insert(object.to_owned(), json!(pair))),
    }
}

fn insert(fields: &mut Map<String, Value>, object: &str, name: &str, value: Value) {
    if let Some(entries) = fields.entry(object).or_insert_with(|| json!({})).as_object_mut() {
        entries.insert(name.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{event::Status, request::Request};

    fn read(query: &[(&str, &str)]) -> Result<(SandboxConfig, bool), Refusal> {
        let owned: Vec<_> = query.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        SandboxConfig::from_query(&owned)
    }

    fn config(text: &str) -> SandboxConfig {
        let Ok(Request::Config(config)) = Request::parse(text) else { panic!("{text}") };
        *config
    }

    #[test]
    fn parameters_mean_what_the_message_means() {
        for (query, text) in [
            (
                &[("idle_timeout", "300"), ("enable_checkpoint", "true")][..],
                r#"{"idle_timeout":300,"enable_checkpoint":true}"#,
            ),
            (&[("idle_timeout", "5m"), ("ttl", "1.5")], r#"{"idle_timeout":"5m","ttl":1.5}"#),
            (
                &[("idle_timeout", "null"), ("enable_sandbox_handoff", "0")],
                r#"{"idle_timeout":null,"enable_sandbox_handoff":false}"#,
            ),
            (
                &[("label", "a=b"), ("label", "c=d=e"), ("env", "X=")],
                r#"{"labels":{"a":"b","c":"d=e"},"env":{"X":""}}"#,
            ),
            (&[("limits.memory", "512MiB"), ("limits.cpus", "1.5")], r#"{"limits":{"memory":"512MiB","cpus":1.5}}"#),
            (&[("persistent", "auto")], r#"{"persistent":"auto"}"#),
            (&[("persistent", "1")], r#"{"persistent":true}"#),
            (&[("cwd", "/1"), ("filesystem_snapshot_name", "1")], r#"{"cwd":"/1","filesystem_snapshot_name":"1"}"#),
        ] {
            assert_eq!(read(query), Ok((config(text), true)), "{query:?}");
        }
    }

    #[test]
    fn details_alone_and_foreign_parameters_are_no_config() {
        assert_eq!(
            read(&[("details", "1"), ("utm", "x")]),
            Ok((SandboxConfig { details: true, ..SandboxConfig::default() }, false))
        );
        assert_eq!(read(&[("action", "fork"), ("language", "python")]), Ok((SandboxConfig::default(), false)));
    }

    #[test]
    fn a_wrong_value_is_refused_by_its_name() {
        for (name, value) in
            [("enable_checkpoint", "yes"), ("idle_timeout", "soon"), ("idle_timeout", "-1"), ("env", "X"), ("cwd", "x")]
        {
            let refusal = read(&[(name, value)]).unwrap_err();
            assert_eq!(refusal.status, Status::CreationError);
            assert!(refusal.message.starts_with(&format!("`{name}`")), "{}", refusal.message);
        }
    }
}
