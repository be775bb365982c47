//! Names as parsed types. Paths and object names are only ever built from these.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a text is not a name. The text itself is left out: it may be long or hostile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a valid {what}: {rule}")]
pub struct Invalid {
    /// Which kind of name the text should have been.
    pub what: &'static str,
    /// What a name of this kind looks like.
    pub rule: &'static str,
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $what:literal, $rule:literal, $holds:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(String);

        impl $type {
            /// Parses a name; [`Invalid`] states the rule if the text breaks it.
            pub fn parse(text: &str) -> Result<Self, Invalid> {
                let holds: fn(&str) -> bool = $holds;
                if holds(text) {
                    Ok(Self(text.to_owned()))
                } else {
                    Err(Invalid { what: $what, rule: $rule })
                }
            }

            /// The name as written on the wire and in object names.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $type {
            type Error = Invalid;
            fn try_from(text: String) -> Result<Self, Invalid> {
                Self::parse(&text)
            }
        }

        impl std::str::FromStr for $type {
            type Err = Invalid;
            fn from_str(text: &str) -> Result<Self, Invalid> {
                Self::parse(text)
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> String {
                name.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name!(
    /// A sandbox, for as long as it exists anywhere. A server generates `sandbox-` and a random UUID; an operator
    /// who restores a sandbox by hand may have chosen another name.
    SandboxId, "sandbox id",
    "it is `sandbox-` and 1 to 36 lower-case letters, digits or `-`, the first and the last of them no `-`",
    |text| text.strip_prefix("sandbox-").is_some_and(is_label)
);
name!(
    /// One running server process; new at every start.
    InstanceId, "instance id", "it is `inst-` and 32 hex digits",
    |text| text.strip_prefix("inst-").is_some_and(|rest| is_hex(rest, 32))
);
name!(
    /// One checkpoint, committed or only attempted: `<sandbox_id>-<epoch>-<seq>-<nonce>`.
    CheckpointId, "checkpoint id", "it is `<sandbox id>-<epoch>-<seq>-<nonce>`",
    |text| CheckpointId::parts(text).is_some()
);
name!(
    /// One command inside a sandbox, as named by the client.
    ExecId, "exec id", "1 to 64 letters, digits, `.`, `_` or `-`, beginning with a letter or digit",
    |text| is_word(text, 64, |c| c.is_ascii_alphanumeric())
);
name!(
    /// A filesystem snapshot.
    SnapshotName, "snapshot name",
    "1 to 63 lower-case letters, digits, `.`, `_` or `-`, beginning with a letter or digit",
    |text| is_word(text, 63, |c| c.is_ascii_lowercase() || c.is_ascii_digit())
);
name!(
    /// The owner of an API key and of everything made with it.
    Tenant, "tenant",
    "1 to 32 lower-case letters, digits or `-`, beginning with a letter or digit",
    |text| text.len() <= 32
        && text.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'z' | b'-'))
);
name!(
    /// SHA-256 in hex, as used in the names of files and objects.
    Sha256Name, "SHA-256", "64 hex digits in lower case", |text| is_hex(text, 64)
);
name!(
    /// A fresh value for one attempt at one write, or for one request.
    Nonce, "nonce", "32 hex digits",
    |text| is_hex(text, 32)
);

impl Sha256Name {
    /// The name of a digest.
    pub fn from_bits(bits: [u8; 32]) -> Self {
        Self(hex(&bits))
    }
}

impl SandboxId {
    /// Makes a sandbox id from a UUID in lower case.
    pub fn from_uuid(uuid: &str) -> Result<Self, Invalid> {
        Self::parse(&format!("sandbox-{uuid}"))
    }
}

impl InstanceId {
    /// Makes an instance id from 16 random bytes.
    pub fn from_bits(bits: [u8; 16]) -> Self {
        Self(format!("inst-{}", hex(&bits)))
    }
}

impl Nonce {
    /// Makes a nonce from 16 random bytes.
    pub fn from_bits(bits: [u8; 16]) -> Self {
        Self(hex(&bits))
    }
}

impl CheckpointId {
    /// Combines the parts; any two attempts differ in the nonce.
    pub fn new(sandbox: &SandboxId, epoch: u64, seq: u64, nonce: &Nonce) -> Self {
        Self(format!("{sandbox}-{epoch}-{seq}-{nonce}"))
    }

    /// The sandbox that the checkpoint belongs to.
    pub fn sandbox(&self) -> SandboxId {
        SandboxId(self.0.rsplitn(4, '-').last().unwrap_or_default().to_owned())
    }

    /// The epoch of the lease under which the checkpoint was made.
    pub fn epoch(&self) -> u64 {
        Self::parts(&self.0).map_or(0, |(epoch, _)| epoch)
    }

    /// The position among the sandbox's checkpoints; the head's is incremented by each commit.
    pub fn seq(&self) -> u64 {
        Self::parts(&self.0).map_or(0, |(_, seq)| seq)
    }

    /// Parses from the end, since a sandbox id may contain `-` and numbers too: the result is unambiguous.
    fn parts(text: &str) -> Option<(u64, u64)> {
        let mut parts = text.rsplitn(4, '-');
        let (nonce, seq, epoch, sandbox) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        SandboxId::parse(sandbox).ok()?;
        if !is_hex(nonce, 32) {
            return None;
        }
        Some((number(epoch)?, number(seq)?))
    }
}

/// The length of a UUID: no name derived from a sandbox id is longer than with a generated id.
const LONGEST_LABEL: usize = 36;

/// Decimal in the one form we write: no sign, no leading zero.
fn number(text: &str) -> Option<u64> {
    let value: u64 = text.parse().ok()?;
    (value.to_string() == text).then_some(value)
}

fn is_label(text: &str) -> bool {
    text.len() <= LONGEST_LABEL
        && !text.is_empty()
        && !text.starts_with('-')
        && !text.ends_with('-')
        && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'z' | b'-'))
}

fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_word(text: &str, longest: usize, allowed: fn(char) -> bool) -> bool {
    text.len() <= longest
        && text.starts_with(allowed)
        && text.chars().all(|c| allowed(c) || matches!(c, '.' | '_' | '-'))
}

/// Two lower-case hexadecimal digits per byte.
pub fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab";

    #[test]
    fn a_sandbox_id_is_its_prefix_and_a_short_name_that_cannot_be_a_path() {
        let longest = format!("sandbox-{}", "z".repeat(36));
        for good in [ID, "sandbox-abc-123", "sandbox-1", "sandbox-a--b", &longest] {
            assert_eq!(SandboxId::parse(good).unwrap().as_str(), good);
        }
        let long = "a".repeat(4096);
        let longer = format!("{longest}z");
        for bad in [
            "",
            "sandbox-",
            "../x",
            "..%2f",
            "/etc/passwd",
            long.as_str(),
            longer.as_str(),
            "abc-123",
            "sandbox_abc",
            "sandbox--abc",
            "sandbox-abc-",
            "sandbox-.",
            "sandbox-a.b",
            "sandbox-a_b",
            "sandbox-a/b",
            "sandbox-a\\b",
            "sandbox-..",
            "sandbox-%2e",
            "sandbox-\0",
            "sandbox-x\n",
            "sandbox-0B9F5A52-6F0E-4B1C-9D3E-0123456789AB",
            "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab\n",
            "sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789aｂ",
            "sandbox-é",
            " sandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab",
        ] {
            assert!(SandboxId::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_checkpoint_id_tells_its_sandbox_epoch_and_seq() {
        let sandbox = SandboxId::parse(ID).unwrap();
        let id = CheckpointId::new(&sandbox, 7, 12, &Nonce::from_bits([0xab; 16]));
        assert_eq!(CheckpointId::parse(id.as_str()).unwrap(), id);
        assert_eq!((id.sandbox(), id.epoch(), id.seq()), (sandbox, 7, 12));
        for bad in ["-1-2", "-07-1-", "-1-+2-", "-1-2-zz", "/../x"] {
            assert!(CheckpointId::parse(&format!("{ID}{bad}")).is_err(), "{bad:?}");
        }
        assert!(CheckpointId::parse("ｓandbox-0b9f5a52-6f0e-4b1c-9d3e-0123456789ab-1-2-3").is_err());
    }

    #[test]
    fn a_checkpoint_id_reads_in_one_way_whatever_its_sandbox_is_called() {
        let nonce = Nonce::from_bits([0xcd; 16]);
        for name in ["sandbox-abc-123", "sandbox-abc", "sandbox-1-2", "sandbox-1", "sandbox-a--1"] {
            let sandbox = SandboxId::parse(name).unwrap();
            let id = CheckpointId::new(&sandbox, 123, 4, &nonce);
            let read = CheckpointId::parse(id.as_str()).unwrap();
            assert_eq!((read.sandbox(), read.epoch(), read.seq()), (sandbox, 123, 4));
            assert!(SandboxId::parse(id.as_str()).is_err(), "a checkpoint is never taken for a sandbox");
        }
        for bad in [format!("sandbox--1-2-{nonce}"), format!("sandbox-1-2-{nonce}"), format!("abc-1-2-{nonce}")] {
            assert!(CheckpointId::parse(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_cannot_climb_or_hide() {
        for bad in ["", ".", "..", "../x", "a/b", "a\\b", "-x", "_x", "a b", "a\0", "A", "é"] {
            assert!(SnapshotName::parse(bad).is_err(), "{bad:?}");
        }
        assert!(SnapshotName::parse(&"a".repeat(63)).is_ok());
        assert!(SnapshotName::parse(&"a".repeat(64)).is_err());
        assert!(SnapshotName::parse("py3.11_numpy-2").is_ok());
        assert!(ExecId::parse("Build-7").is_ok());
        assert!(SnapshotName::parse("team-a~numpy").is_err(), "`~` parts a tenant from a name");
        for bad in ["", "-a", "a~b", "a.b", "a_b", "A", "a/b", "a=b", "é", &"a".repeat(33)] {
            assert!(Tenant::parse(bad).is_err(), "{bad:?}");
        }
        for good in ["a", "0", "team-a", "k-0123456789ab", &"a".repeat(32)] {
            assert!(Tenant::parse(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn a_bad_name_inside_json_is_an_error_that_names_the_kind() {
        let error = serde_json::from_str::<SandboxId>("\"../x\"").unwrap_err().to_string();
        assert!(error.contains("sandbox id"), "{error}");
        assert!(!error.contains("../x"), "{error}");
    }
}
