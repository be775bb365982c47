//! Credentials for a proxy in front of the server, such as Cloud Run's access control.

#[cfg(feature = "google")]
mod google;

use std::{fmt, future::Future, sync::Arc};

use futures::future::BoxFuture;

use crate::{Error, connect::Address};

/// Names and values.
pub type Headers = Vec<(String, String)>;
type Source = dyn Fn() -> BoxFuture<'static, Result<Headers, Error>> + Send + Sync;

/// Gives headers before each handshake. Clones share what is kept between handshakes.
///
/// ```
/// # use baton_client::{Auth, Connection};
/// let auth = Auth::source(|| async { Ok(vec![("Authorization".into(), "Bearer …".into())]) });
/// let connection = Connection { auth: Some(auth), ..Connection::default() };
/// ```
#[derive(Clone)]
pub struct Auth(Kind);

#[derive(Clone)]
enum Kind {
    Source(Arc<Source>),
    #[cfg(feature = "google")]
    Google(Arc<google::IdTokens>),
}

impl Auth {
    /// Google's ID token for the server's address, as Cloud Run requires it, with the credentials of this
    /// machine: the file named by `GOOGLE_APPLICATION_CREDENTIALS`, or the metadata server. The token is cached
    /// and renewed before it expires.
    #[cfg(feature = "google")]
    pub fn google() -> Self {
        Self(Kind::Google(Arc::default()))
    }

    /// Headers from the caller, requested before each handshake.
    pub fn source<F, H>(source: F) -> Self
    where
        F: Fn() -> H + Send + Sync + 'static,
        H: Future<Output = Result<Headers, Error>> + Send + 'static,
    {
        Self(Kind::Source(Arc::new(move || Box::pin(source()))))
    }

    /// The headers for a request to the server at `url`.
    pub async fn headers(&self, url: &str) -> Result<Headers, Error> {
        self.headers_for(&Address::parse(url)?).await
    }

    #[cfg_attr(not(feature = "google"), expect(unused_variables, reason = "who gives headers knows the address"))]
    pub(crate) async fn headers_for(&self, address: &Address) -> Result<Headers, Error> {
        match &self.0 {
            Kind::Source(source) => source().await,
            #[cfg(feature = "google")]
            Kind::Google(tokens) => {
                let token = tokens.token(&address.origin()).await?;
                Ok(vec![("authorization".into(), format!("Bearer {token}"))])
            }
        }
    }
}

/// Does not print secrets.
impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Auth(…)")
    }
}
