//! A variable that the server reads: its name, the kind of its value, its default and its meaning.

use std::{borrow::Cow, fmt, time::Duration};

/// The kind of value that a variable takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    Text,
    /// Text that only the platform sets: there is no flag.
    Platform,
    Secret,
    ApiKeys,
    Keys,
    Names,
    Digests,
    Path,
    Port,
    Address,
    AddressOrOff,
    DomainOrOff,
    Url,
    YesNo,
    Count,
    CountOrNone,
    Factor,
    Size,
    Span,
    SpanOrOff,
    Rate,
    Limits,
    Egress,
    EgressLimits,
    Addresses,
    Quotas,
    PlainWords,
    Requirement,
}

impl ValueKind {
    pub const fn expects(self) -> &'static str {
        match self {
            Self::Text | Self::Platform | Self::Secret => "text",
            Self::Names => "a list separated by commas",
            Self::ApiKeys => "keys separated by commas, each alone or as tenant=key, and none of two tenants",
            Self::Keys => "keys of at least 32 bytes each, separated by commas",
            Self::Digests => "SHA-256 digests of 64 hex digits in lower case, separated by commas",
            Self::Path => "a path",
            Self::Port => "a port such as 8080",
            Self::Address => "an address with a port such as 127.0.0.1:8080",
            Self::AddressOrOff => "an address with a port such as 127.0.0.1:9464, or off",
            Self::DomainOrOff => "a domain name such as preview.example.org, or off",
            Self::Url => "a URL such as http://127.0.0.1:4443",
            Self::YesNo => "true or false",
            Self::Count => "a whole number above zero",
            Self::CountOrNone => "a whole number; 0 is none",
            Self::Factor => "a number from 0.02 to 50",
            Self::Size => "a size such as 512MiB or 10GiB",
            Self::Span => "a duration such as 500ms, 15s or 2m",
            Self::SpanOrOff => "a duration such as 90s or 30days, or off",
            Self::Rate => "a rate such as 10/s or 100/m, or off",
            Self::PlainWords => "documents or predecessor",
            Self::Requirement => "required or optional",
            Self::Limits => "limits such as memory=512MiB/2GiB,cpus=1/4,pids=256 (default/ceiling)",
            Self::Egress => "none, any, or destinations such as example.org:443,*.example.net,203.0.113.0/24:5432",
            Self::EgressLimits => {
                "limits such as connections=100,opens=20/s,rate=10MiB,total=off,connect=5s,idle=10m,lifetime=1h"
            }
            Self::Addresses => "addresses such as 10.0.0.5:5432,10.0.0.6 (no names and no networks)",
            Self::Quotas => "quotas such as sandboxes=20,snapshots=50,idle=1h;team-a:sandboxes=100",
        }
    }

    pub const fn is_secret(self) -> bool {
        matches!(self, Self::Secret | Self::ApiKeys | Self::Keys)
    }
}

/// The value of an unset variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    Unset,
    Is(&'static str),
    /// In whole seconds; its number is elsewhere.
    Time(Duration),
    /// Determined at start; the text says how.
    Found(&'static str),
}

impl Preset {
    /// The value as it would be given.
    pub fn value(self) -> Option<Cow<'static, str>> {
        match self {
            Self::Unset | Self::Found(_) => None,
            Self::Is(text) => Some(text.into()),
            Self::Time(span) => Some(format!("{}s", span.as_secs()).into()),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Variable {
    pub name: &'static str,
    pub kind: ValueKind,
    pub preset: Preset,
    pub meaning: &'static str,
}

impl Variable {
    /// The flag of `baton serve`, without its dashes: called like the variable.
    pub fn flag(&self) -> Option<String> {
        let name = self.name.strip_prefix("BATON_").unwrap_or(self.name);
        (self.kind != ValueKind::Platform).then(|| name.to_ascii_lowercase().replace('_', "-"))
    }
}

/// As messages refer to it.
impl fmt::Display for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Section {
    pub title: &'static str,
    pub variables: &'static [Variable],
}
