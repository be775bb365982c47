//! `--limit NAME=VALUE` and `--egress DESTINATIONS`: what a sandbox may use and reach.

use baton_protocol::{limits::Limits, sandbox_network::Egress};
use serde_json::Value;

/// One limit, as given.
#[derive(Clone, Debug)]
pub struct Limit(String, Value);

/// Refuses an invalid limit at once; only the server knows how much it allows.
pub fn parse_limit(text: &str) -> Result<Limit, String> {
    let (name, value) = text.split_once('=').ok_or("write it as NAME=VALUE")?;
    let limit = Limit(name.to_owned(), Value::String(value.to_owned()));
    let mut limits = Limits::default();
    limits.set(name, &limit.1)?;
    limits.check().map(|()| limit)
}

/// Parses `none`, `any`, or destinations separated by commas.
pub fn parse_egress(text: &str) -> Result<Egress, String> {
    text.parse()
}

/// All limits; if one is given twice, the last counts.
pub fn limits(given: &[Limit]) -> Limits {
    let mut limits = Limits::default();
    for Limit(name, value) in given {
        // Each was checked when it was parsed.
        let _ = limits.set(name, value);
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_protocol::limits::Cpus;

    #[test]
    fn limits_are_written_as_people_do_and_what_is_none_is_named() {
        let given: Vec<_> =
            ["memory=512MiB", "cpus=1.5", "memory=1GiB"].iter().map(|text| parse_limit(text).unwrap()).collect();
        let all = limits(&given);
        assert_eq!((all.memory, all.cpus, all.pids), (Some(1 << 30), Some(Cpus(1500)), None));
        for (text, sentence) in [
            ("memory", "write it as NAME=VALUE"),
            ("ram=1GiB", "`limits.ram` is not a limit"),
            ("pids=many", "`limits.pids` must be "),
        ] {
            assert!(parse_limit(text).unwrap_err().starts_with(sentence), "{text}");
        }
    }
}
