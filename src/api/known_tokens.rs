//! Tokens that were recently valid on this instance. Their bearers pass even if others at the same address have tried
//! too many wrong ones. The stored hash still decides whether a token is valid.

use std::collections::HashMap;

use baton_protocol::id::SandboxId;
use parking_lot::Mutex;

use super::token;

/// At least this many are remembered, and at most twice as many.
const GENERATION: usize = 10_000;

#[derive(Debug, Default)]
struct Generations {
    now: HashMap<SandboxId, String>,
    before: HashMap<SandboxId, String>,
}

#[derive(Debug, Default)]
pub struct KnownTokens(Mutex<Generations>);

impl KnownTokens {
    /// Remembers the hash of a valid token.
    pub fn remember(&self, id: &SandboxId, sha256: &str) {
        let mut known = self.0.lock();
        if known.now.len() >= GENERATION && !known.now.contains_key(id) {
            known.before = std::mem::take(&mut known.now);
        }
        known.now.insert(id.clone(), sha256.to_owned());
    }

    /// Whether `token` is the one that was valid for `id`; with `is_optional` a missing token passes, too.
    pub fn has(&self, id: &SandboxId, token: Option<&str>, is_optional: bool) -> bool {
        let known = self.0.lock();
        let stored = known.now.get(id).or_else(|| known.before.get(id));
        stored.is_some_and(|stored| token::matches(token, stored) || (is_optional && token.is_none()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_tokens_are_known_and_no_others() {
        let known = KnownTokens::default();
        let id =
            |number: usize| SandboxId::parse(&format!("sandbox-{number:08x}-0000-4000-8000-000000000000")).unwrap();
        known.remember(&id(0), &token::sha256("right"));
        assert!(known.has(&id(0), Some("right"), false));
        assert!(!known.has(&id(0), Some("wrong"), true) && !known.has(&id(1), Some("right"), false));
        assert!(!known.has(&id(0), None, false) && known.has(&id(0), None, true) && !known.has(&id(1), None, true));
        known.remember(&id(0), &token::sha256("renewed"));
        assert!(known.has(&id(0), Some("renewed"), false) && !known.has(&id(0), Some("right"), false));
        for number in 1..=GENERATION {
            known.remember(&id(number), &token::sha256("another"));
        }
        assert!(known.has(&id(0), Some("renewed"), false), "the generation before is known too");
        for number in GENERATION..=2 * GENERATION {
            known.remember(&id(number), &token::sha256("another"));
        }
        assert!(!known.has(&id(0), Some("renewed"), false));
        assert!(known.has(&id(2 * GENERATION), Some("another"), false));
        let held = known.0.lock();
        assert!(held.now.len() + held.before.len() <= 2 * GENERATION);
    }
}
