//! Stored records that carry their version, and how a record of an older version is read.
//!
//! ```text
//!   {"version": 1, …} ──UPGRADES[0]──▶ {"version": 2, …} ──UPGRADES[1]──▶ … ──▶ the current type
//! ```
//!
//! A manifest is written once and may be read by much later servers, so each version stays readable. To change a
//! format, append a function that upgrades the version before to the record's `UPGRADES`, and add a fixture of the
//! new version to `fixtures/manifests`; those of older versions stay.

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

/// Makes a record of the next version out of one of its own version. [`parse`] sets `version` itself. What does not
/// have the expected form is left as it is: the current type refuses it.
pub type UpgradeFn = fn(&mut Map<String, Value>);

/// A stored record with a `version`, counted from 1.
pub trait Versioned: DeserializeOwned {
    /// `UPGRADES[0]` upgrades version 1 to version 2, and so on up to the current version.
    const UPGRADES: &'static [UpgradeFn];
    /// The version that this code writes, and the newest that it reads.
    const VERSION: u32 = Self::UPGRADES.len() as u32 + 1;
}

/// Why a stored record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// A later server wrote the record: it may be intact, and such a server can read it.
    #[error("it has version {found}, but this server reads only versions up to {newest}")]
    Newer {
        /// The version of the record.
        found: u32,
        /// The newest version that this code reads.
        newest: u32,
    },
    /// The text is not a record of its version.
    #[error(transparent)]
    Malformed(#[from] serde_json::Error),
}

/// The one field that every version has.
#[derive(Deserialize)]
struct Header {
    version: u32,
}

/// Parses a record of the current version or an older one.
pub fn parse<T: Versioned>(bytes: &[u8]) -> Result<T, Unreadable> {
    let Header { version } = serde_json::from_slice(bytes)?;
    if version == T::VERSION {
        return Ok(serde_json::from_slice(bytes)?);
    }
    if version > T::VERSION {
        return Err(Unreadable::Newer { found: version, newest: T::VERSION });
    }
    let Some(before) = version.checked_sub(1) else {
        return Err(Unreadable::Malformed(serde::de::Error::custom("there is no version 0")));
    };
    let mut record: Map<String, Value> = serde_json::from_slice(bytes)?;
    for (upgrade, version) in T::UPGRADES.iter().zip(2u32..).skip(before as usize) {
        upgrade(&mut record);
        record.insert("version".to_owned(), version.into());
    }
    Ok(serde_json::from_value(Value::Object(record))?)
}

#[cfg(test)]
mod tests {
    use serde::Serialize;
    use serde_json::json;

    use super::*;

    /// An invented record: version 1 called its size `bytes`, version 2 had no `kind`.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Third {
        version: u32,
        size: u64,
        kind: String,
    }

    impl Versioned for Third {
        const UPGRADES: &'static [UpgradeFn] = &[
            |record| {
                if let Some(bytes) = record.remove("bytes") {
                    record.insert("size".to_owned(), bytes);
                }
            },
            |record| drop(record.insert("kind".to_owned(), json!("layer"))),
        ];
    }

    fn read(record: &Value) -> Result<Third, Unreadable> {
        parse(record.to_string().as_bytes())
    }

    #[test]
    fn every_older_version_is_upgraded_step_by_step() {
        assert_eq!(Third::VERSION, 3);
        let current = |kind: &str| Third { version: 3, size: 7, kind: kind.to_owned() };
        for (stored, expected) in [
            (json!({"version": 1, "bytes": 7}), current("layer")),
            (json!({"version": 2, "size": 7}), current("layer")),
            (json!({"version": 3, "size": 7, "kind": "rootfs"}), current("rootfs")),
        ] {
            assert_eq!(read(&stored).unwrap(), expected, "{stored}");
        }
    }

    #[test]
    fn a_newer_version_is_an_error_of_its_own_whatever_else_it_has() {
        for stored in [json!({"version": 4, "size": 7, "kind": "layer"}), json!({"version": 4, "later": []})] {
            let error = read(&stored).unwrap_err();
            assert!(matches!(error, Unreadable::Newer { found: 4, newest: 3 }), "{error:?}");
            assert_eq!(error.to_string(), "it has version 4, but this server reads only versions up to 3");
        }
    }

    #[test]
    fn what_has_no_known_version_or_not_its_form_is_malformed() {
        for stored in [
            json!({"size": 7, "kind": "layer"}),
            json!({"version": 0, "size": 7, "kind": "layer"}),
            json!({"version": "3", "size": 7, "kind": "layer"}),
            json!({"version": 1}),
            json!({"version": 2, "size": "seven"}),
            json!([1]),
        ] {
            assert!(matches!(read(&stored), Err(Unreadable::Malformed(_))), "{stored}");
        }
        assert!(matches!(parse::<Third>(b"{\"version\":3"), Err(Unreadable::Malformed(_))));
    }
}
