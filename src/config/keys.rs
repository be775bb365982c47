//! API keys, and the tenants they belong to.

use baton_protocol::id::{Tenant, hex};
use sha2::{Digest, Sha256};

use super::parse::pieces;
use crate::telemetry::Redacted;

/// A name before `=` that is shorter than this is not a key: it could be guessed.
const LEAST_BARE: usize = 16;

/// The secret with which a client creates sandboxes, and the tenant that owns them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiKey {
    pub tenant: Tenant,
    pub secret: Redacted<String>,
}

impl ApiKey {
    /// Parses `tenant=secret`, or a secret alone. It is the former if a tenant's name precedes the first `=` and more
    /// than `=` follows it, so that padded base64 is a secret alone.
    fn parse(text: &str) -> Option<Self> {
        let (before, behind) = text.split_once('=').unwrap_or((text, ""));
        let is_empty = behind.trim_matches('=').is_empty();
        match Tenant::parse(before) {
            Ok(tenant) if !is_empty => Some(Self { tenant, secret: Redacted::new(behind.to_owned()) }),
            // The tenant's secret is missing, because of an unset variable.
            Ok(_) if text.contains('=') && before.len() < LEAST_BARE => None,
            Ok(_) | Err(_) => Some(Self { tenant: derived(text)?, secret: Redacted::new(text.to_owned()) }),
        }
    }
}

/// The tenant of a key that names none: always the same for that key, and no help in guessing it.
fn derived(secret: &str) -> Option<Tenant> {
    let digest = hex(&Sha256::digest(secret.as_bytes()));
    Tenant::parse(&format!("k-{}", digest.get(..12)?)).ok()
}

/// Parses a list of keys; several may belong to one tenant, but none to two.
pub fn api_keys(text: &str) -> Option<Vec<ApiKey>> {
    let keys: Vec<_> = pieces(text, ',').map(ApiKey::parse).collect::<Option<_>>()?;
    let is_twice = |key: &ApiKey| keys.iter().any(|other| other.secret == key.secret && other.tenant != key.tenant);
    let is_sound = !keys.is_empty() && !keys.iter().any(is_twice);
    is_sound.then_some(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<Vec<(String, String)>> {
        let keys = api_keys(text)?;
        Some(keys.into_iter().map(|key| (key.tenant.to_string(), key.secret.reveal().clone())).collect())
    }

    #[test]
    fn a_key_belongs_to_the_tenant_before_it_or_to_one_of_its_own() {
        let pair = |tenant: &str, secret: &str| (tenant.to_owned(), secret.to_owned());
        assert_eq!(
            read("team-a=one, team-a=two,team-b=three="),
            Some(vec![pair("team-a", "one"), pair("team-a", "two"), pair("team-b", "three=")]),
            "several keys of one tenant: rotation"
        );
        // printf alpha | sha256sum
        assert_eq!(read("alpha"), Some(vec![pair("k-8ed3f6ad685b", "alpha")]));
        assert_eq!(read("alpha,alpha").unwrap().len(), 2, "the same key twice is one key");
    }

    #[test]
    fn keys_of_before_are_what_they_were() {
        for bare in [
            "alpha",
            "0123456789abcdef0123456789abcdef",
            "c2VjcmV0IG9mIGEgY2xpZW50Cg==",
            "c2VjcmV0",
            "lowercasebase64withpad==",
            "lowercasebase64withpad=",
            "Team=secret",
            "team_a=secret",
            "=secret",
            "a-name-that-is-longer-than-32-bytes=secret",
        ] {
            let keys = read(bare).unwrap();
            assert!(keys.len() == 1 && keys[0].0.starts_with("k-") && keys[0].1 == bare, "{bare}: {keys:?}");
        }
    }

    #[test]
    fn what_would_let_somebody_in_by_mistake_is_refused() {
        for bad in ["", ",", " , ", "team-a=", "team-a==", "team-a=,team-b=x", "a=same,b=same", "same,a=same"] {
            assert_eq!(read(bad), None, "{bad:?}");
        }
    }
}
