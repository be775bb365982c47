//! What a sandbox may reach: `network` in the config message, in the metadata and in the operator's settings.
//!
//! Whether a particular connection is allowed is decided by the server, which knows the addresses behind a name.

use core::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::{Map, Value};

use crate::{agent::MAX_NAME, printable::printable_start};

/// More rules are refused.
pub const MAX_RULES: usize = 256;
const EXPECTED: &str = "\"none\", \"any\" or a list of destinations such as \"example.org:443\"";

/// The network of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxNetwork {
    /// Where programs inside may connect to; `None` uses the operator's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// Keys of a later version, preserved unchanged.
    #[serde(flatten)]
    pub unknown: Map<String, Value>,
}

/// Where programs may connect to. Some addresses are never reached, whatever the policy: those of the server, of its
/// private networks and of its platform.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Egress {
    /// Nowhere: the sandbox has only its own loopback.
    #[default]
    None,
    /// Everywhere.
    Any,
    /// To these destinations.
    List(Vec<EgressRule>),
}

/// A destination: a host and perhaps a port, such as `example.org:443`, `*.example.net` or `203.0.113.0/24:5432`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EgressRule {
    /// Which hosts.
    pub host: EgressHost,
    /// Which port; `None` is every port.
    pub port: Option<u16>,
}

/// The hosts of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum EgressHost {
    /// One name, in lower case.
    Name(String),
    /// Every name below this one, written `*.example.net`; not the name itself.
    Below(String),
    /// The addresses that begin with the first `prefix` bits of `address`.
    Net {
        /// The first address; all bits after the prefix are zero.
        address: IpAddr,
        /// How many bits are fixed.
        prefix: u8,
    },
}

/// Why text is not a destination.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a destination: write a name, *.name, an address or a network, and perhaps a port, such as example.org:443, *.example.net or 203.0.113.0/24:5432"
)]
pub struct InvalidRule(String);

impl SandboxNetwork {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Reads the value of `network` strictly, as a client sends it. The error says what is expected of which key.
    pub fn from_client(value: &Value) -> Result<Self, String> {
        let Value::Object(map) = value else { return Err("`network` must be an object.".to_owned()) };
        let mut network = Self::default();
        for (key, value) in map {
            match key.as_str() {
                "egress" if value.is_null() => {}
                "egress" => {
                    network.egress = Some(Egress::from_json(value).map_err(|why| format!("`network.egress`: {why}."))?);
                }
                unknown => {
                    let unknown = printable_start(unknown, 40);
                    return Err(format!("`network.{unknown}` does not exist: there is `egress`."));
                }
            }
        }
        Ok(network)
    }
}

impl Egress {
    /// Reads `"none"`, `"any"`, or a list of destinations; the error is the rest of a sentence.
    pub fn from_json(value: &Value) -> Result<Self, String> {
        match value {
            Value::String(word) => match word.as_str() {
                "none" => Ok(Self::None),
                "any" => Ok(Self::Any),
                _ => Err(format!("it must be {EXPECTED}")),
            },
            Value::Array(values) => {
                let texts = values.iter().map(|value| value.as_str().ok_or_else(|| format!("it must be {EXPECTED}")));
                Self::of_rules(texts)
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => Err(format!("it must be {EXPECTED}")),
        }
    }

    /// The first destination that `ceiling` does not cover as a whole, as text; `None` if it covers all.
    pub fn beyond(&self, ceiling: &Self) -> Option<String> {
        match (self, ceiling) {
            (Self::None, _) | (_, Self::Any) => None,
            (Self::Any, Self::None | Self::List(_)) => Some("any".to_owned()),
            (Self::List(rules), Self::None) => rules.first().map(ToString::to_string),
            (Self::List(rules), Self::List(allowed)) => {
                let is_allowed = |rule: &&EgressRule| allowed.iter().any(|wide| rule.is_within(wide));
                rules.iter().find(|rule| !is_allowed(rule)).map(ToString::to_string)
            }
        }
    }

    fn of_rules<'a>(texts: impl ExactSizeIterator<Item = Result<&'a str, String>>) -> Result<Self, String> {
        if texts.len() > MAX_RULES {
            return Err(format!("it has {} destinations, and at most {MAX_RULES} are possible", texts.len()));
        }
        let rules = texts.map(|text| text?.parse::<EgressRule>().map_err(|error| error.to_string()));
        Ok(Self::List(rules.collect::<Result<_, _>>()?))
    }
}

/// As a setting: `none`, `any`, or destinations separated by commas.
impl FromStr for Egress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "none" => Ok(Self::None),
            "any" => Ok(Self::Any),
            list => {
                let texts: Vec<_> = list.split(',').map(str::trim).filter(|text| !text.is_empty()).collect();
                Self::of_rules(texts.into_iter().map(Ok))
            }
        }
    }
}

impl fmt::Display for Egress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Any => f.write_str("any"),
            Self::List(rules) => {
                let texts: Vec<_> = rules.iter().map(ToString::to_string).collect();
                f.write_str(&texts.join(","))
            }
        }
    }
}

impl Serialize for Egress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_str("none"),
            Self::Any => serializer.serialize_str("any"),
            Self::List(rules) => serializer.collect_seq(rules.iter().map(ToString::to_string)),
        }
    }
}

impl<'de> Deserialize<'de> for Egress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_json(&Value::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl FromStr for EgressRule {
    type Err = InvalidRule;

    fn from_str(text: &str) -> Result<Self, InvalidRule> {
        let invalid = || InvalidRule(printable_start(text, 80));
        let (host, port) = split_port(text.trim()).ok_or_else(invalid)?;
        let host = parse_host(host).ok_or_else(invalid)?;
        Ok(Self { host, port })
    }
}

/// Splits off `:port`. An IPv6 address with a port stands in brackets.
fn split_port(text: &str) -> Option<(&str, Option<u16>)> {
    let parse = |port: &str| port.parse().ok().filter(|port| *port > 0).map(Some);
    if let Some(rest) = text.strip_prefix('[') {
        let (inside, after) = rest.split_once(']')?;
        return match after.strip_prefix(':') {
            Some(port) => Some((inside, parse(port)?)),
            None => after.is_empty().then_some((inside, None)),
        };
    }
    match text.split_once(':') {
        None => Some((text, None)),
        Some((_, rest)) if rest.contains(':') => Some((text, None)),
        Some((host, port)) => Some((host, parse(port)?)),
    }
}

fn parse_host(text: &str) -> Option<EgressHost> {
    if let Some(name) = text.strip_prefix("*.") {
        return host_name(name).map(EgressHost::Below);
    }
    let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
    if let Ok(address) = address.parse::<IpAddr>() {
        let most = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Some(most), |prefix| prefix.parse().ok().filter(|prefix| *prefix <= most))?;
        let is_first = network(address, prefix) == address;
        return is_first.then_some(EgressHost::Net { address, prefix });
    }
    if prefix.is_some() { None } else { host_name(text).map(EgressHost::Name) }
}

/// A host name in lower case, without the dot at its end; `None` if it is not one. Anything that could be read as a
/// number is refused: some resolvers take `0x7f.1` for an address.
pub fn host_name(text: &str) -> Option<String> {
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    let is_label = |label: &str| {
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        (1..=63).contains(&label.len()) && !label.starts_with('-') && label.bytes().all(is_letter)
    };
    let last = name.rsplit('.').next()?;
    let is_number = last.bytes().all(|byte| byte.is_ascii_digit())
        || last.strip_prefix("0x").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()));
    (name.len() <= MAX_NAME && name.split('.').all(is_label) && !is_number).then_some(name)
}

/// The first address of the network that `address` is in.
fn network(address: IpAddr, prefix: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            Ipv4Addr::from_bits(v4.to_bits() & mask).into()
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
            Ipv6Addr::from_bits(v6.to_bits() & mask).into()
        }
    }
}

impl EgressRule {
    /// Whether everything that this rule covers is covered by `wide`.
    fn is_within(&self, wide: &Self) -> bool {
        let has_port = wide.port.is_none() || wide.port == self.port;
        let has_host = match (&self.host, &wide.host) {
            (EgressHost::Name(name), wide) => wide.has_name(name),
            (EgressHost::Below(name), wide @ EgressHost::Below(wider)) => name == wider || wide.has_name(name),
            (EgressHost::Net { address, prefix }, wide @ EgressHost::Net { prefix: wider, .. }) => {
                prefix >= wider && wide.has_address(*address)
            }
            (EgressHost::Below(_), EgressHost::Name(_) | EgressHost::Net { .. })
            | (EgressHost::Net { .. }, EgressHost::Name(_) | EgressHost::Below(_)) => false,
        };
        has_host && has_port
    }
}

impl EgressHost {
    /// Whether `name`, in lower case, is one of these hosts. Addresses have no names.
    pub fn has_name(&self, name: &str) -> bool {
        match self {
            Self::Name(own) => own == name,
            Self::Below(own) => {
                name.strip_suffix(own.as_str()).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
            }
            Self::Net { .. } => false,
        }
    }

    /// Whether `address` is one of these hosts. Names have no addresses.
    pub fn has_address(&self, address: IpAddr) -> bool {
        match self {
            Self::Name(_) | Self::Below(_) => false,
            Self::Net { address: own, prefix } => {
                own.is_ipv4() == address.is_ipv4() && network(address, *prefix) == *own
            }
        }
    }

    /// The address, if it is exactly one.
    pub fn single_address(&self) -> Option<IpAddr> {
        match self {
            Self::Net { address, prefix } => (*prefix == if address.is_ipv4() { 32 } else { 128 }).then_some(*address),
            Self::Name(_) | Self::Below(_) => None,
        }
    }
}

impl fmt::Display for EgressRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.host, self.port) {
            (EgressHost::Net { address: IpAddr::V6(_), .. }, Some(port)) => write!(f, "[{}]:{port}", self.host),
            (host, Some(port)) => write!(f, "{host}:{port}"),
            (host, None) => write!(f, "{host}"),
        }
    }
}

impl fmt::Display for EgressHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Below(name) => write!(f, "*.{name}"),
            Self::Net { address, .. } if self.single_address().is_some() => write!(f, "{address}"),
            Self::Net { address, prefix } => write!(f, "{address}/{prefix}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_form_of_a_destination_is_read_and_written_the_same() {
        for text in [
            "example.org",
            "example.org:443",
            "*.example.net",
            "*.example.net:80",
            "203.0.113.7",
            "203.0.113.7:5432",
            "203.0.113.0/24",
            "203.0.113.0/24:5432",
            "0.0.0.0/0",
            "2001:db8::1",
            "2001:db8::/32",
            "[2001:db8::1]:443",
            "[2001:db8::/32]:443",
            "_dmarc.example.org",
        ] {
            assert_eq!(text.parse::<EgressRule>().expect(text).to_string(), text);
        }
        assert_eq!("Example.ORG.:443".parse::<EgressRule>().unwrap().to_string(), "example.org:443");
        assert_eq!("[2001:db8::1]".parse::<EgressRule>().unwrap().to_string(), "2001:db8::1");
    }

    #[test]
    fn what_is_not_a_destination_is_refused_with_what_is() {
        for text in [
            "",
            "*",
            "*.",
            "example.org:",
            "example.org:0",
            "example.org:65536",
            "example.org:http",
            "https://example.org",
            "example.org/path",
            "a..b",
            "-a.example",
            "203.0.113.1/24",
            "203.0.113.0/33",
            "1.2.3",
            "1.2.3.4.5",
            "0x7f000001",
            "127.1",
            "[2001:db8::1",
            "[example.org]x",
            "exa mple.org",
            "exämple.org",
        ] {
            let error = text.parse::<EgressRule>().expect_err(text).to_string();
            assert!(error.contains("example.org:443"), "{error}");
        }
        assert!(format!("{}.org", "a".repeat(64)).parse::<EgressRule>().is_err());
        assert!(["abcdefg"; 40].join(".").parse::<EgressRule>().is_err());
    }

    #[test]
    fn a_rule_covers_its_names_and_no_others() {
        let host = |text: &str| text.parse::<EgressRule>().unwrap().host;
        assert!(host("example.org").has_name("example.org"));
        assert!(!host("example.org").has_name("www.example.org"));
        assert!(host("*.example.org").has_name("a.b.example.org"));
        for other in ["example.org", ".example.org", "badexample.org", "example.org.evil"] {
            assert!(!host("*.example.org").has_name(other), "{other}");
        }
        assert!(!host("203.0.113.0/24").has_name("203.0.113.7"));
    }

    #[test]
    fn a_network_covers_its_addresses_in_its_own_family() {
        let host = |text: &str| text.parse::<EgressRule>().unwrap().host;
        let covers = |rule: &str, address: &str| host(rule).has_address(address.parse().unwrap());
        assert!(covers("203.0.113.0/24", "203.0.113.255") && !covers("203.0.113.0/24", "203.0.114.0"));
        assert!(covers("0.0.0.0/0", "8.8.8.8") && !covers("0.0.0.0/0", "::1"));
        assert!(covers("2001:db8::/32", "2001:db8:ffff::1") && !covers("2001:db8::/32", "2001:db9::"));
        assert!(covers("::/0", "::ffff:1.2.3.4") && !covers("0.0.0.0/0", "::ffff:1.2.3.4"));
        assert_eq!(host("203.0.113.7").single_address(), Some("203.0.113.7".parse().unwrap()));
        assert_eq!(host("203.0.113.0/24").single_address(), None);
    }

    #[test]
    fn the_policy_is_a_word_or_a_list() {
        for (value, shown) in [
            (json!("none"), "none"),
            (json!("any"), "any"),
            (json!([]), ""),
            (json!(["a.example:1", "10.0.0.0/8"]), "a.example:1,10.0.0.0/8"),
        ] {
            let egress = Egress::from_json(&value).unwrap();
            assert_eq!((serde_json::to_value(&egress).unwrap(), egress.to_string()), (value, shown.to_owned()));
        }
        assert_eq!("a.example:1, 10.0.0.0/8".parse::<Egress>().unwrap().to_string(), "a.example:1,10.0.0.0/8");
        for bad in [json!("all"), json!(1), json!([1]), json!({}), json!(["*"]), json!(vec!["a.example"; 257])] {
            assert!(Egress::from_json(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_client_is_told_which_key_is_wrong() {
        let read = |value: Value| SandboxNetwork::from_client(&value);
        assert_eq!(read(json!({"egress": "any"})).unwrap().egress, Some(Egress::Any));
        assert!(read(json!({})).unwrap().is_empty() && read(json!({"egress": null})).unwrap().is_empty());
        assert!(read(json!({"ingress": 1})).unwrap_err().contains("`network.ingress`"));
        assert!(read(json!({"egress": ["*"]})).unwrap_err().contains("`network.egress`: `*` is not a destination"));
        assert!(read(json!("any")).unwrap_err().contains("`network` must be an object"));
    }

    #[test]
    fn what_a_client_asks_for_is_covered_by_the_ceiling_as_a_whole() {
        for (asked, ceiling, expected) in [
            ("none", "none", None),
            ("any", "any", None),
            ("any", "a.example", Some("any")),
            ("a.example:443", "none", Some("a.example:443")),
            ("a.example:443", "a.example", None),
            ("a.example", "a.example:443", Some("a.example")),
            ("a.example,b.org", "*.example", Some("b.org")),
            ("*.b.example", "*.example", None),
            ("*.example", "*.b.example", Some("*.example")),
            ("*.example", "*.example", None),
            ("example", "*.example", Some("example")),
            ("10.1.0.0/16", "10.0.0.0/8", None),
            ("10.0.0.0/8", "10.1.0.0/16", Some("10.0.0.0/8")),
            ("10.0.0.0/8", "::/0", Some("10.0.0.0/8")),
            ("a.example", "0.0.0.0/0", Some("a.example")),
        ] {
            let found = asked.parse::<Egress>().unwrap().beyond(&ceiling.parse().unwrap());
            assert_eq!(found.as_deref(), expected, "{asked} below {ceiling}");
        }
    }
}
