//! Quotas: the most that one tenant may have. Pure decisions, each refusal with the sentence that a client receives.

use std::{collections::BTreeMap, time::Duration};

use baton_protocol::id::Tenant;

use super::{
    parse::{count, pieces, span},
    variables::QUOTAS,
};

/// The quota of one tenant; `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Concurrent sandboxes on one instance.
    pub sandboxes: Option<u32>,
    /// Stored snapshots.
    pub snapshots: Option<u32>,
    /// The longest idle timeout of a new sandbox.
    pub idle: Option<Duration>,
}

/// The quotas of all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quotas {
    each: Quota,
    /// The tenants with a quota of their own.
    tenants: BTreeMap<Tenant, Quota>,
}

impl Quotas {
    /// Parses `sandboxes=20,snapshots=50,idle=1h;team-a:sandboxes=100,idle=off`: the quota of every tenant, then the
    /// exceptions of single tenants. `None` means that the text is invalid.
    pub fn parse(text: &str) -> Option<Self> {
        let (named, general): (Vec<_>, Vec<_>) = pieces(text, ';').partition(|part| part.contains(':'));
        let mut quotas = Self::default();
        if general.len() > 1 {
            return None;
        }
        for part in general {
            quotas.each.set(part)?;
        }
        for part in named {
            let (tenant, part) = part.split_once(':')?;
            let mut quota = quotas.each;
            quota.set(part)?;
            if quotas.tenants.insert(Tenant::parse(tenant.trim()).ok()?, quota).is_some() {
                return None;
            }
        }
        Some(quotas)
    }

    /// Without a tenant, clients cannot be told apart and nothing is counted.
    pub fn of(&self, tenant: Option<&Tenant>) -> Quota {
        tenant.map_or_else(Quota::default, |tenant| self.tenants.get(tenant).copied().unwrap_or(self.each))
    }
}

impl Quota {
    fn set(&mut self, text: &str) -> Option<()> {
        for piece in pieces(text, ',') {
            let (name, value) = piece.split_once('=')?;
            let value = Some(value.trim()).filter(|value| *value != "off");
            match name.trim() {
                "sandboxes" => self.sandboxes = value.map(|value| count(value).ok_or(())).transpose().ok()?,
                "snapshots" => self.snapshots = value.map(|value| count(value).ok_or(())).transpose().ok()?,
                "idle" => self.idle = value.map(|value| whole(value).ok_or(())).transpose().ok()?,
                _ => return None,
            }
        }
        Some(())
    }

    /// Whether a tenant with this many sandboxes on this instance may have one more.
    pub fn allow_sandbox(&self, here: usize) -> Result<(), String> {
        allow("sandboxes", here, self.sandboxes, "at once on this server")
    }

    /// Whether a tenant with this many snapshots may store one more.
    pub fn allow_snapshot(&self, stored: usize) -> Result<(), String> {
        allow("snapshots", stored, self.snapshots, "stored at once")
    }

    /// The idle timeout in seconds of a new sandbox, `None` for never: the requested one, which is refused above the
    /// quota, or else the default, which is lowered to the quota.
    pub fn idle_timeout(&self, asked: Option<Option<u64>>, default: Option<u64>) -> Result<Option<u64>, String> {
        let Some(most) = self.idle.map(|most| most.as_secs()) else { return Ok(asked.unwrap_or(default)) };
        match asked {
            None => Ok(Some(default.map_or(most, |default| default.min(most)))),
            Some(Some(seconds)) if seconds <= most => Ok(Some(seconds)),
            Some(more) => Err(format!(
                "`idle_timeout` is {}, and the quota of this key allows {} at most (`idle` in {QUOTAS}).",
                more.map_or_else(|| "never".to_owned(), show),
                show(most)
            )),
        }
    }
}

fn allow(name: &str, have: usize, most: Option<u32>, how: &str) -> Result<(), String> {
    match most {
        Some(most) if have >= most as usize => {
            Err(format!("The quota of this key is used up: {most} {name} {how} (`{name}` in {QUOTAS})."))
        }
        Some(_) | None => Ok(()),
    }
}

/// Parses an idle timeout in whole seconds.
fn whole(text: &str) -> Option<Duration> {
    span(text).filter(|span| span.subsec_nanos() == 0)
}

fn show(seconds: u64) -> String {
    humantime::format_duration(Duration::from_secs(seconds)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> Tenant {
        name.parse().unwrap()
    }

    #[test]
    fn each_tenant_has_the_general_quota_but_for_what_it_has_of_its_own() {
        let quotas =
            Quotas::parse("sandboxes=20, snapshots=50,idle=1h; team-a:sandboxes=100,idle=off ;team-b:snapshots=1")
                .unwrap();
        let hour = Some(Duration::from_secs(3600));
        let all = Quota { sandboxes: Some(20), snapshots: Some(50), idle: hour };
        assert_eq!(quotas.of(Some(&tenant("any"))), all);
        assert_eq!(quotas.of(Some(&tenant("team-a"))), Quota { sandboxes: Some(100), idle: None, ..all });
        assert_eq!(quotas.of(Some(&tenant("team-b"))), Quota { snapshots: Some(1), ..all });
        assert_eq!(quotas.of(None), Quota::default(), "without keys nothing is counted");
        // The order of the parts does not matter.
        let same = Quotas::parse("team-b:snapshots=1;sandboxes=20,snapshots=50,idle=1h;team-a:sandboxes=100,idle=off")
            .unwrap();
        assert_eq!(same, quotas);
    }

    #[test]
    fn what_does_not_fit_is_no_quota() {
        for bad in [
            "20",
            "sandboxes",
            "sandboxes=-1",
            "sandboxes=0",
            "sandboxes=many",
            "boxes=1",
            "idle=soon",
            "idle=500ms",
            "sandboxes=1;snapshots=1",
            "Team:sandboxes=1",
            ":sandboxes=1",
            "a:sandboxes=1;a:sandboxes=2",
            "a:b:sandboxes=1",
        ] {
            assert_eq!(Quotas::parse(bad), None, "{bad}");
        }
    }

    /// Every count up to four against every quota up to three, and against none.
    #[test]
    fn one_more_is_allowed_exactly_below_the_quota() {
        for have in 0..=4_usize {
            for most in [None, Some(1), Some(2), Some(3)] {
                let allowed = most.is_none_or(|most| have < most as usize);
                let quota = Quota { sandboxes: most, ..Quota::default() };
                assert_eq!((quota.allow_sandbox(have).is_ok(), quota.allow_snapshot(have)), (allowed, Ok(())));
                let quota = Quota { snapshots: most, ..Quota::default() };
                assert_eq!((quota.allow_snapshot(have).is_ok(), quota.allow_sandbox(have)), (allowed, Ok(())));
            }
        }
        let quota = Quota { sandboxes: Some(2), ..Quota::default() };
        let sentence = quota.allow_sandbox(2).unwrap_err();
        assert_eq!(
            sentence,
            "The quota of this key is used up: 2 sandboxes at once on this server (`sandboxes` in BATON_QUOTAS)."
        );
    }

    /// Never, shorter, equal and longer than the quota: as the request, as the default, and as both.
    #[test]
    fn no_new_sandbox_idles_longer_than_the_quota() {
        let spans = [None, Some(59), Some(60), Some(61)];
        let asked: Vec<_> = spans.iter().map(|span| Some(*span)).chain([None]).collect();
        for (asked, default) in asked.iter().flat_map(|asked| spans.map(|default| (*asked, default))) {
            assert_eq!(Quota::default().idle_timeout(asked, default), Ok(asked.unwrap_or(default)));
            let given = Quota { idle: Some(Duration::from_secs(60)), ..Quota::default() }.idle_timeout(asked, default);
            match (asked, given) {
                (Some(Some(seconds)), Ok(given)) => assert!(given == Some(seconds) && seconds <= 60),
                (None, Ok(given)) => assert_eq!(given, Some(default.map_or(60, |default| default.min(60)))),
                (Some(None | Some(61)), Err(sentence)) => assert!(sentence.contains("BATON_QUOTAS"), "{sentence}"),
                (asked, given) => panic!("{asked:?}: {given:?}"),
            }
        }
        let hour = Quota { idle: Some(Duration::from_secs(3600)), ..Quota::default() };
        let sentence = hour.idle_timeout(Some(None), None).unwrap_err();
        assert_eq!(
            sentence,
            "`idle_timeout` is never, and the quota of this key allows 1h at most (`idle` in BATON_QUOTAS)."
        );
    }
}
