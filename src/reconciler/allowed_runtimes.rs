//! Which runsc binaries may run here besides this instance's own. Pure.
//!
//! A checkpoint names the binary that made it, and anyone who can write objects can name any binary. This list alone
//! decides what runs with the full rights of the server, at every start, also for binaries fetched earlier.

use std::collections::BTreeSet;

use baton_protocol::{id::Sha256Name, manifest::RunscBuild};

/// The runsc builds that releases of this server shipped with.
const KNOWN: [&str; 1] = ["e748771a877043a8710ed043d28a8338d7e6bdc08bd1e0612ce7f49543ad6528"];

#[derive(Clone, Debug)]
pub struct AllowedRuntimes(BTreeSet<Sha256Name>);

impl Default for AllowedRuntimes {
    /// Only the builds known to this release.
    fn default() -> Self {
        Self(KNOWN.iter().filter_map(|sha256| Sha256Name::parse(sha256).ok()).collect())
    }
}

impl AllowedRuntimes {
    /// `None`: the operator set no list.
    pub fn new(listed: Option<Vec<Sha256Name>>) -> Self {
        listed.map_or_else(Self::default, |listed| Self(listed.into_iter().collect()))
    }

    /// The digest of the binary that a manifest names, if it is allowed here.
    pub fn find(&self, runsc: &RunscBuild) -> Option<Sha256Name> {
        runsc.sha256.clone().filter(|name| self.0.contains(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runsc(sha256: Option<&str>) -> RunscBuild {
        let sha256 = sha256.map(|text| Sha256Name::parse(text).unwrap());
        RunscBuild { version: "other".to_owned(), platform: "systrap".to_owned(), flags: Vec::new(), sha256 }
    }

    #[test]
    fn only_what_is_known_or_listed_may_run() {
        let listed = "ab".repeat(32);
        let with_list = AllowedRuntimes::new(Some(vec![Sha256Name::parse(&listed).unwrap()]));
        let without = AllowedRuntimes::new(None);
        assert_eq!(with_list.find(&runsc(Some(&listed))).unwrap().as_str(), listed);
        assert_eq!(with_list.find(&runsc(Some(KNOWN[0]))), None, "the operator's list is the whole list");
        assert_eq!(without.find(&runsc(Some(KNOWN[0]))).unwrap().as_str(), KNOWN[0]);
        assert_eq!(without.find(&runsc(Some(&listed))), None);
        assert_eq!((without.find(&runsc(None)), with_list.find(&runsc(None))), (None, None));
    }
}
