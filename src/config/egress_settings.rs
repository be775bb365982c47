//! What programs in sandboxes may reach, and how much of it.

use std::time::Duration;

use baton_protocol::sandbox_network::{Egress, EgressRule};

use super::{
    Error, Rate, Reader,
    parse::{self, count, pieces, rate, size, span, span_or_off},
    variables::{EGRESS, EGRESS_EXEMPT, EGRESS_LIMITS, EGRESS_MAX},
};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressSettings {
    /// Of sandboxes that say nothing else.
    pub default: Egress,
    pub ceiling: Egress,
    /// Special addresses that may be dialled all the same.
    pub exempt: Vec<EgressRule>,
    pub limits: EgressLimits,
}

/// `None` means no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EgressLimits {
    /// Connections of a sandbox at once.
    pub connections: u32,
    pub opens: Option<Rate>,
    /// Bytes per second, both directions together.
    pub rate: Option<u64>,
    /// Bytes of one container, both directions together.
    pub total: Option<u64>,
    /// Time to resolve a name and to connect.
    pub connect: Duration,
    pub idle: Option<Duration>,
    pub lifetime: Option<Duration>,
}

impl Default for EgressLimits {
    fn default() -> Self {
        Self {
            connections: 1024,
            opens: Some(Rate { count: 200, per: Duration::from_secs(1) }),
            rate: None,
            total: None,
            connect: Duration::from_secs(10),
            idle: Some(Duration::from_secs(3600)),
            lifetime: None,
        }
    }
}

impl EgressLimits {
    /// Parses `connections=100,rate=10MiB`; what is not named keeps its default. `None` means that the text is invalid.
    pub fn parse(text: &str) -> Option<Self> {
        let mut limits = Self::default();
        for piece in pieces(text, ',') {
            let (name, value) = piece.split_once('=')?;
            let value = value.trim();
            match name.trim() {
                "connections" => limits.connections = count(value).filter(|count| *count <= MOST_CONNECTIONS)?,
                "opens" => limits.opens = rate(value)?,
                "rate" => limits.rate = bytes(value)?,
                "total" => limits.total = bytes(value)?,
                "connect" => limits.connect = span(value)?,
                "idle" => limits.idle = span_or_off(value)?,
                "lifetime" => limits.lifetime = span_or_off(value)?,
                _ => return None,
            }
        }
        Some(limits)
    }
}

/// What an agent handles at most.
const MOST_CONNECTIONS: u32 = baton_protocol::agent::MAX_CONNECTIONS as u32;

/// The inner `None` means off.
fn bytes(text: &str) -> Option<Option<u64>> {
    if text == "off" { Some(None) } else { size(text).filter(|size| *size > 0).map(Some) }
}

/// Exact addresses; a network or a name is refused.
fn exempt(text: &str) -> Option<Vec<EgressRule>> {
    let rules = pieces(text, ',').map(|piece| piece.parse::<EgressRule>().ok());
    rules.map(|rule| rule.filter(|rule| rule.host.single_address().is_some())).collect()
}

impl EgressSettings {
    pub(super) fn read(from: &mut Reader<'_>) -> Result<Self, Error> {
        let settings = Self {
            default: from.required(EGRESS, parse::egress)?,
            ceiling: from.required(EGRESS_MAX, parse::egress)?,
            exempt: from.optional(EGRESS_EXEMPT, exempt)?.unwrap_or_default(),
            limits: from.required(EGRESS_LIMITS, EgressLimits::parse)?,
        };
        match settings.default.beyond(&settings.ceiling) {
            None => Ok(settings),
            Some(beyond) => Err(Error::Conflict(format!(
                "{EGRESS} allows {beyond}, which {EGRESS_MAX} does not: raise {EGRESS_MAX} or lower {EGRESS}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_of_the_table_is_the_default_of_the_type() {
        let text = EGRESS_LIMITS.preset.value().unwrap();
        assert_eq!(EgressLimits::parse(&text), Some(EgressLimits::default()));
    }

    #[test]
    fn limits_that_are_not_named_keep_their_default() {
        let limits = EgressLimits::parse("connections=10, rate=1MiB,idle=off").unwrap();
        let expected = EgressLimits { connections: 10, rate: Some(1 << 20), idle: None, ..EgressLimits::default() };
        assert_eq!(limits, expected);
        for bad in
            ["connections", "connections=0", "connections=4096", "rate=-1", "rate=0", "speed=1", "opens=5", "idle=1"]
        {
            assert_eq!(EgressLimits::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_exact_addresses_are_exempt() {
        assert_eq!(exempt("10.0.0.5:5432, fd00::1").unwrap().len(), 2);
        for bad in ["10.0.0.0/8", "db.internal", "10.0.0.5:0"] {
            assert_eq!(exempt(bad), None, "{bad}");
        }
    }
}
