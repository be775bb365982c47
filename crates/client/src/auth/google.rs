//! Google ID tokens, one per audience, cached until shortly before they expire.

use std::{collections::BTreeMap, error, time::Duration};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use google_cloud_auth::credentials::idtoken;
use serde_json::Value;
use tokio::sync::Mutex;

use crate::{Error, client_clock};

/// How long before its expiry a token is renewed.
const RENEW_BEFORE_EXPIRY: Duration = Duration::from_secs(300);

/// Locked while a token is fetched: concurrent callers get the same token.
#[derive(Default)]
pub(super) struct IdTokens(Mutex<BTreeMap<String, Kept>>);

struct Kept {
    token: String,
    /// Expiry since 1970, as stated by the token: a machine may sleep in between.
    end: Duration,
}

impl IdTokens {
    pub(super) async fn token(&self, audience: &str) -> Result<String, Error> {
        let mut all = self.0.lock().await;
        let kept = all.get(audience).filter(|kept| client_clock::wall() < kept.end);
        if let Some(kept) = kept
            && client_clock::wall() + RENEW_BEFORE_EXPIRY < kept.end
        {
            return Ok(kept.token.clone());
        }
        match (fetch(audience).await, kept) {
            (Ok(token), _) => {
                let end = end_of(&token).unwrap_or_default();
                all.insert(audience.to_owned(), Kept { token: token.clone(), end });
                Ok(token)
            }
            // The cached token is valid for a few more minutes, and later calls retry.
            (Err(_), Some(kept)) => Ok(kept.token.clone()),
            (Err(error), None) => Err(error),
        }
    }
}

async fn fetch(audience: &str) -> Result<String, Error> {
    // The library ships no cryptography of its own.
    drop(rustls::crypto::ring::default_provider().install_default());
    let credentials = idtoken::Builder::new(audience).build().map_err(|error| {
        if error.is_not_supported() {
            let why = "a person's own Google credentials give no token for a service: use those of a service account, \
                       or send the output of `gcloud auth print-identity-token` as a header";
            return Error::Auth(why.into());
        }
        no_token(&error)
    })?;
    // The library's own cache is not used: its clock stops while a machine sleeps.
    credentials.id_token().await.map_err(|error| no_token(&error))
}

fn no_token(error: &(dyn error::Error + 'static)) -> Error {
    let mut causes: Vec<String> = Vec::new();
    for cause in std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string) {
        if !causes.iter().any(|known| known.contains(&cause)) {
            causes.push(cause);
        }
    }
    Error::Auth(format!("no Google ID token can be had here: {}", causes.join(": ")))
}

/// When a JWT expires; a token that cannot be parsed is never cached.
fn end_of(token: &str) -> Option<Duration> {
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    let claims: Value = serde_json::from_slice(&claims).ok()?;
    claims.get("exp").and_then(Value::as_u64).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_says_itself_when_it_ends() {
        let token = |claims: &str| format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims));
        assert_eq!(end_of(&token(r#"{"exp":1800000000}"#)), Some(Duration::from_secs(1_800_000_000)));
        for unread in [token("{}"), token(r#"{"exp":"soon"}"#), token("["), "opaque".into(), "a.b.c".into()] {
            assert_eq!(end_of(&unread), None, "{unread}");
        }
    }
}
