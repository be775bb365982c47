//! Signatures: an HMAC beside a manifest proves that a holder of the key wrote it. Without the key, a party with write
//! access to the bucket can remove a checkpoint or restore an older one, but cannot forge one.

use baton_protocol::id::hex;
use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::{
    checkpoint_io::{retry, wait_for},
    store::{Error, Precondition, Result, Store},
};
use crate::{clock::SharedClock, telemetry::Redacted};

/// The keys of an instance: the first one signs, all of them verify. Without keys nothing is signed or verified.
#[derive(Clone, Debug, Default)]
pub struct Seals {
    keys: Vec<Redacted<String>>,
    /// Without a key, never replace a signed record with an unsigned one.
    keeps_sealed: bool,
}

impl Seals {
    pub fn new(keys: Vec<Redacted<String>>) -> Self {
        Self { keys, keeps_sealed: false }
    }

    /// For an operator's command, which may lack the instances' key: records that they signed stay signed.
    pub fn of_command(keys: Vec<Redacted<String>>) -> Self {
        Self { keys, keeps_sealed: true }
    }

    /// Whether a record may be replaced: a command without a key must not replace a signed record.
    pub fn may_replace(&self, is_sealed: bool) -> bool {
        !is_sealed || !self.keeps_sealed || self.are_asked_for()
    }

    /// The signature of the object `key` with this content; `None` without keys.
    pub fn seal(&self, key: &str, content: &[u8]) -> Option<String> {
        self.keys.first().and_then(|secret| mac(secret, key, content)).map(|mac| hex(&mac.finalize().into_bytes()))
    }

    pub fn are_asked_for(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Whether one of the keys made this signature, checked in constant time for each key.
    pub fn is_verified(&self, key: &str, content: &[u8], seal: &[u8]) -> bool {
        let Some(seal) = unhex(seal) else { return false };
        let made = |secret| mac(secret, key, content).is_some_and(|mac| mac.verify_slice(&seal).is_ok());
        self.keys.iter().any(made)
    }
}

/// Writes the signature of the object `about`, whose content has this digest, if there are keys. Idempotent.
pub(super) async fn put(
    store: &dyn Store,
    clock: &SharedClock,
    seals: &Seals,
    about: &str,
    seal: &str,
    sha256: &str,
) -> Result<()> {
    let Some(text) = seals.seal(about, sha256.as_bytes()) else { return Ok(()) };
    let text = Bytes::from(text);
    retry(clock, || store.put(seal, text.clone(), Precondition::Any)).await.map(drop)
}

/// Verifies the signature of the object `about`, whose content has this digest, if there are keys.
pub(super) async fn check(
    store: &dyn Store,
    clock: &SharedClock,
    seals: &Seals,
    about: &str,
    seal: &str,
    sha256: &str,
) -> Result<()> {
    if !seals.are_asked_for() {
        return Ok(());
    }
    match wait_for(store, clock, seal).await {
        Ok(text) if seals.is_verified(about, sha256.as_bytes(), &text) => Ok(()),
        Ok(_) | Err(Error::NotFound(_)) => Err(Error::Unsigned(about.to_owned())),
        Err(error) => Err(error),
    }
}

/// Covers the name too: a signature is not valid under another name.
fn mac(secret: &Redacted<String>, key: &str, content: &[u8]) -> Option<Hmac<Sha256>> {
    // HMAC accepts keys of every length.
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.reveal().as_bytes()).ok()?;
    mac.update(key.as_bytes());
    mac.update(&[0]);
    mac.update(content);
    Some(mac)
}

fn unhex(text: &[u8]) -> Option<[u8; 32]> {
    let text = std::str::from_utf8(text).ok()?.trim_end();
    let mut bytes = [0; 32];
    if text.len() != 64 {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seals(keys: &[&str]) -> Seals {
        Seals::new(keys.iter().map(|key| Redacted::new((*key).to_owned())).collect())
    }

    #[test]
    fn a_seal_is_the_hmac_of_name_and_content() {
        // printf 'a/b\0text' | openssl dgst -sha256 -hmac key
        let known = "925c2f6a7d2fecc47c58873a7c1a4cc9cecb03436e37e6ed986d0033c029c3f0";
        assert_eq!(seals(&["key", "other"]).seal("a/b", b"text").as_deref(), Some(known));
    }

    #[test]
    fn every_key_opens_and_the_first_one_seals() {
        let (old, both, new) = (seals(&["old"]), seals(&["new", "old"]), seals(&["new"]));
        let sealed = |by: &Seals| by.seal("k", b"x").unwrap();
        let opens = |seals: &Seals, seal: &str| seals.is_verified("k", b"x", seal.as_bytes());
        assert!(opens(&both, &sealed(&old)) && opens(&new, &sealed(&both)) && opens(&both, &sealed(&new)));
        assert!(!opens(&old, &sealed(&both)) && !opens(&new, &sealed(&old)));
    }

    #[test]
    fn another_name_another_content_and_no_seal_at_all_are_refused() {
        let one = seals(&["key"]);
        let seal = one.seal("k", b"x").unwrap();
        assert!(one.is_verified("k", b"x", seal.as_bytes()));
        assert!(!one.is_verified("l", b"x", seal.as_bytes()) && !one.is_verified("k", b"y", seal.as_bytes()));
        for seal in [&b""[..], b"00", &[0xff; 64], &seal.as_bytes()[..63], "é".repeat(32).as_bytes()] {
            assert!(!one.is_verified("k", b"x", seal));
        }
        assert!(Seals::default().seal("k", b"x").is_none() && !Seals::default().are_asked_for());
    }
}
