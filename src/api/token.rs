//! Tokens and keys: created once, stored only as a hash, compared in constant time.

use baton_protocol::{
    event::Token,
    id::{self, Tenant},
};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::{clock::Clock, config::ApiKey};

/// A new 256-bit token, which lets its bearer attach.
pub fn fresh(clock: &dyn Clock) -> Token {
    let mut bits = [0; 32];
    clock.fill(&mut bits);
    Token(id::hex(&bits))
}

/// The hash of a token, which is all that is stored of it.
pub fn sha256(token: &str) -> String {
    id::hex(&Sha256::digest(token.as_bytes()))
}

/// Whether `token` has the stored hash. No token matches an empty hash.
pub fn matches(token: Option<&str>, stored: &str) -> bool {
    // A missing token costs the same time as a wrong one.
    let given = sha256(token.unwrap_or_default());
    let equal: bool = given.as_bytes().ct_eq(stored.to_ascii_lowercase().as_bytes()).into();
    equal && token.is_some()
}

/// Whether `given` is one of `keys`, without leaking anything about them through timing.
pub fn is_one_of(given: Option<&str>, keys: &[String]) -> bool {
    let given = sha256(given.unwrap_or_default());
    keys.iter().fold(false, |found, key| found | bool::from(given.as_bytes().ct_eq(sha256(key).as_bytes())))
}

/// The tenant of the key `given`, without leaking anything about the keys through timing.
pub fn tenant_of<'a>(given: Option<&str>, keys: &'a [ApiKey]) -> Option<&'a Tenant> {
    let given = sha256(given.unwrap_or_default());
    keys.iter().fold(None, |found, key| {
        let is_it: bool = given.as_bytes().ct_eq(sha256(key.secret.reveal()).as_bytes()).into();
        if is_it { Some(&key.tenant) } else { found }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{clock::SystemClock, config::api_keys};

    #[test]
    fn a_token_is_long_fresh_and_matches_only_its_own_hash() {
        let (one, other) = (fresh(&SystemClock), fresh(&SystemClock));
        assert_eq!(one.0.len(), 64);
        assert_ne!(one, other);
        assert!(matches(Some(&one.0), &sha256(&one.0)));
        assert!(matches(Some(&one.0), &sha256(&one.0).to_uppercase()));
        for bad in [None, Some(""), Some(other.0.as_str()), Some(&one.0[..63])] {
            assert!(!matches(bad, &sha256(&one.0)));
        }
        assert!(!matches(None, &sha256("")));
        assert!(!matches(Some(""), ""));
    }

    #[test]
    fn a_key_is_one_of_the_keys_or_nothing() {
        let keys = ["alpha".to_owned(), "beta".to_owned()];
        assert!(is_one_of(Some("beta"), &keys));
        assert!(!is_one_of(Some("gamma"), &keys));
        assert!(!is_one_of(None, &keys));
        assert!(!is_one_of(Some(""), &[]));
    }

    #[test]
    fn a_key_belongs_to_its_tenant_and_its_name_is_no_part_of_it() {
        let keys = api_keys("team-a=alpha,team-a=beta,team-b=gamma").expect("keys");
        let of = |given| tenant_of(given, &keys).map(Tenant::as_str);
        assert_eq!(
            (of(Some("alpha")), of(Some("beta")), of(Some("gamma"))),
            (Some("team-a"), Some("team-a"), Some("team-b"))
        );
        for bad in [None, Some(""), Some("delta"), Some("team-a=alpha"), Some("team-a")] {
            assert_eq!(of(bad), None, "{bad:?}");
        }
    }
}
