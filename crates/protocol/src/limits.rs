//! How much of its machine a sandbox may use: what a client requests, and what an operator allows.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::{Map, Value};

use crate::printable::printable_start;

/// Every limit, in the order in which messages list them.
pub const NAMES: [&str; 5] = ["memory", "cpus", "pids", "disk", "files"];

/// With less memory, a sandbox would hardly start.
const LEAST_MEMORY: u64 = 32 << 20;
const LEAST_CPUS: u32 = 50;
const LEAST_PIDS: u32 = 8;
const LEAST_DISK: u64 = 1 << 20;
const LEAST_FILES: u32 = 32;
/// More than any machine has; sums of such values do not overflow.
const MOST_BYTES: u64 = 1 << 50;
const MOST_CPUS: u32 = 1_000_000;
const MOST_COUNT: u32 = 1 << 20;

/// `None` means no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Bytes of memory, for all commands together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// CPU time, in CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Cpus>,
    /// Concurrent processes and threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids: Option<u32>,
    /// Bytes written to files, beyond what the sandbox started with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<u64>,
    /// Open files per process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<u32>,
    /// Limits of a later version, preserved unchanged.
    #[serde(flatten)]
    pub unknown: Map<String, Value>,
}

/// Thousandths of a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cpus(pub u32);

impl Limits {
    /// Whether nothing is limited.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Sets one limit by its name; `null` means no limit. The error is a sentence that names the limit. An unknown name
    /// is preserved unchanged.
    pub fn set(&mut self, name: &str, value: &Value) -> Result<(), String> {
        match name {
            "memory" => self.memory = read(name, value, bytes(LEAST_MEMORY), "32MiB or more, as bytes or a size")?,
            "cpus" => self.cpus = read(name, value, cpus, "a number from 0.05 to 1000")?,
            "pids" => self.pids = read(name, value, count(LEAST_PIDS), "a whole number from 8 to 1048576")?,
            "disk" => self.disk = read(name, value, bytes(LEAST_DISK), "1MiB or more, as bytes or a size")?,
            "files" => self.files = read(name, value, count(LEAST_FILES), "a whole number from 32 to 1048576")?,
            unknown => {
                self.unknown.insert(unknown.to_owned(), value.clone());
            }
        }
        Ok(())
    }

    /// Refuses unknown limits.
    pub fn check(&self) -> Result<(), String> {
        let Some(name) = self.unknown.keys().next() else { return Ok(()) };
        let name = printable_start(name, 40);
        Err(format!("`limits.{name}` is not a limit: there are {}.", NAMES.join(", ")))
    }
}

fn read<T>(name: &str, value: &Value, fit: impl Fn(&Given) -> Option<T>, expected: &str) -> Result<Option<T>, String> {
    let given = match value {
        Value::Null => return Ok(None),
        Value::Number(number) => Some(Given::Number(number.as_f64().unwrap_or(f64::NAN))),
        Value::String(text) => Some(Given::Text(text.trim())),
        Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    };
    let fitting = given.and_then(|given| fit(&given));
    fitting.map(Some).ok_or_else(|| format!("`limits.{name}` must be {expected}."))
}

enum Given<'a> {
    Number(f64),
    Text(&'a str),
}

impl Given<'_> {
    fn number(&self) -> Option<f64> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Text(text) => text.parse().ok(),
        }
    }
}

fn bytes(least: u64) -> impl Fn(&Given<'_>) -> Option<u64> {
    move |given| {
        let bytes = match given {
            Given::Number(number) => whole(*number)?,
            Given::Text(text) => size(text)?,
        };
        (least..=MOST_BYTES).contains(&bytes).then_some(bytes)
    }
}

fn count(least: u32) -> impl Fn(&Given<'_>) -> Option<u32> {
    move |given| {
        let count = u32::try_from(whole(given.number()?)?).ok()?;
        (least..=MOST_COUNT).contains(&count).then_some(count)
    }
}

fn cpus(given: &Given<'_>) -> Option<Cpus> {
    let thousandths = (given.number()? * 1000.0).round();
    (f64::from(LEAST_CPUS)..=f64::from(MOST_CPUS)).contains(&thousandths).then_some(Cpus(thousandths as u32))
}

fn whole(number: f64) -> Option<u64> {
    (number.fract() == 0.0 && (0.0..=MOST_BYTES as f64).contains(&number)).then_some(number as u64)
}

/// Parses `10GiB`, `1.5 MiB`, `4096`; as usual, `GB` counts in powers of 1,000 and `G` in powers of 1,024.
pub fn size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().ok()?;
    let unit: u64 = match text[digits..].trim() {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return None,
    };
    let bytes = number * unit as f64;
    (bytes < (1_u64 << 53) as f64).then_some(bytes as u64)
}

/// Formats as `512MiB`: in the largest unit that gives a whole number.
pub fn show_size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = units.into_iter().find(|(_, bits)| bytes > 0 && bytes.trailing_zeros() >= *bits);
    unit.map_or_else(|| format!("{bytes} bytes"), |(name, bits)| format!("{}{name}", bytes >> bits))
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", f64::from(self.0) / 1000.0)
    }
}

impl Serialize for Cpus {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(1000) {
            serializer.serialize_u32(self.0 / 1000)
        } else {
            serializer.serialize_f64(f64::from(self.0) / 1000.0)
        }
    }
}

impl<'de> Deserialize<'de> for Limits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut limits = Self::default();
        for (name, value) in Map::deserialize(deserializer)? {
            limits.set(&name, &value).map_err(D::Error::custom)?;
        }
        Ok(limits)
    }
}

/// What a sandbox gets by default, and the most that it may request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// The limits of a sandbox that requests none.
    pub default: Limits,
    /// The highest limits that a client may request.
    pub ceiling: Limits,
}

impl Bounds {
    /// Parses `memory=512MiB/2GiB,pids=256`: default and ceiling, or one value for both.
    pub fn parse(text: &str) -> Option<Self> {
        let mut bounds = Self::default();
        for piece in text.split(',').map(str::trim).filter(|piece| !piece.is_empty()) {
            let (name, values) = piece.split_once('=')?;
            let (default, ceiling) = values.split_once('/').unwrap_or((values, values));
            for (limits, value) in [(&mut bounds.default, default), (&mut bounds.ceiling, ceiling)] {
                limits.set(name.trim(), &Value::String(value.to_owned())).ok()?;
            }
        }
        let well = bounds.ceiling.check().and_then(|()| bounds.allow(&bounds.default));
        well.is_ok().then_some(bounds)
    }

    /// Returns the requested limits, with defaults for the rest; the error is a sentence that names the limit exceeded.
    pub fn apply(&self, asked: &Limits) -> Result<Limits, String> {
        asked.check()?;
        self.allow(asked)?;
        Ok(Limits {
            memory: asked.memory.or(self.default.memory),
            cpus: asked.cpus.or(self.default.cpus),
            pids: asked.pids.or(self.default.pids),
            disk: asked.disk.or(self.default.disk),
            files: asked.files.or(self.default.files),
            unknown: Map::new(),
        })
    }

    fn allow(&self, asked: &Limits) -> Result<(), String> {
        let most = &self.ceiling;
        within("memory", asked.memory, most.memory, |bytes| show_size(*bytes))?;
        within("cpus", asked.cpus, most.cpus, Cpus::to_string)?;
        within("pids", asked.pids, most.pids, u32::to_string)?;
        within("disk", asked.disk, most.disk, |bytes| show_size(*bytes))?;
        within("files", asked.files, most.files, u32::to_string)
    }
}

fn within<T: PartialOrd>(
    name: &str,
    asked: Option<T>,
    most: Option<T>,
    show: impl Fn(&T) -> String,
) -> Result<(), String> {
    match (asked, most) {
        (Some(asked), Some(most)) if asked > most => {
            Err(format!("`limits.{name}` is {}, and this server allows {} at most.", show(&asked), show(&most)))
        }
        (Some(_) | None, Some(_) | None) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn limits(value: Value) -> Result<Limits, String> {
        serde_json::from_value(value).map_err(|error| error.to_string())
    }

    #[test]
    fn limits_are_numbers_or_texts_and_are_written_as_numbers() {
        let all = json!({"memory": "512MiB", "cpus": 1.5, "pids": 256, "disk": 1_073_741_824, "files": "1024"});
        let read = limits(all).unwrap();
        assert_eq!((read.memory, read.cpus, read.pids), (Some(512 << 20), Some(Cpus(1500)), Some(256)));
        assert_eq!((read.disk, read.files), (Some(1 << 30), Some(1024)));
        let text = r#"{"memory":536870912,"cpus":1.5,"pids":256,"disk":1073741824,"files":1024}"#;
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
        assert_eq!(serde_json::to_value(limits(json!({"cpus": "2"})).unwrap()).unwrap(), json!({"cpus": 2}));
        assert!(limits(json!({"memory": null})).unwrap().is_empty());
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (value, name) in [
            (json!({"memory": "lots"}), "memory"),
            (json!({"memory": 1024}), "memory"),
            (json!({"memory": -1}), "memory"),
            (json!({"memory": 1e300}), "memory"),
            (json!({"memory": [1]}), "memory"),
            (json!({"cpus": 0}), "cpus"),
            (json!({"cpus": "NaN"}), "cpus"),
            (json!({"cpus": true}), "cpus"),
            (json!({"pids": 1.5}), "pids"),
            (json!({"pids": 3}), "pids"),
            (json!({"disk": "1KiB"}), "disk"),
            (json!({"files": {}}), "files"),
            (json!({"files": 1e12}), "files"),
        ] {
            let sentence = limits(value.clone()).unwrap_err();
            assert!(sentence.starts_with(&format!("`limits.{name}` must be ")), "{value}: {sentence}");
        }
    }

    #[test]
    fn a_limit_of_a_later_version_is_kept_in_records_and_refused_from_clients() {
        let later = json!({"memory": 1 << 30, "io": {"read": 5}});
        let read = limits(later.clone()).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), later);
        let sentence = "`limits.io` is not a limit: there are memory, cpus, pids, disk, files.";
        assert_eq!(Bounds::default().apply(&read), Err(sentence.to_owned()));
    }

    #[test]
    fn what_was_not_asked_for_is_the_default_and_what_is_too_much_is_named() {
        let bounds = Bounds::parse("memory=512MiB/2GiB, cpus=1/1.5,pids=256").unwrap();
        let given = |value| bounds.apply(&limits(value).unwrap());
        let filled = given(json!({"memory": "1GiB", "files": 64})).unwrap();
        assert_eq!((filled.memory, filled.cpus, filled.pids), (Some(1 << 30), Some(Cpus(1000)), Some(256)));
        assert_eq!((filled.disk, filled.files), (None, Some(64)));
        for (value, sentence) in [
            (json!({"memory": "3GiB"}), "`limits.memory` is 3GiB, and this server allows 2GiB at most."),
            (json!({"memory": (2_u64 << 30) + 1}), "2147483649 bytes, and this server allows 2GiB at most."),
            (json!({"cpus": 2}), "`limits.cpus` is 2, and this server allows 1.5 at most."),
            (json!({"pids": 257}), "`limits.pids` is 257, and this server allows 256 at most."),
        ] {
            let refused = given(value).unwrap_err();
            assert!(refused.ends_with(sentence), "{refused}");
        }
        assert_eq!(given(json!({"disk": "100GiB"})).unwrap().disk, Some(100 << 30), "there is no ceiling for it");
    }

    #[test]
    fn bounds_have_a_default_below_their_ceiling() {
        let bounds = Bounds::parse("memory=512MiB/2GiB, cpus=1.5,pids=256").unwrap();
        assert_eq!((bounds.default.memory, bounds.ceiling.memory), (Some(512 << 20), Some(2 << 30)));
        assert_eq!((bounds.default.cpus, bounds.ceiling.cpus), (Some(Cpus(1500)), Some(Cpus(1500))));
        assert_eq!((bounds.ceiling.pids, bounds.ceiling.disk), (Some(256), None));
        assert_eq!(Bounds::parse(""), Some(Bounds::default()));
        for text in ["memory", "memory=2GiB/1GiB", "ram=1GiB", "cpus=0", "cpus=NaN", "pids=8/x", "memory=1MiB"] {
            assert_eq!(Bounds::parse(text), None, "{text}");
        }
    }

    #[test]
    fn sizes_are_read_as_people_write_them_and_shown_so() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("10GiB", 10 << 30),
            ("1.5 MiB", 3 << 19),
            ("2M", 2 << 20),
            ("3GB", 3_000_000_000),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in ["", "GiB", "-1", "1e3", "10 gigs", "1.2.3G", "99999999TiB", "NaN", "ten"] {
            assert_eq!(size(text), None, "{text}");
        }
        assert_eq!(
            (show_size(3 << 19), show_size(512 << 20), show_size(7)),
            ("1536KiB".into(), "512MiB".into(), "7 bytes".into())
        );
    }
}
