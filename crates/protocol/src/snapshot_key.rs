//! Which snapshot a name refers to: each tenant has its own name space, and public snapshots have another.

use std::fmt;

use crate::id::{Invalid, SnapshotName, Tenant};

/// Separates the tenant from the name. Neither contains it.
const SEPARATOR: char = '~';

/// A filesystem snapshot as named in storage: `<tenant>~<name>`, or `<name>` for a public one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotKey {
    /// `None` is public: every tenant may start from it, and no tenant may write or delete it.
    pub tenant: Option<Tenant>,
    /// The name, unique for its tenant.
    pub name: SnapshotName,
}

impl SnapshotKey {
    /// The key of a tenant's snapshot, or of a public one.
    pub fn new(tenant: Option<&Tenant>, name: &SnapshotName) -> Self {
        Self { tenant: tenant.cloned(), name: name.clone() }
    }

    /// Parses the form used in object names.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        match text.split_once(SEPARATOR) {
            None => Ok(SnapshotName::parse(text)?.into()),
            Some((tenant, name)) => Ok(Self { tenant: Some(Tenant::parse(tenant)?), name: SnapshotName::parse(name)? }),
        }
    }

    /// What a name may refer to for this tenant; the first that exists counts: its own snapshot, then the public one.
    pub fn candidates(tenant: Option<&Tenant>, name: &SnapshotName) -> Vec<Self> {
        let own = tenant.map(|tenant| Self::new(Some(tenant), name));
        own.into_iter().chain([Self::new(None, name)]).collect()
    }

    /// The prefix of the stored names of all snapshots of a tenant, and of no others.
    pub fn prefix_of(tenant: &Tenant) -> String {
        format!("{tenant}{SEPARATOR}")
    }
}

impl From<SnapshotName> for SnapshotKey {
    fn from(name: SnapshotName) -> Self {
        Self { tenant: None, name }
    }
}

impl fmt::Display for SnapshotKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tenant {
            Some(tenant) => write!(f, "{tenant}{SEPARATOR}{}", self.name),
            None => write!(f, "{}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(tenant: Option<&str>, name: &str) -> SnapshotKey {
        SnapshotKey { tenant: tenant.map(|tenant| tenant.parse().unwrap()), name: name.parse().unwrap() }
    }

    #[test]
    fn a_key_is_read_in_one_way_and_is_never_a_path() {
        for (text, expected) in [
            ("numpy", key(None, "numpy")),
            ("team-a~numpy", key(Some("team-a"), "numpy")),
            ("a~b.c", key(Some("a"), "b.c")),
        ] {
            assert_eq!(SnapshotKey::parse(text).unwrap(), expected);
            assert_eq!(expected.to_string(), text);
        }
        for bad in ["", "~", "~numpy", "team-a~", "a~b~c", "a~../x", "../a~b", "a/b~c", "A~b", "a.b~c", "a~~b"] {
            assert!(SnapshotKey::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_name_means_the_own_snapshot_before_the_public_one_and_never_anothers() {
        let [a, b] = ["team-a", "team-b"].map(|name| Tenant::parse(name).unwrap());
        let name = SnapshotName::parse("numpy").unwrap();
        let (own, public) = (key(Some("team-a"), "numpy"), key(None, "numpy"));
        assert_eq!(SnapshotKey::candidates(Some(&a), &name), [own.clone(), public.clone()]);
        assert_eq!(SnapshotKey::candidates(None, &name), std::slice::from_ref(&public));
        assert!(own.to_string().starts_with(&SnapshotKey::prefix_of(&a)));
        assert!(!own.to_string().starts_with(&SnapshotKey::prefix_of(&b)));
        assert!(!key(Some("team-a-b"), "numpy").to_string().starts_with(&SnapshotKey::prefix_of(&a)));
        assert!(!public.to_string().contains(SEPARATOR));
    }
}
